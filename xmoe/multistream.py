# SPDX-License-Identifier: Apache-2.0
"""The `multistream` settings of both connectors: one typed contract, checked before anything is
built.

    mapping -> MultistreamConfig -> validate(capabilities, shape) -> compared by both roles

The default is a single stream. What an adapter can do it declares as `Capabilities`; a combination
that is not known to be safe is refused with its reason, and nothing is probed at run time.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from xmoe import env
from xmoe.errors import ConfigError

MAX_INFLIGHT = 4
ROLES = ("ffn", "attention")

LEGACY_KEYS: Mapping[str, str] = {
    "is_multistream": 'mode="overlap"',
    "is_attn_multistream": 'mode="overlap" with roles=["attention"]',
    "is_ffn_multistream": 'mode="overlap" with roles=["ffn"]',
    "multistream_info": "mode and roles",
}
"""Switches that earlier connectors had, and what says the same today."""


class StreamMode(str, enum.Enum):
    """off, the default, and serial: everything on one stream. overlap: three streams."""

    OFF = "off"
    SERIAL = "serial"
    OVERLAP = "overlap"


class RecvGate(str, enum.Enum):
    """What must hold before a receive is posted."""

    NONE = "none"
    READY_PROBE = "ready_probe"
    CORE_PARTITION = "core_partition"


class MetadataRead(str, enum.Enum):
    """How an item's layer and rows get to compute. blocking: the host waits for the receive, then
    reads. pinned_async: the receive's stream copies them to pinned memory, the host waits for the
    same event. device: the host reads nothing, the model takes them from device tensors."""

    BLOCKING = "blocking"
    PINNED_ASYNC = "pinned_async"
    DEVICE = "device"


class HostFence(str, enum.Enum):
    """Where the host waits for the events of finished items; never the whole device."""

    NONE = "none"
    STEP = "step"
    ITEM = "item"


@dataclass(frozen=True)
class Capabilities:
    """What an adapter and its operators can do. Declared, never probed.

    Attributes:
        connector: name for reports.
        roles: sides that the adapter implements.
        honours_current_stream: operators run on the stream they are given.
        recv_send_same_channel_exclusive: a receive and a send of one channel may not run at once.
        recv_blocks_cores: a receive that waits holds the cores that compute needs.
        host_metadata: shape and layer of an item are known only after its receive.
        metadata_reads: ways in which that can be read here. metadata_problems: why others cannot.
        graph_safe: the operators may be captured.
        max_outstanding_per_channel: dispatches that may be unanswered; None: no limit here.
        ready_probe: there is a readiness probe that holds no cores.
        core_limits: the operators keep to a number of cores that is set for them.
        peer_abort: a failure here can end the peer's waits.
    """

    connector: str
    roles: frozenset[str]
    honours_current_stream: bool
    recv_send_same_channel_exclusive: bool
    recv_blocks_cores: bool
    host_metadata: bool
    metadata_reads: frozenset[MetadataRead]
    graph_safe: bool
    max_outstanding_per_channel: int | None
    ready_probe: bool
    core_limits: bool
    peer_abort: bool
    metadata_problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class PipelineShape:
    """The deployment that settings are checked against; the same on all ranks.

    Attributes:
        channels: communication groups that items alternate between, by stage.
        attention_groups: groups whose dispatches may be outstanding at once.
        slot_bytes: of one FFN slot: receive outputs at full capacity, and as many rows of results.
        vector_cores: of one device; None when unknown.
        split: how an Attention batch becomes stages.
    """

    attention_ranks: int
    ffn_ranks: int
    layers: int
    stages: int = 1
    channels: tuple[str, ...] = ("afd",)
    attention_groups: int = 1
    tp_size: int = 1
    slot_bytes: int = 0
    vector_cores: int | None = None
    dynamic_quant: bool = False
    graph: bool = False
    context_parallel: bool = False
    split: str = "request"


_SECONDS = env.seconds()
_KINDS: Mapping[str, env.Kind] = {
    "mode": env.choice(*(m.value for m in StreamMode)),
    "recv_gate": env.choice(*(m.value for m in RecvGate)),
    "metadata_read": env.choice(*(m.value for m in MetadataRead)),
    "fence": env.choice(*(m.value for m in HostFence)),
    "max_inflight": env.integer(1, MAX_INFLIGHT),
    "memory_budget_bytes": env.integer(1, 1 << 50),
    "recv_cores": env.integer(1, 1024),
    "compute_cores": env.integer(1, 1024),
    "send_cores": env.integer(1, 1024),
    "wait_timeout_s": _SECONDS,
    "shutdown_timeout_s": _SECONDS,
    "stall_warn_s": _SECONDS,
    "trace": env.BOOLEAN,
}
_ENUMS: Mapping[str, type[enum.Enum]] = {
    "mode": StreamMode,
    "recv_gate": RecvGate,
    "metadata_read": MetadataRead,
    "fence": HostFence,
}
_MAY_BE_NONE = ("memory_budget_bytes", "recv_cores", "compute_cores", "send_cores")


@dataclass(frozen=True)
class MultistreamConfig:
    """How a connector's operators and the model's compute share streams; immutable and checked.

    Attributes:
        mode: see StreamMode.
        roles: sides that use it; the other one stays on a single stream.
        max_inflight: slots; counts as 1 unless the mode is overlap.
        memory_budget_bytes: for the buffers of all slots of an FFN rank.
        recv_gate: see RecvGate. recv_cores, compute_cores, send_cores: of a partition.
        metadata_read, fence: see there.
        wait_timeout_s: bound of each wait for one item.
        shutdown_timeout_s: after which buffers that may be in use are kept instead of freed.
        stall_warn_s: after which a wait is reported, without effect.
        trace: record phases.
    """

    mode: StreamMode = StreamMode.OFF
    roles: frozenset[str] = frozenset({"ffn"})
    max_inflight: int = 2
    memory_budget_bytes: int | None = None
    recv_gate: RecvGate = RecvGate.NONE
    recv_cores: int | None = None
    compute_cores: int | None = None
    send_cores: int | None = None
    metadata_read: MetadataRead = MetadataRead.BLOCKING
    fence: HostFence = HostFence.STEP
    wait_timeout_s: float = 60.0
    shutdown_timeout_s: float = 5.0
    stall_warn_s: float = 30.0
    trace: bool = False

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            parsed: Any = env.parse_as(kind, f"multistream.{name}", value, "correct it")
            if name in _ENUMS:
                parsed = _ENUMS[name](parsed)
            object.__setattr__(self, name, parsed)
        object.__setattr__(self, "roles", _roles(self.roles))
        if self.mode is not StreamMode.OVERLAP:
            object.__setattr__(self, "max_inflight", 1)

    def mode_of(self, role: str) -> StreamMode:
        """How `role` runs: a side that is not among `roles` stays on one stream."""
        if self.mode is StreamMode.OVERLAP and role not in self.roles:
            return StreamMode.SERIAL
        return self.mode

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The known setting names."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object] | None) -> MultistreamConfig:
        """Read the object under the key "multistream". None and {} are the defaults.

        Raises:
            ConfigError: unknown and legacy keys, wrong types, values out of range.
        """
        if mapping is None:
            return cls()
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"multistream is {mapping!r}; allowed: an object with the keys "
                f"{', '.join(cls.keys())}; next: write it as one"
            )
        refuse_legacy(mapping)
        if "event_ring" in mapping:
            raise ConfigError(
                "multistream setting 'event_ring' does not exist any more; allowed: nothing in its "
                "place, every slot has the events that it needs; next: remove it"
            )
        known = cls.keys()
        for key in mapping:
            if key not in known:
                raise ConfigError(
                    f"unknown multistream setting {key!r}; nearest: "
                    f"{env.nearest(str(key), known)}; known: {', '.join(known)}; next: correct "
                    "or remove it"
                )
        given: dict[str, Any] = {k: v for k, v in mapping.items() if v is not None}
        return cls(**given)

    def to_mapping(self) -> dict[str, Any]:
        """The settings as JSON values."""
        found: dict[str, Any] = {}
        for name in self.keys():
            value = getattr(self, name)
            if isinstance(value, frozenset):
                value = sorted(value)
            found[name] = value.value if isinstance(value, enum.Enum) else value
        return found

    def digest(self, shape: PipelineShape) -> str:
        """Equal on two ranks exactly when settings and deployment are; both roles compare it."""
        values = {"settings": self.to_mapping(), "shape": dataclasses.asdict(shape)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def problems(self, capabilities: Capabilities, shape: PipelineShape) -> tuple[str, ...]:
        """Why this combination is not supported; empty when it is."""
        return tuple(_problems(self, capabilities, shape))

    def validate(self, capabilities: Capabilities, shape: PipelineShape) -> None:
        """Refuse an unsupported combination. Local; call it before anything is built.

        Raises:
            ConfigError: with every reason.
        """
        found = self.problems(capabilities, shape)
        if found:
            raise ConfigError(
                f"multistream settings are not supported with {capabilities.connector}: "
                f"{'; '.join(found)}; allowed: see the support matrix; next: change these "
                'settings, or mode="off"'
            )


def refuse_legacy(mapping: Mapping[str, object]) -> None:
    """ConfigError naming today's setting if `mapping` holds an earlier connector's switch."""
    for key, now in LEGACY_KEYS.items():
        if key in mapping:
            raise ConfigError(
                f"setting {key!r} of earlier connectors is not accepted; allowed: the object "
                f'"multistream" with {now}; next: replace it'
            )


def _roles(value: object) -> frozenset[str]:
    items = value if isinstance(value, (frozenset, set, list, tuple)) else (value,)
    if not items or any(item not in ROLES for item in items):
        raise ConfigError(
            f"multistream.roles={value!r}; allowed: a list of {', '.join(ROLES)}; next: correct it"
        )
    return frozenset(items)


def _problems(c: MultistreamConfig, a: Capabilities, s: PipelineShape) -> Sequence[str]:
    found: list[str] = []
    if not c.roles <= a.roles:
        missing = sorted(c.roles - a.roles)
        found.append(f"roles={missing}: the adapter has {sorted(a.roles)} only")
    if s.graph and not a.graph_safe:
        found.append("graph capture: the operators are eager only")
    if s.context_parallel:
        found.append("context or sequence parallel Attention: never tried with these operators")
    if not 1 <= s.stages <= 2:
        found.append(f"stages={s.stages}: 1 or 2 are known")
    if s.split not in ("request", "token"):
        found.append(f"split={s.split!r}: request, token")
    if s.split == "token" and s.tp_size < 2:
        found.append('split="token" needs tp_size of 2 or more')
    if a.host_metadata and c.metadata_read not in a.metadata_reads:
        ways = ", ".join(sorted(m.value for m in a.metadata_reads))
        why = "".join(f"; {problem}" for problem in a.metadata_problems)
        found.append(f'metadata_read="{c.metadata_read.value}": readable here: {ways}{why}')
    if not a.host_metadata and c.metadata_read is not MetadataRead.BLOCKING:
        found.append(
            f'metadata_read="{c.metadata_read.value}": shapes are known in advance here, nothing '
            "is read; leave it out"
        )
    found += _count_problems(c, a, s)
    if c.mode is StreamMode.OVERLAP:
        found += _overlap_problems(c, a, s)
    return found


def _count_problems(c: MultistreamConfig, a: Capabilities, s: PipelineShape) -> list[str]:
    """A kernel that waits holds its cores, so whatever may run at once must fit."""
    counts = [n for n in (c.recv_cores, c.compute_cores, c.send_cores) if n is not None]
    if counts and not a.core_limits:
        return ["recv_cores, compute_cores, send_cores: the operators do not keep to core limits"]
    if s.vector_cores is not None and sum(counts) > s.vector_cores:
        return [f"recv_cores, compute_cores, send_cores: {sum(counts)} of {s.vector_cores} cores"]
    return []


def _overlap_problems(c: MultistreamConfig, a: Capabilities, s: PipelineShape) -> list[str]:
    found: list[str] = []
    if not a.honours_current_stream:
        found.append("overlap: the operators do not run on the caller's stream")
    if a.recv_send_same_channel_exclusive:
        found += _exclusive_problems(c, s)
    if a.recv_blocks_cores and "ffn" in c.roles:
        found += _core_problems(c, a, s)
    elif c.recv_gate is not RecvGate.NONE:
        found.append(
            f'recv_gate="{c.recv_gate.value}": a waiting receive leaves the cores of compute free '
            'here, use "none"'
        )
    if s.slot_bytes and c.max_inflight > 1 and "ffn" in c.roles and a.host_metadata:
        need = s.slot_bytes * c.max_inflight
        if c.memory_budget_bytes is None:
            found.append(f"memory_budget_bytes is not set: {need} bytes of buffers")
        elif c.memory_budget_bytes < need:
            found.append(
                f"memory_budget_bytes={c.memory_budget_bytes}: {c.max_inflight} slots need {need}"
            )
    if "attention" in c.roles and s.stages < 2:
        found.append("roles with attention: one stage has nothing to overlap with")
    return found


def _exclusive_problems(c: MultistreamConfig, s: PipelineShape) -> list[str]:
    found = []
    if s.stages < 2:
        found.append("overlap with one stage: receive, compute and send of one group are serial")
    if len(set(s.channels)) < s.stages or not all(s.channels):
        found.append(f"channels {list(s.channels)}: {s.stages} stages need as many distinct groups")
    if c.recv_cores != c.send_cores:
        found.append(
            f"recv_cores={c.recv_cores}, send_cores={c.send_cores}: must be equal, the launch "
            "counters lie where the core count puts them"
        )
    return found


def _core_problems(c: MultistreamConfig, a: Capabilities, s: PipelineShape) -> list[str]:
    found = []
    cores = (c.recv_cores, c.compute_cores, c.send_cores)
    if c.recv_gate is RecvGate.NONE:
        found.append('recv_gate="none": a receive that waits starves compute of all vector cores')
    elif c.recv_gate is RecvGate.READY_PROBE and not a.ready_probe:
        found.append('recv_gate="ready_probe": this operator library has no readiness probe')
    elif c.recv_gate is RecvGate.CORE_PARTITION:
        if not a.core_limits:
            found.append('recv_gate="core_partition": the operators do not keep to core limits')
        if any(count is None for count in cores):
            found.append("core_partition needs recv_cores, compute_cores and send_cores")
    return found
