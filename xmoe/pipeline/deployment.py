# SPDX-License-Identifier: Apache-2.0
"""One rank of `xmoe pipeline run`: device, groups, adapter, loop; the modes in turn.

Runs on the software device only, because its model is made of that device's test kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xmoe.comm.agree import (
    agree_success,
    as_peer_lost,
    broadcast_bytes,
    compare_digest,
    exchange_step,
    introduce,
    lost_ranks,
    peer_lost,
)
from xmoe.comm.hccl import HcclCommunicator, make_root_info
from xmoe.errors import ConfigError
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice
from xmoe.kernels.npu_device import NpuDevice, torch_npu
from xmoe.kernels.ops.cam.binding import CamLibrary, open_cam
from xmoe.kernels.ops.cam.host import HostCamAsyncOps, HostCamP2POps
from xmoe.kernels.ops.cam.host_memory import PinnedCopy, StopBuffer
from xmoe.kernels.ops.cam.npu import NpuCamAsyncOps, NpuCamP2POps
from xmoe.kernels.ops.cam.protocols import CamAsyncOps, CamP2POps
from xmoe.kernels.ops.cam.soft import HostWaits, KernelTrace, SoftCam, TaskTrace
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.multistream import Capabilities, MultistreamConfig, PipelineShape, StreamMode
from xmoe.outputs import note
from xmoe.pipeline.adapters import camasync, camp2p
from xmoe.pipeline.adapters.base import StepPlan
from xmoe.pipeline.adapters.camasync_attention import CamAsyncAttentionAdapter
from xmoe.pipeline.adapters.camasync_ffn import CamAsyncFfnAdapter
from xmoe.pipeline.attention import AttentionLoop
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.ffn import FfnLoop
from xmoe.pipeline.items import TraceEntry
from xmoe.pipeline.synthetic import SyntheticAttention, SyntheticFfn
from xmoe.ranks import RankContext

CONNECTORS = ("camp2p", "camasync")
DEVICES = ("host", "npu")
RankDevice = HostDevice | NpuDevice


def open_device(name: str, index: int) -> RankDevice:
    """Device `index`, for CPU tensors or torch_npu's; current for this process in the second case.

    Raises:
        LibraryNotFound: there is no such library.
    """
    if name == "npu":
        torch_npu().npu.set_device(index)
        return NpuDevice(index)
    return HostDevice(load(find_toolkit()), index=index)


@dataclass(frozen=True)
class RunSpec:
    """What to run; the same on all ranks.

    `tokens` are one Attention rank's of one stage. `uneven` takes one token from every second
    rank. `experts` are one FFN rank's; `shared_expert` takes the older operators, which carry one
    more. `device`: "host" for CPU tensors, "npu" for torch_npu's.
    """

    connector: str
    attn: int
    ffn: int
    layers: int
    stages: int = 1
    steps: int = 2
    tokens: int = 32
    hidden: int = 64
    topk: int = 2
    experts: int = 4
    tp_size: int = 1
    dynamic_quant: bool = False
    shared_expert: bool = False
    uneven: bool = False
    routing: str = "mixed"
    compute_us: int = 200
    attention_us: int = 200
    buffer_mb: int = 16
    timeout_s: float = 30.0
    device: str = "host"
    config: MultistreamConfig = field(default_factory=MultistreamConfig)

    @property
    def size(self) -> int:
        return self.attn + self.ffn

    def is_ffn(self, rank: int) -> bool:
        """FFN ranks come first in CAMP2P and last in CAMAsync."""
        return rank < self.ffn if self.connector == "camp2p" else rank >= self.attn

    def p2p_topology(self, rank: int) -> CamP2PTopology:
        """A rank's place in CAMP2P."""
        cores = self.config.recv_cores or CamP2PTopology.aiv_num
        return CamP2PTopology(self.ffn, self.attn, rank, self.hidden, self.topk, cores)

    def async_topology(self, rank: int) -> CamAsyncTopology:
        """A rank's place in CAMAsync."""
        return CamAsyncTopology(
            self.attn,
            self.ffn,
            rank,
            self.hidden,
            self.topk,
            self.experts,
            max_seq_len=max(self.tokens, 1) * self.tp_size,
            tp_size=self.tp_size,
            dynamic_quant=self.dynamic_quant,
        )

    def capabilities(self) -> Capabilities:
        """What the adapters will declare over the software device, before they exist."""
        if self.connector == "camp2p":
            return camp2p.capabilities(peer_abort=True)
        return camasync.capabilities(
            self.async_topology(0),
            ready_probe=True,
            core_limits=True,
            peer_abort=True,
            shared_expert=self.shared_expert,
        )

    def shape(self, vector_cores: int | None = None) -> PipelineShape:
        """The deployment for the settings' checks; a device's cores are known in its ranks."""
        p2p = self.connector == "camp2p"
        held = 0
        if not p2p:
            held = camasync.slot_bytes(self.async_topology(0), shared_expert=self.shared_expert)
        return PipelineShape(
            attention_ranks=self.attn,
            ffn_ranks=self.ffn,
            layers=self.layers,
            stages=self.stages,
            channels=tuple(f"stage{s}" for s in range(self.stages)) if p2p else ("afd",),
            attention_groups=self.attn // self.tp_size,
            tp_size=self.tp_size,
            slot_bytes=held,
            vector_cores=vector_cores,
            dynamic_quant=self.dynamic_quant,
        )


