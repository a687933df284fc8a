# SPDX-License-Identifier: Apache-2.0
"""The CAM operators as torch operators, under the names that the connectors' plugins give them.

    afd_ascend::a2e, e2a                                  afd-plugin csrc/npu/torch_extension
    afd_ascend::afd_async_{dispatch,combine}_{send,recv}  afd-plugin torch_binding_cam_async.cpp
    umdk_cam_op_lib::async_...                            the closed wheel; schemas as it reports

(all read 2026-10). Where a vendor's library has registered an operator it is used as it is; its
schema must be ours. Where it has not, `register` does, for npu tensors over the C ABI and for meta
tensors: on the current stream, with the host's task queue emptied first, inference only. Load a
vendor's extension before the first use of these: torch lets nobody register a name twice.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from xmoe.errors import LibraryError, SymbolMissing
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.npu_device import NpuDevice
from xmoe.kernels.ops.cam.binding import open_cam
from xmoe.kernels.ops.cam.host import HostCamAsyncOps, HostCamP2POps
from xmoe.kernels.ops.cam.protocols import A2EOutput, DispatchItem
from xmoe.kernels.ops.cam.topology import (
    CamAsyncTopology,
    CamP2PTopology,
    receive_capacity,
    refuse,
    require,
)

_NEW, _OLD = "afd_ascend", "umdk_cam_op_lib"
_RANKS = "int {moe}, int {attn}, int {experts}, int {rank}, int world_size"
_ROUTED = {"moe": "moe_rank_num", "attn": "attn_rank_num", "experts": "route_expert_num_per_moe"}
_ROUTED_FFN = _RANKS.format(**_ROUTED, rank="moe_rank_id")
_ROUTED_ATTENTION = _RANKS.format(**_ROUTED, rank="attn_rank_id")
_SHARED = _RANKS.format(
    moe="expert_rank_size", attn="attention_rank_size", experts="expert_per_rank", rank="rank"
)
_P2P = (
    "int batch_size=0, int hidden_size=0, int topk=0, int expert_rank_size=0, "
    "int attention_rank_size=0, int rank=0, str group_ep='', int aiv_num=0"
)

SCHEMAS: Mapping[str, str] = {
    f"{_NEW}::a2e": (
        f"(Tensor x, Tensor? expert_ids=None, Tensor? scales=None, {_P2P}, int compute_gate=0)"
        " -> Tensor[]"
    ),
    f"{_NEW}::e2a": f"(Tensor expand_x, Tensor atten_batch_size, {_P2P}) -> Tensor",
    f"{_NEW}::afd_async_dispatch_send": (
        "(Tensor x, Tensor expert_ids, Tensor comm_args, int comm_id, int max_seq_len, "
        f"int batch_size, int hidden_size, int top_k, {_ROUTED_ATTENTION}, int layer_index, "
        "int tp_size, int dynamic_quant, str group_name) -> Tensor"
    ),
    f"{_NEW}::afd_async_dispatch_recv": (
        "(Tensor x, Tensor comm_args, int comm_id, int max_seq_len, int hidden_size, int top_k, "
        f"{_ROUTED_FFN}, int tp_size, int dynamic_quant, str group_name) -> Tensor[]"
    ),
    f"{_NEW}::afd_async_combine_send": (
        "(Tensor expand_x, Tensor comm_args, Tensor batch_info, int comm_id, int max_seq_len, "
        f"int hidden_size, int top_k, {_ROUTED_FFN}, int tp_size, str group_name) -> Tensor"
    ),
    f"{_NEW}::afd_async_combine_recv": (
        "(Tensor expand_x, Tensor expert_ids, Tensor expert_scales, Tensor comm_args, int comm_id, "
        f"int batch_size, int hidden_size, int top_k, {_ROUTED_ATTENTION}, str group_name)"
        " -> Tensor"
    ),
    f"{_OLD}::async_dispatch_send": (
        "(Tensor x, Tensor expert_ids, Tensor comm_args, int comm_id, int max_seq_len, "
        f"int batch_size, int hidden_size, int top_k, {_SHARED}, int layer_index, int tp_size, "
        "int dynamic_quant, str group_name) -> Tensor"
    ),
    f"{_OLD}::async_dispatch_recv": (
        "(Tensor x, Tensor comm_args, int comm_id, int batch_size, int hidden_size, int top_k, "
        f"{_SHARED}, int tp_size, int dynamic_quant, str group_name) -> Tensor[]"
    ),
    f"{_OLD}::async_combine_send": (
        "(Tensor expand_x, Tensor expand_x_shared, Tensor comm_args, Tensor expert_token_nums, "
        f"int comm_id, int batch_size, int hidden_size, int top_k, {_SHARED}, int tp_size, "
        "str group_name) -> Tensor"
    ),
    f"{_OLD}::async_combine_recv": (
        "(Tensor expand_x, Tensor expert_ids, Tensor expert_scales, Tensor comm_args, int comm_id, "
        f"int batch_size, int hidden_size, int top_k, {_SHARED}, str group_name) -> Tensor"
    ),
}


_SYMBOLS: Mapping[str, str] = {
    f"{_NEW}::a2e": "aclnnA2e",
    f"{_NEW}::e2a": "aclnnE2a",
    **{
        f"{prefix}{verb.lower()}_{end.lower()}": f"{symbol}{verb}{end}"
        for prefix, symbol in (
            (f"{_NEW}::afd_async_", "aclnnAfdAsync"),
            (f"{_OLD}::async_", "aclnnXsdUmdkAsync"),
        )
        for verb in ("Dispatch", "Combine")
        for end in ("Send", "Recv")
    },
}
"""The C function of each; of the closed wheel's none is known, the software device has its own."""


