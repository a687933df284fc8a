# SPDX-License-Identifier: Apache-2.0
"""The step path on npu tensors: what the host waits for, what is allocated, what failures do."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xmoe.config import XmoeConfig
from xmoe.errors import AclError, ProcessLost, XmoeError
from xmoe.fused import FusedStep
from xmoe.ranks import RankContext, run_ranks
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2)
LAYERS = 3
DEADLINE_S = 120.0


def _host_waits() -> int:
    """How often this process' host waited so far, as the software device counts: for a device, a
    stream, an event."""
    counts = (ctypes.c_uint64 * 3)()
    ctypes.CDLL("libascendcl.so").xsdCounters(counts)
    return sum(counts)


def _allocations() -> int:
    """How often torch_npu's caching allocator was asked for memory so far."""
    return int(torch.npu.memory_stats()["allocation.all.allocated"])


def _weights(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(layer)
    gate_up = torch.randn(SHAPE.num_experts, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make)
    down = torch.randn(SHAPE.num_experts, SHAPE.intermediate, SHAPE.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.04).bfloat16()


def _batch(seed: int, num_tokens: int) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, SHAPE.hidden, generator=make).bfloat16()
    ids = torch.rand(num_tokens, SHAPE.num_experts, generator=make).topk(SHAPE.topk, dim=1).indices
    return hidden, ids, torch.rand(num_tokens, SHAPE.topk, generator=make)


def _check(output: torch.Tensor, batch: tuple[torch.Tensor, ...], layer: int) -> None:
    gate_up, down = _weights(layer)
    want = moe_reference(
        batch[0].double().numpy(), batch[1].numpy(), batch[2].numpy(),
        gate_up.double().numpy(), down.double().numpy(),
    )  # fmt: skip
    assert (row_errors(output.double().cpu().numpy(), want) <= BF16_ROW_TOLERANCE).all()


Body = Callable[[RankContext, torch.device, MoeRunner, list[Any]], Any]


def _rank(context: RankContext, body: Body, settings: dict[str, Any]) -> Any:
    import torch_npu  # noqa: F401

    group = context.init_process_group(DEADLINE_S)
    torch.npu.set_device(context.rank)
    device = torch.device("npu", context.rank)
    config = XmoeConfig.from_mapping({"mode": "on", "step_timeout_s": DEADLINE_S, **settings})
    share = SHAPE.num_experts // context.size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    runner = MoeRunner.create(SHAPE, config, group=group, device=device)
    layers = []
    for index in range(LAYERS):
        parts = (part[mine].contiguous().to(device) for part in _weights(index))
        layers.append(runner.layer(ExpertWeights(*parts), index))
    return body(context, device, runner, layers)


def _ranks(body: Body, **settings: Any) -> list[Any]:
    return run_ranks(_rank, 2, body, settings, silence_s=DEADLINE_S)


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
def test_a_steady_fused_call_waits_for_nothing_and_allocates_nothing(padding: str) -> None:
    def body(
        context: RankContext, device: torch.device, runner: MoeRunner, layers: list[Any]
    ) -> None:
        counts = [3, 5]
        host = _batch(context.rank, counts[context.rank])
        host[1][0, 1] = -1  # whatever the ids are
        host[1][1, 0] = SHAPE.num_experts + 3
        hidden, ids, weights = (tensor.to(device) for tensor in host)
        outs = [torch.empty_like(hidden) for _ in layers]
        with runner:
            seen = []
            for number in range(6):
                context.report("step", step=number)
                with runner.step(counts[context.rank]):
                    before = _host_waits(), _allocations()
                    for layer, out in zip(layers, outs, strict=True):
                        assert layer(hidden, ids, weights, out=out) is out
                    seen.append((_host_waits() - before[0], _allocations() - before[1]))
                with runner.step(counts[context.rank]):
                    before = _host_waits(), _allocations()
                    own = [layer(hidden, ids, weights) for layer in layers]
                    seen.append((_host_waits() - before[0], _allocations() - before[1]))
            # The first calls make the workspace. A result of its own is all that is allocated.
            assert seen[2:] == [(0, 0), (0, LAYERS)] * 5, seen
            before = _host_waits(), _allocations()
            torch.npu.current_stream().synchronize()
            del own[0]
            own.append(torch.empty_like(hidden))
            assert _host_waits() > before[0] and _allocations() > before[1]  # they do count
            kept = torch.where(ids < SHAPE.num_experts, ids, -1).cpu()
            for index, out in enumerate(outs):
                _check(out, (host[0], kept, host[2]), index)
            with pytest.warns(RuntimeWarning, match=f"^{12 * LAYERS} expert ids"):
                runner.drain()

    _ranks(body, padding=padding)


