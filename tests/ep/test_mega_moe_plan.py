# SPDX-License-Identifier: Apache-2.0
"""The launch plan on the software device: the same bits as a launch with everything made anew."""

from __future__ import annotations

import contextlib

import pytest
import torch

from support.mega_moe import Rank, batch, experts
from support.ranks import run_ranks, values
from xmoe.kernels.acl import op as two_phase
from xmoe.kernels.acl.handles import DeviceMemory, TensorDesc, TensorListDesc
from xmoe.kernels.acl.plan import STEP_TENSORS, Packed
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.types import ExpertWeights

pytestmark = [pytest.mark.ep, pytest.mark.timeout(300)]
EXPERTS, TOPK = 8, 2


def operator(me, rank, *, reuse=False, weights=None):
    """A second operator over the rank's resource."""
    local = EXPERTS // me.resource.handle.ep_size
    weights = experts(rank * local, local) if weights is None else weights
    made = MegaMoe(
        me.device.runtime,
        me.resource.handle,
        weights,
        EXPERTS,
        me.resource.workspace,
        reuse_executor=reuse,
    )
    me.stack.callback(made.close)
    return made


def anew(me, op, tokens, mask=None):
    """One launch by the plain two-phase call, every descriptor made for it."""
    runtime, stream = me.device.runtime, me.executor.stream
    y = torch.empty_like(tokens.hidden_states)
    ids = tokens.topk_ids if mask is None else tokens.topk_ids.clone()
    counts = torch.empty(op._local, dtype=torch.int32)
    tensors = (tokens.hidden_states, ids, tokens.topk_weights, mask, y, counts)
    with contextlib.ExitStack() as keep:

        def described(value):
            made = [
                TensorDesc(runtime, value.address + i * value.step(), value.shape,
                           dtype=value.dtype)
                for i in range(value.count)
            ]  # fmt: skip
            return keep.enter_context(TensorListDesc(runtime, made) if value.is_list else made[0])

        args = {
            key: described(value) if isinstance(value, Packed) else value
            for key, value in op._constants().items()
        }
        for key, tensor in zip(STEP_TENSORS, tensors, strict=True):
            args[key] = None if tensor is None else keep.enter_context(
                TensorDesc(runtime, tensor.data_ptr(), tuple(tensor.shape),
                           dtype=str(tensor.dtype))
            )  # fmt: skip

        def scratch(nbytes):
            return keep.enter_context(DeviceMemory(runtime, nbytes))

        def queue(queue_stream):
            with two_phase.prepare(runtime, op._symbols, args) as prepared:
                memory = scratch(prepared.workspace_bytes)
                two_phase.launch(prepared, memory, queue_stream.handle())

        me.resource.launch(stream, queue)
        with me.device.bind():
            stream.synchronize(20)
    return y, counts


def launch(me, op, tokens, mask=None):
    stream = me.executor.stream
    return me.resource.launch(stream, lambda queue: op.launch(tokens, queue, mask))


def wait(me):
    with me.device.bind():
        me.executor.stream.synchronize(20)


def _same_bits(rank, group, reuse):
    differences = []
    with Rank(rank, group, EXPERTS, TOPK, 8) as me, me.device.bind():
        op = operator(me, rank, reuse=reuse)
        for round_number, tokens in enumerate((3, 5, 3, 5, 8, 3)):
            data = batch(tokens, EXPERTS, TOPK, seed=10 * round_number + rank)
            mask = torch.ones(tokens, dtype=torch.int8) if round_number == 4 else None
            if mask is not None:
                mask[-1] = 0
            want, want_counts = anew(me, op, data, mask)
            got = launch(me, op, data, mask)
            wait(me)
            live = tokens if mask is None else tokens - 1
            if not torch.equal(got.hidden_states[:live], want[:live]):
                differences.append(("y", round_number))
            if not torch.equal(got.tokens_per_expert, want_counts):
                differences.append(("counts", round_number))
        told = op.plan.counters()
    return differences, told


@pytest.mark.parametrize("reuse", [False, True])
def test_the_same_bits_as_a_launch_with_everything_made_anew(reuse):
    for differences, told in values(run_ranks(_same_bits, 2, reuse)):
        assert differences == []
        assert told["launches"] == 6 and told["shapes"] == 3
        assert told["phase_one"] == (3 if reuse else 6)
        assert told["reused"] == (3 if reuse else 0)


def _queued(rank, group):
    """Many launches of one kept executor with other tensors each, none waited for."""
    with Rank(rank, group, EXPERTS, TOPK, 8) as me, me.device.bind():
        plain, reusing = operator(me, rank), operator(me, rank, reuse=True)
        batches = [batch(4, EXPERTS, TOPK, seed=100 * n + rank) for n in range(12)]
        want = [launch(me, plain, one) for one in batches]
        wait(me)
        got = [launch(me, reusing, one) for one in batches]
        wait(me)
        same = [
            torch.equal(a.hidden_states, b.hidden_states)
            and torch.equal(a.tokens_per_expert, b.tokens_per_expert)
            for a, b in zip(want, got, strict=True)
        ]
        distinct = not torch.equal(want[0].hidden_states, want[1].hidden_states)
        return same, distinct, reusing.plan.counters()


def test_queued_launches_of_one_executor_keep_their_own_tensors():
    for same, distinct, told in values(run_ranks(_queued, 2)):
        assert all(same) and distinct
        assert told["phase_one"] == 1 and told["reused"] == 11


def _moved(rank, group):
    """Weights that get new memory between launches."""
    local = EXPERTS // 2
    with Rank(rank, group, EXPERTS, TOPK, 8) as me, me.device.bind():
        first, second = experts(rank * local, local), experts(50 + rank * local, local)
        moving = ExpertWeights(first.gate_up.clone(), first.down.clone())
        op = operator(me, rank, reuse=True, weights=moving)
        other = operator(me, rank, weights=second)
        data = batch(4, EXPERTS, TOPK, seed=rank)
        before = launch(me, op, data)
        wait(me)
        old = moving.gate_up.data, moving.down.data
        moving.gate_up.data, moving.down.data = second.gate_up.clone(), second.down.clone()
        after, want = launch(me, op, data), launch(me, other, data)
        wait(me)
        del old
        return (
            torch.equal(after.hidden_states, want.hidden_states),
            torch.equal(before.hidden_states, after.hidden_states),
        )


def test_weights_with_new_memory_are_used():
    assert values(run_ranks(_moved, 2)) == [(True, False)] * 2


def _flat(rank, group, reuse):
    """Device memory and descriptors over 100 launches."""
    with Rank(rank, group, EXPERTS, TOPK, 8) as me, me.device.bind():
        op = operator(me, rank, reuse=reuse)
        data = [batch(n, EXPERTS, TOPK, seed=n) for n in (2, 3)]
        runtime = me.device.runtime
        free, total = runtime.ffi.new("size_t*"), runtime.ffi.new("size_t*")

        def used():
            assert runtime.acl.aclrtGetMemInfo(0, free, total) == 0
            return total[0] - free[0]

        def some(count):
            queued = []
            for number in range(count):
                queued.append(launch(me, op, data[number % 2]))
                if number % 10 == 9:
                    wait(me)
                    queued.clear()

        some(10)
        before, made = used(), op.plan.counters()["descriptors"]
        some(100)
        return used() - before, op.plan.counters()["descriptors"] - made


@pytest.mark.parametrize("reuse", [False, True])
def test_a_hundred_launches_hold_no_more(reuse):
    assert values(run_ranks(_flat, 2, reuse)) == [(0, 0)] * 2