@dataclass
class RankRun:
    """What one rank brings back of one mode; `digest` is of the bits of all outputs."""

    role: str
    mode: str
    items: int = 0
    seconds: list[float] = field(default_factory=list)
    digest: str = ""
    vector_cores: int = 0
    outputs: list[Any] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    phases: list[tuple[str, str, int, int, str, int, str]] = field(default_factory=list)
    kernels: list[KernelTrace] = field(default_factory=list)
    tasks: list[TaskTrace] = field(default_factory=list)
    entries: list[TraceEntry] = field(default_factory=list)
    streams: dict[int, str] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)


class _Rank:
    """Device, library and groups of one rank and mode."""

    def __init__(self, spec: RunSpec, rank: int, group: ProcessGroup, device: RankDevice) -> None:
        self.spec = spec
        self.rank = rank
        self.group = group
        self.device = device
        self.library: CamLibrary = open_cam(find_toolkit())
        if not SoftCam.available(self.library):
            raise ConfigError(
                f"{self.library.path} is not the software device's; allowed: XMOE_DEVICE=soft, the "
                "synthetic model is made of its test kernels; next: set it"
            )
        self.soft = SoftCam(self.library, shared_expert=spec.shared_expert)
        self.vector_cores = self.soft.free_cores(rank)[0]  # nothing runs yet

    @contextlib.contextmanager
    def communicators(self, count: int) -> Iterator[tuple[str, ...]]:
        """COLLECTIVE: `count` communicators over all ranks, gone when all are through."""
        spec, made = self.spec, []
        with self.device.bind():
            for _ in range(count):
                info = make_root_info(self.device.runtime) if self.rank == 0 else None
                info = broadcast_bytes(self.group, info, "root info", spec.timeout_s)
                made.append(
                    HcclCommunicator(
                        self.device.runtime, spec.size, self.rank, info, spec.buffer_mb
                    )
                )
            try:
                yield tuple(comm.name() for comm in made)
                # Nobody destroys a window that another rank still uses.
                agree_success(self.group, "end of the run", None, spec.timeout_s)
            finally:
                for comm in made:
                    comm.close()

    def alive(self) -> None:
        """While idle: a peer that is gone will never send."""
        if lost_ranks(self.group):
            raise peer_lost(self.group, "pipeline, idle", "its process has ended")

    def stalled(self, text: str) -> None:
        """A wait takes long."""
        note(f"xmoe pipeline, rank {self.rank}: {text}")

    def lost(self, error: Exception) -> Exception:
        return as_peer_lost(error, self.group, "pipeline")

    def p2p_ops(self) -> CamP2POps:
        """The operators for this rank's tensors."""
        topology, device = self.spec.p2p_topology(self.rank), self.device.torch_device
        if device.type == "npu":
            return NpuCamP2POps(topology, device)
        return HostCamP2POps(self.library, topology)

    def async_ops(self) -> CamAsyncOps:
        """The operators for this rank's tensors."""
        topology, device = self.spec.async_topology(self.rank), self.device.torch_device
        if device.type == "npu":
            return NpuCamAsyncOps(topology, device, shared_expert=self.spec.shared_expert)
        return HostCamAsyncOps(self.library, topology, shared_expert=self.spec.shared_expert)

    def stop_buffer(self, ops: CamAsyncOps) -> StopBuffer | None:
        """Where the operators take one."""
        if not ops.topology.dynamic_quant or ops.shared_expert:
            return None
        return StopBuffer(self.library, device=self.device.torch_device)

    def ffn_loop(self, config: MultistreamConfig, groups: tuple[str, ...]) -> FfnLoop:
        """The FFN side of the connector."""
        s, cores = self.spec, config.compute_cores or SyntheticFfn.vector_cores
        adapter: camp2p.CamP2PFfnAdapter | CamAsyncFfnAdapter
        if s.connector == "camp2p":
            p2p = self.p2p_ops()
            most = s.tokens * p2p.topology.ratio
            adapter = camp2p.CamP2PFfnAdapter(p2p, groups, most, aborter=self.soft)
            model = SyntheticFfn(self.soft, 1, 0, s.compute_us, cores)
        else:
            self.soft.set_cores(config.recv_cores, config.send_cores)
            ops = self.async_ops()
            words = ops.topology.info_length(ops.shared_expert)
            adapter = CamAsyncFfnAdapter(
                ops,
                groups[0],
                gate=config.recv_gate,
                probe=self.soft,
                aborter=self.soft,
                core_limits=True,
                alive=self.alive,
                metadata_read=config.metadata_read,
                host_copy=lambda: PinnedCopy(self.library, words),
                stop=self.stop_buffer(ops),
            )
            first = (self.rank - s.attn) * s.experts
            model = SyntheticFfn(self.soft, s.ffn * s.experts, first, s.compute_us, cores)
        shape = s.shape(self.vector_cores)
        return FfnLoop(
            self.device, adapter, model, config, shape, translate=self.lost, on_stall=self.stalled
        )

    def attention_loop(self, config: MultistreamConfig, groups: tuple[str, ...]) -> AttentionLoop:
        """The Attention side of the connector."""
        s = self.spec
        adapter: camp2p.CamP2PAttentionAdapter | CamAsyncAttentionAdapter
        if s.connector == "camp2p":
            adapter = camp2p.CamP2PAttentionAdapter(self.p2p_ops(), groups, aborter=self.soft)
        else:
            adapter = CamAsyncAttentionAdapter(
                self.async_ops(),
                groups[0],
                stages=s.stages,
                probe=self.soft,
                aborter=self.soft,
                core_limits=True,
            )
        model = SyntheticAttention(
            self.soft,
            seed=self.rank,
            topk=s.topk,
            num_experts=s.ffn * s.experts,
            gate=s.connector == "camasync",
            routing=s.routing,
            microseconds=s.attention_us,
        )
        shape = s.shape(self.vector_cores)
        return AttentionLoop(
            self.device, adapter, model, config, shape, translate=self.lost, on_stall=self.stalled
        )


