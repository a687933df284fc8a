# SPDX-License-Identifier: Apache-2.0
"""What `xmoe doctor` and the capability probe say about whole and half-installed machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import acl_stubs
from support.acl_stubs import BOTH, LAUNCH, NEITHER, environment, make_vendor, run_child


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    return acl_stubs.make_toolkit(tmp_path / "cann", stub_base)


def doctor(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from xmoe.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=env, cwd="/", capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def report(env: dict[str, str], code: int) -> dict[str, Any]:
    done = doctor(env, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["valid"] is (code == 0)
    return dict(found)


def codes(found: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in found["problems"]]


def test_a_valid_chain(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    companion = make_vendor(tmp_path / "c", NEITHER)
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=f"{vendor}:{companion}:{tmp_path}/gone:")
    found = report(env, 0)
    assert found["toolkit"]["found_via"] == "ASCEND_HOME_PATH"
    assert found["toolkit"]["version"] == "9.1.0"
    verdicts = [v["verdict"] for v in found["vendor_chain"]]
    assert verdicts == ["provides MegaMoe", "no MegaMoe symbols"]
    assert [s["reason"] for s in found["skipped"]] == ["does not exist", "empty entry"]
    assert found["mega_moe"]["abi_variant"] == "B"
    assert [o["ok"] for o in found["mega_moe"]["origins"]] == [True, True]
    assert found["comm"]["missing"] == [] and len(found["comm"]["needed"]) == 13
    assert found["device"]["kind"] == "vendor CANN" and found["device"]["soc"] == "Ascend910_9391"
    assert [x["name"] for x in found["libraries"]] == [*acl_stubs.BASE_SYMBOLS, "libcust_opapi.so"]
    choice = found["policy"]["Qwen3.5-35B-A3B"]
    assert choice["path"] in ("mega_moe", "fused_moe") and choice["ep_size"] == 8
    text = doctor(env)
    assert text.returncode == 0 and "xmoe doctor: valid" in text.stdout
    assert f"aclnnMegaMoe from {vendor}/op_api/lib/libcust_opapi.so" in text.stdout
    assert f"skipped '{tmp_path}/gone' (ASCEND_CUSTOM_OPP_PATH): does not exist" in text.stdout


@pytest.mark.parametrize(
    ("source", "code"),
    [(None, "file_missing"), (LAUNCH, "only_launch_symbol"), (NEITHER, "no_symbols")],
)
def test_an_invalid_chain_names_the_reason_and_the_remedy(
    source: str | None, code: str, root: Path, tmp_path: Path
) -> None:
    vendor = make_vendor(tmp_path / "v", source)
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    found = report(env, 1)
    assert codes(found) == [code] and found["problems"][0]["remedy"]
    for choice in found["policy"].values():
        assert choice["path"] == "fused_moe"
        assert any(code in reason or str(vendor) in reason for reason in choice["reasons"])
    text = doctor(env).stdout
    assert "NOT VALID" in text and code in text and "next step: " in text
    demanded = report({**env, "XMOE_MODE": "on"}, 1)
    assert [c["path"] for c in demanded["policy"].values()] == [None, None]


def test_an_unknown_version_makes_the_chain_invalid(root: Path, tmp_path: Path) -> None:
    (root / "version.info").unlink()
    vendor = make_vendor(tmp_path / "v", BOTH)
    found = report(environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor)), 1)
    assert codes(found) == ["version_unknown"]
    assert {c["path"] for c in found["policy"].values()} == {"fused_moe"}


def test_no_toolkit_at_all(tmp_path: Path) -> None:
    found = report(environment(None, ASCEND_HOME_PATH=str(tmp_path)), 1)
    assert codes(found) == ["toolkit_missing"] and found["libraries"] == []
    assert "NOT VALID" in doctor(environment(None, ASCEND_HOME_PATH=str(tmp_path))).stdout


def test_missing_communication_symbols_are_listed(root: Path, tmp_path: Path) -> None:
    (root / "lib64/libhccl_fwk.so").unlink()
    vendor = make_vendor(tmp_path / "v", BOTH)
    found = report(environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor)), 1)
    assert codes(found) == ["comm_symbol_missing"]
    assert found["comm"]["missing"] == ["HcclGetRemoteIpcHcclBuf", "HcclCommGetHandleWithName"]


def test_a_pinned_variant_is_used(root: Path, tmp_path: Path) -> None:
    (root / "version.info").write_text("Version=9.2.0\n")
    vendor = make_vendor(tmp_path / "v", BOTH, "9.2.0")
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_PROBE="off")
    assert codes(report(env, 1)) == ["variant_unknown"]
    found = report({**env, "XMOE_ABI_VARIANT": "G"}, 0)
    assert found["mega_moe"]["abi_variant"] == "G"
    assert found["mega_moe"]["variant_source"].startswith("pinned by abi_variant, not confirmed")
    del env["XMOE_ABI_PROBE"]
    assert codes(report({**env, "XMOE_ABI_VARIANT": "G"}, 1)) == ["variant_mismatch"]
    assert report(env, 0)["mega_moe"]["variant_source"].startswith("return-code probe")


def test_the_report_loads_no_torch(root: Path) -> None:
    code = """
