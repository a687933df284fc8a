# SPDX-License-Identifier: Apache-2.0
"""NpuDevice: streams, events, memory, order against the host queue, and what a failure means."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from support.npu import child
from xmoe.errors import AclError, ConfigError, ProcessLost, XmoeError

ROUNDS = 300


def _device(device: torch.device) -> Any:
    from xmoe.kernels.npu_device import NpuDevice

    return NpuDevice(device.index)


def _copy(device: Any, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """A C launch: it does not pass through torch_npu's host queue."""
    runtime = device.runtime
    pointers = [runtime.ffi.cast("void*", tensor.data_ptr()) for tensor in (target, source)]
    nbytes = source.numel() * source.element_size()
    raw = runtime.ffi.cast("aclrtStream", stream)
    status = runtime.acl.aclrtMemcpyAsync(pointers[0], nbytes, pointers[1], nbytes, 3, raw)
    assert status == 0


def _wrong_copies(torch_device: torch.device, cached: bool) -> int:
    """Torch operators write a value, a C launch copies it; how often is it an older one?"""
    device = _device(torch_device)
    stream = device.current_stream()
    source = torch.zeros(256, device=torch_device)
    targets = torch.zeros(ROUNDS, 256, device=torch_device)
    kept = stream.handle()
    for round_number in range(ROUNDS):
        source.zero_()
        for _ in range(4):
            source.add_(round_number)
        _copy(device, targets[round_number], source, kept if cached else stream.handle())
    torch.npu.synchronize()
    wanted = 4 * torch.arange(ROUNDS, dtype=torch.float32)
    return int((targets.cpu() != wanted.unsqueeze(1)).any(dim=1).sum())


def test_handle_read_at_each_launch_keeps_the_order() -> None:
    assert child(_wrong_copies, False) == 0


def test_cached_handle_loses_the_order() -> None:
    """Why the handle is never kept: the same loop with one read before it."""
    assert child(_wrong_copies, True) > 0


def test_events_order_two_streams() -> None:
    def body(torch_device: torch.device) -> None:
        device = _device(torch_device)
        first, second = device.create_stream(), device.create_stream()
        assert first.handle() != second.handle()
        event = device.create_event()
        values = torch.zeros(1 << 16, device=torch_device)
        torch.npu.synchronize()
        with torch.npu.stream(first.torch_stream()):
            for _ in range(50):
                values.add_(1)
            event.record(first)
        second.wait_event(event)
        with torch.npu.stream(second.torch_stream()):
            copy = values * 2
        second.synchronize(10.0)
        assert event.query()
        assert torch.equal(copy.cpu(), torch.full((1 << 16,), 100.0))
        for one in (event, first, second):
            one.close()
            one.close()

    child(body)


def test_current_stream_is_asked_at_each_use() -> None:
    def body(torch_device: torch.device) -> None:
        device = _device(torch_device)
        current = device.current_stream()
        outside = current.handle()
        other = torch.npu.Stream()
        with torch.npu.stream(other):
            assert current.handle() == other.npu_stream != outside
        assert current.handle() == outside

    child(body)


def test_binding_is_undone_and_nests() -> None:
    def body(torch_device: torch.device) -> None:
        from xmoe.kernels.npu_device import NpuDevice

        first, second = NpuDevice(0), NpuDevice(1)
        assert torch.npu.current_device() == 0
        with second.bind():
            assert torch.npu.current_device() == 1
            with first.bind(), second.bind():
                assert torch.npu.current_device() == 1
            assert torch.npu.current_device() == 1
            with pytest.raises(KeyError), first.bind():
                assert torch.npu.current_device() == 0
                raise KeyError
            assert torch.npu.current_device() == 1
        assert torch.npu.current_device() == 0

        def elsewhere() -> None:  # a thread without a device yet
            with second.bind():
                seen.append(torch.npu.current_device())

        seen: list[int] = []
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == [1] and torch.npu.current_device() == 0

    child(body)


