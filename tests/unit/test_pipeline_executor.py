# SPDX-License-Identifier: Apache-2.0
"""The executor on streams with torch_npu's semantics: exact waits, rules, failures, closing."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from support.devices import FakeDevice
from support.mock_stream import Kernel, MockEvent, MockNpu, MockStream
from support.pipeline import item_of
from xmoe.errors import (
    AclError,
    CommError,
    ConfigError,
    FenceTimeout,
    PeerLost,
    PipelineStopped,
    XmoeError,
)
from xmoe.kernels.device import InlineDevice
from xmoe.multistream import MultistreamConfig, StreamMode
from xmoe.pipeline import failure
from xmoe.pipeline.channels import Channel, ChannelRule
from xmoe.pipeline.events import EventLease, EventPool
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.items import Phase, PhaseKind, WorkItem
from xmoe.pipeline.options import ExecutorOptions
from xmoe.pipeline.ticket import Ticket

R, M, C, S = PhaseKind.RECV, PhaseKind.METADATA, PhaseKind.COMPUTE, PhaseKind.SEND
SERIAL, OVERLAP = StreamMode.SERIAL, StreamMode.OVERLAP


def make(device: MockNpu, mode: StreamMode = OVERLAP, slots: int = 2, *rules: ChannelRule, **kw):
    known = ("timeout_s", "trace", "shutdown_timeout_s", "stall_warn_s")
    options = {key: kw.pop(key) for key in known if key in kw}
    made = ExecutorOptions(mode, slots, **{"timeout_s": 0.05, **options})
    return StreamExecutor(device, made, channels=rules, **kw)


def exclusive(*names: str) -> tuple[ChannelRule, ...]:
    return tuple(ChannelRule(name, 1, exclusive=True) for name in names)


def test_records_and_waits_of_two_groups_in_exact_order():
    """recv 1, compute 2, send 3; events 0.. in the order in which they are first recorded."""
    device = MockNpu()
    with make(device, OVERLAP, 2, *exclusive("g0", "g1")) as executor:
        for n in range(3):
            executor.submit(item_of(device, f"i{n}", R, C, S, channel=f"g{n % 2}"))
        log = list(device.log)
    assert log == [
        ("launch", 1, "i0.recv"), ("record", 1, 0),
        ("wait", 2, 0), ("launch", 2, "i0.compute"), ("record", 2, 1),
        ("wait", 3, 1), ("launch", 3, "i0.send"), ("record", 3, 2),
        ("launch", 1, "i1.recv"), ("record", 1, 3),
        ("wait", 2, 3), ("launch", 2, "i1.compute"), ("record", 2, 4),
        ("wait", 3, 4), ("launch", 3, "i1.send"), ("record", 3, 5),
        # Slot 0 again, and group g0 again: the receive waits for the send of i0 (event 2).
        ("wait", 1, 2), ("launch", 1, "i2.recv"), ("record", 1, 0),
        ("wait", 2, 0), ("launch", 2, "i2.compute"), ("record", 2, 1),
        ("wait", 3, 1), ("launch", 3, "i2.send"), ("record", 3, 2),
    ]  # fmt: skip
    assert device.dropped_waits == 0 and device.device_syncs == 0


def test_more_slots_than_groups_need_an_edge_of_their_own():
    """Four slots, one group: the receive of i1 is ordered behind the send of i0 by the channel."""
    device = MockNpu()
    with make(device, OVERLAP, 4, *exclusive("g")) as executor:
        for n in range(2):
            executor.submit(item_of(device, f"i{n}", R, C, S, channel="g"))
        before = device.log.index(("launch", 1, "i1.recv"))
        assert device.log[before - 1] == ("wait", 1, 2)  # event 2: the send of i0


@pytest.mark.parametrize("kinds", [(R, C, S), (R, M, C, S), (R, M), (C,), (R,), (C, S)])
def test_serial_issues_the_same_operations_in_the_same_order(kinds):
    orders, traces = [], []
    for mode in (SERIAL, OVERLAP):
        device = MockNpu()
        with make(device, mode, 3, trace=True) as executor:
            for n in range(7):
                executor.submit(item_of(device, f"i{n}", *kinds, channel=f"g{n % 2}", layer=n))
            traces.append([(e.op, e.phase, e.layer, e.channel, e.sequence) for e in executor.trace])
        orders.append(device.launches())
        streams = {entry[1] for entry in device.log if entry[0] == "launch"}
        assert len(streams) == (1 if mode is SERIAL else len([k for k in kinds if k is not M]))
        if mode is SERIAL:
            assert not [entry for entry in device.log if entry[0] == "wait"]
    assert orders[0] == orders[1] and traces[0] == traces[1]


def test_streams_that_are_one_are_refused():
    device = MockNpu()
    for _ in range(30):
        device.create_stream()
    with pytest.raises(ConfigError, match="three distinct ones"):
        make(MockNpu(pool=2))
    executor = make(device)  # 31, 32 and 33: the last is stream 1, which is none of these
    executor.close()


def test_streams_are_closed_when_a_later_one_cannot_be_had():
    class Two(MockNpu):
        def create_stream(self) -> MockStream:
            if len(self.streams) == 2:
                raise AclError("aclrtCreateStream", 207001, "MEMORY", "no more")
            return super().create_stream()

    device = Two()
    with pytest.raises(AclError, match="207001"):
        make(device)
    assert [stream.closed for stream in device.streams] == [True, True]


@pytest.mark.parametrize("broken", ["owned", "event", "stream"])
def test_closing_goes_on_when_one_thing_cannot_be_closed(broken):
    device, owned = MockNpu(), [SimpleNamespace(closed=False) for _ in range(4)]

    def boom() -> None:
        raise AclError("close", 507899, "DRIVER", "")

    for one in owned:
        one.close = lambda one=one: setattr(one, "closed", True)

    def before(kind, context):
        if kind is C:
            context.own(*owned[:2] if context.layer == 0 else owned[2:])
        if kind is S and context.layer == 1:
            raise RuntimeError("broke")

    executor = make(device)
    executor.submit(item_of(device, "i", R, C, S, before=before, layer=0))
    with pytest.raises(RuntimeError, match="broke"):
        executor.submit(item_of(device, "j", R, C, S, before=before, layer=1))
    assert executor.quarantined == 2
    things = {"owned": owned, "event": device.events, "stream": device.streams}
    first = things[broken][-1 if broken == "event" else 1]  # closed first, of its kind
    first.close = boom
    with pytest.raises(AclError, match="507899"):
        executor.close()
    rest = [one for kind in things.values() for one in kind if one is not first]
    assert len(rest) == 4 + 6 + 3 - 1 and all(one.closed for one in rest)


def recorded(lease: EventLease, stream: MockStream) -> EventLease:
    """As the executor does it."""
    lease.generation += 1
    lease.event.record(stream)
    lease.stream = stream
    return lease


def test_an_event_refuses_what_the_device_would_silently_ignore():
    device = MockNpu()
    stream, pool = device.create_stream(), EventPool(device)
    lease = pool.take()
    for call in (lease.query, lambda: lease.synchronize(1.0), lambda: lease.wait_on(stream)):
        with pytest.raises(XmoeError, match="while it is not recorded"):
            call()
    assert recorded(lease, stream).generation == 1
    assert recorded(lease, stream).generation == 2
    lease.wait_on(stream)
    lease.stream = None  # as before a recording: the device would wait for the earlier one
    with pytest.raises(XmoeError, match="generation 2 is queried while it is not recorded"):
        lease.query()
    pool.close()
    pool.close()
    assert device.events[0].closed and device.dropped_waits == 0


def test_every_slot_has_its_events_and_closing_releases_them():
    device = MockNpu()
    with make(device, OVERLAP, 2) as executor:
        for n in range(9):
            executor.submit(item_of(device, f"i{n}", R, C, S))
        assert len(device.events) == 6
    assert all(event.closed for event in device.events)


@pytest.mark.parametrize("after", ["phases", "items"])
def test_a_recording_that_was_lost_is_waited_for_by_nobody(monkeypatch, after):
    """The device would take the wait for one about nothing, or about the recording before."""
    device = MockNpu()
    executor = make(device, OVERLAP, 1)
    if after == "items":
        executor.submit(item_of(device, "i", R, C)).result()

    def lost(self, stream) -> None:
        raise AclError("record", 507014, "TASK_QUEUE", "an earlier launch failed")

    with monkeypatch.context() as patch:
        patch.setattr(MockEvent, "record", lost)
        with pytest.raises(AclError):
            executor.submit(item_of(device, "j", R, C))
    (ticket,) = executor._failure.quarantined
    lease = ticket._slot.lanes[0][1]
    assert lease.generation == (2 if after == "items" else 1)
    with pytest.raises(XmoeError, match="waited for while it is not recorded"):
        lease.wait_on(executor.stream)
    executor.close()


def test_channel_rules():
    channel = Channel(ChannelRule("a", 2, opens=S, closes=R))
    device = MockNpu()
    stream, pool = device.create_stream(), EventPool(device)

    def go(kind):
        edges = channel.edges(kind)
        lease = recorded(pool.take(), stream)
        channel.commit(kind, lease)
        return edges, lease

    with pytest.raises(CommError, match="a send before each recv"):
        channel.edges(R)
    (_, opened), _ = go(S), go(S)
    with pytest.raises(CommError, match="2 unanswered at most"):
        channel.edges(S)
    edges, first = go(R)
    assert edges == (None, opened)  # an answer waits for its own dispatch
    assert go(S)[0] == (None, first)  # the third opening needs the first closing
    _, second = go(R)
    go(R)
    assert go(S)[0] == (None, second) and channel.outstanding == 1
    with pytest.raises(ConfigError, match="max_outstanding=0"):
        ChannelRule("a", 0)


def test_a_credit_is_taken_at_issue_and_its_wait_is_on_the_device():
    device = MockNpu()
    rule = ChannelRule("g", 1, opens=S, closes=R)
    executor = make(device, OVERLAP, 3, rule)
    first = executor.begin(item_of(device, "a", C, S, channel="g"))
    executor.issue(first)
    executor.issue(first)
    with pytest.raises(CommError, match="1 unanswered at most"):
        executor.submit(item_of(device, "b", S, channel="g"))
    assert executor.failed is None  # refused before anything was queued
    executor.submit(item_of(device, "c", R, C, channel="g"))
    second = executor.begin(item_of(device, "d", S, channel="g"))
    executor.issue(second)
    dispatch, answer, again = (
        device.log.index(("launch", stream, name))
        for stream, name in ((3, "a.send"), (1, "c.recv"), (3, "d.send"))
    )
    # The answer waits for its dispatch, the next dispatch for the answer; nothing else.
    assert device.log[answer - 1] == ("wait", 1, device.log[dispatch + 1][2])
    assert ("wait", 3, device.log[answer + 1][2]) in device.log[again - 2 : again]
    with pytest.raises(ConfigError, match="all phases were issued"):
        executor.issue(second)
    executor.drain()
    with pytest.raises(XmoeError, match="channel 'g': 1 unanswered"):
        executor.close()


def test_metadata_runs_once_the_receive_is_over_and_names_the_layer():
    device = MockNpu()
    seen = []

    def before(kind, context):
        if kind is M:
            seen.append(device.world.step())  # nothing is left to do: the receive is over
            context.layer = 7
        seen.append((kind, context.layer))

    with make(device, trace=True) as executor:
        executor.submit(item_of(device, "i", R, M, C, before=before, layer=-1))
        assert seen == [(R, -1), False, (M, 7), (C, 7)]
        assert [(e.phase, e.layer, e.stream) for e in executor.trace] == [
            ("recv", -1, "recv"), ("metadata", 7, "host"), ("compute", 7, "compute"),
        ]  # fmt: skip


@pytest.mark.parametrize("free", [True, False])
def test_the_trace_counts_a_channels_phases_on_the_device(free):
    device = MockNpu()
    with make(device, OVERLAP, 2, ChannelRule("g", exclusive=not free), trace=True) as executor:
        for n in range(2):
            executor.submit(item_of(device, f"i{n}", R, M, C, S, channel="g"))
        counted = [(e.phase, e.sequence) for e in executor.trace if e.phase in ("recv", "send")]
    assert counted == [("recv", 0), ("send", 1), ("recv", 2), ("send", 3)]


def test_an_error_after_a_first_phase_ran_is_no_refusal(monkeypatch):
    device = MockNpu()
    executor = make(device)

    def closed(self, stream) -> None:
        raise ConfigError("the event is closed")

    monkeypatch.setattr(MockEvent, "record", closed)
    with pytest.raises(ConfigError):
        executor.submit(item_of(device, "i", R, C))
    assert executor.failed is not None and executor.quarantined == 1  # its kernel is queued
    executor.close()


def test_only_the_first_failure_is_told():
    told = []
    failed = failure.Failure(None, lambda error, unsent: told.append(error))
    first, second = CommError("first"), CommError("second")
    assert [failed.make_final(None, error, ()) for error in (first, second)] == [first, second]
    assert failed.error is first and told == [first]


def test_a_ticket_that_is_done_has_nothing_to_do_with_its_slots_next_item():
    device = MockNpu()
    executor = make(device, OVERLAP, 1, timeout_s=0.02, shutdown_timeout_s=0.01)
    first = executor.submit(item_of(device, "i", R, C))
    first.result()
    second = executor.submit(stuck_item(device, [], S))
    assert first.recorded == [] and "all phases done" in first.where()
    assert [kind for kind, _ in second.recorded] == [R, S] and "phase recv" in second.where()
    with pytest.raises(FenceTimeout):
        second.result()
    executor.close()


def test_a_failure_of_any_phases_stream_is_seen():
    """The send came through although compute, on another stream, has failed."""
    device = FakeDevice()

    def push(task):
        return lambda context: context.stream.push(task, always=True)

    def broken() -> None:
        raise AclError("kernel", 507035, "X", "")

    tasks = [lambda: None, broken, lambda: None]
    phases = tuple(Phase(k, "c", push(t)) for k, t in zip((R, C, S), tasks, strict=True))
    executor = StreamExecutor(device, ExecutorOptions(OVERLAP, 2, timeout_s=5.0))
    with pytest.raises(AclError, match="507035"):
        executor.submit(WorkItem("i", 0, phases)).result()
    executor.close()
    device.close()


@pytest.mark.parametrize(("mode", "waits"), [(SERIAL, 1), (OVERLAP, 3)])
def test_each_stream_is_waited_for_once(mode, waits):
    device = MockNpu()
    with make(device, mode, 1) as executor:
        executor.submit(item_of(device, "i0", R, C, S))
        assert device.event_syncs == 0
        executor.submit(item_of(device, "i1", R, C, S))  # takes the slot over
        assert device.event_syncs == waits


@pytest.mark.parametrize("phase", ["recv", "compute", "send"])
def test_one_streams_end_tells_of_every_phases_failure(phase):
    device = FakeDevice()
    executor = make(device, SERIAL, 1)

    def fails() -> None:
        raise AclError(phase, 507035, "X", "")

    def run(context, name):
        context.stream.push(fails if name == phase else lambda: None)

    phases = tuple(Phase(k, "g", lambda c, n=k.value: run(c, n)) for k in (R, C, S))
    executor.submit(WorkItem("i0", 0, phases))
    with pytest.raises(AclError, match=phase):
        executor.submit(WorkItem("i1", 0, phases))
    with pytest.raises(XmoeError, match="first failure"):
        executor.submit(WorkItem("i2", 0, phases))
    executor.close()
    device.close()


def test_the_gate_is_asked_before_a_receive_and_slots_come_back_meanwhile():
    device = MockNpu()
    asked = []
    executor = make(device)
    first = executor.submit(item_of(device, "i", R, C, S))

    def gate() -> bool:
        device.world.step()
        asked.append(first.done)
        return first.done

    executor.submit(item_of(device, "j", R, C, S, gate=gate))
    assert asked[0] is False and asked[-1] is True and len(asked) > 3
    executor.close()


def test_stop_at_the_gate_loses_nothing():
    device = MockNpu()
    executor = make(device)
    executor.submit(item_of(device, "i", R, C, S))
    timer = threading.Timer(0.05, executor.request_stop)
    timer.start()
    with pytest.raises(PipelineStopped, match="nothing was issued"):
        executor.submit(item_of(device, "j", R, gate=lambda: False, may_idle=True))
    timer.join()
    executor.close()
    assert executor.failed is None and executor.quarantined == 0


def stuck_item(device: MockNpu, go: list, *kinds: PhaseKind, name: str = "stuck"):
    """Its first phase launches a kernel that waits for a peer; the rest are empty."""

    def recv(context) -> None:
        kernel = Kernel(f"{name}.spin", 48, ready=lambda: bool(go))
        device.launch(context.stream.handle(), kernel)

    rest = [Phase(kind, "c", lambda context: None) for kind in kinds]
    return WorkItem(name, 5, (Phase(R, "c", recv), *rest), stage=1)


def test_stop_while_a_receive_is_blocked_aborts_it():
    device = MockNpu()
    go, told = [], []

    def on_failure(error, unsent) -> None:
        told.append((type(error), [ticket.context.slot for ticket in unsent]))
        go.append(1)  # the abort word

    executor = make(device, on_failure=on_failure, timeout_s=30.0)
    threading.Timer(0.05, executor.request_stop).start()
    with pytest.raises(PipelineStopped, match="stuck, layer 5, stage 1, slot 0, phase recv"):
        executor.submit(stuck_item(device, go, M, C))
    assert told == [(PipelineStopped, [0])]
    executor.close()
    executor.close()
    assert executor.quarantined == 0  # the streams have stopped


def test_a_receive_that_never_ends_is_quarantined_not_freed():
    device = MockNpu()
    executor = make(device, shutdown_timeout_s=0.02, timeout_s=0.02)
    kept = len(failure.QUARANTINE)
    ticket = executor.submit(stuck_item(device, [], S))
    with pytest.raises(FenceTimeout, match="stuck, layer 5, stage 1, slot 0, phase recv") as caught:
        ticket.result()
    assert "not finished after 0.02 s" in str(caught.value)
    executor.close()
    assert executor.quarantined == 1 and not device.streams[0].closed
    assert len(failure.QUARANTINE) > kept  # lives on when the executor is gone


def test_a_long_wait_is_reported_once():
    device = MockNpu()
    heard = []
    executor = make(device, on_stall=heard.append, stall_warn_s=0.01, timeout_s=0.06)
    with pytest.raises(FenceTimeout):
        executor.submit(stuck_item(device, [], S)).result()
    assert len(heard) == 1 and "stuck, layer 5, stage 1, slot 0, phase recv" in heard[0]


@pytest.mark.parametrize("mode", [SERIAL, OVERLAP])
@pytest.mark.parametrize("where", [R, M, C, S])
def test_an_exception_in_any_phase_is_final_and_the_peers_are_told_once(mode, where):
    device = MockNpu()
    told = []

    def before(kind, context):
        if kind is where and context.layer == 1:
            raise RuntimeError(f"{kind.value} broke")

    executor = make(device, mode, 2, on_failure=lambda error, unsent: told.append(len(unsent)))
    first = executor.submit(item_of(device, "i0", R, M, C, S, before=before))
    with pytest.raises(RuntimeError, match=f"{where.value} broke"):
        executor.submit(item_of(device, "i1", R, M, C, S, before=before, layer=1))
    launched = device.launches()
    for call in (lambda: executor.submit(item_of(device, "i2", R)), executor.drain, first.result):
        with pytest.raises((XmoeError, RuntimeError)):
            call()
    assert told == [1] and device.launches() == launched
    executor.close()
    assert executor.quarantined == 0


def test_a_late_device_error_is_final_and_nothing_is_waited_for_again():
    """torch_npu: the failing launch is reported by a later call, once, then calls vanish."""
    device = MockNpu()
    device.fail_launch = "i1.compute"
    device.torch_device = SimpleNamespace(type="npu")
    executor = make(device, OVERLAP, 4)
    executor.submit(item_of(device, "i0", R, C, S))
    executor.submit(item_of(device, "i1", R, C, S))
    device.world.until(lambda: bool(device.failure))
    with pytest.raises(AclError, match="earlier launch failed"):
        executor.submit(item_of(device, "i2", R, C, S))
    dropped = device.dropped
    with pytest.raises(XmoeError, match="first failure"):
        executor.submit(item_of(device, "i3", R, C, S))
    waits = device.event_syncs, device.stream_syncs
    executor.close()
    assert (device.event_syncs, device.stream_syncs) == waits and device.dropped == dropped
    assert executor.quarantined == 3


def test_slot_exhaustion_by_items_that_nobody_issued_is_an_error_not_a_hang():
    device = MockNpu()
    executor = make(device, OVERLAP, 2)
    tickets = [executor.begin(item_of(device, f"i{n}", R, S)) for n in range(2)]
    with pytest.raises(XmoeError, match="all 2 slots are taken.*phase that nobody has issued"):
        executor.begin(item_of(device, "i2", R))
    for ticket in tickets:
        executor.issue(ticket)
        executor.issue(ticket)
    executor.submit(item_of(device, "i2", R))
    executor.close()


def test_an_item_left_half_issued_fails_at_closing():
    device = MockNpu()
    told = []
    executor = make(device, on_failure=lambda error, unsent: told.append(len(unsent)))
    executor.issue(executor.begin(item_of(device, "half", R, C)))
    with pytest.raises(XmoeError, match="only 1 of 2 phases"):
        executor.close()
    assert told == [1]


def test_a_dead_peer_seen_at_the_gate_is_final():
    device = MockNpu()
    executor = make(device)

    def gate() -> bool:
        raise PeerLost("rank 3 is gone")

    with pytest.raises(PeerLost):
        executor.submit(item_of(device, "i", R, gate=gate))
    assert isinstance(executor.failed, PeerLost)
    executor.close()


def test_the_reports_of_a_failing_abort_are_added():
    device = MockNpu()

    def on_failure(error, unsent) -> None:
        raise CommError("group is unknown")

    def before(kind, context):
        raise RuntimeError("broke")

    executor = make(device, on_failure=on_failure)
    with pytest.raises(RuntimeError, match="broke") as caught:
        executor.submit(item_of(device, "i", R, before=before))
    assert "group is unknown" in caught.value.__notes__[0]
    executor.close()


def test_an_abort_that_breaks_ends_the_executor_all_the_same():
    device = MockNpu()

    def on_failure(error, unsent) -> None:
        raise ZeroDivisionError("the abort's own defect")

    def before(kind, context):
        raise RuntimeError("broke")

    executor = make(device, on_failure=on_failure)
    with pytest.raises(ZeroDivisionError):
        executor.submit(item_of(device, "i", R, before=before))
    with pytest.raises(XmoeError, match="stopped after its first failure"):
        executor.submit(item_of(device, "j", R))
    executor.close()


def test_options_follow_the_settings_and_the_role():
    config = MultistreamConfig(mode=OVERLAP, max_inflight=3, roles=frozenset({"ffn"}))
    ffn, attention = (ExecutorOptions.of(config, role) for role in ("ffn", "attention"))
    assert (ffn.mode, ffn.max_inflight) == (OVERLAP, 3)
    assert (attention.mode, attention.max_inflight) == (SERIAL, 1)
    assert ExecutorOptions.of(config, "attention", slots=3).max_inflight == 3
    for bad in ({"max_inflight": 5}, {"mode": StreamMode.OFF}):
        with pytest.raises(ConfigError):
            ExecutorOptions(**bad)


def test_a_session_binds_once_and_excludes_other_threads():
    device = MockNpu()
    executor = make(device)
    done = []
    thread = threading.Thread(target=lambda: done.append(executor.inflight or executor.drain()))
    with executor.session():
        executor.submit(item_of(device, "i", R, C, S))
        other = threading.Thread(target=lambda: executor.submit(item_of(device, "j", C)))
        other.start()
        time.sleep(0.02)
        assert "j.compute" not in device.launches()
    other.join(5)
    thread.start()
    thread.join(5)
    assert "j.compute" in device.launches()
    executor.close()


def test_a_report_is_not_disturbed_by_items_that_end_meanwhile(monkeypatch):
    device = MockNpu()
    executor = make(device)
    first, _ = (executor.submit(item_of(device, name, R, C, S)) for name in "ij")
    where = Ticket.where

    def slow(ticket: Ticket) -> str:
        text = where(ticket)
        thread = threading.Thread(target=first.result)
        thread.start()
        thread.join(5)
        return text

    monkeypatch.setattr(Ticket, "where", slow)
    assert [text.split(",")[0] for text in executor.report().split(" | ")] == ["i", "j"]
    executor.close()


def test_inline_devices_run_in_overlap_mode_too():
    with StreamExecutor(InlineDevice(), ExecutorOptions(OVERLAP, 4)) as executor:
        seen = []
        phases = tuple(Phase(k, "c", lambda c, k=k: seen.append(k)) for k in (R, M, C, S))
        executor.submit(WorkItem("i", 0, phases)).result()
        assert seen == [R, M, C, S]