from xmoe import doctor
doctor.collect()
say([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    assert run_child(code, environment(root)) == []


@pytest.mark.parametrize("raises", ["ImportError", "OSError", "RuntimeError", "AttributeError"])
def test_a_device_module_that_cannot_load_is_unavailable(raises: str, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(
        f"import os\nos.environ['TRIES'] = os.environ.get('TRIES', '') + 'x'\n"
        f"raise {raises}('libascend_hal.so: cannot open')\n"
    )
    (tmp_path / "cann_ops_transformer").mkdir()
    code = f"""
sys.path.insert(0, {str(tmp_path)!r})
import xmoe, xmoe.kernels.capability as capability
seen = [capability.module_state("torch_npu") for _ in range(2)]
empty = capability.module_state("cann_ops_transformer")
absent = capability.module_state("no_such.module")
say([seen[0] == seen[1], seen[0].available, seen[0].error, os.environ["TRIES"], empty.available,
     empty.error, absent.available, absent.error])
"""
    got = run_child(code, environment(None))
    assert got[:2] == [True, False]
    assert got[2] == f"{raises}: libascend_hal.so: cannot open" and got[3] == "x"
    assert got[4] is False and "empty folder" in got[5]
    assert got[6] is False and "no_such" in got[7]


def test_a_probe_failure_is_a_problem_with_its_text(root: Path) -> None:
    code = """
from xmoe.kernels import capability
def broken(kit):
    raise RuntimeError("half installed")
loader.load = broken
first, second = capability.probe(), capability.probe()
say([first == second, first.available, first.problems, first.library_problem,
     first.to_dict()["soc"]])
"""
    same, available, problems, library, soc = run_child(code, environment(root))
    assert same and not available and soc is None
    assert problems == [["probe_failed", "RuntimeError: half installed"]]
    assert library == "probe_failed: RuntimeError: half installed"


def test_the_probe_answers_alike_twice_and_follows_the_environment(
    root: Path, tmp_path: Path
) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    code = f"""
from xmoe.kernels import capability
seen = [capability.probe(), capability.probe()]
os.environ["ASCEND_CUSTOM_OPP_PATH"] = {str(vendor)!r}
seen += [capability.probe(), capability.probe()]
say([seen[0] == seen[1], seen[2] == seen[3], seen[0].library_problem, seen[2].available,
     seen[2].to_dict()])
"""
    same, again, problem, available, plain = run_child(code, environment(root))
    assert same and again and available
    assert problem.startswith("file_missing: ")
    assert plain["origins"][0]["symbol"] == "aclnnMegaMoe" and plain["abi_variant"] == "B"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", ""),
        (
            "raise OSError('libascend_hal.so: cannot open')",
            "OSError: libascend_hal.so: cannot open",
        ),
        ("import os; os._exit(7)", "its import ended with 7"),
    ],
)
def test_a_torch_npu_that_is_there_is_tried(
    source: str, problem: str, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch_npu.py").write_text(source + "\n")
    vendor = make_vendor(tmp_path / "v", BOTH)
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert report(env, 0)["torch_npu"]["problem"] == "not installed"
    paths = [str(tmp_path / "modules"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found = report(env, 0)["torch_npu"]
    assert found == {"found": True, "usable": not problem, "problem": problem}
    text = doctor(env).stdout
    assert (f"torch_npu cannot be imported: {problem}" in text) == bool(problem)
