# SPDX-License-Identifier: Apache-2.0
"""The connectors' operators as torch operators on npu tensors, and the pipeline through them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.npu import child, join_group
from xmoe.multistream import MetadataRead, MultistreamConfig, RecvGate, StreamMode
from xmoe.pipeline.deployment import RankRun, RunSpec
from xmoe.pipeline.report import report
from xmoe.pipeline.run import check, run
from xmoe.ranks import RankContext, run_ranks

BOTH = (StreamMode.SERIAL, StreamMode.OVERLAP)
NAMES = {
    "afd_ascend": (
        "a2e", "e2a", "afd_async_dispatch_send", "afd_async_dispatch_recv",
        "afd_async_combine_send", "afd_async_combine_recv",
    ),
    "umdk_cam_op_lib": (
        "async_dispatch_send", "async_dispatch_recv", "async_combine_send", "async_combine_recv",
    ),
}  # fmt: skip
ROWS, HIDDEN, ROUNDS = 6, 32, 200


def spec(connector: str, **kw: Any) -> RunSpec:
    p2p = connector == "camp2p"
    config = MultistreamConfig(
        mode=StreamMode.OVERLAP,
        roles=kw.pop("roles", frozenset({"ffn"})),
        max_inflight=3,
        recv_gate=RecvGate.NONE if p2p else RecvGate.READY_PROBE,
        memory_budget_bytes=None if p2p else 1 << 30,
        metadata_read=kw.pop("read", MetadataRead.BLOCKING),
        wait_timeout_s=60.0,
        trace=True,
    )
    given = {"attn": 2, "ffn": 1, "layers": 3, "stages": 2 if p2p else 1, "steps": 2, "tokens": 9}
    given |= {"hidden": HIDDEN, "compute_us": 50, "attention_us": 50, "timeout_s": 60.0}
    return RunSpec(connector=connector, config=config, **{**given, **kw})


CASES = {
    "camp2p": spec("camp2p"),
    "camp2p, both roles": spec("camp2p", ffn=2, attn=3, roles=frozenset({"ffn", "attention"})),
    "camasync": spec("camasync", routing="skewed"),
    "camasync, quantised, one rank without rows": spec(
        "camasync", ffn=2, routing="low", dynamic_quant=True, topk=3, read=MetadataRead.PINNED_ASYNC
    ),
    "camasync, device metadata": spec("camasync", read=MetadataRead.DEVICE),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_pipeline_on_npu_tensors_gives_the_host_adaptors_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_SIZE_FACTOR", "0.001")
    host, npu = CASES[name], replace(CASES[name], device="npu")
    check(npu, BOTH)
    wanted, found = run(host, BOTH), run(npu, BOTH)
    assert report(npu, BOTH, found)["equal"] is True
    assert report(npu, BOTH, found)["violations"] == 0
    bits = [[one.digest for one in runs if one.role == "attention"] for runs in wanted]
    assert [[one.digest for one in runs if one.role == "attention"] for runs in found] == bits
    for runs in found:
        for one in runs:
            assert one.counters["host_device_waits"] == 0
            _check_streams(one)


def _check_streams(one: RankRun) -> None:
    """Every operator ran on the stream of its phase, not on torch_npu's default one."""
    roles = {"DispatchRecv": "recv", "CombineSend": "send", "A2e": "recv", "E2a": "send"}
    if one.mode != "overlap" or one.role != "ffn":
        return
    seen = 0
    for kernel in one.kernels:
        for op, role in roles.items():
            if op in kernel.op:
                assert one.streams.get(kernel.stream) == role, kernel
                seen += 1
    assert seen >= 2 * one.items


def test_names_and_shapes_are_the_plugins() -> None:
    """Meta kernels give the shapes that the real ones give; nothing but names is asked of a group
    that does not exist."""

    def body(device: torch.device) -> None:
        from xmoe.errors import AclError, ConfigError
        from xmoe.kernels.ops.cam.torch_ops import SCHEMAS, register

        assert register() == tuple(SCHEMAS) == register()
        for namespace, names in NAMES.items():
            for name in names:
                packet = getattr(getattr(torch.ops, namespace), name)
                assert f"{namespace}::{name}" in SCHEMAS and packet.default is not None
        ops = torch.ops.afd_ascend
        for place in ("meta", device):
            x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device=place)
            nothing = torch.zeros(0, dtype=torch.bfloat16, device=place)
            calls = {
                "send": lambda x=x: ops.a2e(
                    x, None, None, ROWS, HIDDEN, 2, 1, 2, 1, "nobody", 8, 0
                ),
                "receive": lambda n=nothing: ops.a2e(
                    n, None, None, ROWS, HIDDEN, 2, 1, 2, 0, "nobody", 8, 0
                ),
            }
            if place != "meta":
                for call in calls.values():
                    with pytest.raises(AclError, match='no communicator named "nobody"'):
                        call()
                with pytest.raises(ConfigError, match="compute_gate"):
                    ops.a2e(x, None, None, ROWS, HIDDEN, 2, 1, 2, 1, "nobody", 8, 1)
                with pytest.raises(ConfigError, match="requires_grad"):
                    ops.a2e(x.float().requires_grad_().bfloat16(), None, None, ROWS, HIDDEN, 2, 1,
                            2, 1, "nobody", 8, 0)  # fmt: skip
                continue
            shapes = {name: [tuple(one.shape) for one in call()] for name, call in calls.items()}
            assert shapes["send"] == [(1, 1), (1, 1), (1, 1), (2,), (1,)]
            assert shapes["receive"] == [(ROWS, HIDDEN), (ROWS, 2), (ROWS, 2), (2,), (ROWS,)]

    child(body)


