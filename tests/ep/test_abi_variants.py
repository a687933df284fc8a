# SPDX-License-Identifier: Apache-2.0
"""The product's call path into each ABI variant, two ranks, against the float64 oracle.

The vendor library is the software vendor compiled with that parameter list; its package does not
tell the variant, so the return-code probe has to.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support import abi_vendors
from support.abi_vendors import LETTERS
from support.mega_moe import Rank, batch
from support.mega_moe import check as check_output
from support.ranks import run_ranks, values
from xmoe.config import XmoeConfig
from xmoe.errors import UnsupportedError
from xmoe.kernels.acl.variants import VARIANTS
from xmoe.policy.facts import Facts
from xmoe.policy.profiles import PROFILES, WITHOUT_LIMITS, profile_named
from xmoe.policy.select import assess
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, Mode, MoeShape
from xmoe.types import Path as MoePath

pytestmark = [
    pytest.mark.ep,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build variants with"),
]

SHAPE = MoeShape(1024, 1024, 4, 2, activation_clamp=0.5)
PROFILE = {
    "B": "a3-seed", "C": "a3-master-2026-07-01", "D": "a3-master-2026-07-01",
    "E": "a3-master-2026-07-21", "F": "a3-hicann-24d42e043",
    **dict.fromkeys("GHIJ", "a3-hicann-12c31dbd4"),
}  # fmt: skip
Environment = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment in which a variant's vendor is the chain; probes are shared by the ranks."""
    folder = tmp_path_factory.mktemp("vendors")

    @functools.cache
    def one(variant: str) -> dict[str, str]:
        vendor = abi_vendors.vendor_folder(folder / variant, variant)
        return {
            "XMOE_DEVICE": "soft",
            "ASCEND_CUSTOM_OPP_PATH": str(vendor),
            "XMOE_ABI_CACHE": str(folder / "probes"),
        }

    return one


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(rank)
    hidden = torch.randn(3 + rank, SHAPE.hidden, generator=make).bfloat16()
    scores = torch.rand(3 + rank, SHAPE.num_experts, generator=make)
    return hidden, scores.topk(SHAPE.topk, dim=1).indices, torch.rand(3 + rank, 2, generator=make)


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(77)
    gate_up = torch.randn(SHAPE.num_experts, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make)
    down = torch.randn(SHAPE.num_experts, SHAPE.intermediate, SHAPE.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.03).bfloat16()


def _through_the_runner(rank: int, group: Any, settings: dict[str, Any]) -> Any:
    config = XmoeConfig.from_mapping(
        {"mode": "on", "max_tokens_per_rank": 8, "ccl_buffer_mb": 16, "step_timeout_s": 30,
         **settings}
    )  # fmt: skip
    gate_up, down = (w[2 * rank : 2 * rank + 2].contiguous() for w in _weights())
    try:
        with MoeRunner.create(SHAPE, config, group=group) as runner:
            output = runner.layer(ExpertWeights(gate_up, down), 0)(*_inputs(rank))
            found = runner.capability
            return output, found.abi_variant, runner.decision.path, found.callable_variants
    except UnsupportedError as error:
        return str(error)


@pytest.mark.parametrize("variant", [v for v in LETTERS if v != "A"])
def test_runner_calls_the_variant_under_its_profile(variant: str, environment: Environment) -> None:
    settings = {"profile": PROFILE[variant]}
    ranks = values(
        run_ranks(_through_the_runner, 2, settings, env=environment(variant), deadline_s=120)
    )
    gate_up, down = (w.double().numpy() for w in _weights())
    for rank, (output, found, path, callable_variants) in enumerate(ranks):
        assert (found, path) == (variant, MoePath.MEGA_MOE)
        assert callable_variants == tuple(LETTERS)
        hidden, ids, weights = _inputs(rank)
        want = moe_reference(
            hidden.double().numpy(), ids.numpy(), weights.numpy(), gate_up, down,
            activation_clamp=0.5,
        )  # fmt: skip
        assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()


