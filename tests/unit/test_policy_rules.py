# SPDX-License-Identifier: Apache-2.0
"""Every check by itself, the order of them, and the tables of shapes that must pass or fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support.policy_cases import GOOD_FACTS, MIB, QWEN_35B, QWEN_397B, facts, shape
from xmoe.layout import min_hccl_buffsize_mb, required_ccl_buffer_bytes, window_spec
from xmoe.policy.decision import Decision
from xmoe.policy.facts import Facts
from xmoe.policy.rules import RULES
from xmoe.policy.select import assess
from xmoe.types import Mode, MoeShape, Path

GA = "a3-9.1.0-ga"


def codes(decision: Decision) -> list[str]:
    return [check.code for check in decision.rejections]


def run(f: Facts = GOOD_FACTS, s: MoeShape = QWEN_35B, profile: str | None = None) -> Decision:
    return assess(Mode.AUTO, f, s, profile)


Spoil = Callable[[Mode, Facts, MoeShape], tuple[Mode, Facts, MoeShape]]


def of_facts(**changes: Any) -> Spoil:
    return lambda m, f, s: (m, replace(f, **changes), s)


def of_shape(**changes: Any) -> Spoil:
    return lambda m, f, s: (m, f, replace(s, **changes))


def of_both(num_experts: int, ep_size: int) -> Spoil:
    return lambda m, f, s: (m, replace(f, ep_size=ep_size), replace(s, num_experts=num_experts))


# In the order of the checks: one way to fail each, and what else that must fail.
SPOILERS: list[tuple[str, Spoil, set[str]]] = [
    ("mode", lambda m, f, s: (Mode.OFF, f, s), set()),
    ("rank_agreement", of_facts(disagreements=("soc differs",)), set()),
    ("soc", of_facts(soc="Ascend310P3"), {"operator_version"}),
    ("library", of_facts(library_problem="mixed_files: two files"), set()),
    ("abi_variant", of_facts(abi_variant="D"), set()),
    ("cann_version", of_facts(cann_version="9.0.0"), set()),
    ("operator_version", of_facts(vendor_version="9.9.9", cann_version="9.9.9"), set()),
    ("comm", of_facts(comm_problem="[comm_symbol_missing] HcclCreateOpResCtx"), set()),
    ("dtype", of_shape(dtype="float16"), set()),
    ("activation", of_shape(activation="gelu_pytorch_tanh"), set()),
    ("activation_clamp", of_shape(activation_clamp=0.0), set()),
    ("gate_up_layout", of_shape(gate_up_layout="interleaved"), set()),
    ("quant", of_shape(quant="w8a8"), set()),
    ("hidden", of_shape(hidden=1000), set()),
    ("intermediate", of_shape(intermediate=256), set()),
    ("topk", of_shape(topk=17), set()),
    ("local_experts", of_both(512, ep_size=2), set()),
    ("num_experts", of_both(1040, ep_size=16), set()),
    ("redundant_experts", of_shape(num_redundant_experts=1), set()),
    ("ep_enabled", of_both(64, ep_size=1), {"ep_size"}),
    ("ep_size", of_facts(ep_size=64), set()),
    ("ep_divides_experts", of_shape(num_experts=126), set()),
    ("moe_tp", of_facts(moe_tp_size=2), set()),
    ("max_tokens_per_rank", of_facts(max_tokens_per_rank=10240), {"window"}),
    ("window", of_facts(ccl_buffer_bytes=80 * MIB), set()),
    ("graph_mode", of_facts(graph_mode=True), set()),
    ("weight_budget", of_facts(weight_bytes=2, weight_budget_bytes=1), set()),
]
ORDER = [code for code, _, _ in SPOILERS]


def test_every_rule_has_a_way_to_fail_here() -> None:
    assert ORDER == [check.code for check in run().checks] and len(ORDER) == len(RULES)


def test_nothing_is_rejected_without_a_reason() -> None:
    decision = run()
    assert decision.path is Path.MEGA_MOE and decision.reasons == ()
    assert {c.code for c in decision.checks if c.passed is None} == {"weight_budget"}


@pytest.mark.parametrize(("code", "spoil", "also"), SPOILERS, ids=ORDER)
def test_one_violation_rejects_for_that_reason_only(
    code: str, spoil: Spoil, also: set[str]
) -> None:
    decision = assess(*spoil(Mode.AUTO, GOOD_FACTS, QWEN_35B))
    assert decision.path is Path.FUSED_MOE
    assert set(codes(decision)) == {code, *also}
    check = decision.check(code)
    assert check.limit and check.source and check.sentence
    assert len(decision.checks) == len(RULES)  # all are always evaluated


@pytest.mark.parametrize("first", range(len(SPOILERS)), ids=ORDER)
def test_first_failing_check_wins(first: int) -> None:
    case = (Mode.AUTO, GOOD_FACTS, QWEN_35B)
    # From the last on, so that of two ways to spoil one value the earlier one stays.
    for _, spoil, _ in reversed(SPOILERS[first:]):
        case = spoil(*case)
    assert codes(assess(*case))[0] == ORDER[first]


@pytest.mark.parametrize(
    ("ep", "case", "ga", "seed"),
    [
        (8, shape(2048, 512, 256, 8), ["intermediate"], []),
        (8, shape(2048, 1024, 256, 8), [], []),
        (8, shape(4096, 1024, 512, 10), [], []),
        (8, shape(2560, 1536, 128, 8), [], []),
        (8, shape(1000, 1024, 64, 4), ["hidden"], ["hidden"]),
        (8, shape(8704, 1024, 64, 4), ["hidden"], ["hidden"]),
        (8, shape(4096, 1024, 130, 8), ["ep_divides_experts"], ["ep_divides_experts"]),
        (8, shape(4096, 1024, 512, 17), ["topk"], ["topk"]),
        (2, shape(4096, 1024, 512, 10), ["local_experts"], ["local_experts"]),
        (6, shape(4096, 1024, 512, 10), ["ep_size", "ep_divides_experts"], None),
        (64, shape(4096, 1024, 512, 10), ["ep_size"], ["ep_size"]),
    ],
)
def test_shapes_under_both_lower_bounds(
    ep: int, case: MoeShape, ga: list[str], seed: list[str] | None
) -> None:
    assert codes(run(facts(ep_size=ep), case, GA)) == ga
    assert codes(run(facts(ep_size=ep), case)) == (ga if seed is None else seed)


def test_shape_reasons_name_field_value_and_limit() -> None:
    text = run(GOOD_FACTS, QWEN_35B, GA).reasons[0]
    assert text.startswith(
        "intermediate: intermediate is 512; allowed: 1024..3072, multiple of 512"
    )
    text = run(facts(ep_size=64)).reasons[0]
    assert text.startswith("ep_size: ep_size is 64; allowed: 2, 4, 8, 16, 32;")


def test_replicas_count_as_physical_experts() -> None:
    plain = shape(4096, 1024, 1024, 8)
    assert codes(run(s=plain)) == []
    replicated = run(s=replace(plain, num_redundant_experts=2))
    assert replicated.check("local_experts").value == 130
    assert replicated.check("num_experts").value == 1040
    assert codes(replicated) == ["local_experts", "num_experts", "redundant_experts"]


@pytest.mark.parametrize("ep", [8, 16])
@pytest.mark.parametrize("case", [QWEN_35B, QWEN_397B], ids=["35B-A3B", "397B-A17B"])
def test_released_shapes_run_at_ep8_and_ep16(ep: int, case: MoeShape) -> None:
    decision = run(facts(ep_size=ep), case)
    assert (decision.path, decision.profile) == (Path.MEGA_MOE, "a3-seed")


def test_a2_keeps_its_own_lower_bound() -> None:
    for ep in (8, 16):
        a2 = facts(soc="Ascend910B2", ep_size=ep, max_tokens_per_rank=64)
        assert codes(run(a2, QWEN_35B)) == ["intermediate"]
        assert codes(run(a2, QWEN_397B)) == []


def test_a5_takes_no_bf16_experts() -> None:
    decision = run(facts(soc="Ascend950PR_9599", ep_size=16), shape(4096, 1024, 256, 8))
    assert codes(decision) == ["quant"]
    assert decision.check("quant").limit == "mxfp8"


@pytest.mark.parametrize(
    ("changes", "rejected"),
    [
        ({"activation": "silu"}, ["activation"]),  # the plain activation is not the gated one
        ({"activation": "my_act"}, ["activation"]),
        ({"activation_clamp": 7.0}, []),
        ({"activation_clamp": float("nan")}, ["activation_clamp"]),
        ({"activation_clamp": float("inf")}, ["activation_clamp"]),
        ({"activation_clamp": -1.0}, ["activation_clamp"]),
        ({"activation": "swigluoai", "activation_clamp": 7.0}, ["activation"]),
    ],
)
def test_activation_and_clamp(changes: dict[str, Any], rejected: list[str]) -> None:
    assert codes(run(s=replace(QWEN_35B, **changes))) == rejected


def test_a5_accepts_a_clamp_without_applying_it_so_it_is_rejected() -> None:
    clamped = shape(4096, 1024, 256, 8, quant="mxfp8", activation_clamp=7.0)
    a5 = facts(soc="Ascend950PR_9599", ep_size=16, runtime_quants=("mxfp8",))
    assert codes(run(a5, clamped)) == ["activation_clamp"]


class _Quant:
    """Stands for an engine's enum member."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value


