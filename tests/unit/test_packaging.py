# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what the checkout holds.

It is built from a source archive and tried where no checkout can be imported.
"""

from __future__ import annotations

import email.parser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.tree import FOLDERS, ROOT, is_checkpoint_file, modules
from xmoe import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# In the tree and on purpose not in the wheel: what they build from isn't there either.
BUILD_SCRIPTS = {"xmoe.kernels.acl.build", "xmoe.kernels.softdev.build"}
# What the software device consists of; its own tests look inside.
DEVICE = "xmoe/kernels/softdev/ascend"
DEVICE_FILES = {
    f"{DEVICE}/lib64/libascendcl.so",
    f"{DEVICE}/lib64/libnnopbase.so",
    f"{DEVICE}/lib64/libhccl.so",
    f"{DEVICE}/lib64/libhccl_fwk.so",
    f"{DEVICE}/opp/vendors/config.ini",
    f"{DEVICE}/opp/vendors/xmoe_transformer/op_api/lib/libcust_opapi.so",
}
IMPORT_ALL = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
failed = []
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
        continue
    origin = getattr(module, "__file__", None)
    if origin and not origin.startswith(sys.prefix):
        failed.append(f"{name} comes from {origin}")
print("\\n".join(failed))
"""


@dataclass
class Built:
    """The wheel and the names in it."""

    wheel: Path
    names: set[str]


def run(*words: str | Path, cwd: Path | str = "/") -> str:
    # Nothing of the calling environment may make the checkout importable.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copy_sources(target: Path) -> None:
    """The files git would hand to a clone, links as links."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A wheel built from a source archive built from a copy: what is missing in either shows."""
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    out = source / "out"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    return Built(wheel, names)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin folder of a fresh environment with the wheel in it and the dependencies of this one."""
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", built.wheel)
    # The dependencies, without what .pth files add: an editable xmoe here must stay invisible.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_outer_site()}
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return venv / "bin"


def _outer_site() -> set[str]:
    return {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}


def expected_path(name: str, path: Path) -> str:
    """Where a module of the tree lands in the wheel."""
    base = name.replace(".", "/")
    return f"{base}/__init__.py" if path.name == "__init__.py" else f"{base}.py"


def test_wheel_has_every_module_and_no_other(built: Built) -> None:
    expected = {
        expected_path(name, path) for name, path in modules().items() if name not in BUILD_SCRIPTS
    }
    packed = {
        name
        for name in built.names
        if name.endswith(".py") and not re.match(r"xmoe/models/checkpoints/\w+/", name)
    }
    assert packed == expected


def test_wheel_has_the_native_parts_and_the_typing_marker(built: Built) -> None:
    assert built.names >= DEVICE_FILES
    assert "xmoe/py.typed" in built.names
    native = [name for name in built.names if re.fullmatch(r"xmoe/kernels/acl/_native\..*so", name)]
    assert len(native) == 1
    assert not built.wheel.name.endswith("-any.whl"), "native code needs a platform tag"


def test_wheel_has_the_data_files_of_the_tree(built: Built) -> None:
    expected = set()
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*"):
            relative = path.relative_to(folder)
            in_link = any((folder / part).is_symlink() for part in relative.parts[:1])
            data = path.suffix in (".json", ".safetensors", ".jinja") or is_checkpoint_file(path)
            if path.is_file() and data and not in_link and "__pycache__" not in path.parts:
                expected.add(f"{package.replace('.', '/')}/{relative.as_posix()}")
    assert expected - built.names == set()


def test_wheel_has_nothing_that_does_not_belong(built: Built) -> None:
    foreign = {
        name
        for name in built.names
        if not name.startswith(("xmoe/", f"xmoe-{__version__}.dist-info/"))
        or name.endswith((".pyc", ".cpp", ".h", ".c", ".o", ".md"))
        # A checkpoint comes with the text that says what it can do.
        and not re.fullmatch(r"xmoe/models/checkpoints/\w+/README\.md", name)
    }
    assert foreign == set()


def test_metadata(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        info = f"xmoe-{__version__}.dist-info"
        text = archive.read(f"{info}/METADATA").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    metadata = email.parser.Parser().parsestr(text)
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = metadata.get_all("Requires-Dist") or []
    base = [line for line in needed if "extra ==" not in line]
    names = {line.split(">")[0].strip() for line in base}
    assert names == {"torch", "numpy", "cffi", "safetensors", "transformers", "rich"}
    # Engines pin torch and transformers to versions that exclude one another: no upper limit here.
    assert not [line for line in base if "<" in line or "==" in line or "~=" in line]
    assert set(metadata.get_all("Provides-Extra") or []) == {"test", "npu", "vllm", "bench"}


def test_every_module_imports_from_the_installed_wheel(installed: Path) -> None:
    names = [name for name in modules() if name not in BUILD_SCRIPTS and "__main__" not in name]
    assert run(installed / "python", "-c", IMPORT_ALL, *names).strip() == ""


def test_installed_command_works(installed: Path) -> None:
    assert run(installed / "xmoe", "--version") == f"xmoe {__version__}\n"
    assert "regress" in run(installed / "xmoe", "--help")
    exported = run(installed / "xmoe", "device", "env")
    assert str(installed.parent) in exported, "the device in the wheel, not one in a checkout"
    run(installed / "xmoe", "doctor")


def test_uninstall_leaves_nothing(installed: Path) -> None:
    # Last in this file: the environment is of no use afterwards.
    python = installed / "python"
    run(sys.executable, "-m", "pip", "--python", python, "uninstall", "--yes", "xmoe")
    left = [
        str(path)
        for path in installed.parent.rglob("*xmoe*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert left == []
