# SPDX-License-Identifier: Apache-2.0
"""Which of torch_npu's operators a toolkit has: read from its files; doctor and explain say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.acl_stubs import BOTH, compile_library, environment, make_toolkit, make_vendor
from xmoe.kernels import capability
from xmoe.kernels.acl.toolkit import find_toolkit

ROUTING = "aclnnMoeInitRoutingV3"
MODEL = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 1024, "moe_intermediate_size": 512,
    "num_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu", "num_hidden_layers": 2,
    "full_attention_interval": 2, "dtype": "bfloat16",
}  # fmt: skip


def functions(*names: str) -> str:
    return "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    """Routing whole, swiglu with one of its two functions, unpermute in a split library."""
    made = make_toolkit(tmp_path / "cann", stub_base)
    source = functions(ROUTING, ROUTING + "GetWorkspaceSize", "aclnnSwiGlu")
    compile_library(made / "lib64" / "libopapi.so", source)
    unpermute = "aclnnMoeTokenUnpermute"
    compile_library(
        made / "lib64" / "libopapi_nn.so", functions(unpermute, unpermute + "GetWorkspaceSize")
    )
    return made


def test_a_toolkits_files_say_which_operators_it_has(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(
        tmp_path / "v", functions("aclnnSwiGluV9", "aclnnDynamicQuant", "aclnnDynamicQuantV2")
    )
    env = {"ASCEND_HOME_PATH": str(root), "ASCEND_CUSTOM_OPP_PATH": str(vendor)}
    found = capability.find_npu_operators(find_toolkit(environ=env))
    assert found.init_routing and found.token_unpermute
    assert not found.swiglu and not found.dynamic_quant and not found.integers
    missing = dict(found.missing)
    assert set(missing) == set(capability.NPU_OPERATORS) - {"init_routing", "token_unpermute"}
    assert missing["swiglu"] == f"no library of {root} defines aclnnSwiGlu"
    lines = found.sentences()
    assert f"swiglu: torch operators, no library of {root} defines aclnnSwiGlu" in lines
    assert "init_routing: npu_moe_init_routing_v2" in lines


def test_a_process_looks_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_npu_operators", [])
    monkeypatch.setenv("ASCEND_HOME_PATH", str(root))
    first = capability.npu_operators()
    assert first.init_routing
    (root / "lib64" / "libopapi.so").unlink()
    assert capability.npu_operators() is first


def test_without_a_toolkit_all_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_npu_operators", [])
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "nowhere"))
    found = capability.npu_operators()
    assert set(dict(found.missing)) == set(capability.NPU_OPERATORS)
    assert "nowhere" in dict(found.missing)["swiglu"]


def test_with_a_wrong_setting_all_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_npu_operators", [])
    monkeypatch.setenv("XMOE_DEVICE", "toaster")
    found = capability.npu_operators()
    assert set(dict(found.missing)) == set(capability.NPU_OPERATORS)
    assert "toaster" in dict(found.missing)["swiglu"]


@pytest.mark.parametrize("installed", [True, False])
def test_doctor_and_explain_say_so(root: Path, tmp_path: Path, installed: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    folder = tmp_path / "packages"
    folder.mkdir()
    if installed:  # found, and never imported
        (folder / "torch_npu.py").write_text("raise SystemExit(9)\n")
    vendor = make_vendor(tmp_path / "v", BOTH)
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    env["PYTHONPATH"] = f"{folder}:{env.get('PYTHONPATH', '')}"
    code = "import sys; from xmoe.cli import main; sys.exit(main(sys.argv[1:]))"
    said = []
    for words in (["doctor"], ["explain", "--model", str(tmp_path), "--ep", "8", "--mode", "off"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env=env, cwd="/", capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == (0 if words[0] == "doctor" else 3), done.stdout + done.stderr
        said.append(done.stdout)
    if not installed:
        assert all("torch operators; torch_npu is not installed" in text for text in said)
        return
    assert "init_routing: npu_moe_init_routing_v2" in said[0]
    assert "2 operators of torch_npu" in said[1]
    assert all(f"swiglu: torch operators, no library of {root}" in text for text in said)
