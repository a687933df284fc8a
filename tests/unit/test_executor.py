# SPDX-License-Identifier: Apache-2.0
"""The serial executor: order, slots, lifetime, failure, closing."""

from __future__ import annotations

import threading
import time

import pytest

from support.devices import FakeDevice
from xmoe.errors import AclError, ConfigError, FenceTimeout, PeerLost, XmoeError
from xmoe.executor import ExecutorOptions, Phase, PhaseKind, StreamExecutor, WorkItem
from xmoe.kernels.device import InlineDevice

R, M, C, S = PhaseKind.RECV, PhaseKind.METADATA, PhaseKind.COMPUTE, PhaseKind.SEND


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


class Held:
    """Something a launch needs until it is done."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def item(*phases: Phase, op: str = "op", layer: int = 0) -> WorkItem:
    return WorkItem(op, layer, phases)


def launch(task, *keep: object, kind=C, channel="c") -> Phase:
    def run(context) -> None:
        context.own(*keep)
        context.stream.push(task)

    return Phase(kind, channel, run)


def boom(*_: object) -> None:
    raise AclError("kernel", 507035, "X", "detail")


@pytest.mark.parametrize("kinds", [(), (S, R), (C, C), (R, S, C), (M,), (M, C)])
def test_bad_items_are_refused(kinds):
    with pytest.raises(ConfigError, match="in this order"):
        item(*(Phase(kind, "c", lambda context: None) for kind in kinds))


def test_phases_run_in_order_and_pass_values():
    seen = []

    def phase(kind):
        def run(context) -> None:
            seen.append(kind)
            context.values[kind] = len(seen)

        return Phase(kind, "compute" if kind is C else "ep", run)

    with StreamExecutor(InlineDevice(), ExecutorOptions(trace=True)) as executor:
        for layer in range(2):
            values = executor.submit(item(phase(R), phase(C), phase(S), layer=layer)).result()
        assert values[S] == 6
    assert seen == [R, C, S, R, C, S]
    assert [(e.layer, e.phase, e.channel, e.sequence) for e in executor.trace] == [
        (0, "recv", "ep", 0),
        (0, "compute", "compute", 0),
        (0, "send", "ep", 1),
        (1, "recv", "ep", 2),
        (1, "compute", "compute", 1),
        (1, "send", "ep", 3),
    ]
    assert all(e.start <= e.end for e in executor.trace)


def test_submit_returns_before_the_device_is_done_and_slots_bound_it(device):
    go, held = threading.Event(), [Held() for _ in range(3)]
    executor = StreamExecutor(device, ExecutorOptions(max_inflight=2))
    first = executor.submit(item(launch(go.wait, held[0])))
    second = executor.submit(item(launch(lambda: None, held[1])))
    assert not first.done and [h.closed for h in held] == [0, 0, 0]
    thread = threading.Thread(target=lambda: executor.submit(item(launch(lambda: None, held[2]))))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()  # no slot is free
    go.set()
    thread.join(5)
    second.result()
    assert first.done and held[0].closed == 1 and held[1].closed == 1
    executor.drain()
    assert held[2].closed == 1
    executor.close()
    executor.close()
    assert all(event.closed for event in device.events) and device.streams[0].closed


def test_the_callers_own_deadline_is_not_a_failure(device):
    go = threading.Event()
    executor = StreamExecutor(device)
    ticket = executor.submit(item(launch(go.wait)))
    with pytest.raises(FenceTimeout):
        ticket.result(timeout_s=0.02)
    go.set()
    ticket.result()
    executor.close()


def test_a_refused_item_leaves_the_executor_usable(device):
    def refuse(context) -> None:
        raise ConfigError("bad ids")

    held = Held()
    executor = StreamExecutor(device)
    with pytest.raises(ConfigError, match="bad ids"):
        executor.submit(item(Phase(R, "ep", refuse)))
    executor.submit(item(launch(lambda: None, held))).result()
    assert held.closed == 1 and executor.failed is None
    with pytest.raises(ConfigError):  # the same error half-way is a failure
        executor.submit(item(launch(lambda: None), Phase(S, "ep", refuse)))
    assert "op, layer 0 was refused half-way: bad ids" in str(executor.failed)
    with pytest.raises(XmoeError, match="first failure"):
        executor.submit(item(launch(lambda: None)))
    executor.close()


@pytest.mark.parametrize("where", ["phase", "device"])
def test_failure_is_final_and_translated(device, where):
    lost = PeerLost("peer 2 lost")
    held, later = Held(), Held()
    executor = StreamExecutor(
        device,
        ExecutorOptions(max_inflight=2),
        translate=lambda error: lost if isinstance(error, AclError) else error,
    )
    if where == "phase":
        with pytest.raises(PeerLost, match="peer 2"):
            executor.submit(item(Phase(C, "c", boom)))
    else:
        ticket = executor.submit(item(launch(boom, held)))
        behind = executor.submit(item(launch(lambda: None, later)))
        for one in (ticket, behind, ticket):
            with pytest.raises(PeerLost, match="peer 2"):
                one.result()
        assert held.closed == 0 and executor.quarantined == 2  # both are on the device
    assert executor.failed is lost
    with pytest.raises(XmoeError, match="peer 2 lost.*build a new one") as caught:
        executor.submit(item(launch(lambda: None)))
    assert caught.value.__cause__ is lost
    executor.close()  # reported before: closing does not raise it again
    executor.close()
    if where == "device":  # the stream has stopped, so nothing uses the memory any more
        assert held.closed == 1 and later.closed == 1


def test_memory_of_a_stuck_stream_is_never_released(device):
    go, held = threading.Event(), Held()
    executor = StreamExecutor(device, ExecutorOptions(timeout_s=0.05))
    ticket = executor.submit(item(launch(go.wait, held), op="mega_moe", layer=7))
    with pytest.raises(FenceTimeout, match="mega_moe, layer 7"):
        ticket.result()
    executor.close()
    assert held.closed == 0 and executor.quarantined == 1 and not device.streams[0].closed
    go.set()


def test_close_reports_a_failure_nobody_saw(device):
    executor = StreamExecutor(device)
    executor.submit(item(launch(boom)))
    with pytest.raises(AclError):
        executor.close()
    executor.close()
    with pytest.raises(XmoeError):
        executor.submit(item(launch(lambda: None)))


def test_what_an_item_owns_and_cannot_close_keeps_no_slot(device):
    class Stuck:
        def close(self) -> None:
            raise ConfigError("it does not close")

    executor = StreamExecutor(device)
    ticket = executor.submit(item(launch(lambda: None, Stuck())))
    with pytest.raises(ConfigError, match="does not close"):
        ticket.result()
    executor.submit(item(launch(lambda: None))).result(5)
    assert executor.leaks() == ()
    executor.close()


def test_closed_executor_refuses():
    executor = StreamExecutor(InlineDevice())
    executor.close()
    with pytest.raises(XmoeError, match="closed"):
        executor.submit(item(Phase(C, "c", lambda context: None)))
    with pytest.raises(ConfigError, match="max_inflight=5"):
        StreamExecutor(InlineDevice(), ExecutorOptions(max_inflight=5))


def test_threads_share_one_executor(device):
    order, lock = [], threading.Lock()
    executor = StreamExecutor(device, ExecutorOptions(max_inflight=3))

    def submit(number: int) -> None:
        for _ in range(20):
            executor.submit(item(launch(lambda: order.append(number)), layer=number)).result()

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    with lock:
        assert sorted(order) == sorted([n for n in range(4) for _ in range(20)])
    executor.close()


def test_where_an_item_is_names_its_first_phase_that_is_not_done(device):
    said = []
    release = threading.Event()

    def compute(context) -> None:
        said.append(context.where())
        context.stream.push(release.wait)

    with StreamExecutor(device) as executor:
        ticket = executor.submit(item(Phase(C, "c", compute)))
        said.append(ticket.where())
        release.set()
        ticket.result()
        said.append(ticket.where())
    assert [text.split("slot 0, ")[1] for text in said] == [
        "phase compute (host)",
        "phase compute",
        "all phases done",
    ]