# ---- over the C ABI ---------------------------------------------------------------------------


@functools.cache
def _device(index: int) -> NpuDevice:
    return NpuDevice(index)


def _stream(tensor: Tensor) -> int:
    """The current stream's handle, with torch_npu's task queue emptied. For one launch."""
    return _device(tensor.device.index).current_stream().handle()


def _library(symbol: str) -> Any:
    return open_cam(find_toolkit(), symbol)


@functools.lru_cache(maxsize=64)
def _p2p(device: torch.device, dtype: torch.dtype, *place: int) -> HostCamP2POps:
    library = _library("aclnnA2eGetWorkspaceSize")
    return HostCamP2POps(library, CamP2PTopology(*place), dtype, device)


@functools.lru_cache(maxsize=64)
def _async(
    device: torch.device, dtype: torch.dtype, shared: bool, quant: int, *place: int
) -> HostCamAsyncOps:
    require("dynamic_quant", quant, quant in (0, 1), "0, 1", "correct it")
    name = "aclnnXsdUmdkAsync" if shared else "aclnnAfdAsync"
    library = _library(f"{name}DispatchSendGetWorkspaceSize")
    attn, ffn, rank, hidden, topk, experts, seq, tp = place
    topology = CamAsyncTopology(
        attn, ffn, rank, hidden, topk, experts, seq, tp, dynamic_quant=bool(quant)
    )
    return HostCamAsyncOps(library, topology, dtype, device, shared_expert=shared)


def _rows(x: Tensor, batch: int, ffn: int, rank: int) -> int:
    return batch if rank < ffn else x.shape[0]


def _a2e(x: Tensor, ids: Any = None, scales: Any = None, batch: int = 0, hidden: int = 0,
         topk: int = 0, ffn: int = 0, attn: int = 0, rank: int = 0, group: str = "",
         aiv: int = 0, gate: int = 0) -> list[Tensor]:  # fmt: skip
    require("compute_gate", gate, gate == 0, "0", "the gate is on the FFN side here")
    rows = _rows(x, batch, ffn, rank)
    out = A2EOutput(*_a2e_outputs(x, ids, scales, batch, hidden, topk, ffn, attn, rank))
    ops = _p2p(x.device, torch.bfloat16, ffn, attn, rank, hidden, topk, aiv)
    ops.a2e(group, x if rank >= ffn else None, rows, stream=_stream(x), out=out)
    return list(vars(out).values())


