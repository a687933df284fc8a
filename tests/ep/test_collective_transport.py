# SPDX-License-Identifier: Apache-2.0
"""The FusedMoE fallback over gloo: right values, the same bits at every EP size, clear refusals."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch

from support.ranks import Ended, run_ranks, values
from xmoe.comm.transport import CollectiveTransport
from xmoe.executor import ExecutorOptions, Phase, PhaseContext, PhaseKind, StreamExecutor, WorkItem
from xmoe.kernels.device import InlineDevice
from xmoe.kernels.ops.fused_moe import expert_mlp
from xmoe.types import ExpertWeights, TokenBatch

HIDDEN, INTER, EXPERTS, TOPK = 64, 48, 16, 4
TOKENS = 37


def _full(dtype: torch.dtype, tokens: int = TOKENS, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    weights = ExpertWeights(
        (torch.randn(EXPERTS, HIDDEN, 2 * INTER, generator=g) / 8).to(dtype),
        (torch.randn(EXPERTS, INTER, HIDDEN, generator=g) / 8).to(dtype),
    )
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOPK] for _ in range(max(1, tokens))])
    batch = TokenBatch(
        torch.randn(tokens, HIDDEN, generator=g).to(dtype),
        ids[:tokens].to(torch.int32),
        torch.rand(tokens, TOPK, generator=g),
    )
    return batch, weights


def _oracle(batch: TokenBatch, weights: ExpertWeights) -> torch.Tensor:
    """Plain float64 loops, no shared code with the product."""
    x, y = batch.hidden_states.double(), torch.zeros(batch.hidden_states.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(batch.topk_ids.shape[1]):
            e = int(batch.topk_ids[t, k])
            if 0 <= e < EXPERTS:
                h = x[t] @ weights.gate_up[e].double()
                gate, up = h[:INTER], h[INTER:]
                row = (gate / (1 + torch.exp(-gate)) * up) @ weights.down[e].double()
                y[t] += float(batch.topk_weights[t, k]) * row
    return y


def _local(weights: ExpertWeights, rank: int, size: int) -> ExpertWeights:
    per = EXPERTS // size
    part = slice(rank * per, (rank + 1) * per)
    return ExpertWeights(weights.gate_up[part].contiguous(), weights.down[part].contiguous())


def split_item(transport, weights, batch, layer=0):
    def recv(context: PhaseContext) -> None:
        tokens, counts, handle = transport.dispatch(batch)
        context.values.update(tokens=tokens, counts=counts, handle=handle)

    def compute(context: PhaseContext) -> None:
        v = context.values
        v["out"] = expert_mlp(v["tokens"], v["counts"].tolist(), weights)

    def send(context: PhaseContext) -> None:
        context.values["y"] = transport.combine(context.values["out"], context.values["handle"])

    return WorkItem(
        "fused_moe",
        layer,
        (
            Phase(PhaseKind.RECV, "ep", recv),
            Phase(PhaseKind.COMPUTE, "compute", compute),
            Phase(PhaseKind.SEND, "ep", send),
        ),
    )


def _share(tokens: int, rank: int, size: int) -> slice:
    """Uneven shares; with more ranks than tokens some are empty."""
    cuts = [tokens * r * r // (size * size) for r in range(size + 1)]
    return slice(cuts[rank], cuts[rank + 1])


def _run(rank, group, size, dtype, tokens=TOKENS, poison=False):
    batch, weights = _full(dtype, tokens)
    part = _share(tokens, rank, size)
    mine = TokenBatch(batch.hidden_states[part], batch.topk_ids[part], batch.topk_weights[part])
    transport = CollectiveTransport(group, EXPERTS)
    with StreamExecutor(InlineDevice(), ExecutorOptions(trace=True)) as executor:
        ticket = executor.submit(split_item(transport, _local(weights, rank, size), mine))
        result = ticket.result()
        assert [t.phase for t in executor.trace] == ["recv", "compute", "send"]
        assert [t.sequence for t in executor.trace] == [0, 0, 1]
    return result["y"], result["counts"]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.ep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_at_every_ep_size_and_close_to_the_oracle(dtype):
    batch, weights = _full(dtype)
    oracle = _oracle(batch, weights)
    digests = {}
    for size in (1, 2, 4, 8, 16):
        outs = values(run_ranks(_run, size, size, dtype, group=size > 1))
        y = torch.cat([out[0] for out in outs])
        assert sum(int(out[1].sum()) for out in outs) == TOKENS * TOPK
        digests[size] = _digest(y)
        tolerance = 2e-5 if dtype is torch.float32 else 2e-2
        assert (y.double() - oracle).abs().max() <= tolerance * oracle.abs().max()
    assert len(set(digests.values())) == 1, digests


@pytest.mark.ep
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_empty_ranks_and_an_empty_step(tokens):
    outs = values(run_ranks(_run, 4, 4, torch.bfloat16, tokens))
    for rank, (y, _) in enumerate(outs):
        part = _share(tokens, rank, 4)
        assert y.shape == (part.stop - part.start, HIDDEN) and y.dtype == torch.bfloat16
    batch, weights = _full(torch.bfloat16, tokens)
    y = torch.cat([out[0] for out in outs]).double()
    assert torch.allclose(y, _oracle(batch, weights), atol=2e-2)


def test_one_hot_expert_of_many_tokens():
    """Batches around block sizes, every token on expert 3 in slot 0; experts 9.. get nothing."""
    for tokens in (1, 15, 16, 17, 255, 256, 257):
        batch, weights = _full(torch.float32, tokens)
        ids = batch.topk_ids % 8
        ids = torch.stack(
            [(row[0] * 0 + torch.tensor([3, 0, 1, 2])).to(torch.int32) for row in ids]
        )
        batch = TokenBatch(batch.hidden_states, ids, batch.topk_weights)
        transport = CollectiveTransport(None, EXPERTS)
        recv, counts, handle = transport.dispatch(batch)
        y = transport.combine(expert_mlp(recv, counts.tolist(), weights), handle)
        assert int(counts.sum()) == tokens * TOPK and int(counts[9]) == 0
        assert torch.allclose(y.double(), _oracle(batch, weights), atol=1e-4)


def _bad_ids(rank, group, bad, checked):
    batch, weights = _full(torch.float32, 8, seed=rank)
    ids = batch.topk_ids.to(torch.int64)
    if rank == 2:
        ids[3, 1] = bad
        ids[5] = -1
    mine = TokenBatch(batch.hidden_states, ids, batch.topk_weights)
    transport = CollectiveTransport(group, EXPERTS, validate_ids="checked" if checked else "drop")
    _, weights = _full(torch.float32, 8)
    local = _local(weights, rank, 4)
    executor = StreamExecutor(InlineDevice())
    error = None
    try:
        y = executor.submit(split_item(transport, local, mine)).result()["y"]
        error = float(
            (y.double() - _oracle(TokenBatch(mine.hidden_states, ids, mine.topk_weights), weights))
            .abs()
            .max()
        )
        if rank == 2:
            assert torch.equal(y[5], torch.zeros(HIDDEN))
    except Exception as e:
        error = (type(e).__name__, str(e))
    # A refused step leaves the next one possible.
    good = TokenBatch(batch.hidden_states, batch.topk_ids, batch.topk_weights)
    y = executor.submit(split_item(transport, local, good)).result()["y"]
    assert (y.double() - _oracle(good, weights)).abs().max() < 1e-4
    return error, transport.dropped_slots


@pytest.mark.ep
@pytest.mark.parametrize(
    "bad", [-7, EXPERTS, EXPERTS + 1, 10**6, 2**31 - 1, 2**32 + 1, -(2**32) + 3]
)
def test_out_of_range_ids(bad):
    """V6.2: refused on all ranks with one text, or left out and counted; never wrapped."""
    outs = values(run_ranks(_bad_ids, 4, bad, True))
    errors = {out[0] for out in outs}
    assert len(errors) == 1
    name, text = errors.pop()
    assert (
        name == "ConfigError" and str(bad) in text and "rank 2" in text and "row 3, slot 1" in text
    )
    outs = values(run_ranks(_bad_ids, 4, bad, False))
    assert [out[1] for out in outs] == [0, 0, 1, 0]
    assert all(out[0] < 1e-4 for out in outs)


@pytest.mark.ep
def test_repeated_ids_are_refused_everywhere():
    batch, _ = _full(torch.float32, 8, seed=2)
    repeated = int(batch.topk_ids[3, 0])
    outs = values(run_ranks(_bad_ids, 4, repeated, True))
    assert len({out[0] for out in outs}) == 1 and "repeated" in outs[0][0][1]


def _nan_row(rank, group):
    batch, weights = _full(torch.bfloat16, 8, seed=rank)
    local = _local(weights if rank == 0 else _full(torch.bfloat16, 8)[1], rank, 2)
    transport = CollectiveTransport(group, EXPERTS)
    executor = StreamExecutor(InlineDevice())
    clean = executor.submit(split_item(transport, local, batch)).result()["y"]
    x = batch.hidden_states.clone()
    w = batch.topk_weights.clone()
    if rank == 1:
        x[2] = float("nan")
        w[4] = float("nan")
    dirty = executor.submit(
        split_item(transport, local, TokenBatch(x, batch.topk_ids, w))
    ).result()["y"]
    bad = torch.isnan(dirty).any(dim=1)
    assert torch.equal(dirty[~bad], clean[~bad])
    return bad.tolist()


@pytest.mark.ep
def test_nan_stays_in_its_row():
    """V6.1: other rows keep their bits."""
    outs = values(run_ranks(_nan_row, 2))
    assert outs[0] == [False] * 8
    assert outs[1] == [i in (2, 4) for i in range(8)]


def _unequal(rank, group):
    batch, _ = _full(torch.float32, 4)
    if rank == 1:
        batch = TokenBatch(torch.zeros(4, HIDDEN * 2), batch.topk_ids, batch.topk_weights)
    CollectiveTransport(group, EXPERTS).dispatch(batch)


@pytest.mark.ep
def test_ranks_with_other_shapes_are_named():
    outs = run_ranks(_unequal, 2, check=False)
    assert {out.error for out in outs} == {"RankDisagreement"}
    assert all("hidden size" in out.message for out in outs)


def _elsewhere(rank, group):
    batch, _ = _full(torch.float32, 4)
    if rank == 1:
        weights = batch.topk_weights.to("meta")
        batch = TokenBatch(batch.hidden_states, batch.topk_ids, weights)
    CollectiveTransport(group, EXPERTS, timeout_s=5.0).dispatch(batch)


@pytest.mark.ep
def test_tensors_of_another_device_are_an_error_on_all_ranks():
    outs = run_ranks(_elsewhere, 2, check=False)
    assert {out.error for out in outs} == {"ConfigError"}
    assert all("topk_weights on meta" in out.message for out in outs)


def _endless(rank, group):
    batch, weights = _full(torch.float32)
    local = _local(weights, rank, 4)
    transport = CollectiveTransport(group, EXPERTS)
    for _ in range(10**9):
        recv, counts, handle = transport.dispatch(batch)
        time.sleep(0.005)
        transport.combine(expert_mlp(recv, counts.tolist(), local), handle)


@pytest.mark.ep
def test_survivors_name_a_killed_peer():
    """V9.1 on the split path."""
    outs: list[Ended] = run_ranks(_endless, 4, check=False, kill=[(2, 1.5)])
    assert outs[2].signal == 9
    for out in outs[:2] + outs[3:]:
        assert out.error == "PeerLost" and "peer 2 lost" in out.message
        assert out.seconds < 15


def test_experts_must_divide():
    with pytest.raises(ValueError, match="num_experts=0"):
        CollectiveTransport(None, 0)
