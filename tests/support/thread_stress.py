# SPDX-License-Identifier: Apache-2.0
"""Many threads over one process' libraries, handles and devices. Run in a child process.

Each function returns sentences on what went wrong; none is right. `GUARDS` names what protects a
shared thing, and `without` takes one such protection away, so that a test can show that it is what
keeps the list empty. Steps that are quick by nature are slowed down so that a race that is possible
is met.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from xmoe.errors import AclError, ConfigError
from xmoe.kernels import capability
from xmoe.kernels.acl import abi_detect, abi_probe, handles, libraries, loader, op, toolkit, vendor
from xmoe.kernels.acl.status import check

THREADS, DEVICES = 24, 4


class NoLock:
    """What a lock would be that nobody takes."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _without_load() -> None:
    loader._lock = NoLock()  # type: ignore[assignment]


def _without_symbols() -> None:
    _after_init(loader.Runtime)


def _without_probe() -> None:
    abi_detect._lock = NoLock()  # type: ignore[assignment]


def _without_open() -> None:
    libraries._lock = NoLock()  # type: ignore[assignment]


def _without_launch() -> None:
    _after_init(op.PreparedCall)


def _without_take() -> None:
    def take(self: handles.OwnedHandle) -> Any:
        handle = self._handle  # what `handle, self._handle = self._handle, None` is made of
        time.sleep(0)
        self._handle = None
        return handle

    handles.OwnedHandle._take = take  # type: ignore[method-assign]


def _after_init(cls: Any) -> None:
    original = cls.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self._lock = NoLock()

    cls.__init__ = init


GUARDS: dict[str, Callable[[], None]] = {
    "load": _without_load,
    "symbols": _without_symbols,
    "probe": _without_probe,
    "open": _without_open,
    "take": _without_take,
    "launch": _without_launch,
}


def crowd(count: int, work: Callable[[int], None]) -> list[str]:
    """Run `work(number)` in `count` threads that start together; what they raised."""
    gate = threading.Barrier(count)
    problems: list[str] = []

    def run(number: int) -> None:
        try:
            gate.wait(30)
            work(number)
        except BaseException as error:
            problems.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0.1, deadline - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in threads)
    return [*problems, f"{stuck} threads stuck"] if stuck else problems


class _SlowSet(set):  # type: ignore[type-arg]
    def add(self, value: Any) -> None:
        time.sleep(0.1)
        super().add(value)


@contextlib.contextmanager
def _counted(counts: Counter[str]) -> Iterator[None]:
    """Count and slow down what must happen once."""

    def slow(module: Any, name: str, seconds: float) -> None:
        original = getattr(module, name)

        def call(*args: Any, **named: Any) -> Any:
            counts[name] += 1
            time.sleep(seconds)
            return original(*args, **named)

        setattr(module, name, call)

    slow(loader, "_load_base", 0.05)
    slow(vendor, "resolve_mega_moe", 0.05)
    slow(abi_probe, "run", 0.3)
    libraries._opened_here = _SlowSet()
    yield


