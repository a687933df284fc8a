# SPDX-License-Identifier: Apache-2.0
"""Modes, group facts, and what a decision can be asked for."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from support.policy_cases import A3, GOOD_FACTS, MIB, QWEN_35B, facts, shape
from xmoe.errors import ConfigError, UnsupportedError
from xmoe.policy import explain
from xmoe.policy.decision import StepDecision
from xmoe.policy.facts import Facts, merge_facts
from xmoe.policy.profiles import PROFILES, profile_for, profile_named, soc_family
from xmoe.policy.select import assess, select
from xmoe.types import Mode, Path

BAD = facts(library_problem="no_symbols: none", ep_size=1, cann_version=None)


def test_auto_takes_mega_moe_when_every_check_passes() -> None:
    decision = select("auto", GOOD_FACTS, QWEN_35B)
    assert (decision.path, decision.mode) == (Path.MEGA_MOE, Mode.AUTO)


def test_auto_falls_back_with_all_reasons() -> None:
    decision = select(Mode.AUTO, BAD, QWEN_35B)
    assert decision.path is Path.FUSED_MOE
    found = [reason.split(":")[0] for reason in decision.reasons]
    assert found == ["library", "cann_version", "local_experts", "ep_enabled", "ep_size"]


def test_off_looks_at_no_device_fact() -> None:
    decision = select(Mode.OFF, BAD, QWEN_35B, profile="no such profile")
    assert decision.path is Path.FUSED_MOE
    assert [check.code for check in decision.checks] == ["mode"]
    assert decision == select("off", facts(ep_size=1), QWEN_35B)


@pytest.mark.parametrize(
    ("found", "case", "code"),
    [
        (facts(soc=None), QWEN_35B, "soc"),  # CPU only
        (facts(ep_size=1), shape(2048, 512, 64, 8), "ep_enabled"),
        (facts(soc="Ascend910B1"), QWEN_35B, "intermediate"),  # I=512 on A2
        (GOOD_FACTS, dataclasses.replace(QWEN_35B, dtype="float16"), "dtype"),
        (facts(graph_mode=True), QWEN_35B, "graph_mode"),
    ],
)
def test_on_refuses_with_the_reason_and_auto_falls_back(
    found: Facts, case: object, code: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(Mode.ON, found, case)  # type: ignore[arg-type]
    assert caught.value.rejections[0].startswith(f"{code}: ")
    assert all(reason in str(caught.value) for reason in caught.value.rejections)
    assert "set mode auto to run fused_moe" in str(caught.value)
    decision = select(Mode.AUTO, found, case)  # type: ignore[arg-type]
    assert decision.path is Path.FUSED_MOE and decision.reasons == caught.value.rejections


def test_on_lists_every_rejection() -> None:
    with pytest.raises(UnsupportedError, match="5 checks reject it") as caught:
        select(Mode.ON, BAD, QWEN_35B)
    assert len(caught.value.rejections) == 5


def test_unknown_mode_and_profile_are_refused() -> None:
    with pytest.raises(ConfigError, match="mode='required'.*allowed: off, auto, on"):
        select("required", GOOD_FACTS, QWEN_35B)
    with pytest.raises(ConfigError, match="'a3-sed' is unknown; nearest: a3-seed"):
        select("auto", GOOD_FACTS, QWEN_35B, profile="a3-sed")


def test_a_named_profile_stands_in_for_an_unknown_version() -> None:
    unknown = facts(vendor_version="9.1.0.custom", cann_version="9.1.0.custom")
    assert select("auto", unknown, QWEN_35B).path is Path.FUSED_MOE
    decision = select("auto", unknown, QWEN_35B, profile="a3-seed")
    assert decision.path is Path.MEGA_MOE
    assert "named by setting" in decision.check("operator_version").sentence


def test_a_profile_of_another_soc_is_rejected() -> None:
    check = select("auto", GOOD_FACTS, QWEN_35B, "a2-seed").check("operator_version")
    assert check.passed is False and "profile a2-seed is for A2" in check.sentence


def test_changing_the_table_row_flips_the_decision() -> None:
    assert select("auto", GOOD_FACTS, QWEN_35B, "a3-9.1.0-ga").path is Path.FUSED_MOE
    assert select("auto", GOOD_FACTS, QWEN_35B, "a3-seed").path is Path.MEGA_MOE


def test_profiles_have_unique_names_sources_and_choosers() -> None:
    assert len({profile.name for profile in PROFILES}) == len(PROFILES)
    chosen = [(p.soc_family, v) for p in PROFILES for v in p.operator_versions]
    assert len(set(chosen)) == len(chosen)
    for profile in PROFILES:
        assert profile_named(profile.name) is profile
        assert profile.name.startswith(profile.soc_family.lower() + "-")
        for field in dataclasses.fields(profile):
            limit = getattr(profile, field.name)
            assert getattr(limit, "source", "none needed")


@pytest.mark.parametrize(
    ("soc", "family"),
    [
        ("Ascend910_9391", "A3"),
        ("ascend910_93", "A3"),
        ("Ascend910B4-1", "A2"),
        ("Ascend950PR_9599", "A5"),
        ("a3", "A3"),
        ("Ascend910", None),
        ("Ascend310P3", None),
        ("", None),
        (None, None),
    ],
)
def test_soc_family(soc: str | None, family: str | None) -> None:
    assert soc_family(soc) == family


def test_profile_choice() -> None:
    expected = {"A3": "a3-seed", "A2": "a2-seed", "A5": "a5-9.1.0"}
    for family, name in expected.items():
        chosen = profile_for(family, "9.1.0")
        assert chosen is not None and chosen.name == name
    assert profile_for(A3, "9.2.0") is None and profile_for(A3, None) is None


def test_merge_takes_minimum_intersection_and_first_problem() -> None:
    ranks = [
        facts(ep_size=3, callable_variants=("B", "D"), ccl_buffer_bytes=9),
        facts(ep_size=3, comm_problem="x: one", ccl_buffer_bytes=7, assumed=("soc",)),
        facts(ep_size=3, comm_problem="[y] two", callable_variants=("D", "B", "E")),
    ]
    merged = merge_facts(ranks)
    assert merged.callable_variants == ("B",)
    assert merged.comm_problem == "x: rank 1: one (and 1 more ranks)"
    assert (merged.ccl_buffer_bytes, merged.assumed) == (7, ("soc",))
    assert merged.disagreements == () and merged.library_problem is None
    assert merge_facts([facts(ccl_buffer_bytes=None), GOOD_FACTS]).ccl_buffer_bytes is None
    with pytest.raises(ConfigError, match="no facts"):
        merge_facts([])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("soc", "Ascend910B1"),
        ("cann_version", "9.1.0-beta.3"),
        ("vendor_version", None),
        ("abi_variant", "D"),
        ("ep_size", 16),
        ("max_tokens_per_rank", 256),
        ("moe_tp_size", 2),
        ("graph_mode", True),
        ("config_digest", "other"),
    ],
)
def test_disagreements_are_named_and_rejected_alike_everywhere(name: str, other: object) -> None:
    ranks = [GOOD_FACTS] * 8
    ranks[5] = dataclasses.replace(GOOD_FACTS, **{name: other})  # type: ignore[arg-type]
    decision = select("auto", merge_facts(ranks), QWEN_35B)
    assert decision.path is Path.FUSED_MOE
    assert decision.rejections[0].code == "rank_agreement"
    assert decision.reasons[0].startswith(f"rank_agreement: rank_agreement is {name} differs:")
    assert "rank 5 has" in decision.reasons[0]


def test_devices_of_one_family_agree() -> None:
    ranks = [facts(ep_size=2), facts(ep_size=2, soc="Ascend910_9392")]
    assert merge_facts(ranks).disagreements == ()


def test_missing_ranks_are_a_disagreement() -> None:
    assert merge_facts([GOOD_FACTS] * 4).disagreements == ("ep_size is 8 but 4 ranks answered",)


def test_a_decision_is_one_line_of_json() -> None:
    decision = select("auto", merge_facts([GOOD_FACTS, BAD]), QWEN_35B)
    text = decision.to_json()
    plain = json.loads(text)
    assert "\n" not in text and plain["path"] == decision.path.value
    assert [check["code"] for check in plain["checks"]] == [c.code for c in decision.checks]


def test_digest_tells_reasons_apart() -> None:
    reasons = [facts(), facts(graph_mode=True), facts(moe_tp_size=2), facts(ccl_buffer_bytes=MIB)]
    digests = {select("auto", found, QWEN_35B).digest() for found in reasons}
    assert len(digests) == len(reasons)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        ([0, 2, 0, 5], 5),
        ([0, 0, 0, 1], 1),
        ([0, 0, 0, 0], 1),
        ([1, 1, 1, 1], 1),
        ([32, 0, 0, 0], 32),
    ],
)
def test_rows_of_a_step_are_the_groups_maximum(tokens: list[int], rows: int) -> None:
    found = facts(ep_size=4, max_tokens_per_rank=32)
    for order in itertools.permutations(tokens):
        step = assess(Mode.ON, found, shape(2048, 512, 64, 8)).for_step(order)
        assert step == StepDecision(Path.MEGA_MOE, rows)


@pytest.mark.parametrize("tokens", [33, 477])
def test_a_step_over_capacity_leaves_mega_moe_on_all_ranks_or_is_refused(tokens: int) -> None:
    found, case = facts(ep_size=4, max_tokens_per_rank=32), shape(2048, 512, 64, 8)
    counts = [1, tokens, 0, 2]
    step = select("auto", found, case).for_step(counts)
    assert (step.path, step.rows_per_rank, step.code) == (Path.FUSED_MOE, tokens, "step_tokens")
    assert f"rank 1 has {tokens} tokens in this step; allowed: 32 per rank" in step.sentence
    with pytest.raises(UnsupportedError, match="rank 1 has") as caught:
        select("on", found, case).for_step(counts)
    assert caught.value.rejections[0].startswith("step_tokens: ")
    assert select("auto", found, case).for_step([32, 1, 1, 1]).path is Path.MEGA_MOE


def test_the_fallback_has_no_capacity() -> None:
    step = select("off", facts(ep_size=2, max_tokens_per_rank=1), QWEN_35B).for_step([9, 0])
    assert step == StepDecision(Path.FUSED_MOE, 9)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [1, -1], [1, True], [1, 2.0], [1, None]])
def test_counts_must_be_the_groups(counts: list[object]) -> None:
    decision = select("auto", facts(ep_size=2), shape(2048, 512, 64, 8))
    with pytest.raises(ConfigError, match="allowed: (one per rank|0 or more)"):
        decision.for_step(counts)  # type: ignore[arg-type]


def test_one_rank_group_can_step() -> None:
    assert select("off", facts(ep_size=1), QWEN_35B).for_step([0]).rows_per_rank == 1


def test_text_has_headline_and_one_line_per_check() -> None:
    lines = explain.lines(select("auto", GOOD_FACTS, QWEN_35B))
    assert lines[0] == "mode auto, EP8: mega_moe (limits a3-seed)" and len(lines) == 28
    lines = explain.lines(select("auto", facts(graph_mode=True, moe_tp_size=2), QWEN_35B))
    assert lines[0].startswith("mode auto, EP8: fused_moe, moe_tp: moe_tp is 2; allowed: 1;")
    assert lines[0].endswith("(and 1 more)")
    assert any(line.startswith("FAIL graph_mode: True; limit no graph capture") for line in lines)