def _a2e_outputs(x: Tensor, ids: Any = None, scales: Any = None, batch: int = 0, hidden: int = 0,
                 topk: int = 0, ffn: int = 1, attn: int = 0, rank: int = 0,
                 *_: Any) -> list[Tensor]:  # fmt: skip
    """Uninitialised, of the shapes and types that the plugin's operator has."""
    rows = _rows(x, batch, ffn, rank)
    receives = rank < ffn
    pairs = (rows, topk) if receives else (1, 1)
    return [
        x.new_empty((rows, hidden) if receives else (1, 1), dtype=torch.bfloat16),
        x.new_empty(pairs, dtype=torch.int32),
        x.new_empty(pairs, dtype=torch.float32),
        x.new_empty(-(-attn // ffn), dtype=torch.int32),
        x.new_empty(rows if receives else 1, dtype=torch.bool),
    ]


def _e2a(x: Tensor, state: Tensor, batch: int = 0, hidden: int = 0, topk: int = 0, ffn: int = 0,
         attn: int = 0, rank: int = 0, group: str = "", aiv: int = 0) -> Tensor:  # fmt: skip
    ops = _p2p(x.device, torch.bfloat16, ffn, attn, rank, hidden, topk, aiv)
    result = ops.e2a(group, x, state, stream=_stream(x))
    # An FFN rank's is one dummy for all calls; an operator's results must not alias.
    return torch.empty_like(result) if rank < ffn else result


def _e2a_output(x: Tensor, state: Tensor, batch: int = 0, hidden: int = 0, topk: int = 0,
                ffn: int = 0, attn: int = 0, rank: int = 0, *_: Any) -> Tensor:  # fmt: skip
    shape = (1, 1) if rank < ffn else (x.shape[0], hidden)
    return x.new_empty(shape, dtype=torch.bfloat16)


def _dispatch_send(shared: bool, x: Tensor, ids: Tensor, comm: Tensor, comm_id: int, seq: int,
                   batch: int, hidden: int, topk: int, ffn: int, attn: int, experts: int,
                   rank: int, world: int, layer: int, tp: int, quant: int,
                   group: str) -> Tensor:  # fmt: skip
    _check_world(world, ffn, attn)
    require("batch_size", batch, batch == x.shape[0], "the rows of x", "pass x.size(0)")
    place = (attn, ffn, rank, hidden, topk, experts, seq, tp)
    ops = _async(x.device, x.dtype, shared, quant, *place)
    ops.dispatch_send(group, x, ids, layer, stream=_stream(x))
    return _sent(x)


def _sent(x: Tensor, *_: Any) -> Tensor:
    """A send's result says nothing, least of all that a peer has taken anything."""
    return x.new_empty(1, dtype=torch.int8)


def _dispatch_recv(shared: bool, x: Tensor, comm: Tensor, comm_id: int, seq: int, hidden: int,
                   topk: int, ffn: int, attn: int, experts: int, rank: int, world: int, tp: int,
                   quant: int, group: str) -> list[Tensor]:  # fmt: skip
    _check_world(world, ffn, attn)
    made = _recv_outputs(shared, x, comm, comm_id, seq, hidden, topk, ffn, attn, experts, rank,
                         world, tp, quant, group)  # fmt: skip
    ops = _async(x.device, x.dtype, shared, quant, attn, ffn, rank, hidden, topk, experts, seq, tp)
    stop = None if x.numel() == 1 else x
    ops.dispatch_recv(group, stream=_stream(x), out=item_of(made), stop=stop)
    return made


def _recv_outputs(shared: bool, x: Tensor, comm: Tensor, comm_id: int, seq: int, hidden: int,
                  topk: int, ffn: int, attn: int, experts: int, rank: int, world: int, tp: int,
                  quant: int, group: str) -> list[Tensor]:  # fmt: skip
    capacity = receive_capacity()
    rows = x.new_empty((capacity, hidden), dtype=torch.int8 if quant else x.dtype)
    scales = x.new_empty(capacity if quant else 1, dtype=torch.float32)
    info = x.new_empty(5 + tp + (experts + shared) * tp, dtype=torch.int64)
    counts = x.new_empty(experts, dtype=torch.int64)
    if not shared:
        return [rows, scales, info, counts]
    more = (torch.empty_like(rows), torch.empty_like(scales), counts.new_empty(1))
    return [rows, more[0], scales, more[1], info, counts, more[2]]


def item_of(made: list[Tensor]) -> DispatchItem:
    """The outputs of a dispatch_recv by name; the older set has seven."""
    if len(made) == 4:
        return DispatchItem(*made)
    rows, shared_rows, scales, shared_scales, info, counts, shared_count = made
    return DispatchItem(rows, scales, info, counts, shared_rows, shared_scales, shared_count)


def _combine_send(x: Tensor, comm: Tensor, info: Tensor, comm_id: int, seq: int, hidden: int,
                  topk: int, ffn: int, attn: int, experts: int, rank: int, world: int, tp: int,
                  group: str, shared: Tensor | None = None) -> Tensor:  # fmt: skip
    _check_world(world, ffn, attn)
    place = (attn, ffn, rank, hidden, topk, experts, seq, tp)
    ops = _async(x.device, x.dtype, shared is not None, 0, *place)
    ops.combine_send(group, x, info, stream=_stream(x), shared_out=shared)
    return _sent(x)


def _combine_send_shared(x: Tensor, shared: Tensor, *rest: Any) -> Tensor:
    send: Callable[..., Tensor] = _combine_send
    return send(x, *rest, shared=shared)


def _combine_recv(shared: bool, x: Tensor, ids: Tensor, weights: Tensor, comm: Tensor,
                  comm_id: int, batch: int, hidden: int, topk: int, ffn: int, attn: int,
                  experts: int, rank: int, world: int, group: str) -> Tensor:  # fmt: skip
    _check_world(world, ffn, attn)
    require("batch_size", batch, batch == ids.shape[0], "the rows of expert_ids", "correct it")
    # The window of Attention does not depend on max_seq_len or tp_size: one set for all batches.
    ops = _async(x.device, x.dtype, shared, 0, attn, ffn, rank, hidden, topk, experts, 1, 1)
    return ops.combine_recv(group, ids, weights, stream=_stream(x))


def _combined(shared: bool, x: Tensor, ids: Tensor, weights: Tensor, comm: Tensor, comm_id: int,
              batch: int, hidden: int, *_: Any) -> Tensor:  # fmt: skip
    return x.new_empty((batch, hidden))


def _check_world(world: int, ffn: int, attn: int) -> None:
    if world != ffn + attn:
        refuse("world_size", world, f"{ffn} FFN and {attn} Attention ranks", "correct it")


_Kernels = tuple[Callable[..., Any], Callable[..., Any]]


def _kernels() -> dict[str, _Kernels]:
    """By operator: for npu tensors, and for meta tensors."""
    found: dict[str, _Kernels] = {
        f"{_NEW}::a2e": (_a2e, _a2e_outputs),
        f"{_NEW}::e2a": (_e2a, _e2a_output),
        f"{_NEW}::afd_async_combine_send": (_combine_send, _sent),
        f"{_OLD}::async_combine_send": (_combine_send_shared, _sent),
    }
    for name, real, meta in (
        ("dispatch_send", _dispatch_send, lambda shared, x, *rest: _sent(x)),
        ("dispatch_recv", _dispatch_recv, _recv_outputs),
        ("combine_recv", _combine_recv, _combined),
    ):
        for prefix, shared in ((f"{_NEW}::afd_async_", False), (f"{_OLD}::async_", True)):
            both = (functools.partial(real, shared), functools.partial(meta, shared))
            found[prefix + name] = both
    return found


# ---- registration -----------------------------------------------------------------------------

_lock = threading.Lock()
_ours: dict[str, torch.library.Library] = {}


def _renew_lock_in_child() -> None:
    # Another thread may have held it at fork; in the child nobody would release it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


def registered(name: str) -> bool:
    """Whether somebody has an implementation of `name` for npu tensors, this module included."""
    try:
        return any(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            for key in ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        )
    except RuntimeError:  # no such operator
        return False


def operator(name: str) -> Callable[..., Any]:
    """The torch operator `name`, registered by its vendor or else here. Local.

    Raises:
        LibraryError: the vendor's operator takes other arguments than these.
    """
    namespace, short = name.split("::")
    with _lock:
        if name not in _ours:
            if registered(name):
                _require_schema(name)
            else:
                _register(name)
    packet = getattr(getattr(torch.ops, namespace), short)
    found: Callable[..., Any] = packet.default
    return found


def register() -> tuple[str, ...]:
    """Register all operators that no vendor has and the operator library can serve; returns those.
    Local; twice is harmless."""
    for name in SCHEMAS:
        with contextlib.suppress(SymbolMissing):
            operator(name)
    return tuple(name for name in SCHEMAS if name in _ours)


def _register(name: str) -> None:
    namespace, short = name.split("::")
    # A name that this library cannot serve stays free for the vendor's extension.
    _library(_SYMBOLS[name] + "GetWorkspaceSize")
    library = torch.library.Library(namespace, "FRAGMENT")
    real, meta = _kernels()[name]
    library.define(short + SCHEMAS[name])
    library.impl(short, real, "PrivateUse1")
    library.impl(short, meta, "Meta")
    _ours[name] = library  # what it registered goes with it


def _require_schema(name: str) -> None:
    wanted = torch._C.parse_schema(name + SCHEMAS[name])
    found = torch._C._get_schema(name, "")
    types = [[str(arg.type) for arg in schema.arguments] for schema in (wanted, found)]
    if types[0] != types[1]:
        raise LibraryError(
            f"{name} is registered as {found}; allowed: the arguments {wanted}; next: use a "
            "plugin of the version that this was written for, or report its schema"
        )
