# SPDX-License-Identifier: Apache-2.0
"""`xmoe explain`: exit codes, the table, the JSON, and what it assumes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xmoe import cli, env, explain

QWEN_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "hidden_act": "silu",
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "dtype": "bfloat16",
    },
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in env.VARIABLES:
        monkeypatch.delenv(row.name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_35B))
    return tmp_path


def run(model: Path, *options: str) -> int:
    return cli.main(["explain", "--model", str(model), *options])


def report(
    capsys: pytest.CaptureFixture[str], model: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    code = run(model, *options, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    return code, document


@pytest.mark.parametrize(
    ("options", "code", "first"),
    [
        (("--ep", "8"), 0, None),
        (("--ep", "16"), 0, None),
        (("--ep", "8", "--mode", "on"), 0, None),
        (("--ep", "8", "--mode", "off"), 3, "mode"),
        (("--ep", "1"), 3, "local_experts"),
        (("--ep", "8", "--soc", "A2"), 3, "intermediate"),
        (("--ep", "8", "--soc", "Ascend910B2", "--mode", "on"), 1, "intermediate"),
        (("--ep", "8", "--profile", "a3-9.1.0-ga"), 3, "intermediate"),
        (("--ep", "8", "--operator-version", "9.2.0"), 3, "operator_version"),
        (("--ep", "8", "--abi-variant", "E"), 3, "abi_variant"),
        (("--ep", "8", "--max-tokens", "3039"), 0, None),
        (("--ep", "8", "--max-tokens", "3040"), 3, "window"),
        (("--ep", "8", "--max-tokens", "3040", "--ccl-buffer-mb", "201"), 0, None),
        (("--ep", "8", "--ccl-buffer-mb", "43"), 0, None),
        (("--ep", "8", "--ccl-buffer-mb", "42"), 3, "window"),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    options: tuple[str, ...],
    code: int,
    first: str | None,
) -> None:
    found, document = report(capsys, model, *options)
    assert found == code
    assert document["path"] == ("mega_moe" if code == 0 else "fused_moe")
    assert document["rejected"] is (code == 1)
    reasons = [reason.split(":")[0] for reason in document["reasons"]]
    assert (reasons[0] if reasons else None) == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--ep", "eight"),
            "argument --ep: 'eight' is not acceptable; allowed: a whole number, 1 to 65536",
        ),
        (("--ep", "0"), "argument --ep: '0'"),
        (("--ep", "8", "--mode", "ON"), "mode='ON' is not acceptable; allowed: off, auto, on"),
        (("--ep", "8", "--max-tokens", "-3"), "max_tokens_per_rank='-3'"),
        (("--ep", "8", "--profile", "a3-sead"), "nearest: a3-seed"),
        (("--ep", "9" * 23), "allowed: a whole number, 1 to 65536"),
        (("--ep", "8", "--abi-variant", "K"), "abi_variant='K' is not acceptable: a document"),
        ((), "--ep"),
        (("--ep", "8", "--max-token", "3"), "--max-tokens"),
    ],
)
def test_bad_input_is_2_with_a_message(
    capsys: pytest.CaptureFixture[str], model: Path, options: tuple[str, ...], message: str
) -> None:
    assert run(model, *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "hidden_act"],
)
def test_a_missing_key_is_an_error_not_a_default(
    capsys: pytest.CaptureFixture[str], model: Path, key: str
) -> None:
    config = json.loads(json.dumps(QWEN_35B))
    del config["text_config"][key]
    (model / "config.json").write_text(json.dumps(config))
    assert run(model, "--ep", "8") == 2
    assert key in capsys.readouterr().err


def test_missing_file_and_wrong_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(tmp_path / "nowhere", "--ep", "8") == 2
    (tmp_path / "config.json").write_text("{")
    assert run(tmp_path, "--ep", "8") == 2
    assert run(tmp_path / "config.json", "--ep", "8") == 2
    assert capsys.readouterr().err.count("xmoe: ") == 3


def test_every_check_is_in_the_table_and_assumptions_are_marked(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    _, document = report(capsys, model, "--ep", "8")
    run(model, "--ep", "8")
    table = capsys.readouterr().out
    for check in document["checks"]:
        assert f" {check['code']} " in table
    assumed = {check["code"] for check in document["checks"] if check["assumed"]}
    assert {"soc", "library", "comm", "abi_variant", "operator_version", "window"} <= assumed
    assert "hidden" not in assumed and "A3 (assumed)" in table
    assert table.strip().endswith("mode auto, EP8: mega_moe (limits a3-seed)")


def test_what_is_given_is_not_assumed(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    options = ("--soc", "Ascend910_9391", "--abi-variant", "B", "--operator-version", "9.1.0")
    _, document = report(capsys, model, "--ep", "8", *options)
    assumed = {check["code"] for check in document["checks"] if check["assumed"]}
    assert not {"soc", "abi_variant", "operator_version", "window"} & assumed
    assert document["sizes"] == {
        "routed_weight_bytes_per_rank": 15 * (1 << 29),
        "required_ccl_buffer_bytes": 88162304,
        "ccl_buffer_bytes": 600 * (1 << 20),
        "min_hccl_buffsize_mb": 43,
        "max_tokens_per_rank_that_fit": 4096,  # the operator's bound, the window would hold 4639
    }


def test_settings_show_their_origin(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**QWEN_35B, "xmoe": {"mode": "on", "max_tokens_per_rank": 64, "fence": "host"}}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("XMOE_MAX_TOKENS_PER_RANK", "32")
    _, document = report(capsys, model, "--ep", "8", "--mode", "auto")
    origins = {row["name"]: (row["value"], row["origin"]) for row in document["settings"]}
    assert origins["mode"] == ("auto", "explicit")
    assert origins["max_tokens_per_rank"] == (32, "environment XMOE_MAX_TOKENS_PER_RANK")
    assert origins["fence"] == ("host", "config.json")
    assert origins["padding"] == ("zero_weight", "default")


def test_unknown_setting_in_config_json(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**QWEN_35B, "xmoe": {"mdoe": "on"}}))
    assert run(model, "--ep", "8") == 2
    assert "unknown xmoe setting 'mdoe' (config.json); nearest: mode" in capsys.readouterr().err


def test_a_profile_alone_says_which_device_is_meant(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    _, document = report(capsys, model, "--ep", "8", "--profile", "a2-seed")
    assert document["facts"]["soc"] == "A2" and "soc" in document["facts"]["assumed"]
    code, document = report(capsys, model, "--ep", "8", "--profile", "a2-seed", "--soc", "A3")
    assert code == 3 and document["reasons"][0].startswith("operator_version")


def test_small_models_are_shown_as_the_loader_pads_them(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    config = json.loads(json.dumps(QWEN_35B))
    config["text_config"].update(hidden_size=192, moe_intermediate_size=96)
    (model / "config.json").write_text(json.dumps(config))
    code, document = report(capsys, model, "--ep", "8")
    assert code == 0 and document["shape"]["hidden"] == 1024
    assert document["stored_shape"]["intermediate"] == 96
    code, document = report(capsys, model, "--ep", "8", "--no-widen")
    assert code == 3 and document["reasons"][0].startswith("hidden: hidden is 192;")
    run(model, "--ep", "8")
    assert "(stored 192 and 96, zero-padded when loaded)" in capsys.readouterr().out


def test_padding_is_the_loaders_default() -> None:
    # Read, not imported: the loader brings torch and transformers with it.
    folder = Path(explain.__file__).parent / "models" / "qwen3_5"
    tree = ast.parse((folder / "engine_transformers.py").read_text())
    load = next(n for n in ast.walk(tree) if getattr(n, "name", None) == "load_model")
    assert isinstance(load, ast.FunctionDef)
    names = [argument.arg for argument in load.args.kwonlyargs]
    default = load.args.kw_defaults[names.index("widen")]
    assert default is not None and ast.literal_eval(default) == explain.WIDEN_TO


def test_needs_neither_torch_nor_a_library(model: Path) -> None:
    script = (
        "import sys; from xmoe import cli; "
        f"code = cli.main(['explain', '--model', {str(model)!r}, '--ep', '8', '--json']); "
        "loaded = {'torch', 'rich', 'transformers', 'numpy', 'cffi'} & set(sys.modules); "
        "assert not loaded, loaded; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