def own_tokens(spec: RunSpec, rank: int) -> int:
    """Tokens of one stage on an Attention rank; at least one row is sent in any case."""
    return max(1, spec.tokens - (rank % 2 if spec.uneven else 0))


def step_input(spec: RunSpec, rank: int, step: int, stage: int, rows: int) -> Tensor:
    """The same rows in every mode; rows beyond the rank's own tokens are padding, zero."""
    generator = torch.Generator().manual_seed(((rank * 1009) + step) * 101 + stage)
    made = torch.zeros(rows, spec.hidden, dtype=torch.bfloat16)
    tokens = own_tokens(spec, rank)
    made[:tokens] = torch.randn(tokens, spec.hidden, generator=generator).to(torch.bfloat16)
    return made


def vector_cores(context: RankContext) -> int:
    """How many this rank's device has. For a rank of its own: a process that has used a device
    cannot fork ranks that use it."""
    with HostDevice(load(find_toolkit()), index=context.rank) as device, device.bind():
        return SoftCam(open_cam(find_toolkit())).free_cores(context.rank)[0]


def rank_main(context: RankContext, spec: RunSpec, modes: tuple[StreamMode, ...]) -> list[RankRun]:
    """Everything one rank does. COLLECTIVE over all ranks."""
    group = context.init_process_group(spec.timeout_s)
    introduce(group, spec.timeout_s)
    runs = []
    with open_device(spec.device, context.rank) as device:
        rank = _Rank(spec, context.rank, group, device)
        for mode in modes:
            context.report("run", mode=mode.value)
            config = replace(spec.config, mode=mode)
            compare_digest(group, config.digest(spec.shape()), "multistream", spec.timeout_s)
            with rank.communicators(spec.stages if spec.connector == "camp2p" else 1) as groups:
                runs.append(_run_mode(context, rank, config, groups))
    return runs


