# SPDX-License-Identifier: Apache-2.0
"""Which probes there are, and running them one after the other in forked ranks with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xmoe.errors import ConfigError
from xmoe.pipeline.probes.evidence import SKIPPED, UNEXPECTED, Evidence
from xmoe.ranks import RankContext, RanksFailed, run_ranks

# Small receive capacity, and waits of the software device that end before a probe's deadline.
_ENVIRON = {"BATCH_SIZE_FACTOR": "0.001", "XSD_WAIT_TIMEOUT_MS": "8000"}
_SILENCE_S = 40.0


@dataclass(frozen=True)
class Probe:
    """One row: what it asks, and what runs it."""

    name: str
    question: str
    run: Callable[[int], Iterator[Evidence]]


def _ranks(fn: Callable[..., Any], *args: Any, environ: Mapping[str, str] = {}) -> list[Any]:
    merged = {**_ENVIRON, **environ}
    return run_ranks(fn, 2, *args, silence_s=_SILENCE_S, environ=merged)


def _p1(_: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import streams

    for p2p in (True, False):
        yield streams.judge_honour(_ranks(streams.stream_honour, p2p))


def _p2(_: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import streams

    for p2p in (True, False):
        yield streams.judge_occupancy(_ranks(streams.occupancy, p2p))


def _p3(_: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import streams

    limit = {"XSD_CAM_DISPATCH_RECV_CORES": "16"}
    plain, limited = _ranks(streams.core_limit), _ranks(streams.core_limit, environ=limit)
    yield streams.judge_limit(plain, limited, 16)


def _p4(items: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import soak

    slow = {"XSD_DELAY_SEED": "7", "XSD_DELAY_MAX_US": "300", "XSD_CAM_COPY_MBPS": "2"}
    yield soak.overlap(items, {**_ENVIRON, **slow})


def _p5(_: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import hazards

    for strict in (True, False):
        results = _ranks(hazards.credit, environ={"XSD_STRICT": str(int(strict))})
        yield hazards.judge_credit(results, strict)


def _p6(items: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import soak

    yield soak.fence(items, _ENVIRON)


def _p7(_: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import hazards

    results = _ranks(hazards.parity, environ={"XSD_WAIT_TIMEOUT_MS": "1000"})
    yield hazards.judge_parity(results, 1.0)


def _p8(_: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import hazards

    yield hazards.judge_abort(_ranks(hazards.abort))
    yield hazards.judge_stop(_ranks(hazards.stop))


def _p9(_: int) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import queue

    yield from queue.probe()


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe("P1", "do the operators run on the stream they are given?", _p1),
        Probe("P2", "which cores does a receive hold while it waits?", _p2),
        Probe("P3", "do the operators keep to a core limit?", _p3),
        Probe("P4", "may a receive run beside a send?", _p4),
        Probe("P5", "what stops a second dispatch before the combine?", _p5),
        Probe("P6", "which hazard does the host wait at a step's end cover?", _p6),
        Probe("P7", "what does one launch too many in a group do?", _p7),
        Probe("P8", "how does a blocked receive end at shutdown?", _p8),
        Probe("P9", "does the host task queue change the order of operations?", _p9),
    )
}


def select(names: Sequence[str]) -> list[Probe]:
    """The probes by name; "all" is every one.

    Raises:
        ConfigError: an unknown name.
    """
    chosen = [name.upper() for name in names]
    if "ALL" in chosen:
        return list(PROBES.values())
    for name in chosen:
        if name not in PROBES:
            raise ConfigError(
                f"unknown probe {name!r}; allowed: {', '.join(PROBES)}, all; next: correct it"
            )
    return [PROBES[name] for name in dict.fromkeys(chosen)]


def _device(context: RankContext) -> tuple[str, bool]:
    """What the probes run on, and whether it is the software device. Runs in a rank of its own:
    a process that has used a device cannot fork ranks that use it."""
    from xmoe.kernels.acl.loader import load
    from xmoe.kernels.acl.toolkit import find_toolkit
    from xmoe.kernels.device import HostDevice

    runtime = load(find_toolkit())
    with HostDevice(runtime) as device, device.bind():
        soc = runtime.ffi.string(runtime.acl.aclrtGetSocName()).decode()
        if runtime.identity is None:
            return str(soc), False
        return f"software device as {soc}", True


def run_probes(
    names: Sequence[str], *, items: int, on_line: Callable[[str], None] | None = None
) -> list[Evidence]:
    """Run them; every line says what it was measured on.

    A rank that fails or misses its deadline is evidence too, "unexpected". On an NPU the probes
    need its profiler and what only the software device has, so they are skipped with that reason.

    Raises:
        ConfigError: an unknown name; LibraryNotFound: there is no device.
    """
    chosen = select(names)
    device, software = run_ranks(_device, 1, silence_s=_SILENCE_S)[0]
    found = []
    for probe in chosen:
        begin = time.monotonic()
        for one in _evidence(probe, items, software):
            took = {"took_s": round(time.monotonic() - begin, 1)}
            one = replace(one, device=device, figures={**one.figures, **took})
            found.append(one)
            if on_line is not None:
                on_line(one.line())
            begin = time.monotonic()
    return found


_NEEDS_SOFTWARE = (
    "needs device times, a timed kernel and an abort word, which this operator library does not "
    "export; run it under the vendor's profiler by the table in docs/stream-pipeline.md"
)


def _evidence(probe: Probe, items: int, software: bool) -> Iterator[Evidence]:
    if not software and probe.name != "P9":
        yield Evidence(probe.name, probe.question, SKIPPED, _NEEDS_SOFTWARE)
        return
    try:
        yield from probe.run(items)
    except RanksFailed as error:
        yield Evidence(probe.name, probe.question, UNEXPECTED, str(error).replace("\n", " | "))
