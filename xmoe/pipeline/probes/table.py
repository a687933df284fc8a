# SPDX-License-Identifier: Apache-2.0
"""Which probes there are, and running them one after the other in forked ranks with a deadline."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xmoe.errors import ConfigError
from xmoe.pipeline.probes.evidence import SKIPPED, UNEXPECTED, Evidence
from xmoe.ranks import RankContext, RanksFailed, run_ranks

# Small receive capacity, and waits of the software device that end before a probe's deadline.
_ENVIRON = {"BATCH_SIZE_FACTOR": "0.001", "XSD_WAIT_TIMEOUT_MS": "8000"}
_SILENCE_S = 40.0


@dataclass(frozen=True)
class Setup:
    """Where probes run. `tensors`: host for CPU tensors, npu for torch_npu's. `items`: for P4, P6.

    Attributes:
        software: the device is the software device, so what only it has may be asked for too.
    """

    items: int
    tensors: str
    software: bool

    @property
    def survives(self) -> bool:
        """Work goes on behind a device error; a process of torch_npu is lost then."""
        return self.software and self.tensors == "host"


@dataclass(frozen=True)
class Probe:
    """One row: what it asks, what runs it, and why it needs the software device; "" where not."""

    name: str
    question: str
    run: Callable[[Setup], Iterator[Evidence]]
    needs_software: str = ""


def _ranks(setup: Setup, fn: Callable[..., Any], *args: Any, **environ: str) -> list[Any]:
    given = (setup.tensors, *args)
    return run_ranks(fn, 2, *given, silence_s=_SILENCE_S, environ={**_ENVIRON, **environ})


def _p1(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import streams

    for p2p in (True, False):
        yield streams.judge_honour(_ranks(setup, streams.stream_honour, p2p))


def _p2(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import streams

    for p2p in (True, False):
        yield streams.judge_occupancy(_ranks(setup, streams.occupancy, p2p))


def _p3(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import streams

    plain, limited = (_ranks(setup, streams.core_limit, limit) for limit in (False, True))
    yield streams.judge_limit(plain, limited)


def _p4(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import soak

    slow = {"XSD_DELAY_SEED": "7", "XSD_DELAY_MAX_US": "300", "XSD_CAM_COPY_MBPS": "2"}
    yield soak.overlap(setup.items, {**_ENVIRON, **slow})


def _p5(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import hazards

    for strict in (True, False) if setup.survives else (False,):
        results = _ranks(setup, hazards.credit, XSD_STRICT=str(int(strict)))
        yield hazards.judge_credit(results, strict)


def _p6(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import soak

    yield soak.fence(setup.items, _ENVIRON)


def _p7(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import hazards

    results = _ranks(setup, hazards.parity, XSD_WAIT_TIMEOUT_MS="1000")
    yield hazards.judge_parity(results, 1.0)


def _p8(setup: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import hazards

    if setup.survives:
        yield hazards.judge_abort(_ranks(setup, hazards.abort))
    yield hazards.judge_stop(_ranks(setup, hazards.stop))


def _p9(_: Setup) -> Iterator[Evidence]:
    from xmoe.pipeline.probes import queue

    yield from queue.probe()


_NO_COUNTS = "core counts are in the vendor's profiler only"
_NO_MODEL = (
    "the loops need a model, and a readiness probe or core limits of the operator library; serve "
    'one there with fence="none" and compare with mode="serial"'
)

PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe("P1", "do the operators run on the stream they are given?", _p1),
        Probe("P2", "which cores does a receive hold while it waits?", _p2),
        Probe("P3", "do the operators keep to a core limit?", _p3, _NO_COUNTS),
        Probe("P4", "may a receive run beside a send?", _p4, _NO_MODEL),
        Probe("P5", "what stops a second dispatch before the combine?", _p5),
        Probe("P6", "which hazard does the host wait at a step's end cover?", _p6, _NO_MODEL),
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
    names: Sequence[str],
    *,
    items: int,
    on_line: Callable[[str], None] | None = None,
    tensors: str | None = None,
) -> list[Evidence]:
    """Run them; every line says what it was measured on.

    A rank that fails or misses its deadline is evidence too, "unexpected". On an NPU they run on
    torch_npu's tensors, and those that need what only the software device has are skipped, with the
    reason. `tensors`: None chooses by the device.

    Raises:
        ConfigError: an unknown name; LibraryNotFound: there is no device.
    """
    chosen = select(names)
    device, software = run_ranks(_device, 1, silence_s=_SILENCE_S)[0]
    setup = Setup(items, tensors or ("host" if software else "npu"), software)
    found = []
    for probe in chosen:
        begin = time.monotonic()
        for one in _evidence(probe, setup):
            took = {"took_s": round(time.monotonic() - begin, 1)}
            one = replace(one, device=device, figures={**one.figures, **took})
            found.append(one)
            if on_line is not None:
                on_line(one.line())
            begin = time.monotonic()
    return found


def _evidence(probe: Probe, setup: Setup) -> Iterator[Evidence]:
    missing = "" if setup.software else probe.needs_software
    if setup.tensors == "npu" and importlib.util.find_spec("torch_npu") is None:
        missing = "torch_npu is not installed, and on this device the operators take its tensors"
    if missing and probe.name != "P9":
        yield Evidence(probe.name, probe.question, SKIPPED, missing)
        return
    try:
        yield from probe.run(setup)
    except RanksFailed as error:
        yield Evidence(probe.name, probe.question, UNEXPECTED, str(error).replace("\n", " | "))