def _run_mode(
    context: RankContext, rank: _Rank, config: MultistreamConfig, groups: tuple[str, ...]
) -> RankRun:
    spec, is_ffn = rank.spec, rank.spec.is_ffn(rank.rank)
    role = "ffn" if is_ffn else "attention"
    run = RankRun(role, config.mode.value, vector_cores=rank.vector_cores)
    if config.trace:
        rank.soft.trace(True)
        rank.soft.trace_tasks(True)
    waits = rank.soft.host_waits()
    if is_ffn:
        with rank.ffn_loop(config, groups) as ffn:
            for step in range(spec.steps):
                ffn.run_step(_plan(rank, step, 0))
                run.marks.append(len(ffn.executor.trace or ()))
                context.report("step", number=step)
            run.items = ffn.items
            _count_waits(run, waits, rank.soft.host_waits())
            _take_trace(run, rank.soft, ffn.executor, groups)
    else:
        with rank.attention_loop(config, groups) as attention:
            for step in range(spec.steps):
                plan = _plan(rank, step, own_tokens(spec, rank.rank))
                stages = range(spec.stages)
                batches = [
                    step_input(spec, rank.rank, step, s, plan.rows[s]).to(rank.device.torch_device)
                    for s in stages
                ]
                begin = time.perf_counter()
                outputs = attention.run_step(plan, batches)
                run.seconds.append(time.perf_counter() - begin)
                run.marks.append(len(attention.executor.trace or ()))
                tokens = own_tokens(spec, rank.rank)
                run.outputs.append([out[:tokens].cpu().float().numpy().copy() for out in outputs])
                context.report("step", number=step)
            _count_waits(run, waits, rank.soft.host_waits())
            _take_trace(run, rank.soft, attention.executor, groups)
        digest = hashlib.sha256()
        for stage_outputs in run.outputs:
            for output in stage_outputs:
                digest.update(output.tobytes())
        run.digest = digest.hexdigest()
    if config.trace:
        run.kernels = rank.soft.read_trace(1 << 16)
        run.tasks = rank.soft.read_tasks(1 << 18)
        rank.soft.trace(False)
        rank.soft.trace_tasks(False)
    for name in groups:
        for key, value in vars(rank.soft.counters(name)).items():
            run.counters[key] = run.counters.get(key, 0) + value
    return run


def _plan(rank: _Rank, step: int, tokens: int) -> StepPlan:
    """The step's plan, from the token counts of all ranks. COLLECTIVE."""
    spec = rank.spec
    counts = exchange_step(rank.group, tokens, step + 1, timeout_s=spec.timeout_s)
    # CAMP2P splits an FFN batch evenly, so all Attention ranks send as many rows as the longest.
    rows = max(counts) if spec.connector == "camp2p" else max(1, tokens)
    dispatches = spec.layers * spec.stages * (spec.attn // spec.tp_size)
    return StepPlan(spec.layers, (rows,) * spec.stages, dispatches)


def _take_trace(
    run: RankRun, soft: SoftCam, executor: StreamExecutor, groups: tuple[str, ...]
) -> None:
    names = {name: f"group{number}" for number, name in enumerate(groups)}  # differ from run to run
    handles = executor.stream_handles
    run.streams = {soft.stream_number(handle): track for track, handle in handles.items()}
    for e in executor.trace or ():
        channel = names.get(e.channel, e.channel)
        run.entries.append(replace(e, channel=channel))
        run.phases.append((e.op, e.phase, e.layer, e.stage, channel, e.sequence, e.stream))


def _count_waits(run: RankRun, before: HostWaits, after: HostWaits) -> None:
    """The host's waits during the loop, as the device counted them."""
    for kind in ("device", "stream", "event"):
        run.counters[f"host_{kind}_waits"] = getattr(after, kind) - getattr(before, kind)


def step_seconds(runs: list[RankRun]) -> float | None:
    """Median over steps of the slowest Attention rank; the first step warms up."""
    steps = [run.seconds for run in runs if run.role == "attention" and run.seconds]
    if not steps:
        return None
    slowest = [max(times) for times in zip(*steps, strict=True)]
    return float(statistics.median(slowest[1:] or slowest))