def first_calls(
    vendor_path: str, companion: str, without: str | None = None, threads: int = THREADS
) -> list[str]:
    """All threads load, look up and probe at once in a process that has loaded nothing yet.

    Half of them with another vendor chain, so that two Runtimes share base libraries and vendor.
    """
    if without is not None:
        GUARDS[without]()
    sys.setswitchinterval(1e-5)
    chains = [vendor_path, f"{vendor_path}:{companion}"]
    kits = [toolkit.find_toolkit("soft", environ={"ASCEND_CUSTOM_OPP_PATH": c}) for c in chains]
    runtimes: list[Any] = [None] * threads
    symbols: list[Any] = [None] * threads
    counts: Counter[str] = Counter()

    def work(number: int) -> None:
        if number % 2:
            time.sleep(0.02)  # so that one chain's load falls into the other's
        runtimes[number] = runtime = loader.load(kits[number % 2])
        symbols[number] = runtime.mega_moe
        for pin in (None, "B"):
            assert runtime.require_mega_moe(pin).variant.id == "B"
            assert len(runtime.libraries) == 5
        capability.module_state("xmoe.types")

    with _counted(counts):
        problems = crowd(threads, work)
    for what, seen, wanted in (
        ("Runtime objects", len({id(r) for r in runtimes}), 2),
        ("function tables", len({id(r.acl) for r in runtimes if r is not None}), 1),
        ("symbol objects", len({id(s) for s in symbols}), 2),
        ("loads of the base libraries", counts["_load_base"], 1),
        # Once per chain without a pin, once per chain with the pin.
        ("look-ups of the vendor", counts["resolve_mega_moe"], 4),
        ("probe processes", counts["run"], 1),
    ):
        if seen != wanted:
            problems.append(f"{what}: {seen}, not {wanted}")
    foreign = {lib.name for r in runtimes if r is not None for lib in r.libraries
               if lib.already_loaded}  # fmt: skip
    if foreign:
        problems.append(f"taken for loaded by somebody else: {sorted(foreign)}")
    return problems


def _bound(runtime: Any, device: int) -> None:
    check(runtime, runtime.acl.aclrtSetDevice(device), "aclrtSetDevice")


