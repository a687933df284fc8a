# SPDX-License-Identifier: Apache-2.0
"""One rank of a probe: a device, a communicator, streams, and both operator sets.

What only the software device has (`soft`) is used where it is there, to be exact; nothing that runs
on an NPU needs it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xmoe.comm.agree import agree_success, broadcast_bytes, introduce
from xmoe.comm.hccl import HcclCommunicator, make_root_info
from xmoe.errors import AclError
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import Event, Stream
from xmoe.kernels.ops.cam.binding import open_cam
from xmoe.kernels.ops.cam.host import HostCamAsyncOps, HostCamP2POps
from xmoe.kernels.ops.cam.npu import NpuCamAsyncOps, NpuCamP2POps
from xmoe.kernels.ops.cam.protocols import CamAsyncOps, CamP2POps
from xmoe.kernels.ops.cam.soft import SoftCam
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.kernels.ops.torch_stream import on_stream
from xmoe.pipeline.deployment import RankDevice, open_device
from xmoe.ranks import RankContext

HIDDEN, TOPK, EXPERTS, ROWS = 16, 2, 4, 6
DEADLINE_S = 30.0
BUFFER_MB = 4
_START_S = 0.2

# What a kernel that will not end may still use; it ends with the process.
_HUNG: list[object] = []


class ProbeRank:
    """Two ranks: in CAMP2P rank 0 is FFN, in CAMAsync rank 1.

    `hung`: a kernel will not end, so nothing can be closed; the process has to end.
    """

    def __init__(self, context: RankContext, group: ProcessGroup, device: RankDevice) -> None:
        self.context = context
        self.rank = context.rank
        self.device = device
        self._group = group
        self.library = open_cam(find_toolkit())
        self.soft = SoftCam(self.library) if SoftCam.available(self.library) else None
        self.cores = self.free_cores()  # nothing runs yet
        self.where = device.torch_device
        self.p2p = self.p2p_ops()
        self.asynchronous = self.async_ops()
        self.name = ""
        self.hung = False
        self.kept: list[Any] = []
        self.streams: list[Stream] = []
        self.events: list[Event] = []

    def p2p_topology(self, aiv_num: int = 8) -> CamP2PTopology:
        return CamP2PTopology(1, self.context.size - 1, self.rank, HIDDEN, TOPK, aiv_num)

    def async_topology(self, dynamic_quant: bool = False) -> CamAsyncTopology:
        return CamAsyncTopology(
            self.context.size - 1, 1, self.rank, HIDDEN, TOPK, EXPERTS, max_seq_len=32,
            dynamic_quant=dynamic_quant,
        )  # fmt: skip

    def p2p_ops(self, aiv_num: int = 8) -> CamP2POps:
        """For this rank's tensors."""
        topology = self.p2p_topology(aiv_num)
        if self.where.type == "npu":
            return NpuCamP2POps(topology, self.where)
        return HostCamP2POps(self.library, topology)

    def async_ops(self, dynamic_quant: bool = False) -> CamAsyncOps:
        """For this rank's tensors."""
        topology = self.async_topology(dynamic_quant)
        if self.where.type == "npu":
            return NpuCamAsyncOps(topology, self.where)
        return HostCamAsyncOps(self.library, topology)

    def free_cores(self) -> int:
        """Vector cores that nothing holds; 0 where that cannot be known."""
        return 0 if self.soft is None else self.soft.free_cores(self.rank)[0]

    def let_start(self, held: int | None = None) -> None:
        """Until a kernel has taken `held` cores (None: all), or, where that cannot be known, for a
        moment."""
        if self.soft is None:
            time.sleep(_START_S)
        else:
            left = 0 if held is None else self.cores - held
            self.wait_until(lambda: self.free_cores() == left)

    def vector_kernel(self, stream: Stream) -> None:
        """A short one on few vector cores."""
        if self.soft is not None:
            self.soft.timed_kernel(stream=stream.handle(), microseconds=200, vector_cores=8)
            return
        rows = torch.zeros(1024, device=self.where)
        self.here()
        self.kept.append(rows)
        with on_stream(self.where, stream.handle()):
            rows.add_(1)

    def here(self) -> None:
        """Tensors made just now are ready on every stream."""
        if self.where.type == "npu":
            self.device.current_stream().synchronize(DEADLINE_S)

    def event(self, stream: Stream) -> Event:
        """Recorded on `stream` now."""
        made = self.device.create_event()
        made.record(stream)
        self.events.append(made)
        return made

    def stream(self) -> Stream:
        made = self.device.create_stream()
        self.streams.append(made)
        return made

    def batch(self, value: float, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one value, experts and weights; kept."""
        x = torch.full((ROWS, HIDDEN), value, dtype=torch.bfloat16)
        ids = (torch.arange(ROWS * TOPK, dtype=torch.int32).reshape(ROWS, TOPK) + first) % EXPERTS
        weights = torch.full((ROWS, TOPK), 0.5)
        made = (x.to(self.where), ids.contiguous().to(self.where), weights.to(self.where))
        self.here()
        self.kept.append(made)
        return made

    def meet(self, what: str, seconds: float = DEADLINE_S) -> None:
        """All ranks are here. COLLECTIVE."""
        agree_success(self._group, what, None, seconds)

    def code(self, stream: Stream, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """0, or the device error with which the stream ended, and its text."""
        try:
            stream.synchronize(timeout_s)
        except AclError as error:
            return error.code, error.detail
        return 0, ""

    def wait_until(self, ready: Any, limit_s: float = DEADLINE_S) -> float:
        """Milliseconds until `ready()`; raises TimeoutError."""
        begin = time.perf_counter()
        while not ready():
            if time.perf_counter() - begin > limit_s:
                raise TimeoutError(f"rank {self.rank}: nothing happened in {limit_s:g} s")
            time.sleep(0.0005)
        return (time.perf_counter() - begin) * 1e3


@contextlib.contextmanager
def probe_rank(context: RankContext, tensors: str) -> Iterator[ProbeRank]:
    """COLLECTIVE: device and communicator for one probe, closed at its end on all ranks. `tensors`:
    host, or npu for torch_npu's."""
    group = context.init_process_group(DEADLINE_S)
    introduce(group, DEADLINE_S)
    with contextlib.ExitStack() as stack:
        device: RankDevice = open_device(tensors, context.rank)
        stack.callback(device.close)
        stack.enter_context(device.bind())
        one = ProbeRank(context, group, device)
        info = make_root_info(device.runtime) if context.rank == 0 else None
        info = broadcast_bytes(group, info, "root info", DEADLINE_S)
        comm = HcclCommunicator(device.runtime, context.size, context.rank, info, BUFFER_MB)
        one.name = comm.name()
        try:
            yield one
            one.meet("end of the probe")
        finally:
            if one.hung:
                _HUNG.append((one, comm, stack.pop_all()))
            else:
                for event in one.events:
                    event.close()
                for stream in one.streams:
                    stream.close()
                comm.close()
