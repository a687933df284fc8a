# SPDX-License-Identifier: Apache-2.0
"""The mock device has the traps of torch_npu; each is shown here once, without the executor."""

from __future__ import annotations

import pytest

from support.mock_stream import Kernel, MockNpu, World
from xmoe.errors import AclError


def test_a_wait_on_an_event_that_was_never_recorded_does_nothing():
    device = MockNpu()
    stream, event, seen = device.create_stream(), device.create_event(), []
    assert event.query() is True
    event.synchronize(1)
    stream.wait_event(event)
    device.launch(stream.handle(), Kernel("late", finish=lambda: seen.append("late")))
    stream.synchronize(1)
    assert seen == ["late"] and device.dropped_waits == 1


def test_a_record_in_the_host_queue_is_not_done_and_a_wait_is_for_its_own_recording():
    device = MockNpu()
    first, second, event = device.create_stream(), device.create_stream(), device.create_event()
    go, order = [], []
    kernel = Kernel("slow", ready=lambda: bool(go), finish=lambda: order.append("slow"))
    device.launch(first.handle(), kernel)
    event.record(first)
    assert event.query() is False
    second.wait_event(event)
    device.launch(second.handle(), Kernel("after", finish=lambda: order.append("after")))
    event.record(second)  # recorded again: the wait above is for the first recording
    with pytest.raises(AclError):
        second.synchronize(0.001)
    go.append(True)
    second.synchronize(1)
    assert order == ["slow", "after"]


def test_the_33rd_stream_is_the_first_one():
    device = MockNpu()
    streams = [device.create_stream() for _ in range(33)]
    assert streams[32].handle() == streams[0].handle()
    assert len({stream.handle() for stream in streams}) == 32


def test_a_failed_launch_is_reported_late_and_once_and_then_everything_vanishes():
    device = MockNpu()
    device.fail_launch = "bad"
    stream, event = device.create_stream(), device.create_event()
    event.record(stream)
    stream.synchronize(1)
    device.launch(stream.handle(), Kernel("bad"))
    event.record(stream)
    device.world.until(lambda: bool(device.failure))
    assert event.query() is True  # the earlier recording answers for the dropped one
    with pytest.raises(AclError, match="earlier launch failed"):
        device.launch(stream.handle(), Kernel("innocent"))
    device.launch(stream.handle(), Kernel("gone"))
    assert device.dropped == 1
    with pytest.raises(AssertionError, match="never returns"):
        event.synchronize(1)


def test_cores_are_held_while_a_kernel_spins_and_given_in_order_of_arrival():
    world = World(3)
    device = MockNpu(world, cores=4)
    a, b, go, order = device.create_stream(), device.create_stream(), [], []
    spins = Kernel("spin", 4, ready=lambda: bool(go), finish=lambda: order.append("spin"))
    device.launch(a.handle(), spins)
    world.until(lambda: device.free_cores == 0)
    device.launch(b.handle(), Kernel("work", 1, finish=lambda: order.append("work")))
    with pytest.raises(AclError):
        b.synchronize(0.001)
    go.append(True)
    b.synchronize(1)
    assert order == ["spin", "work"] and device.free_cores == 4
