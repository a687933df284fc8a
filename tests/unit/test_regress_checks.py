# SPDX-License-Identifier: Apache-2.0
"""Each verdict of a regression run turns to FAIL on what it exists to catch."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from xmoe.cli import main
from xmoe.errors import ConfigError
from xmoe.regress import add_arguments, checks, report
from xmoe.regress.plan import Plan, expected_answer, plan_from_args
from xmoe.regress.rank import Capture, RankReport
from xmoe.regress.stored import StoredExperts
from xmoe.types import FenceMode, MoeShape
from xmoe.types import Path as MoePath

PROMPTS = ("123加456等于多少？", "What is 123 plus 456?")


def _plan(requests: int = 4, ep_size: int = 2, rounds: int = 2) -> Plan:
    return Plan(
        model_dir="",
        ep_size=ep_size,
        rounds=rounds,
        requests=tuple(PROMPTS[i % 2] for i in range(requests)),
        max_new_tokens=8,
        paths=(MoePath.FUSED_MOE,),
        fence=FenceMode.STREAM,
        step_timeout_s=10.0,
    )


def _reports(plan: Plan) -> list[RankReport]:
    return [
        RankReport(
            rank=rank,
            ready_s=0.1,
            outputs={"fused_moe": [[("579", [5, 7, 9])] * plan.waves for _ in range(plan.rounds)]},
            expert_bytes_read=500,
            expert_bytes_held=500,
            expert_bytes_once=500,
            decisions={"fused_moe": {}},
        )
        for rank in range(plan.ep_size)
    ]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("123加456等于多少？", "579"),
        ("What is 123 plus 456?", "579"),
        ("只回答最终数字：9 + 1", "10"),
        ("Who wrote this?", None),
        ("123 and 456", None),
    ],
)
def test_expected_answer(prompt: str, answer: str | None) -> None:
    assert expected_answer(prompt) == answer


def test_requests_go_round_the_ranks_and_the_rest_is_empty() -> None:
    plan = _plan(requests=3, ep_size=2)
    assert plan.waves == 2
    assert [plan.prompt(rank, 1) for rank in range(2)] == [PROMPTS[0], None]


def test_equal_right_answers_pass() -> None:
    plan = _plan()
    verdicts = checks.check_outputs(plan, _reports(plan))
    assert [(v.name, v.passed) for v in verdicts] == [("identical", True), ("right", True)]
    assert verdicts[0].detail.startswith("8/8")


@pytest.mark.parametrize(
    ("text", "tokens", "failing"),
    [
        ("578", [5, 7, 8], {"identical", "right"}),
        ("579", [5, 7, 9, 1], {"identical"}),
        ("", [], {"identical", "right"}),
    ],
)
def test_one_deviating_answer_fails(text: str, tokens: list[int], failing: set[str]) -> None:
    plan = _plan()
    reports = _reports(plan)
    reports[1].outputs["fused_moe"][1] = [("579", [5, 7, 9]), (text, tokens)]
    verdicts = checks.check_outputs(plan, reports)
    assert {v.name for v in verdicts if not v.passed} == failing


def test_same_wrong_answer_everywhere_is_identical_but_not_right() -> None:
    plan = _plan()
    reports = _reports(plan)
    for one in reports:
        one.outputs["fused_moe"] = [[("500", [5, 0, 0])] * plan.waves] * plan.rounds
    verdicts = {v.name: v.passed for v in checks.check_outputs(plan, reports)}
    assert verdicts == {"identical": True, "right": False}


SHAPE = MoeShape(hidden=8, intermediate=3, num_experts=4, topk=2)


def _stored(folder: Path, fused: bool = True, interleaved: bool = False) -> StoredExperts:
    torch.manual_seed(3)
    gate_up, down = torch.randn(4, 6, 8), torch.randn(4, 8, 3)
    text: dict[str, object] = {"hidden_size": 8}
    prefix = "model.language_model.layers.0.mlp.experts."
    tensors = {prefix + "gate_up_proj": gate_up, prefix + "down_proj": down}
    if not fused:
        tensors = {}
        for expert in range(4):
            name = f"{prefix}{expert}."
            tensors[name + "gate_proj.weight"] = gate_up[expert, :3].clone()
            tensors[name + "up_proj.weight"] = gate_up[expert, 3:].clone()
            tensors[name + "down_proj.weight"] = down[expert].clone()
    if interleaved:
        mixed = torch.stack([gate_up[:, :3], gate_up[:, 3:]], dim=2).reshape(4, 6, 8)
        tensors[prefix + "gate_up_proj"] = mixed.contiguous()
        text["gate_up_layout"] = "interleaved"
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    return StoredExperts(str(folder))


def _silu(gate: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate))


def _capture(stored: StoredExperts, wide: int = 10, act=_silu, clamp: float = 1e9) -> Capture:
    rng = np.random.default_rng(5)
    x = np.zeros((5, wide), np.float32)
    x[:, :8] = rng.standard_normal((5, 8))
    ids = np.array([[0, 3], [1, 2], [3, 1], [2, -1], [-1, -1]])
    weights = rng.random((5, 2)).astype(np.float32)
    gate_up, down = stored.experts(0, [0, 1, 2, 3])
    output = np.zeros((5, wide), np.float32)
    for t, k in np.argwhere(ids >= 0):
        pre = x[t, :8].astype(np.float64) @ gate_up[ids[t, k]]
        inner = act(np.minimum(pre[:3], clamp)) * np.clip(pre[3:], -clamp, clamp)
        output[t, :8] += (weights[t, k] * (inner @ down[ids[t, k]])).astype(np.float32)
    return Capture("fused_moe", 0, 0, x, ids, weights, output)


@pytest.mark.parametrize("fused", [True, False])
def test_reference_reads_both_layouts(tmp_path: Path, fused: bool) -> None:
    stored = _stored(tmp_path, fused)
    assert stored.total_bytes == 4 * (6 * 8 + 8 * 3) * 4
    (verdict,) = checks.check_reference([_capture(stored)], stored, SHAPE)
    assert verdict.passed, verdict.detail


def test_reference_catches_a_swapped_row_and_a_dirty_column(tmp_path: Path) -> None:
    stored = _stored(tmp_path)
    swapped = _capture(stored)
    swapped.output[[0, 1]] = swapped.output[[1, 0]]
    dirty = _capture(stored)
    dirty.output[2, 9] = 1e-3
    nan = _capture(stored)
    nan.output[0, 0] = np.nan
    for call in (swapped, dirty, nan):
        (verdict,) = checks.check_reference([call], stored, SHAPE)
        assert not verdict.passed


def test_reference_reads_interleaved_rows(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = _stored(tmp_path / "plain")
    stored = _stored(tmp_path, interleaved=True)
    (verdict,) = checks.check_reference([_capture(plain)], stored, SHAPE)
    assert verdict.passed, verdict.detail


def _gelu_tanh(gate: np.ndarray) -> np.ndarray:
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner))


@pytest.mark.parametrize(
    ("act", "clamp", "changed"),
    [
        (_silu, 0.5, {"activation_clamp": 0.5}),
        (_gelu_tanh, 1e9, {"activation": "gelu_pytorch_tanh"}),
        (_gelu_tanh, 0.5, {"activation": "geglu_tanh", "activation_clamp": 0.5}),
    ],
)
def test_reference_takes_activation_and_clamp_from_the_shape(
    tmp_path: Path, act, clamp: float, changed: dict
) -> None:
    stored = _stored(tmp_path)
    call = _capture(stored, act=act, clamp=clamp)
    (right,) = checks.check_reference([call], stored, replace(SHAPE, **changed))
    (plain,) = checks.check_reference([call], stored, SHAPE)
    assert right.passed and not plain.passed, (right.detail, plain.detail)


def test_dropped_ids_fail_the_run() -> None:
    plan = _plan()
    reports = _reports(plan)
    for one in reports:
        one.dropped_ids = {"fused_moe": 0}
    assert [v.passed for v in checks.check_ids(reports)] == [True]
    reports[1].dropped_ids["fused_moe"] = 3
    (verdict,) = checks.check_ids(reports)
    assert not verdict.passed and verdict.detail.startswith("3 left out")


def test_memory_check_wants_one_share() -> None:
    plan = _plan()
    (good,) = checks.check_memory(plan, _reports(plan), 1000)
    (bad,) = checks.check_memory(plan, _reports(plan), 500)
    assert (good.passed, bad.passed) == (True, False)
    twice = _reports(plan)
    twice[1].expert_bytes_held = 1000
    (held_twice,) = checks.check_memory(plan, twice, 1000)
    assert not held_twice.passed and "NOT each weight once" in held_twice.detail


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("loading 123 experts", True),
        ("error 507035 on stream 0", False),
        ("EZ9999: inner error", False),
        ("loss is NaN", False),
        ("Traceback (most recent call last):", False),
    ],
)
def test_error_scan(tmp_path: Path, line: str, clean: bool) -> None:
    (tmp_path / "rank-0.log").write_text(line + "\n")
    assert checks.check_logs(str(tmp_path)).passed is clean


def test_released_names_what_is_left(tmp_path: Path) -> None:
    folder = str(tmp_path)
    alive = checks.check_released("run-1-", [os.getpid()], folder)
    assert not alive.passed and str(os.getpid()) in alive.detail
    (tmp_path / "run-2-window").touch()  # another job's
    assert checks.check_released("run-1-", [], folder).passed
    (tmp_path / "run-1-window").touch()
    left = checks.check_released("run-1-", [], folder)
    assert not left.passed and "run-1-window" in left.detail


def test_json_of_failed_ranks_says_so() -> None:
    verdict = checks.Verdict("ranks", "", False, "rank 1 died")
    document = json.loads(json.dumps(report.to_json(_plan(), [], [verdict], 1.0)))
    assert document["passed"] is False and document["outputs"] == {}


def test_json_is_complete_and_plain() -> None:
    plan = _plan()
    verdicts = checks.check_outputs(plan, _reports(plan))
    document = report.to_json(plan, _reports(plan), verdicts, 1.0)
    again = json.loads(json.dumps(document))
    assert again["passed"] is True
    assert again["outputs"]["fused_moe"] == [["579"] * 4] * 2
    assert "not the operator's" in again["note"]


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["--requests", "-1"], ["--timeout", "0"], ["--prompt", " "]]
)
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regress", *words]) == 2
    assert "allowed: " in capsys.readouterr().err


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match="no config.json"):
        plan_from_args(parser.parse_args(["--model", str(tmp_path)]))


def test_progress_names_each_layer_once_all_ranks_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = report.Progress(2)
    for layer in range(3):
        progress(0, "load", {"layer": layer})
    assert capsys.readouterr().err == ""
    for layer in range(2):
        progress(1, "load", {"layer": layer})
    progress(1, "layer", {"layer": 2})  # for the watchdog only
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[regress] load layer 0", "[regress] load layer 1"]
