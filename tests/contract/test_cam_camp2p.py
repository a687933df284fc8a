# SPDX-License-Identifier: Apache-2.0
"""a2e and e2a on the software device, across forked processes with FFN and Attention roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.cam_ranks import REMOTE, VECTOR_FAULT, VECTOR_TIMEOUT, CamRank, cam_rank
from support.ranks import run_ranks, values
from xmoe.errors import AclError, ConfigError
from xmoe.kernels.ops.cam.host import HostCamP2POps
from xmoe.kernels.ops.cam.topology import CamP2PTopology

HIDDEN = 32


def rows(rank: int, stage: int, layer: int, count: int) -> torch.Tensor:
    """What an Attention rank sends: exact in bfloat16, different everywhere."""
    seed = 1000 * rank + 100 * stage + layer
    data = np.random.default_rng(seed).integers(-64, 64, (count, HIDDEN))
    return torch.from_numpy(data.astype(np.float32)).to(torch.bfloat16)


def topology(rank: int, ffn: int, attn: int, aiv_num: int = 8) -> CamP2PTopology:
    return CamP2PTopology(ffn, attn, rank, HIDDEN, topk=2, aiv_num=aiv_num)


def ffn_side(one: CamRank, t: CamP2PTopology, groups: list[str], layers: int, count: int) -> bool:
    ops, keep, stream = HostCamP2POps(one.library, t), [], one.stream()
    exact = True
    for layer in range(layers):
        for stage, group in enumerate(groups):
            total = count * t.ratio
            got = ops.a2e(group, None, total, stream=stream)
            one.sync(stream)
            want = torch.cat([rows(p, stage, layer, count) for p in t.attention_peers()])
            exact &= torch.equal(got.hidden_states[: len(want)], want)
            out = got.hidden_states * 2 + 1
            keep.append(out)
            ops.e2a(group, out, got.atten_batch_size, stream=stream)
            one.sync(stream)
    return exact


def attention_side(
    one: CamRank, t: CamP2PTopology, groups: list[str], layers: int, count: int
) -> bool:
    ops, stream = HostCamP2POps(one.library, t), one.stream()
    exact = True
    for layer in range(layers):
        sent = [rows(one.rank, stage, layer, count) for stage in range(len(groups))]
        states = []
        for x, group in zip(sent, groups, strict=True):
            states.append(ops.a2e(group, x, count, stream=stream))
        for x, group, state in zip(sent, groups, states, strict=True):
            got = ops.e2a(group, x, state.atten_batch_size, stream=stream)
            one.sync(stream)
            exact &= torch.equal(got, x * 2 + 1)
    return exact


def exchange(rank: int, _: Any, folder: str, ffn: int, attn: int, stages: int) -> Any:
    with cam_rank(rank, ffn + attn, folder) as one:
        groups = [one.communicator(f"afd{s}") for s in range(stages)]
        t = topology(rank, ffn, attn)
        side = ffn_side if t.is_ffn else attention_side
        return side(one, t, groups, layers=4, count=5), one.soft.counters(groups[0])


@pytest.mark.parametrize(("ffn", "attn", "stages"), [(1, 1, 1), (1, 2, 2), (2, 3, 2)])
def test_payload_is_exact_over_layers_and_stages(
    tmp_path: Path, ffn: int, attn: int, stages: int
) -> None:
    results = values(run_ranks(exchange, ffn + attn, str(tmp_path), ffn, attn, stages, group=False))
    assert all(exact for exact, _ in results)
    for _, counters in results:
        assert counters.order_violations == counters.overlap_violations == 0


def extra_launch(rank: int, _: Any, folder: str) -> tuple[int, str]:
    """The Attention rank launches a2e twice before the FFN rank's first: the counters differ."""
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, 1, 1)
        ops, stream = HostCamP2POps(one.library, t), one.stream()
        x = rows(1, 0, 0, 4)
        if not t.is_ffn:
            for _i in range(2):
                ops.a2e(group, x, 4, stream=stream)
            one.sync(stream)
            one.mark("sent")
            one.meet("gave up")  # a rank that leaves would be reported instead of the timeout
            return 0, str(one.soft.counters(group).order_violations)
        one.meet("sent")
        ops.a2e(group, None, 4, stream=stream)
        with pytest.raises(AclError) as caught:
            one.sync(stream)
        one.mark("gave up")
        return caught.value.code, caught.value.detail


def test_a_missing_launch_hangs_until_the_wait_timeout(tmp_path: Path) -> None:
    env = {"XSD_WAIT_TIMEOUT_MS": "300"}
    (code, text), (_, violations) = values(
        run_ranks(extra_launch, 2, str(tmp_path), group=False, env=env)
    )
    assert code == VECTOR_TIMEOUT
    assert "flag of launch 1, seen 2" in text
    assert violations == "1"


