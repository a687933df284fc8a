# SPDX-License-Identifier: Apache-2.0
"""The software device's build: its tree, what it links, and that nothing is compiled twice."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support.softdev import SOFTDEV
from support.tree import ROOT

SCRIPT = SOFTDEV / "build.py"
TREE = SOFTDEV / "ascend"
VENDOR = "opp/vendors/xmoe_transformer"


def test_the_tree_looks_like_a_cann_installation():
    priority = (TREE / "opp/vendors/config.ini").read_text()
    assert priority == "load_priority=xmoe_transformer,xmoe_cam\n"
    for name in (
        "version.info",
        f"{VENDOR}/version.info",
        "share/info/ops_transformer/version.info",
    ):
        assert "Version=9.1.0" in (TREE / name).read_text().splitlines()
    assert (TREE / VENDOR / "op_api/lib/libcust_opapi.so").is_file()


@pytest.mark.parametrize(
    ("path", "needed", "rpath"),
    [
        ("lib64/libascendcl.so", set(), "$ORIGIN"),
        ("lib64/libnnopbase.so", {"libascendcl.so"}, "$ORIGIN"),
        ("lib64/libhccl.so", {"libascendcl.so"}, "$ORIGIN"),
        ("lib64/libhccl_fwk.so", {"libhccl.so"}, "$ORIGIN"),
        (
            f"{VENDOR}/op_api/lib/libcust_opapi.so",
            {"libnnopbase.so", "libhccl.so", "libascendcl.so"},
            "$ORIGIN/../../../../../lib64",
        ),
    ],
)
def test_libraries_find_each_other_and_nothing_else(path, needed, rpath):
    done = subprocess.run(
        ["readelf", "-d", str(TREE / path)], capture_output=True, text=True, check=True
    )
    wanted = set(re.findall(r"NEEDED\).*\[(.*)\]", done.stdout))
    system = {name for name in wanted if re.match(r"lib(c|m|stdc\+\+|gcc_s)\.so|ld-linux", name)}
    assert needed <= wanted and not {n for n in wanted - system if "torch" in n or "python" in n}
    assert wanted - system <= {"libascendcl.so", "libnnopbase.so", "libhccl.so"}
    assert re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", done.stdout) == [rpath]
    assert re.findall(r"SONAME\).*\[(.*)\]", done.stdout) == [Path(path).name]


def test_an_unchanged_tree_is_not_built_again(capsys):
    build = runpy.run_path(str(SCRIPT))["build"]
    build(folders=("acl", "hccl_fwk"))  # may compile when sources are newer
    before = (TREE / "lib64/libascendcl.so").stat().st_mtime_ns
    capsys.readouterr()
    build(folders=("acl", "hccl_fwk"), verbose=True)
    assert capsys.readouterr().out == ""
    assert (TREE / "lib64/libascendcl.so").stat().st_mtime_ns == before


def test_build_errors_are_readable(tmp_path, monkeypatch):
    space = runpy.run_path(str(SCRIPT))
    with pytest.raises(space["BuildError"], match="sanitize='leak' is not known"):
        space["build"](tmp_path / "a", sanitize="leak")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(space["BuildError"], match="install g\\+\\+ or set CXX"):
        space["build"](tmp_path / "b", folders=("hccl_fwk",))
    monkeypatch.setenv("CXX", "false")
    assert space["main"](["--output", str(tmp_path / "c")]) == 1


def test_script_and_package_need_neither_torch_nor_xmoe():
    code = (
        "import runpy, sys\n"
        f"runpy.run_path({str(SCRIPT)!r})\n"
        "assert 'torch' not in sys.modules and 'xmoe' not in sys.modules\n"
        "from xmoe.kernels import softdev\n"
        "assert 'torch' not in sys.modules and softdev.is_built()\n"
        "print(softdev.environment()['ASCEND_HOME_PATH'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(TREE)


def test_environment_activates_the_device_for_other_programs():
    from xmoe.kernels import softdev

    code = (
        "import ctypes\n"
        "lib = ctypes.CDLL('libhccl_fwk.so')\n"
        "acl = ctypes.CDLL('libascendcl.so')\n"
        "acl.xsdIdentity.restype = ctypes.c_char_p\n"
        "print(acl.xsdIdentity().decode())\n"
    )
    env = {**os.environ, **softdev.environment()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "software device" in done.stdout, done.stderr
