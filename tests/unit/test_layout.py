# SPDX-License-Identifier: Apache-2.0
"""Window arithmetic against numbers worked by hand, and inverse functions against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.policy_cases import QWEN_35B, shape
from xmoe import layout
from xmoe.errors import ConfigError
from xmoe.layout import MIB, WindowSpec

FAMILIES = ("A2", "A3", "A5")
SPECS = st.builds(
    WindowSpec,
    tokens_per_rank=st.integers(1, 20_000),
    hidden=st.integers(2, 16).map(lambda n: n * 512),
    topk=st.integers(1, 16),
    ep_size=st.sampled_from((2, 4, 8, 16, 32, 64, 128)),
    local_experts=st.integers(1, 128),
    quantised=st.booleans(),
    flag_min_bytes=st.sampled_from((0, 512 * 1024)),
)


def spec(
    tokens: int, hidden: int, topk: int, ep: int, local: int = 32, **rest: object
) -> WindowSpec:
    return WindowSpec(tokens, hidden, topk, ep, local, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "case", "expected"),
    [
        # counts 2*384*4, two tensors of 1*1*2048, flags 2*512, 10 MiB
        ("A3", spec(1, 1024, 1, 2), 3072 + 2 * 2048 + 1024 + 10 * MIB),
        # counts 8*1152*4, two tensors of 512*8*4096, flags 8*512
        ("A3", spec(512, 2048, 8, 8), 36864 + 2 * 16777216 + 4096 + 10 * MIB),
        ("A3", spec(4096, 2048, 8, 8), 36864 + 268435456 + 4096 + 10 * MIB),
        # counts 16*2176*4, two tensors of 512*10*8192, flags 16*512
        ("A3", spec(512, 4096, 10, 16), 139264 + 83886080 + 8192 + 10 * MIB),
        # quantised: row 2048+512, plus a float scale per row
        (
            "A3",
            spec(16, 2048, 8, 8, quantised=True),
            36864 + 327680 + 512 + 524288 + 4096 + 10 * MIB,
        ),
        # a later build reserves at least 512 KiB of flags
        ("A3", spec(512, 2048, 8, 8, flag_min_bytes=524288), 36864 + 33554432 + 524288 + 10 * MIB),
        # R = 1*2*min(1,4) = 2: max(2*2048+2048, 2048+2*2048); flags 1024 + 2*128*64 + 2*64
        ("A2", spec(1, 1024, 1, 2, 4), 3072 + 6144 + 17536 + 10 * MIB),
        # R = 4*2*2 = 16: max(16*1536+8*2048, 8*1536+16*2048) + 16*4
        ("A2", spec(4, 1024, 2, 2, 4, quantised=True), 3072 + 45056 + 64 + 17536 + 10 * MIB),
        # masks 16*8*(512+32), tokens 512*4224, results 512*4096*8*2
        ("A5", spec(512, 4096, 8, 8, 16), 61440 + 69632 + 2162688 + 33554432),
    ],
)
def test_required_window_by_hand(family: str, case: WindowSpec, expected: int) -> None:
    assert layout.required_window_bytes(family, case) == expected
    halves = 1 if family == "A5" else 2
    assert layout.required_ccl_buffer_bytes(family, case) == halves * expected


def test_rows_that_fit_known_buffers() -> None:
    # (256 MiB - 10 MiB - 36864 - 4096) / 65536 = 3935.4; with 200 MiB 3039.4
    case = spec(1, 2048, 8, 8)
    assert layout.max_tokens_per_rank_that_fit("A3", case, 512 * MIB) == 3935
    assert layout.max_tokens_per_rank_that_fit("A3", case, 400 * MIB) == 3039
    assert layout.max_tokens_per_rank_that_fit("A3", case, 20 * MIB) == 0


def test_a3_offsets_by_hand() -> None:
    found = layout.a3_window_layout(spec(512, 2048, 8, 8), 200 * MIB)
    assert {r.name: (r.offset, r.size_bytes) for r in found.regions} == {
        "reserved": (0, 10485760),
        "sent_tokens": (10485760, 16777216),
        "results": (27262976, 16777216),
        "token_counts": (209674240, 36864),
        "flags": (209711104, 4096),
    }
    assert found.region("flags").end == 200 * MIB
    with pytest.raises(KeyError):
        found.region("sent_scales")


def test_max_recv_rows_by_hand() -> None:
    assert layout.max_recv_rows(4, 8, 8, 32) == 256
    assert layout.max_recv_rows(4, 8, 8, 2) == 64  # a token reaches at most the 2 experts of a rank


def test_routed_weights_of_35b_at_ep8() -> None:
    # 32 experts * 3 * 2048 * 512 * 2 bytes * 40 layers = 7.5 GiB
    assert layout.routed_weight_bytes_per_rank(QWEN_35B, 8, 40) == 15 * (1 << 29)


def test_physical_experts_count_replicas() -> None:
    assert layout.physical_experts_per_rank(shape(1024, 512, 1024, 8), 8) == 128
    replicated = shape(1024, 512, 1024, 8, num_redundant_experts=2)
    assert layout.physical_experts_per_rank(replicated, 8) == 130


@pytest.mark.parametrize("name", ["tokens_per_rank", "hidden", "topk", "ep_size", "local_experts"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_sizes_must_be_positive_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        replace(spec(1, 1024, 1, 2), **{name: value})  # type: ignore[arg-type]


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="'A4' is unknown; allowed: A2, A3, A5"):
        layout.required_window_bytes("A4", spec(1, 1024, 1, 2))


@settings(max_examples=100, deadline=None)
@given(case=SPECS, family=st.sampled_from(FAMILIES))
def test_exact_requirement_is_accepted_and_one_byte_less_is_not(
    case: WindowSpec, family: str
) -> None:
    need = layout.required_ccl_buffer_bytes(family, case)
    assert layout.max_tokens_per_rank_that_fit(family, case, need) >= case.tokens_per_rank
    assert layout.max_tokens_per_rank_that_fit(family, case, need - 1) < case.tokens_per_rank


@settings(max_examples=100, deadline=None)
@given(case=SPECS, family=st.sampled_from(FAMILIES))
def test_printed_buffsize_is_the_smallest_that_works(case: WindowSpec, family: str) -> None:
    mb = layout.min_hccl_buffsize_mb(family, case)
    need = layout.required_ccl_buffer_bytes(family, case)
    assert layout.ccl_buffer_bytes_of(mb, family) >= need
    assert layout.ccl_buffer_bytes_of(mb - 1, family) < need


def test_exact_multiple_of_a_mib_gets_no_extra_mib() -> None:
    # Each unit of hidden adds 4 bytes (two tensors of bf16): widen it to the next whole MiB.
    case = spec(1, 512, 1, 4)
    missing = -layout.required_window_bytes("A3", case) % MIB
    exact = replace(case, hidden=case.hidden + missing // 4)
    assert layout.required_window_bytes("A3", exact) == 11 * MIB
    assert layout.min_hccl_buffsize_mb("A3", exact) == 11


@settings(max_examples=100, deadline=None)
@given(
    case=SPECS,
    family=st.sampled_from(FAMILIES),
    name=st.sampled_from(("tokens_per_rank", "hidden", "topk")),
)
def test_need_grows_with_every_size(case: WindowSpec, family: str, name: str) -> None:
    larger = replace(case, **{name: getattr(case, name) * 2})
    assert layout.required_window_bytes(family, larger) > layout.required_window_bytes(family, case)


@pytest.mark.parametrize("family", ["A2", "A3", "A5"])
def test_growth_with_ep_is_at_most_linear(family: str) -> None:
    # 1024 tokens per rank, 7168 hidden, top-6, 256 experts: the per-rank number stays per rank.
    need = {
        ep: layout.required_ccl_buffer_bytes(family, spec(1024, 7168, 6, ep, 256 // ep))
        for ep in (8, 16, 32)
    }
    assert need[8] <= need[16] <= 2 * need[8]
    assert need[16] <= need[32] <= 2 * need[16]


@settings(max_examples=100, deadline=None)
@given(case=SPECS, slack=st.integers(0, 64 * MIB))
def test_regions_tile_the_window_without_overlap(case: WindowSpec, slack: int) -> None:
    window = layout.required_window_bytes("A3", case) + slack
    found = layout.a3_window_layout(case, window)
    assert found.required_bytes == sum(region.size_bytes for region in found.regions)
    assert found.regions[0].offset == 0 and found.regions[-1].end == window
    gaps = [b.offset - a.end for a, b in zip(found.regions, found.regions[1:], strict=False)]
    assert sorted(gaps) == [0] * (len(gaps) - 1) + [slack]
    for name in ("sent_tokens", "results"):
        assert found.region(name).offset % 4 == 0
    with pytest.raises(ConfigError, match=f"allowed: {found.required_bytes} bytes or more"):
        layout.a3_window_layout(case, found.required_bytes - 1)


@settings(max_examples=50, deadline=None)
@given(case=SPECS, tokens=st.integers(1, 20_000))
def test_counts_and_flags_do_not_move_with_the_batch(case: WindowSpec, tokens: int) -> None:
    other = replace(case, tokens_per_rank=tokens)
    window = max(layout.required_window_bytes("A3", c) for c in (case, other))
    first, second = (layout.a3_window_layout(c, window) for c in (case, other))
    for name in ("token_counts", "flags"):
        assert first.region(name) == second.region(name)