def test_scratch_memory_is_the_caching_allocators() -> None:
    def body(torch_device: torch.device) -> None:
        device = _device(torch_device)
        before = torch.npu.memory_allocated()
        memory = device.allocate(4 << 20)
        grown = torch.npu.memory_allocated() - before
        assert 4 << 20 <= grown <= (4 << 20) + 1024  # the allocator pads
        assert memory.nbytes == 4 << 20 and memory.handle % 512 == 0
        memory.close()
        assert torch.npu.memory_allocated() == before

    child(body)


def test_same_libascendcl_as_torch_npu() -> None:
    def body(torch_device: torch.device) -> None:
        device = _device(torch_device)
        assert device.runtime.libraries[0].already_loaded
        assert device.runtime.identity is not None

    child(body)


def test_foreign_event_is_refused() -> None:
    def body(torch_device: torch.device) -> None:
        with pytest.raises(ConfigError, match="not made by an NpuDevice"):
            _device(torch_device).current_stream().wait_event(object())

    child(body)


def _fail(device: torch.device) -> None:
    """One asynchronous launch that fails on the device: an index out of range."""
    table = torch.zeros(4, 8, device=device)
    torch.nn.functional.embedding(torch.full((2,), 99, device=device), table)


@pytest.mark.parametrize("seen_by_torch_first", [False, True])
def test_process_is_lost_after_a_failed_launch(seen_by_torch_first: bool) -> None:
    """Loudly, whoever hears of the failure first: torch_npu itself reports it only once."""

    def body(torch_device: torch.device) -> str:
        device = _device(torch_device)
        stream = device.current_stream()
        _fail(torch_device)
        if seen_by_torch_first:
            with pytest.raises(RuntimeError):
                torch.npu.synchronize()
        with pytest.raises(AclError) as caught:
            stream.synchronize(10.0)
        for use in (stream.handle, device.create_event, device.create_stream,
                    device.current_stream, lambda: device.empty((1,), torch.float32),
                    lambda: _device(torch_device)):  # fmt: skip
            with pytest.raises(ProcessLost, match="this process is lost"):
                use()
        device.close()
        return str(caught.value)

    text = child(
        body,
    )
    assert "50" in text


def test_runner_refuses_a_lost_process() -> None:
    def body(torch_device: torch.device) -> None:
        from xmoe.config import XmoeConfig
        from xmoe.runner import MoeRunner
        from xmoe.types import MoeShape

        shape = MoeShape(hidden=1024, intermediate=512, num_experts=4, topk=2)
        config = XmoeConfig.from_mapping({"mode": "off"})
        with MoeRunner.create(shape, config, device=torch_device):
            pass
        _fail(torch_device)
        with pytest.raises(XmoeError):
            _device(torch_device).current_stream().synchronize(10.0)
        with pytest.raises(XmoeError, match="this process is lost"):
            MoeRunner.create(shape, config, device=torch_device)

    child(body)


def _captured(torch_device: torch.device) -> Any:
    import torch_npu

    from xmoe.config import XmoeConfig
    from xmoe.runner import MoeRunner
    from xmoe.types import ExpertWeights, MoeShape

    eager = _device(torch_device).capturing()
    torch_npu._C._npu_isCurrentStreamCapturing = lambda: True  # the software device has no graphs
    shape = MoeShape(hidden=64, intermediate=32, num_experts=4, topk=2)
    gate_up, down = torch.zeros(4, 64, 64).bfloat16(), torch.zeros(4, 32, 64).bfloat16()
    weights = ExpertWeights(gate_up.to(torch_device), down.to(torch_device))
    config = XmoeConfig.from_mapping({"mode": "off"})
    with MoeRunner.create(shape, config, device=torch_device) as runner:
        layer = runner.layer(weights, 3)
        x = torch.zeros(2, 64, dtype=torch.bfloat16, device=torch_device)
        ids = torch.tensor([[0, 1], [2, 3]], device=torch_device)
        try:
            layer(x, ids, torch.ones(2, 2, device=torch_device))
        except ConfigError as error:
            return eager, str(error)
    return eager, ""


def test_a_layer_call_on_a_captured_stream_is_refused() -> None:
    eager, said = child(_captured)
    assert eager is False
    assert said.startswith("layer 3 was called while the current stream is captured into a graph")
