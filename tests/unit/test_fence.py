# SPDX-License-Identifier: Apache-2.0
"""The launch fence on a device of threads."""

from __future__ import annotations

import threading
import time

import pytest

from support.devices import FakeDevice
from xmoe.comm.fence import LaunchFence
from xmoe.errors import AclError, FenceTimeout
from xmoe.types import FenceMode


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


def _race(device: FakeDevice, mode: FenceMode, launches: int) -> int:
    """Alternate two streams; count how often two launches were on the device at once."""
    fence = LaunchFence(mode, device)
    streams = [device.create_stream(), device.create_stream()]
    busy, overlaps = threading.Lock(), [0]

    def kernel() -> None:
        if not busy.acquire(blocking=False):
            overlaps[0] += 1
            return
        time.sleep(0.002)
        busy.release()

    for number in range(launches):
        with fence.acquire(streams[number % 2]) as lease:
            streams[number % 2].push(kernel)
            lease.record()
    fence.drain()
    assert fence.launches == launches
    fence.close()
    fence.close()
    return overlaps[0]


@pytest.mark.parametrize("mode", [FenceMode.STREAM, FenceMode.HOST])
def test_ordered_modes_never_overlap(device, mode):
    assert _race(device, mode, 50) == 0


def test_off_overlaps(device):
    assert _race(device, FenceMode.OFF, 50) > 0


def test_same_stream_costs_no_wait(device):
    fence = LaunchFence(FenceMode.STREAM, device)
    one, two = device.create_stream(), device.create_stream()
    for stream in (one, one, one, two, two, one):
        with fence.acquire(stream) as lease:
            lease.record()
    assert fence.waits == 2 and len(one.waits) == 1 and len(two.waits) == 1


def test_host_mode_waits_for_the_last_launch(device):
    fence = LaunchFence(FenceMode.HOST, device)
    stream, done = device.create_stream(), []
    with fence.acquire(stream) as lease:
        stream.push(lambda: (time.sleep(0.05), done.append(1)))
        lease.record()
    with fence.acquire(stream) as lease:
        assert done == [1]
        lease.record()


def test_an_exception_synchronises_and_gives_the_lease_back(device):
    fence = LaunchFence(FenceMode.STREAM, device)
    stream, done = device.create_stream(), []
    with pytest.raises(KeyError):
        with fence.acquire(stream):
            stream.push(lambda: (time.sleep(0.05), done.append(1)))
            raise KeyError("x")
    assert done == [1]
    with fence.acquire(stream) as lease:
        lease.record()
    lease.record()  # a second call does nothing
    assert fence.launches == 1


def test_an_abandoned_launch_is_synchronised(device):
    fence = LaunchFence(FenceMode.STREAM, device)
    stream, done = device.create_stream(), []
    with fence.acquire(stream):
        stream.push(lambda: (time.sleep(0.02), done.append(1)))
    assert done == [1] and fence.launches == 0


def test_the_lease_excludes_other_threads(device):
    fence = LaunchFence(FenceMode.STREAM, device, timeout_s=0.1)
    stream = device.create_stream()
    caught: list[Exception] = []

    def other() -> None:
        try:
            fence.acquire(stream)
        except FenceTimeout as error:
            caught.append(error)

    with fence.acquire(stream) as lease:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        lease.record()
    assert "fence_timeout_s" in str(caught[0])


def test_drain_times_out_and_reports_device_errors(device):
    fence = LaunchFence(FenceMode.STREAM, device)
    stream, go = device.create_stream(), threading.Event()
    with fence.acquire(stream) as lease:
        stream.push(go.wait)
        lease.record()
    with pytest.raises(FenceTimeout, match="not finished after 0.05 s"):
        fence.drain(0.05)
    go.set()
    fence.drain()

    def fail() -> None:
        raise AclError("kernel", 507035, "X", "")

    with fence.acquire(stream) as lease:
        stream.push(fail)
        lease.record()
    with pytest.raises(AclError):
        fence.drain()


def test_many_streams_keep_a_bounded_number_of_events(device):
    fence = LaunchFence(FenceMode.STREAM, device)
    for _ in range(40):
        stream = device.create_stream()
        with fence.acquire(stream) as lease:
            lease.record()
    assert sum(not event.closed for event in device.events) <= 32
    fence.close()
    assert all(event.closed for event in device.events)


def test_room_is_made_only_when_the_oldest_launch_is_over(device):
    """The event of a launch that runs is all that others can wait for."""
    fence = LaunchFence(FenceMode.OFF, device, timeout_s=0.1)
    busy, go = device.create_stream(), threading.Event()
    with fence.acquire(busy) as lease:
        busy.push(go.wait)
        lease.record()
    first = device.events[0]
    for _ in range(31):
        with fence.acquire(device.create_stream()) as lease:
            lease.record()
    late, launched = device.create_stream(), []
    with pytest.raises(FenceTimeout, match="an earlier stream's launch: not finished after 0.1 s"):
        with fence.acquire(late):
            launched.append(1)
    assert not launched and not first.closed
    go.set()
    with fence.acquire(late) as lease:  # the lease was given back
        lease.record()
    assert first.closed and fence.launches == 33


def test_no_event_means_no_launch(device):
    """What is needed to mark a launch is made before it: afterwards it would be too late."""
    fence = LaunchFence(FenceMode.STREAM, device)
    stream, made, launched = device.create_stream(), device.create_event, []

    def none_left():
        raise AclError("aclrtCreateEvent", 207001, "MEMORY_ALLOCATION", "")

    device.create_event = none_left
    with pytest.raises(AclError):
        with fence.acquire(stream):
            launched.append(1)
    assert not launched
    device.create_event = made
    with fence.acquire(stream) as lease:
        lease.record()


def test_close_does_not_wait_for_ever_for_a_lease(device):
    fence = LaunchFence(FenceMode.STREAM, device, timeout_s=0.1)
    stream, caught = device.create_stream(), []

    def close() -> None:
        try:
            fence.close()
        except FenceTimeout as error:
            caught.append(error)

    with fence.acquire(stream) as lease:
        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and "has held the lease for 0.1 s" in str(caught[0])
        lease.record()
    fence.close()
    assert all(event.closed for event in device.events)


def test_waiting_for_a_stream_says_what_for_and_is_bounded(device):
    fence = LaunchFence(FenceMode.STREAM, device)
    stream, go = device.create_stream(), threading.Event()
    fence.wait_for_stream(stream.handle(), 0.05, "nothing")  # never launched
    with fence.acquire(stream) as lease:
        stream.push(go.wait)
        lease.record()
    with pytest.raises(FenceTimeout, match="mega_moe, layer 3: not finished after 0.05 s"):
        fence.wait_for_stream(stream.handle(), 0.05, "mega_moe, layer 3")
    go.set()
    fence.wait_for_stream(stream.handle(), 10.0, "mega_moe, layer 3")


def test_a_launch_can_be_waited_for_while_the_next_one_is_recorded(device):
    fence = LaunchFence(FenceMode.STREAM, device)
    stream, go, seen = device.create_stream(), threading.Event(), []
    with fence.acquire(stream) as lease:
        stream.push(go.wait)
        lease.record()
    (event,) = device.events
    record = event.record

    def watched(*args):
        with pytest.raises(FenceTimeout):
            fence.wait_for_stream(stream.handle(), 0.05)
        seen.append(1)
        record(*args)

    event.record = watched
    try:
        with fence.acquire(stream) as lease:
            lease.record()
    finally:
        go.set()
    assert seen == [1]