@pytest.mark.parametrize("spelling", [None, "", "none", "NONE", _Quant("NONE", 0)], ids=repr)
def test_all_spellings_of_no_quantisation_decide_alike(spelling: object) -> None:
    case = shape(2048, 512, 256, 8, quant=spelling)
    assert case == QWEN_35B
    assert run(s=case).digest() == run().digest()


@pytest.mark.parametrize("quant", ["w8a8", "w4a8"])
@pytest.mark.parametrize("soc", ["Ascend910_9391", "Ascend910B2"])
def test_integer_weights_on_a2_and_a3(soc: str, quant: str) -> None:
    case = replace(QWEN_397B, quant=quant)
    able = facts(soc=soc, ep_size=16, max_tokens_per_rank=64, runtime_quants=("none", quant))
    decision = run(able, case)
    assert codes(decision) == []
    # The window is sized for int8 rows, which are smaller.
    need = {s.quant: int(run(able, s).check("window").limit.split()[0]) for s in (case, QWEN_397B)}
    assert need[quant] < need["none"]
    assert codes(run(replace(able, runtime_quants=("none",)), case)) == ["quant"]
    assert run(replace(able, runtime_quants=("none",)), case).check("quant").limit == "none"


@pytest.mark.parametrize(
    ("soc", "quant", "limit"),
    [
        ("Ascend910_9391", "mxfp8", "none, w8a8, w4a8"),
        ("Ascend950PR_9599", "w8a8", "mxfp8"),
        ("Ascend950PR_9599", "mxfp4", "mxfp8"),
    ],
)
def test_weight_formats_belong_to_their_devices(soc: str, quant: str, limit: str) -> None:
    able = facts(soc=soc, ep_size=16, runtime_quants=("none", "w8a8", "w4a8", "mxfp8", "mxfp4"))
    decision = run(able, shape(4096, 1024, 256, 8, quant=quant))
    assert codes(decision) == ["quant"] and decision.check("quant").limit == limit