def test_a_vendors_registration_is_used_and_not_replaced() -> None:
    def body(device: torch.device) -> None:
        from xmoe.errors import LibraryError
        from xmoe.kernels.ops.cam.npu import NpuCamP2POps
        from xmoe.kernels.ops.cam.topology import CamP2PTopology
        from xmoe.kernels.ops.cam.torch_ops import SCHEMAS, operator, register

        vendor = torch.library.Library("afd_ascend", "DEF")
        vendor.define("a2e" + SCHEMAS["afd_ascend::a2e"])
        seen: list[Any] = []

        def a2e(x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
            seen.append((args, torch.npu.current_stream().npu_stream))
            return [x + 1, x, x, x, x]

        vendor.impl("a2e", a2e, "PrivateUse1")
        vendor.define("e2a(Tensor expand_x, int other) -> Tensor")
        vendor.impl("e2a", lambda x, other: x, "PrivateUse1")
        with pytest.raises(LibraryError, match="e2a is registered as"):
            operator("afd_ascend::e2a")
        with pytest.raises(LibraryError, match="e2a is registered as"):
            register()
        assert operator("afd_ascend::a2e") is torch.ops.afd_ascend.a2e.default
        ops = NpuCamP2POps.__new__(NpuCamP2POps)  # without e2a, which is another's here
        ops._topology, ops._device = CamP2PTopology(1, 1, 1, HIDDEN), device
        ops._a2e, ops._nothing = operator("afd_ascend::a2e"), (None, None, None)
        side = torch.npu.Stream()
        x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device=device)
        out = ops.a2e("g", x, ROWS, stream=side.npu_stream)
        torch.npu.synchronize()
        assert out.hidden_states.cpu().eq(1).all()
        ((args, stream),) = seen
        assert args == (None, None, ROWS, HIDDEN, 1, 1, 1, 1, "g", 8)  # a default is left out
        assert stream == side.npu_stream

    child(body)


def _exchange(context: RankContext) -> Any:
    """The operators called by name, on the current stream, behind torch operators that are still in
    the host's queue: a launch that overtook them would send older values."""
    from xmoe.comm.agree import agree_success, broadcast_bytes, introduce
    from xmoe.comm.hccl import HcclCommunicator, make_root_info
    from xmoe.kernels.npu_device import NpuDevice
    from xmoe.kernels.ops.cam.torch_ops import register

    group = join_group(context, hccl=False)
    introduce(group, 60.0)
    register()
    rank, device = context.rank, NpuDevice(context.rank)
    info = make_root_info(device.runtime) if rank == 0 else None
    info = broadcast_bytes(group, info, "root info", 60.0)
    comm = HcclCommunicator(device.runtime, 2, rank, info, 4)
    ops, name, wrong = torch.ops.afd_ascend, comm.name(), 0
    place = (ROWS, HIDDEN, 1, 1, 1, rank, name, 8)
    side = torch.npu.Stream()
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device=device.torch_device)
    x = x[:0] if rank == 0 else x
    torch.npu.synchronize()
    with torch.npu.stream(side):
        for number in range(ROUNDS):
            if rank == 0:
                got = ops.a2e(x, None, None, *place)
                ops.e2a(got[0] * 2 + 1, got[3], *place)
                continue
            x.zero_()
            for _ in range(4):
                x.add_(number % 16)  # results stay exact in bfloat16
            sent = ops.a2e(x, None, None, *place)
            result = ops.e2a(x, sent[3], *place)
            wrong += int((result.float().cpu() != 8 * (number % 16) + 1).any())
    side.synchronize()
    agree_success(group, "end", None, 60.0)
    comm.close()
    return wrong, threading.active_count()


def test_operators_by_name_keep_the_order_of_the_current_stream() -> None:
    results = run_ranks(_exchange, 2, silence_s=120.0)
    assert [wrong for wrong, _ in results] == [0, 0]


def test_the_stop_buffer_ends_a_receive_on_the_npu_adaptor() -> None:
    """See tests/ep: the same loop, with its tensors on the device."""
    s = spec("camasync", attn=1, dynamic_quant=True)
    config = replace(
        s.config, recv_gate=RecvGate.CORE_PARTITION, recv_cores=16, compute_cores=8, send_cores=8
    )
    _, found = run_ranks(_blocked, 2, replace(s, config=config, device="npu"), silence_s=120.0)
    said, failed, stopped = found
    assert said == 0 and not failed and stopped


def _blocked(context: RankContext, s: RunSpec) -> Any:
    import os

    from xmoe.pipeline import deployment

    os.environ |= {"XSD_CAM_DISPATCH_RECV_CORES": "16", "BATCH_SIZE_FACTOR": "0.001"}
    group = context.init_process_group(60.0)
    deployment.introduce(group, 60.0)
    with deployment.open_device("npu", context.rank) as device:
        rank = deployment._Rank(s, context.rank, group, device)
        with rank.communicators(1) as groups:
            if not s.is_ffn(context.rank):
                return None
            with rank.ffn_loop(s.config, groups) as loop:
                threading.Timer(0.3, loop.stop).start()
                loop.serve(deployment.StepPlan(s.layers, (s.tokens,)))
                adapter: Any = loop._adapter
                return adapter.finished, loop.executor.failed is not None, adapter.stopped
