# SPDX-License-Identifier: Apache-2.0
"""The checks, in order. Each looks at facts, shape and limit profile and says what it found.

All of them are always evaluated: a user sees everything that stands in the way at once. A check
whose limit is not known (no profile) has None as outcome; the check on the profile itself rejects.
Nothing here knows a model by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from xmoe import layout
from xmoe.policy.decision import Check, Value
from xmoe.policy.facts import Facts, problem_code, problem_text
from xmoe.policy.limits import Limit
from xmoe.policy.profiles import PROFILES, WITHOUT_LIMITS, LimitProfile, soc_family
from xmoe.types import Mode, MoeShape

KNOWN_VARIANTS = ("A", "B", "C", "D", "E", "F", "G", "H", "I", "J")
KNOWN_QUANTS = ("none", "w8a8", "w4a8", "mxfp8", "mxfp8_w4", "mxfp4")
_XMOE = "xmoe, this release"


@dataclass(frozen=True)
class Case:
    """What the rules look at. `profile` is None when none fits; `pinned`: the user named it."""

    mode: Mode
    facts: Facts
    shape: MoeShape
    profile: LimitProfile | None
    pinned: bool = False

    @property
    def local_experts(self) -> int:
        return layout.physical_experts_per_rank(self.shape, max(1, self.facts.ep_size))


Rule = Callable[[Case], Check]


def _result(
    code: str, passed: bool | None, value: Value, limit: str, source: str, next_step: str
) -> Check:
    if passed is None:
        sentence = f"not checked: {next_step}"
    elif passed:
        sentence = f"{code} is {_show(value)}"
    else:
        sentence = f"{code} is {_show(value)}; allowed: {limit}; {next_step}"
    return Check(code, passed, value, limit, source, sentence)


def _show(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not known" if value is None else str(value)


def _limited(
    case: Case,
    code: str,
    value: Value,
    pick: Callable[[LimitProfile], Limit],
    next_step: str = "use a model or an operator build that fits, or let mode auto fall back",
) -> Check:
    """Compare with one limit of the profile."""
    if case.profile is None:
        return _result(code, None, value, "-", "-", "no limit profile")
    limit = pick(case.profile)
    return _result(code, limit.accepts(value), value, str(limit), limit.source, next_step)


def _mode(case: Case) -> Check:
    passed = case.mode is not Mode.OFF
    return _result("mode", passed, case.mode.value, "auto, on", _XMOE, "set mode auto or on")


def _rank_agreement(case: Case) -> Check:
    found = case.facts.disagreements
    value = "; ".join(found) if found else "all ranks agree"
    return _result(
        "rank_agreement",
        not found,
        value,
        "equal on all ranks",
        "MegaMoe documentation: sizing arguments must be equal on all ranks",
        "make the ranks' environment, software and settings equal",
    )


def _soc(case: Case) -> Check:
    return _result(
        "soc",
        soc_family(case.facts.soc) is not None,
        case.facts.soc,
        "Ascend910B (A2), Ascend910_93 (A3), Ascend950 (A5)",
        "limit profiles",
        "run on one of these devices",
    )


def _problem(code: str, problem: str | None, source: str, next_step: str) -> Check:
    if problem is None:
        return _result(code, True, "ok", "no problem", source, "")
    failed = _result(code, False, problem_code(problem), "no problem", source, next_step)
    sentence = f"{problem_code(problem)}: {problem_text(problem)}; {next_step}"
    return Check(code, False, failed.value, failed.limit, source, sentence)


def _library(case: Case) -> Check:
    return _problem("library", case.facts.library_problem, "library chain", "run xmoe doctor")


def _comm(case: Case) -> Check:
    return _problem("comm", case.facts.comm_problem, "HCCL symbols", "run xmoe doctor")


def _abi_variant(case: Case) -> Check:
    value = case.facts.abi_variant
    next_step = "set abi_variant to what the installed operator package exports"
    if value not in KNOWN_VARIANTS:
        limit, source = ", ".join(KNOWN_VARIANTS), "ABI variant table"
        return _result("abi_variant", False, value, limit, source, next_step)
    if value not in case.facts.callable_variants:
        limit = ", ".join(case.facts.callable_variants) or "none"
        return _result("abi_variant", False, value, limit, f"callable by {_XMOE}", next_step)
    if value in WITHOUT_LIMITS:
        limit = ", ".join(v for v in KNOWN_VARIANTS if v not in WITHOUT_LIMITS)
        why = f"variant {value}: {WITHOUT_LIMITS[value]}; install a later operator package"
        return _result("abi_variant", False, value, limit, "limit profiles", why)
    return _limited(case, "abi_variant", value, lambda p: p.abi_variants, next_step)


def _release(version: str | None) -> str:
    """What stands before the pre-release part, 9.1.0 of 9.1.0-beta.3; 9.1 counts as 9.1.0."""
    text = "" if version is None else version.strip().lower().split("-")[0]
    return f"{text}.0" if text.count(".") == 1 else text


def _cann_version(case: Case) -> Check:
    cann, vendor = case.facts.cann_version, case.facts.vendor_version
    source = "vllm-ascend issue 17307: a vendor package on another base loses attributes"
    if cann is None:
        next_step = "make the toolkit's version.info readable"
        return _result("cann_version", False, None, "a known version", source, next_step)
    if vendor is None:
        return _result("cann_version", None, cann, "-", source, "operator version not known")
    return _result(
        "cann_version",
        _release(cann) == _release(vendor),
        cann,
        f"the release of the operator package, {_release(vendor)}",
        source,
        "install toolkit and operator package of one release",
    )


def _operator_version(case: Case) -> Check:
    version, family = case.facts.vendor_version, soc_family(case.facts.soc)
    known = sorted({v for p in PROFILES if p.soc_family == family for v in p.operator_versions})
    limit = ", ".join(known) or "none for this SoC"
    code, source = "operator_version", "limit profiles"
    if case.profile is None:
        next_step = "name a limit profile with the setting 'profile' if you know the build's limits"
        return _result(code, False, version, limit, source, next_step)
    if case.profile.soc_family != family:
        next_step = f"profile {case.profile.name} is for {case.profile.soc_family}; name another"
        return _result(code, False, version, f"a profile for {family}", source, next_step)
    how = "named by setting" if case.pinned else "chosen by SoC and operator version"
    sentence = f"operator_version is {_show(version)}; limits of {case.profile.title}, {how}"
    return Check(code, True, version, limit if not case.pinned else "any", source, sentence)


def _dtype(case: Case) -> Check:
    return _limited(case, "dtype", case.shape.dtype, lambda p: p.dtype)


def _activation(case: Case) -> Check:
    check = _limited(case, "activation", case.shape.activation, lambda p: p.activation)
    if check.passed and case.shape.activation != "swiglu":
        source = f"{check.source}; parameters not passed by {_XMOE}"
        return _result(
            "activation", False, check.value, "swiglu", source, "let mode auto fall back"
        )
    return check


def _activation_clamp(case: Case) -> Check:
    clamp, code = case.shape.activation_clamp, "activation_clamp"
    if clamp is None:
        return Check(code, True, None, "-", "-", "the model has no activation clamp")
    if case.profile is None:
        return _result(code, None, clamp, "-", "-", "no limit profile")
    # The operator takes 0 for "no clamp", so a model that really clamps at 0 cannot be expressed.
    passed = case.profile.clamp_applied and math.isfinite(clamp) and clamp > 0
    limit = "finite, more than 0" if case.profile.clamp_applied else "no clamp"
    value = clamp if math.isfinite(clamp) else str(clamp)
    source, next_step = case.profile.clamp_source, "let mode auto fall back"
    return _result(code, passed, value, limit, source, next_step)


def _gate_up_layout(case: Case) -> Check:
    value = case.shape.gate_up_layout
    source = "R910: gate in columns [0, I), up in [I, 2I); interleave is forced to 0"
    next_step = "rearrange the weights when loading"
    passed = value == "concatenated"
    return _result("gate_up_layout", passed, value, "concatenated", source, next_step)


def _quant(case: Case) -> Check:
    value, next_step = case.shape.quant, "let mode auto fall back or load other weights"
    if value not in KNOWN_QUANTS:
        limit = ", ".join(KNOWN_QUANTS)
        return _result("quant", False, value, limit, "weight formats of MegaMoe", next_step)
    if value not in case.facts.runtime_quants:
        limit = ", ".join(case.facts.runtime_quants) or "none of them"
        return _result("quant", False, value, limit, _XMOE, next_step)
    return _limited(case, "quant", value, lambda p: p.quant, next_step)


def _hidden(case: Case) -> Check:
    return _limited(case, "hidden", case.shape.hidden, lambda p: p.hidden)


def _intermediate(case: Case) -> Check:
    return _limited(case, "intermediate", case.shape.intermediate, lambda p: p.intermediate)


def _topk(case: Case) -> Check:
    check = _limited(case, "topk", case.shape.topk, lambda p: p.topk)
    if check.passed and case.shape.topk > case.shape.num_experts:
        limit = f"at most the number of experts, {case.shape.num_experts}"
        return _result("topk", False, case.shape.topk, limit, "distinct ids", "correct the model")
    return check


def _local_experts(case: Case) -> Check:
    next_step = "use more ranks or fewer replicas (replicas count)"
    value = case.local_experts
    return _limited(case, "local_experts", value, lambda p: p.local_experts, next_step)


def _num_experts(case: Case) -> Check:
    replicas = case.shape.num_redundant_experts * case.facts.ep_size
    total = case.shape.num_experts + replicas
    return _limited(case, "num_experts", total, lambda p: p.num_experts)


def _redundant_experts(case: Case) -> Check:
    value = case.shape.num_redundant_experts
    next_step = "switch expert replicas off; ids are not mapped to replicas"
    return _result("redundant_experts", value == 0, value, "0", _XMOE, next_step)


def _ep_enabled(case: Case) -> Check:
    value, source = case.facts.ep_size, "MegaMoe is an operator across ranks"
    return _result("ep_enabled", value > 1, value, "2 or more ranks", source, "use 2 ranks or more")


def _ep_size(case: Case) -> Check:
    next_step = "start another number of ranks"
    return _limited(case, "ep_size", case.facts.ep_size, lambda p: p.ep_size, next_step)


def _ep_divides_experts(case: Case) -> Check:
    experts, ranks = case.shape.num_experts, case.facts.ep_size
    passed = ranks > 0 and experts % ranks == 0
    limit = f"a divisor of the {experts} experts"
    source = "expert g lives on rank g / (E / P)"
    return _result(
        "ep_divides_experts", passed, ranks, limit, source, "start another number of ranks"
    )


def _moe_tp(case: Case) -> Check:
    value = case.facts.moe_tp_size
    source = f"{_XMOE}: routed output is not reduced over tensor-parallel ranks"
    return _result("moe_tp", value == 1, value, "1", source, "set MoE tensor parallelism to 1")


def _max_tokens(case: Case) -> Check:
    next_step = "lower max_tokens_per_rank; larger steps then run fused_moe"
    value = case.facts.max_tokens_per_rank
    return _limited(case, "max_tokens_per_rank", value, lambda p: p.tokens_per_rank, next_step)


def _window(case: Case) -> Check:
    facts, profile, code = case.facts, case.profile, "window"
    have = facts.ccl_buffer_bytes
    if profile is None or profile.window is None:
        return _result(code, None, have, "-", "-", "no size formula for this operator build")
    if min(facts.max_tokens_per_rank, facts.ep_size, case.shape.hidden, case.shape.topk) < 1:
        return _result(code, None, have, "-", "-", "sizes are not positive")
    spec = layout.window_spec(
        case.shape, facts.ep_size, facts.max_tokens_per_rank, profile.flag_min_bytes
    )
    need = layout.required_ccl_buffer_bytes(profile.window, spec)
    mb = layout.min_hccl_buffsize_mb(profile.window, spec)
    limit = f"{need} bytes or more (HCCL_BUFFSIZE {mb})"
    source = "ops-transformer 9.1.0 CalcLeastCclBufferSize"
    if have is None:
        return _result(code, None, None, limit, source, "buffer size not known yet")
    fit = layout.max_tokens_per_rank_that_fit(profile.window, spec, have)
    next_step = f"set HCCL_BUFFSIZE to at least {mb}, or max_tokens_per_rank to at most {fit}"
    return _result(code, have >= need, have, limit, source, next_step)


def _graph_mode(case: Case) -> Check:
    value, next_step = case.facts.graph_mode, "run eagerly"
    return _result("graph_mode", not value, value, "no graph capture", _XMOE, next_step)


def _weight_budget(case: Case) -> Check:
    need, budget = case.facts.weight_bytes, case.facts.weight_budget_bytes
    if need is None or budget is None:
        return _result("weight_budget", None, need, "-", "-", "weight size or room not known")
    next_step = "use more ranks or free device memory"
    limit = f"{budget} bytes"
    return _result("weight_budget", need <= budget, need, limit, "memory of the device", next_step)


RULES: tuple[Rule, ...] = (
    _mode,
    _rank_agreement,
    _soc,
    _library,
    _abi_variant,
    _cann_version,
    _operator_version,
    _comm,
    _dtype,
    _activation,
    _activation_clamp,
    _gate_up_layout,
    _quant,
    _hidden,
    _intermediate,
    _topk,
    _local_experts,
    _num_experts,
    _redundant_experts,
    _ep_enabled,
    _ep_size,
    _ep_divides_experts,
    _moe_tp,
    _max_tokens,
    _window,
    _graph_mode,
    _weight_budget,
)


def evaluate(case: Case) -> tuple[Check, ...]:
    """All checks, in order."""
    return tuple(rule(case) for rule in RULES)
