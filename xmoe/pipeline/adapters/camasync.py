# SPDX-License-Identifier: Apache-2.0
"""CAMAsync: dispatch and combine in separate halves, items in the order in which the device finds
them.

What an FFN rank receives next, and for which layer, is known only when it is there; so an item has
a metadata phase. What protects the windows is a credit: an Attention rank has one unanswered
dispatch in a group, whatever its stages. No operator enforces it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xmoe.kernels.ops.cam.protocols import CamAsyncOps, ReadinessProbe
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, receive_capacity
from xmoe.multistream import Capabilities, MetadataRead
from xmoe.pipeline.adapters.base import ConnectorAdapter, GroupAborter


@dataclass(slots=True)
class AFDAsyncTransferState:
    """What travels from a receive to its send (FFN), or from a dispatch to its combine (Attention).

    Tensors are views; the slot owns their bases. `token_nums_rankid_layeridx` is batch_info,
    `group_list` the rows of each expert.
    """

    batch_size: int = 1
    hidden_size: int = 1
    topk: int = 1
    layer_idx: int = 0
    token_nums_rankid_layeridx: Tensor | None = None
    group_list: Tensor | None = None
    dynamic_scales: Tensor | None = None
    expand_x_shared: Tensor | None = None
    dynamic_scales_shared: Tensor | None = None


def device_metadata_problem(
    topology: CamAsyncTopology, capacity: int, shared_expert: bool = False
) -> str:
    """Why the host may not leave an item's metadata unread; empty when it may.

    A dispatch that does not fit one receive comes in several, and only the metadata says which is
    the last one.
    """
    t = topology
    rows = t.max_seq_len * (min(t.topk, t.experts_per_rank) + shared_expert)
    if rows <= capacity:
        return ""
    return (
        f"device: up to {rows} rows of a dispatch do not fit a receive of {capacity}, and the host "
        "must see which part is the last"
    )


def slot_bytes(
    topology: CamAsyncTopology,
    *,
    capacity: int | None = None,
    shared_expert: bool = False,
    itemsize: int = 2,
) -> int:
    """Bytes of device memory that an FFN slot may hold: what a receive fills, rows for the model's
    results, and one row for items without any. `itemsize` is the model type's."""
    t, quant = topology, topology.dynamic_quant
    rows = receive_capacity() if capacity is None else capacity
    received = rows * t.hidden * (1 if quant else itemsize) + 4 * (rows if quant else 1)
    counts = 8 * (t.info_length(shared_expert) + t.experts_per_rank + shared_expert)
    return (
        (received + rows * t.hidden * itemsize) * (1 + shared_expert)
        + counts
        + (t.hidden * itemsize)
    )


def capabilities(
    topology: CamAsyncTopology,
    *,
    ready_probe: bool,
    core_limits: bool,
    peer_abort: bool,
    capacity: int | None = None,
    shared_expert: bool = False,
    host_copy: bool = True,
) -> Capabilities:
    """From the sources of the routed-only operators; of the closed older set it is assumed."""
    reads = {MetadataRead.BLOCKING: "", MetadataRead.PINNED_ASYNC: ""}
    if not host_copy:
        reads[MetadataRead.PINNED_ASYNC] = "pinned_async: no pinned memory was given"
    rows = receive_capacity() if capacity is None else capacity
    reads[MetadataRead.DEVICE] = device_metadata_problem(topology, rows, shared_expert)
    return Capabilities(
        connector="CAMAsync",
        roles=frozenset({"ffn", "attention"}),
        honours_current_stream=True,
        recv_send_same_channel_exclusive=False,
        recv_blocks_cores=True,
        host_metadata=True,
        metadata_reads=frozenset(way for way, problem in reads.items() if not problem),
        metadata_problems=tuple(problem for problem in reads.values() if problem),
        graph_safe=False,
        max_outstanding_per_channel=1,
        ready_probe=ready_probe,
        core_limits=core_limits,
        peer_abort=peer_abort,
    )


class CamAsyncAdapter(ConnectorAdapter):
    """What both roles share.

    `probe` and `core_limits` say what the operator library has: both roles check one configuration.
    `capacity`: rows of a receive output, the operators' own; None asks the operators.
    """

    def __init__(
        self,
        ops: CamAsyncOps,
        group: str,
        *,
        is_ffn: bool,
        aborter: GroupAborter | None,
        probe: ReadinessProbe | None,
        core_limits: bool,
        capacity: int | None,
        host_copy: bool = True,
    ) -> None:
        super().__init__(ops.topology, (group,), is_ffn=is_ffn, first="Attention", aborter=aborter)
        self._ops = ops
        self._topology = ops.topology
        self._group = group
        self._probe = probe
        self._capacity = capacity
        self._capabilities = capabilities(
            ops.topology,
            ready_probe=probe is not None,
            core_limits=core_limits,
            peer_abort=aborter is not None,
            capacity=capacity,
            shared_expert=ops.shared_expert,
            host_copy=host_copy,
        )

    @property
    def capabilities(self) -> Capabilities:
        """See Adapter."""
        return self._capabilities