def test_mxfp_on_a5_needs_a_wrapper_that_passes_it_on() -> None:
    a5 = facts(soc="Ascend950PR_9599", ep_size=16, runtime_quants=("none", "w8a8", "w4a8"))
    case = shape(4096, 1024, 256, 8, quant="mxfp8")
    assert codes(run(a5, case)) == ["quant"]
    assert codes(run(replace(a5, runtime_quants=("mxfp8",)), case)) == []


def test_unknown_quantisation_lists_the_known_ones() -> None:
    check = run(s=replace(QWEN_35B, quant="fp8-e5m2")).check("quant")
    assert check.passed is False and check.limit == "none, w8a8, w4a8, mxfp8, mxfp8_w4, mxfp4"


@pytest.mark.parametrize("tokens", [1, 32, 477, 4096])
def test_window_boundary_and_the_advice_it_gives(tokens: int) -> None:
    spec = window_spec(QWEN_35B, 8, tokens)
    need = required_ccl_buffer_bytes("A3", spec)
    asked = facts(max_tokens_per_rank=tokens, ccl_buffer_bytes=need)
    assert codes(run(asked)) == []
    check = run(replace(asked, ccl_buffer_bytes=need - 1)).check("window")
    assert check.passed is False
    mb = min_hccl_buffsize_mb("A3", spec)
    assert f"HCCL_BUFFSIZE to at least {mb}, or max_tokens_per_rank to at most {tokens - 1}" in (
        check.sentence
    )
    assert codes(run(replace(asked, ccl_buffer_bytes=2 * mb * MIB))) == []
    assert codes(run(replace(asked, ccl_buffer_bytes=2 * (mb - 1) * MIB))) == ["window"]