def _through_the_operator(rank: int, group: Any) -> Any:
    with Rank(rank, group, 4, 2, 4) as me:
        assert me.device.runtime.mega_moe.variant is not None
        return me.run(batch(4, 4, 2, seed=rank)), me.device.runtime.mega_moe.variant.id


def test_operator_calls_variant_a(environment: Environment) -> None:
    # The policy accepts A nowhere (see below); the call itself is right all the same.
    ranks = values(run_ranks(_through_the_operator, 2, env=environment("A"), deadline_s=120))
    assert [variant for _, variant in ranks] == ["A", "A"]
    check_output([y for y, _ in ranks], [batch(4, 4, 2, seed=r) for r in range(2)], 4)


@pytest.mark.parametrize("profile", [None, "a3-seed", "a3-hicann-12c31dbd4"])
def test_policy_refuses_variant_a_with_the_reason(
    profile: str | None, environment: Environment
) -> None:
    settings = {} if profile is None else {"profile": profile}
    ranks = values(
        run_ranks(_through_the_runner, 2, settings, env=environment("A"), deadline_s=120)
    )
    assert ranks[0] == ranks[1]
    assert "abi_variant is A; allowed: B, C, D, E, F, G, H, I, J; variant A:" in ranks[0], ranks
    assert "Atlas A5 alone" in ranks[0] and "states its limits" in ranks[0]


@pytest.mark.parametrize("settings", [{}, {"abi_variant": "E"}])
def test_a_variant_the_profile_does_not_list_is_refused_by_name(
    settings: dict[str, Any], environment: Environment
) -> None:
    ranks = values(
        run_ranks(
            _through_the_runner, 2, {"profile": "a3-seed", **settings}, env=environment("E"),
            deadline_s=120,
        )
    )  # fmt: skip
    assert ranks[0] == ranks[1] and "abi_variant is E; allowed: B, D" in ranks[0], ranks


def test_a_wrong_pin_is_refused_alike_on_every_rank(environment: Environment) -> None:
    settings = {"profile": "a3-seed", "abi_variant": "B"}
    ranks = values(
        run_ranks(_through_the_runner, 2, settings, env=environment("D"), deadline_s=120)
    )
    assert ranks[0] == ranks[1]
    assert "variant_mismatch" in ranks[0] and "abi_variant=B" in ranks[0]
    assert "identified D" in ranks[0]


def test_an_unknown_variant_means_the_split_path_in_mode_auto(environment: Environment) -> None:
    settings = {"mode": "auto", "abi_variant": "B"}
    ranks = values(
        run_ranks(_through_the_runner, 2, settings, env=environment("D"), deadline_s=120)
    )
    assert [path for _, _, path, _ in ranks] == [MoePath.FUSED_MOE] * 2
    assert [found for _, found, _, _ in ranks] == [None, None]


def test_every_variant_but_a_has_a_profile_that_accepts_it() -> None:
    known = {v for profile in PROFILES for v in profile.abi_variants.values}
    assert known == set(LETTERS) - set(WITHOUT_LIMITS) == set(LETTERS) - {"A"}
    for variant, name in PROFILE.items():
        profile = profile_named(name)
        facts = Facts(
            soc="Ascend910_9391", cann_version="9.1.0", vendor_version="9.1.0-beta.3",
            abi_variant=variant, ep_size=2, max_tokens_per_rank=8, ccl_buffer_bytes=1 << 30,
            callable_variants=tuple(VARIANTS),
        )  # fmt: skip
        decision = assess(Mode.ON, facts, SHAPE, profile.name)
        assert decision.check("abi_variant").passed, variant
        other = "B" if variant != "B" else "J"
        refused = assess(Mode.ON, replace(facts, abi_variant=other), SHAPE, profile.name)
        assert not refused.check("abi_variant").passed