def churn(without: str | None = None, rounds: int = 12) -> list[str]:
    """Memory, streams, events and descriptors made and closed on several devices.

    Three threads close each of them at the same moment. The device answers a second release with an
    error, and counts what is left.
    """
    if without is not None:
        GUARDS[without]()
    sys.setswitchinterval(1e-6)
    runtime = loader.load(toolkit.find_toolkit("soft"))
    check(runtime, runtime.acl.aclInit(runtime.ffi.NULL), "aclInit")
    made: list[list[handles.OwnedHandle]] = [[] for _ in range(THREADS // 3)]
    gates = [threading.Barrier(3) for _ in made]

    wrong: list[str] = []

    def work(number: int) -> None:
        team, role = divmod(number, 3)
        _bound(runtime, team % DEVICES)
        for round_number in range(rounds):
            if role == 0:
                made[team] = _objects(runtime, round_number)
            gates[team].wait(30)
            for one in made[team]:
                try:
                    one.close()
                except AclError as error:
                    wrong.append(str(error))
            gates[team].wait(30)

    problems = crowd(THREADS, work)
    return [*problems, *wrong[:5]]


def _objects(runtime: Any, number: int) -> list[handles.OwnedHandle]:
    memory = handles.DeviceMemory(runtime, 4096)
    memory.write(bytes([number % 251]) * 64)
    stream, event = handles.AclStream(runtime), handles.AclEvent(runtime)
    event.record(stream)
    stream.synchronize(20)
    assert memory.read(64) == bytes([number % 251]) * 64
    tensors = [handles.TensorDesc(runtime, memory.handle, (4, 8), dtype="float32")
               for _ in range(4)]  # fmt: skip
    listed = handles.TensorListDesc(runtime, tensors[:3])
    return [listed, tensors[3], event, stream, memory, *tensors[:3]]


def one_executor(without: str | None = None, rounds: int = 40) -> list[str]:
    """Many threads launch and close one prepared call: one launch, and never after the close."""
    if without is not None:
        GUARDS[without]()
    sys.setswitchinterval(1e-6)
    runtime = loader.load(toolkit.find_toolkit("soft"))
    _bound(runtime, 0)
    real = runtime.mega_moe

    class Slow:
        """The symbols, with time to be overtaken between the check and the call."""

        launch_addr = real.launch_addr

        def require_variant(self) -> Any:
            time.sleep(0.0005)
            return real.variant

    problems: list[str] = []
    for _ in range(rounds):
        launched: list[int] = []
        refused: list[int] = []
        wrong: list[str] = []
        prepared = op.PreparedCall(
            runtime, Slow(), 0, runtime.ffi.cast("aclOpExecutor*", 64), False,  # type: ignore
            contextlib.ExitStack(), {},
        )  # fmt: skip

        def work(
            number: int,
            prepared: op.PreparedCall = prepared,
            launched: list[int] = launched,
            refused: list[int] = refused,
            wrong: list[str] = wrong,
        ) -> None:
            try:
                op.launch(prepared, None, 0)
                launched.append(number)
            except ConfigError:
                refused.append(number)
            except Exception as error:
                # The device knows no such executor and says so: the call did reach it.
                launched.append(number)
                wrong.append(str(error))

        problems += crowd(8, work)
        if len(launched) != 1 or len(refused) != 7:
            problems.append(f"one op_executor was launched {len(launched)} times")
    return problems


def device_workers(rounds: int = 6) -> list[str]:
    """Two groups of workers launch MegaMoe while as many threads load, probe, open and close.

    Every worker checks that each of its launches gives the same bytes; their values are compared
    with the reference at the end.
    """
    import torch

    from support import mega_moe
    from xmoe.comm.hccl import HcclCommunicator, make_root_info
    from xmoe.comm.window import context_bytes
    from xmoe.kernels.device import HostDevice
    from xmoe.kernels.ops.mega_moe import MegaMoe
    from xmoe.kernels.ops.workspace import WorkspaceCache
    from xmoe.types import CommHandle

    kit = toolkit.find_toolkit("soft")
    groups, workers = 2, 2 * DEVICES
    roots: list[bytes] = [b""] * groups
    gates = [threading.Barrier(DEVICES) for _ in range(groups)]
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    running = threading.Event()
    running.set()
    finished: list[int] = []

    def worker(number: int) -> None:
        group, rank = divmod(number, DEVICES)
        runtime = loader.load(kit)
        with HostDevice(runtime, rank) as device, device.bind(), contextlib.ExitStack() as stack:
            if rank == 0:
                roots[group] = make_root_info(runtime)
            gates[group].wait(30)
            comm = HcclCommunicator(runtime, DEVICES, rank, roots[group], 14)
            stack.callback(comm.close)
            spans = comm.spans()
            packed = bytearray(context_bytes(rank, comm.create_context(), spans))
            context = torch.frombuffer(packed, dtype=torch.int32).clone()
            handle = CommHandle(comm.name(), rank, DEVICES, spans[rank].size_bytes, context)
            stream = device.create_stream()
            stack.callback(stream.close)
            space = WorkspaceCache(runtime, lambda _: stream.synchronize(30))
            stack.callback(space.close)
            fused = MegaMoe(runtime, handle, mega_moe.experts(rank, 1), DEVICES, space)
            stack.callback(fused.close)
            tokens = mega_moe.batch(3, DEVICES, 2, seed=number)
            for _ in range(rounds):
                launch = fused.launch(tokens, stream)
                stream.synchronize(30)
                first = outputs.setdefault((group, rank), launch.hidden_states)
                assert torch.equal(first, launch.hidden_states), "bytes differ between launches"
            gates[group].wait(30)

    def other(number: int) -> None:
        while running.is_set():
            runtime = loader.load(toolkit.find_toolkit("soft"))
            assert capability.probe("soft").available
            with HostDevice(runtime, number % (DEVICES + 2)) as device, device.bind():
                for one in _objects(runtime, number):
                    one.close()

    def work(number: int) -> None:
        try:
            (worker if number < workers else other)(number)
        finally:
            finished.append(number)
            if sum(n < workers for n in finished) == workers or number >= workers:
                running.clear()

    problems = crowd(2 * workers, work)
    if not problems:
        for group in range(groups):
            batches = [mega_moe.batch(3, DEVICES, 2, seed=group * DEVICES + r)
                       for r in range(DEVICES)]  # fmt: skip
            mega_moe.check([outputs[group, r] for r in range(DEVICES)], batches, DEVICES)
    return problems
