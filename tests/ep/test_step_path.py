# SPDX-License-Identifier: Apache-2.0
"""The step path of CPU tensors: one host wait a call, memory that stays, any mode of the caller."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xmoe.config import XmoeConfig
from xmoe.errors import CommError, ConfigError, FenceTimeout
from xmoe.ranks import RankContext, run_ranks
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2)
DEADLINE_S = 60.0
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(11)
    gate_up = torch.randn(SHAPE.num_experts, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make)
    down = torch.randn(SHAPE.num_experts, SHAPE.intermediate, SHAPE.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.04).bfloat16()


def _batch(seed: int, num_tokens: int) -> Batch:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, SHAPE.hidden, generator=make).bfloat16()
    ids = torch.rand(num_tokens, SHAPE.num_experts, generator=make).topk(SHAPE.topk, dim=1).indices
    return hidden, ids, torch.rand(num_tokens, SHAPE.topk, generator=make)


def _check(output: torch.Tensor, batch: Batch) -> None:
    gate_up, down = (tensor.double().numpy() for tensor in _weights())
    hidden, ids, weights = (tensor.detach() for tensor in batch)
    want = moe_reference(hidden.double().numpy(), ids.numpy(), weights.numpy(), gate_up, down)
    assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()


def _rank(context: RankContext, body: Callable[..., Any], settings: dict[str, Any]) -> Any:
    group = context.init_process_group(DEADLINE_S)
    config = XmoeConfig.from_mapping({"mode": "on", "step_timeout_s": DEADLINE_S, **settings})
    share = SHAPE.num_experts // context.size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    with torch.inference_mode(context.rank == 1):  # what is made may outlive the mode
        runner = MoeRunner.create(SHAPE, config, group=group)
        layer = runner.layer(ExpertWeights(*(part[mine].clone() for part in _weights())), 0)
    with runner:
        return body(context, runner, layer)


def _ranks(body: Callable[..., Any], **settings: Any) -> list[Any]:
    return run_ranks(_rank, 2, body, settings, silence_s=DEADLINE_S)


def _host_waits(runner: MoeRunner) -> list[int]:
    """How often this process' host waited, as the software device counts: for a device, a stream,
    an event."""
    libraries = runner._runtime_device.runtime.libraries
    path = next(one.path for one in libraries if one.name == "libascendcl.so")
    counts = (ctypes.c_uint64 * 3)()
    ctypes.CDLL(str(path)).xsdCounters(counts)
    return list(counts)


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
def test_a_fused_call_waits_once_and_moves_no_memory(padding: str) -> None:
    def body(context: RankContext, runner: MoeRunner, layer: Any) -> None:
        assert runner._fused is not None
        counts = [3, 5]
        batch = _batch(context.rank, counts[context.rank])
        out = torch.empty_like(batch[0])
        with runner.step(counts[context.rank]):
            layer(*batch, out=out)  # makes the workspace
            held = [tensor.data_ptr() for tensor in runner._fused.rows.tensors]
            before = _host_waits(runner)
            for number in range(1, 11):
                assert layer(*batch, out=out) is out
                after = _host_waits(runner)
                assert [b - a for a, b in zip(before, after, strict=True)] == [0, 0, number]
        assert [tensor.data_ptr() for tensor in runner._fused.rows.tensors] == held
        _check(out, batch)

    _ranks(body, padding=padding)


def test_results_are_memory_of_their_own_or_the_callers() -> None:
    def body(context: RankContext, runner: MoeRunner, layer: Any) -> None:
        batches = [_batch(10 * context.rank + number, 1 + number) for number in range(4)]
        own = []
        for number, batch in enumerate(batches):
            with runner.step(1 + number):
                own.append(layer(*batch))
        in_place = [tensor.clone() for tensor in batches[3]]
        with runner.step(4):  # also over the input, which was read by then
            layer(*in_place, out=in_place[0])
        for output, batch in zip(own, batches, strict=True):
            _check(output, batch)
        assert torch.equal(in_place[0], own[3])

    _ranks(body)


def test_an_output_that_does_not_fit_is_refused_and_holds_nobody() -> None:
    def body(context: RankContext, runner: MoeRunner, layer: Any) -> None:
        batch = _batch(context.rank, 3)
        with runner.step(3):
            if context.rank == 0:
                with pytest.raises(ConfigError, match=r"out is \[2, 1024\]"):
                    layer(*batch, out=torch.empty(2, SHAPE.hidden, dtype=torch.bfloat16))
            else:
                _check(layer(*batch), batch)

    _ranks(body)


def test_gradients_and_inference_mode_of_the_caller_do_not_matter() -> None:
    def body(context: RankContext, runner: MoeRunner, layer: Any) -> None:
        batch = _batch(context.rank, 3)
        wanting = (batch[0].clone().requires_grad_(), batch[1], batch[2].clone().requires_grad_())
        plain = layer(*batch)
        taught = layer(*wanting)
        with torch.inference_mode():
            inferred = layer(*batch)
        again = layer(*batch)
        assert not taught.requires_grad
        for output in (taught, inferred, again):
            assert torch.equal(output, plain)
        assert runner._fused is not None
        assert not any(tensor.requires_grad for tensor in runner._fused.rows.tensors)

    _ranks(body)


def test_threads_may_call_layers_at_once() -> None:
    """Calls exclude each other until the rows were read. Each rank brings as many tokens to every
    call, so any order of the calls fits any other."""

    def body(context: RankContext, runner: MoeRunner, layer: Any) -> None:
        batches = [_batch(10 * context.rank + number, 4) for number in range(3)]
        wanted = [layer(*batch) for batch in batches]
        wrong: list[object] = []

        def work(batch: Batch, want: torch.Tensor) -> None:
            try:
                for _ in range(10):
                    if not torch.equal(layer(*batch), want):
                        wrong.append("another result")
            except Exception as error:  # noqa: BLE001
                wrong.append(error)

        with runner.step(4):
            threads = [
                threading.Thread(target=work, args=both)
                for both in zip(batches, wanted, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []

    _ranks(body)


def test_close_keeps_the_rows_after_a_failure_that_no_launch_met() -> None:
    """On npu tensors a drain or the next step meets it: the device may still write to the rows."""

    def body(context: RankContext, runner: MoeRunner, layer: Any) -> None:
        from xmoe import fused

        step, resource = runner._fused, runner._resource
        assert step is not None and resource is not None
        with runner.step(3):
            layer(*_batch(context.rank, 3))
        resource.translate(FenceTimeout("a drain that did not end"))
        wanted = (step.rows, resource.handle, resource.workspace)
        step.close()
        for memory in wanted:
            assert any(one is memory for one in fused._KEPT)

    _ranks(body)


def test_a_launch_that_does_not_end_is_bounded_named_and_keeps_its_memory() -> None:
    """A peer that never launches: the device may go on writing, so nothing of it is given back."""

    def body(context: RankContext, runner: MoeRunner, layer: Any) -> list[str]:
        from xmoe import fused

        meet = time.monotonic() + 8.0  # at the step that both take part in
        if context.rank == 1:
            time.sleep(8.0)
            with pytest.raises(CommError) as caught, runner.step(3):
                pass
            return [str(caught.value)]
        batch = _batch(0, 3)
        out = torch.empty_like(batch[0])
        said = []
        runner._counts = (3, 3)  # as in a step that both had begun
        for _ in range(2):
            with pytest.raises(CommError) as caught:
                layer(*batch, out=out)
            said.append(f"{type(caught.value).__name__}: {caught.value}")
        assert runner._fused is not None
        for held in (runner._fused.rows, out):
            assert any(one is held for one in fused._KEPT)
        runner._counts = None
        time.sleep(max(0.0, meet - time.monotonic()))
        with pytest.raises(CommError) as caught, runner.step(3):
            pass
        return [*said, str(caught.value)]

    environ = {"XSD_WAIT_TIMEOUT_MS": "6000"}
    settings = {"step_timeout_s": 3.0, "fence_timeout_s": 8.0}
    said, peer = run_ranks(_rank, 2, body, settings, silence_s=DEADLINE_S, environ=environ)
    assert "mega_moe, layer 0: not finished after 3 s" in said[0]
    assert said[1].startswith("CommError: communication resource failed before")
    # The peer hears of it at the next step.
    assert peer == said[2:] and "failed on rank 0: communication resource failed" in peer[0]