def test_calls_on_two_streams_are_ordered_on_the_device() -> None:
    """One window and one set of rows for both streams, and the host never waits in between."""

    def body(
        context: RankContext, device: torch.device, runner: MoeRunner, layers: list[Any]
    ) -> None:
        streams = [torch.npu.Stream(), torch.npu.Stream()]
        batches = [_batch(10 * context.rank + number, 4) for number in range(2)]
        given = [tuple(tensor.to(device) for tensor in batch) for batch in batches]
        torch.npu.synchronize()
        with runner:
            results = []
            with runner.step(4):
                for _ in range(2):  # the workspace of each stream
                    for number, stream in enumerate(streams):
                        with torch.npu.stream(stream):
                            layers[0](*given[number])
                before = _host_waits()
                for turn in range(30):
                    number, index = turn % 2, turn % LAYERS
                    with torch.npu.stream(streams[number]):
                        results.append((layers[index](*given[number]), number, index))
                assert _host_waits() == before
            torch.npu.synchronize()
            for output, number, index in results:
                _check(output, batches[number], index)

    _ranks(body)


class _Task(ctypes.Structure):
    """XsdTaskEntry of the software device."""

    _fields_ = [("name", ctypes.c_char * 32), ("stream", ctypes.c_uint64),
                ("device", ctypes.c_uint32), ("status", ctypes.c_uint32),
                ("start_ns", ctypes.c_uint64), ("end_ns", ctypes.c_uint64)]  # fmt: skip


def test_the_fences_event_covers_the_last_use_of_the_rows() -> None:
    """Another stream waits for that event before it writes to them, and torch_npu's host queue
    would let the event overtake the operators that still read."""

    def body(
        context: RankContext, device: torch.device, runner: MoeRunner, layers: list[Any]
    ) -> list[list[str]]:
        batch = tuple(tensor.to(device) for tensor in _batch(context.rank, 4))
        out = torch.empty_like(batch[0])
        acl = ctypes.CDLL("libascendcl.so")
        entries = (_Task * 4096)()
        calls = []
        with runner, runner.step(4):
            layers[0](*batch, out=out)
            for _ in range(20):
                torch.npu.synchronize()
                acl.xsdTaskTraceEnable(1)
                layers[0](*batch, out=out)
                torch.npu.synchronize()
                acl.xsdTaskTraceEnable(0)
                found = acl.xsdTaskTraceRead(entries, len(entries), None)
                calls.append([entry.name.decode() for entry in entries[:found]])
        return calls

    for calls in _ranks(body):
        for names in calls:
            assert "MaskedFill" in names[-2] and "ecord" in names[-1], names


def _fail(device: torch.device) -> None:
    """One asynchronous launch that fails on the device: an index out of range."""
    table = torch.zeros(4, 8, device=device)
    torch.nn.functional.embedding(torch.full((2,), 99, device=device), table)


@pytest.mark.parametrize("told_to_torch", [False, True])
def test_a_failure_on_one_rank_is_an_error_of_the_next_step_on_all(told_to_torch: bool) -> None:
    """Also when torch_npu has told somebody else already, who did not listen."""

    def body(
        context: RankContext, device: torch.device, runner: MoeRunner, layers: list[Any]
    ) -> str:
        batch = tuple(tensor.to(device) for tensor in _batch(context.rank, 4))
        with runner.step(4):
            layers[0](*batch)
        torch.npu.synchronize()
        if context.rank == 1:
            _fail(device)
            if told_to_torch:
                with pytest.raises(RuntimeError):
                    torch.npu.synchronize()
        # A step does not wait, so it may be over before the device has got there.
        with pytest.raises(XmoeError) as caught:
            for _ in range(500):
                with runner.step(4):
                    time.sleep(0.01)
        if context.rank == 1:
            for use in (runner.drain, runner.stats, runner.close):
                with pytest.raises((ProcessLost, AclError)):
                    use()
        else:
            runner.close()
        return str(caught.value)

    texts = _ranks(body)
    assert all("rank 1" in text for text in texts), texts


def test_close_raises_what_nobody_has_waited_for() -> None:
    def body(
        context: RankContext, device: torch.device, runner: MoeRunner, layers: list[Any]
    ) -> None:
        batch = tuple(tensor.to(device) for tensor in _batch(context.rank, 4))
        with runner.step(4):
            layers[0](*batch)
        torch.npu.synchronize()
        _fail(device)
        with pytest.raises(XmoeError):
            runner.close()
        runner.close()
        from xmoe.kernels.npu_device import require_usable

        with pytest.raises(ProcessLost):
            require_usable()

    _ranks(body)


def test_shared_rows_are_ready_for_any_stream_once_they_are_made() -> None:
    """The first call may be on another stream than the making; tasks are slow here."""

    def body(
        context: RankContext, device: torch.device, runner: MoeRunner, layers: list[Any]
    ) -> None:
        with runner:
            assert runner._resource is not None
            for _ in range(20):
                torch.zeros(8, device=device)
            assert not torch.npu.current_stream().query()  # so it would show
            made = FusedStep(SHAPE, runner.config, runner._device, runner._resource)
            assert torch.npu.current_stream().query()
            made.close()

    environ = {"XSD_DELAY_SEED": "3", "XSD_DELAY_MAX_US": "50000"}
    run_ranks(_rank, 2, body, {}, silence_s=DEADLINE_S, environ=environ)
