# SPDX-License-Identifier: Apache-2.0
"""A launch that was queued and never marked: no other one may enter a window that may be busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.devices import FakeDevice
from xmoe.comm.fence import LaunchFence
from xmoe.comm.resource_core import ResourceCore
from xmoe.errors import AclError, CommError
from xmoe.types import FenceMode


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice()
    yield made
    made.close()


def _core(device: Any, timeout_s: float) -> Any:
    core: Any = ResourceCore.__new__(ResourceCore)
    core.failed, core._closing, core._device = None, False, device
    core.fence = LaunchFence(FenceMode.STREAM, device, timeout_s, core._fail)
    return core


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("ends", [False, True])
def test_a_busy_window_takes_no_other_launch(
    device: FakeDevice, kind: type[BaseException], ends: bool
) -> None:
    core, go, launched = _core(device, 5.0 if ends else 0.1), threading.Event(), []
    first, second = device.create_stream(), device.create_stream()
    if ends:
        go.set()

    def broken(stream: Any) -> None:
        stream.push(go.wait)
        raise kind("after the launch")

    try:
        with pytest.raises(kind, match="after the launch"):
            core.launch(first, broken)
        if ends:
            core.launch(second, launched.append)
            assert launched == [second]
            return
        with pytest.raises(CommError, match="failed before .*TIMEOUT"):
            core.launch(second, launched.append)
        assert not launched
    finally:
        go.set()


def test_who_waits_for_the_lease_learns_of_it(device: FakeDevice) -> None:
    core, waiting, caught = _core(device, 10.0), threading.Event(), []
    first, second = device.create_stream(), device.create_stream()
    acquire = core.fence.acquire

    def told(stream: Any) -> Any:
        waiting.set()
        return acquire(stream)

    def other() -> None:
        try:
            core.launch(second, lambda stream: None)
        except CommError as error:
            caught.append(str(error))

    thread = threading.Thread(target=other)

    def never_ends(timeout_s: float) -> None:
        assert waiting.wait(10)
        raise AclError("sync", 507046, "TIMEOUT", "")

    def broken(stream: Any) -> None:
        core.fence.acquire = told
        thread.start()
        raise RuntimeError("after the launch")

    first.synchronize = never_ends  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        core.launch(first, broken)
    thread.join(20)
    assert not thread.is_alive() and "failed before" in caught[0]


def test_a_launch_that_cannot_be_marked_and_does_not_end(device: FakeDevice) -> None:
    core, go = _core(device, 0.1), threading.Event()
    first, second = device.create_stream(), device.create_stream()

    def queued(stream: Any) -> None:
        stream.push(go.wait)

        def refused(*_: object) -> None:
            raise AclError("aclrtRecordEvent", 507000, "X", "")

        device.events[0].record = refused  # type: ignore[method-assign]

    try:
        with pytest.raises(AclError):
            core.launch(first, queued)
        with pytest.raises(CommError, match="failed before"):
            core.launch(second, lambda stream: None)
    finally:
        go.set()