def core_counts(rank: int, _: Any, folder: str) -> int:
    """The Attention rank takes more cores for e2a than for a2e: new counters start behind."""
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t, stream = topology(rank, 1, 1), one.stream()
        more = topology(rank, 1, 1, aiv_num=8 if rank == 0 else 16)
        ops, others = (HostCamP2POps(one.library, each) for each in (t, more))
        x = rows(1, 0, 0, 4)
        state = ops.a2e(group, x, 4, stream=stream)
        one.sync(stream)
        others.e2a(group, x, state.atten_batch_size, stream=stream)
        if t.is_ffn:
            one.sync(stream)
            one.meet("gave up")
            return 0
        with pytest.raises(AclError) as caught:
            one.sync(stream)
        one.mark("gave up")
        return caught.value.code


def test_core_counts_that_differ_between_a2e_and_e2a_break_the_counter(tmp_path: Path) -> None:
    env = {"XSD_WAIT_TIMEOUT_MS": "300"}
    codes = values(run_ranks(core_counts, 2, str(tmp_path), group=False, env=env))
    assert codes == [0, VECTOR_TIMEOUT]


def overlapping(rank: int, _: Any, folder: str) -> tuple[int, int]:
    """FFN posts a2e(L+1) on the receive stream before e2a(L) is through: both count at once."""
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, 1, 1)
        ops = HostCamP2POps(one.library, t)
        recv, send = one.stream(), one.stream()
        x = rows(1, 0, 0, 4)
        if not t.is_ffn:
            state = ops.a2e(group, x, 4, stream=recv)
            ops.e2a(group, x, state.atten_batch_size, stream=recv)
            with pytest.raises(AclError):
                one.sync(recv)
            return 0, 0
        first = ops.a2e(group, None, 4, stream=recv)
        one.sync(recv)
        ops.a2e(group, None, 4, stream=recv)  # spins: Attention has not sent it
        while one.soft.free_cores(0)[0] == 48:
            pass
        ops.e2a(group, first.hidden_states, first.atten_batch_size, stream=send)
        with pytest.raises(AclError) as caught:
            one.sync(send)
        return caught.value.code, one.soft.counters(group).overlap_violations


def test_strict_mode_reports_a_receive_that_overlaps_the_send_of_its_group(tmp_path: Path) -> None:
    env = {"XSD_WAIT_TIMEOUT_MS": "500"}
    ffn, _ = values(run_ranks(overlapping, 2, str(tmp_path), group=False, env=env))
    assert ffn == (VECTOR_FAULT, 1)


def aborted(rank: int, _: Any, folder: str) -> tuple[int, str]:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, 1, 1)
        ops, stream = HostCamP2POps(one.library, t), one.stream()
        if not t.is_ffn:
            one.meet("spinning")
            one.soft.abort(group, reason=7)
            return one.soft.abort_state(group), ""
        ops.a2e(group, None, 4, stream=stream)
        while one.soft.free_cores(0)[0] == 48:  # queued is not yet spinning
            pass
        one.mark("spinning")
        with pytest.raises(AclError) as caught:
            one.sync(stream)
        return caught.value.code, caught.value.detail


def test_the_abort_word_releases_a_spinning_receive_on_the_peer(tmp_path: Path) -> None:
    (code, text), (state, _) = values(run_ranks(aborted, 2, str(tmp_path), group=False))
    assert code == REMOTE
    assert "aborted by rank 1, reason 7" in text
    assert state == (7 << 16) | 2


def refused(rank: int, _: Any, folder: str) -> list[str]:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, 1, 1)
        ops, stream = HostCamP2POps(one.library, t), one.stream()
        x, told = rows(1, 0, 0, 4), []
        calls = [
            lambda: ops.a2e("nobody", x, 4, stream=stream),
            lambda: ops.a2e(group, x, 0, stream=stream),
            lambda: ops.e2a(group, x.float(), torch.zeros(1, dtype=torch.int32), stream=stream),
            lambda: ops.e2a(group, x, torch.zeros(1, dtype=torch.int64), stream=stream),
        ]
        if not t.is_ffn:
            calls.append(lambda: ops.a2e(group, x[:, :8], 4, stream=stream))
            calls.append(lambda: ops.a2e(group, torch.zeros(99999, HIDDEN), 1, stream=stream))
        for call in calls:
            with pytest.raises((AclError, ConfigError)) as caught:
                call()
            told.append(str(caught.value))
        one.sync(stream)
        return told


def test_bad_arguments_are_refused_before_anything_is_queued(tmp_path: Path) -> None:
    ffn, attn = values(run_ranks(refused, 2, str(tmp_path), group=False))
    assert 'no communicator named "nobody"' in ffn[0]
    assert "allowed: 1 or more" in ffn[1]
    assert all("allowed:" in text for text in attn[1:])


def test_topology_rejects_what_the_kernels_cannot_do() -> None:
    for bad in (
        {"ffn_size": 3, "attn_size": 2, "rank": 0, "hidden": 8},
        {"ffn_size": 1, "attn_size": 1, "rank": 2, "hidden": 8},
        {"ffn_size": 1, "attn_size": 1, "rank": 0, "hidden": 0},
        {"ffn_size": 1, "attn_size": 1, "rank": True, "hidden": 8},
        {"ffn_size": 1, "attn_size": 1, "rank": 0, "hidden": 8, "aiv_num": 0},
    ):
        with pytest.raises(ConfigError, match="allowed"):
            CamP2PTopology(**bad)
