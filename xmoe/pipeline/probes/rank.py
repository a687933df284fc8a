# SPDX-License-Identifier: Apache-2.0
"""One rank of a probe: a device, a communicator, streams, and both operator sets."""

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
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice, Stream
from xmoe.kernels.ops.cam.binding import open_cam
from xmoe.kernels.ops.cam.host import HostCamAsyncOps, HostCamP2POps
from xmoe.kernels.ops.cam.soft import SoftCam
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.ranks import RankContext

HIDDEN, TOPK, EXPERTS, ROWS = 16, 2, 4, 6
DEADLINE_S = 30.0
BUFFER_MB = 4


class ProbeRank:
    """Two ranks: in CAMP2P rank 0 is FFN, in CAMAsync rank 1."""

    def __init__(self, context: RankContext, group: ProcessGroup, device: HostDevice) -> None:
        self.context = context
        self.rank = context.rank
        self.device = device
        self._group = group
        self.library = open_cam(find_toolkit())
        self.soft = SoftCam(self.library)
        self.cores = self.soft.free_cores(self.rank)[0]  # nothing runs yet
        self.p2p = HostCamP2POps(self.library, self.p2p_topology())
        self.asynchronous = HostCamAsyncOps(self.library, self.async_topology())
        self.name = ""
        self.kept: list[Any] = []
        self.streams: list[Stream] = []

    def p2p_topology(self) -> CamP2PTopology:
        return CamP2PTopology(1, self.context.size - 1, self.rank, HIDDEN, topk=TOPK)

    def async_topology(self, dynamic_quant: bool = False) -> CamAsyncTopology:
        return CamAsyncTopology(
            self.context.size - 1, 1, self.rank, HIDDEN, TOPK, EXPERTS, max_seq_len=32,
            dynamic_quant=dynamic_quant,
        )  # fmt: skip

    def stream(self) -> Stream:
        made = self.device.create_stream()
        self.streams.append(made)
        return made

    def batch(self, value: float, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one value, experts and weights; kept."""
        x = torch.full((ROWS, HIDDEN), value, dtype=torch.bfloat16)
        ids = (torch.arange(ROWS * TOPK, dtype=torch.int32).reshape(ROWS, TOPK) + first) % EXPERTS
        made = (x, ids.contiguous(), torch.full((ROWS, TOPK), 0.5))
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

    def all_cores_taken(self) -> bool:
        return self.soft.free_cores(self.rank)[0] == 0


@contextlib.contextmanager
def probe_rank(context: RankContext) -> Iterator[ProbeRank]:
    """COLLECTIVE: device and communicator for one probe, closed at its end on all ranks."""
    group = context.init_process_group(DEADLINE_S)
    introduce(group, DEADLINE_S)
    with HostDevice(load(find_toolkit()), index=context.rank) as device, device.bind():
        one = ProbeRank(context, group, device)
        info = make_root_info(device.runtime) if context.rank == 0 else None
        info = broadcast_bytes(group, info, "root info", DEADLINE_S)
        comm = HcclCommunicator(device.runtime, context.size, context.rank, info, BUFFER_MB)
        one.name = comm.name()
        try:
            yield one
            one.meet("end of the probe")
        finally:
            for stream in one.streams:
                stream.close()
            comm.close()
