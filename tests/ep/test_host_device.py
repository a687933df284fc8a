# SPDX-License-Identifier: Apache-2.0
"""HostDevice over the software device: binding per thread, closing, foreign objects."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.ranks import run_ranks
from xmoe.errors import AclError, ConfigError, UnsupportedError
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice, InlineDevice

pytestmark = pytest.mark.ep


def _current(runtime) -> int | None:
    out = runtime.ffi.new("int32_t*")
    return int(out[0]) if runtime.acl.aclrtGetDevice(out) == 0 else None


def _binding(rank, group):
    runtime = load(find_toolkit("soft"))
    zero, one, again = HostDevice(runtime, 0), HostDevice(runtime, 1), HostDevice(runtime, 0)

    def nested() -> list[int | None]:
        seen = [_current(runtime)]
        with zero.bind():
            seen.append(_current(runtime))
            with one.bind():
                seen.append(_current(runtime))
                with one.bind():
                    seen.append(_current(runtime))
            seen.append(_current(runtime))
        return seen

    with ThreadPoolExecutor(2) as pool:  # a pool that two groups with different devices share
        for first in [pool.submit(nested) for _ in range(8)]:
            assert first.result()[1:] == [0, 1, 1, 0]
    zero.close()
    zero.close()
    with again.bind():  # the same device, still open
        assert _current(runtime) == 0
        stream = again.create_stream()
        event = again.create_event()
        assert stream.handle() and event.query() is False
        event.synchronize(1)
        event.record(stream)
        stream.synchronize(5)
        assert event.query() is True
        stream.close()
        stream.close()
        event.close()
    assert again.current_stream() is again.current_stream()
    again.close()
    with pytest.raises(ConfigError, match="is closed"), again.bind():
        pass
    with one.bind():
        queue = one.create_stream()
        with pytest.raises(ConfigError, match="not made by a HostDevice"):
            queue.wait_event(InlineDevice().create_event())
        with pytest.raises(ConfigError, match="not made by a HostDevice"):
            one.create_event().record(InlineDevice().create_stream())
        event = one.create_event()
        event.record(queue)
        with pytest.raises(ConfigError, match="timeout of 0 s"):
            event.synchronize(0)
        event.synchronize(5)
        queue.close()
        for call in (lambda: queue.wait_event(event), lambda: event.record(queue), queue.handle):
            with pytest.raises(ConfigError, match="AclStream is closed"):
                call()
        event.close()
        for call in (lambda: event.synchronize(1), event.query):
            with pytest.raises(ConfigError, match="AclEvent is closed"):
                call()
    one.close()
    with pytest.raises(AclError, match="device 99"):
        HostDevice(runtime, 99)


def test_binding():
    run_ranks(_binding, 1, group=False)


def test_host_tensors_are_refused_where_devices_have_their_own_memory() -> None:
    class Foreign:
        shares_host_memory = False
        toolkit = type("Toolkit", (), {"root": "/usr/local/Ascend"})

    with pytest.raises(UnsupportedError, match="memory of their own.*XMOE_DEVICE=soft"):
        HostDevice(Foreign())  # type: ignore[arg-type]