def test_a_window_for_16_tokens_serves_16() -> None:
    buffer = required_ccl_buffer_bytes("A3", window_spec(QWEN_35B, 8, 16))
    assert codes(run(facts(max_tokens_per_rank=16, ccl_buffer_bytes=buffer))) == []
    rejected = codes(run(facts(max_tokens_per_rank=8192, ccl_buffer_bytes=buffer)))
    assert rejected == ["max_tokens_per_rank", "window"]


def test_unknown_buffer_size_is_no_rejection_but_says_what_is_needed() -> None:
    check = run(facts(ccl_buffer_bytes=None)).check("window")
    assert check.passed is None and check.limit == "88162304 bytes or more (HCCL_BUFFSIZE 43)"


def test_a_group_wide_token_count_is_refused_by_name() -> None:
    check = run(facts(max_tokens_per_rank=8 * 1024)).check("max_tokens_per_rank")
    assert check.passed is False and check.sentence.startswith("max_tokens_per_rank is 8192;")


@pytest.mark.parametrize(
    ("variant", "callable_variants", "sentence"),
    [
        (None, ("B",), "abi_variant is not known; allowed: A, B, C"),
        ("K", ("B",), "abi_variant is K; allowed: A, B, C"),
        ("E", ("B",), "abi_variant is E; allowed: B;"),
        ("A", ("A", "B"), "abi_variant is A; allowed: B, C, D, E, F, G, H, I, J; variant A: it "),
        ("E", ("B", "E"), "abi_variant is E; allowed: B, D;"),
        ("B", (), "abi_variant is B; allowed: none;"),
    ],
)
def test_abi_variant(
    variant: str | None, callable_variants: tuple[str, ...], sentence: str
) -> None:
    check = run(facts(abi_variant=variant, callable_variants=callable_variants)).check(
        "abi_variant"
    )
    assert check.passed is False and check.sentence.startswith(sentence)


@pytest.mark.parametrize(
    ("cann", "vendor", "rejected"),
    [
        ("9.1.0", "9.1.0", []),
        ("9.1.0-beta.3", "9.1.0-beta.3", []),
        ("9.1.0", " 9.1.0 ", []),
        ("9.1", "9.1.0", []),
        ("9.10", "9.1.0", ["cann_version"]),
        (None, "9.1.0", ["cann_version"]),
        ("9.1.0", None, ["operator_version"]),
        ("9.1.0", "9.2.0", ["cann_version", "operator_version"]),
        ("9.1.0", "9.10.0", ["cann_version", "operator_version"]),
        ("8.5.0", "8.5.0", ["operator_version"]),
        ("9.1.0", "9.1.0-beta.2", ["operator_version"]),
        ("9.1.0", "", ["cann_version", "operator_version"]),
    ],
)
def test_versions(cann: str | None, vendor: str | None, rejected: list[str]) -> None:
    found = facts(cann_version=cann, vendor_version=vendor)
    assert codes(run(found)) == rejected


def test_problem_codes_are_shown_whichever_way_they_are_written() -> None:
    for text in ("[mixed_files] a and b", "mixed_files: a and b"):
        check = run(facts(library_problem=text)).check("library")
        assert check.value == "mixed_files" and check.sentence.startswith("mixed_files: a and b;")
    check = run(facts(comm_problem="no such thing: really")).check("comm")
    assert check.value == "problem" and "no such thing: really" in check.sentence
