# SPDX-License-Identifier: Apache-2.0
"""What the asynchronous operators do not protect against, and how the software device shows it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cam_ranks import REMOTE, VECTOR_FAULT, VECTOR_TIMEOUT, CamRank, cam_rank
from support.ranks import run_ranks, values
from xmoe.errors import AclError, CommError, ConfigError
from xmoe.kernels.ops.cam.host import HostCamAsyncOps
from xmoe.kernels.ops.cam.host_memory import StopBuffer
from xmoe.kernels.ops.cam.topology import CamAsyncTopology

HIDDEN, TOPK, EXPERTS = 16, 2, 4
ENV = {"BATCH_SIZE_FACTOR": "0.001", "XSD_WAIT_TIMEOUT_MS": "5000"}


def topology(rank: int, attn: int = 1, **kw: Any) -> CamAsyncTopology:
    return CamAsyncTopology(attn, 1, rank, HIDDEN, TOPK, EXPERTS, max_seq_len=32, **kw)


def batch(value: float, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.full((6, HIDDEN), value, dtype=torch.bfloat16)
    ids = (torch.arange(6 * TOPK, dtype=torch.int32).reshape(6, TOPK) + first) % EXPERTS
    return x, ids, torch.full((6, TOPK), 0.5)


def answer(one: CamRank, t: CamAsyncTopology, group: str, stream: int) -> int:
    """Receive one item and send its rows back unchanged."""
    ops = HostCamAsyncOps(one.library, t)
    item = ops.dispatch_recv(group, stream=stream)
    one.sync(stream)
    rows = item.hidden_states[: max(1, int(item.tokens_per_expert.sum()))]
    ops.combine_send(group, rows.contiguous(), item.batch_info, stream=stream)
    one.sync(stream)
    return int(item.batch_info[2])


def double_dispatch(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops, stream = HostCamAsyncOps(one.library, t), one.stream()
        if t.is_ffn:
            one.meet("sent")
            return answer(one, t, group, stream)
        x1, ids1, w = batch(1.0)
        x2, ids2, _w = batch(2.0, first=1)
        ops.dispatch_send(group, x1, ids1, 1, stream=stream)
        ops.dispatch_send(group, x2, ids2, 2, stream=stream)
        code = 0
        try:
            one.sync(stream)
        except AclError as error:
            code = error.code
        one.mark("sent")
        again = one.stream()
        got = ops.combine_recv(group, ids1, w, stream=again)
        one.sync(again)
        return code, one.soft.counters(group).credit_violations, float(got[0, 0])


def test_strict_mode_refuses_a_second_dispatch(tmp_path: Path) -> None:
    (code, count, value), layer = values(
        run_ranks(double_dispatch, 2, str(tmp_path), group=False, env=ENV)
    )
    assert (code, count, layer) == (VECTOR_FAULT, 1, 1)
    assert value == 1.0  # the first dispatch is untouched


def test_without_strict_mode_a_second_dispatch_overwrites_the_first(tmp_path: Path) -> None:
    env = {**ENV, "XSD_STRICT": "0"}
    (code, count, value), layer = values(
        run_ranks(double_dispatch, 2, str(tmp_path), group=False, env=env)
    )
    assert (code, count, layer) == (0, 1, 2)
    assert value == 2.0  # the caller of dispatch 1 gets dispatch 2's rows


def prefetch(rank: int, _: Any, folder: str, gate: bool) -> Any:
    """Credit 1: the receive of item 2 is posted before the compute of item 1 is issued."""
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops = HostCamAsyncOps(one.library, t)
        recv, work, send = one.stream(), one.stream(), one.stream()
        if not t.is_ffn:
            for layer in range(2):
                x, ids, w = batch(float(layer + 1))
                ops.dispatch_send(group, x, ids, layer, stream=recv)
                one.keep(ops.combine_recv(group, ids, w, stream=recv))
                try:
                    one.sync(recv)
                except AclError as error:
                    return error.code
            return 0
        one.soft.trace(True)
        item = ops.dispatch_recv(group, stream=recv)
        one.sync(recv)
        out = torch.empty(item.hidden_states.shape, dtype=torch.bfloat16)
        second = None
        if not gate:
            second = ops.dispatch_recv(group, stream=recv)
            while one.soft.free_cores(rank)[0] != 0:
                time.sleep(0.001)
        elif one.soft.ready(t, group) > 0:
            second = ops.dispatch_recv(group, stream=recv)
        one.soft.timed_kernel(
            stream=work,
            microseconds=500,
            vector_cores=8,
            tag=0,
            rows=item.hidden_states,
            out=out,
            tokens_per_expert=item.tokens_per_expert,
        )
        try:
            one.sync(work, 5000)
            if not gate:
                one.sync(recv)
            ops.combine_send(group, out, item.batch_info, stream=send)
            one.sync(send)
            while second is None and one.soft.ready(t, group) == 0:
                time.sleep(0.001)
            second = second or ops.dispatch_recv(group, stream=recv)
            one.sync(recv)
            ops.combine_send(group, second.hidden_states, second.batch_info, stream=send)
            one.sync(send)
            code = 0
        except AclError as error:
            code = error.code
        kernel = next(k for k in one.soft.read_trace() if k.op == "aclnnXsdTimedKernel")
        return code, (kernel.cores_ns - kernel.start_ns) / 1e6, one.soft.free_cores(rank)[0]


def test_a_receive_posted_before_compute_is_a_deadlock_ended_by_the_timeout(
    tmp_path: Path,
) -> None:
    env = {**ENV, "XSD_WAIT_TIMEOUT_MS": "400"}
    attn, (code, waited_ms, free) = values(
        run_ranks(prefetch, 2, str(tmp_path), False, group=False, env=env)
    )
    # One side's wait ends first and takes the group down; compute had no cores until then.
    assert VECTOR_TIMEOUT in (attn, code)
    assert {attn, code} <= {VECTOR_TIMEOUT, REMOTE}
    assert waited_ms > 200
    assert free == 48


def test_the_readiness_gate_removes_the_deadlock(tmp_path: Path) -> None:
    attn, (code, waited_ms, free) = values(
        run_ranks(prefetch, 2, str(tmp_path), True, group=False, env=ENV)
    )
    assert (attn, code, free) == (0, 0, 48)
    assert waited_ms < 200


def test_a_core_partition_removes_the_deadlock(tmp_path: Path) -> None:
    env = {**ENV, "XSD_CAM_DISPATCH_RECV_CORES": "16"}
    attn, (code, waited_ms, _free) = values(
        run_ranks(partitioned, 2, str(tmp_path), group=False, env=env)
    )
    assert (attn, code) == (0, 0)
    assert waited_ms < 200


def partitioned(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops = HostCamAsyncOps(one.library, t)
        recv, work, send = one.stream(), one.stream(), one.stream()
        if not t.is_ffn:
            for layer in range(2):
                x, ids, w = batch(float(layer + 1))
                ops.dispatch_send(group, x, ids, layer, stream=recv)
                one.keep(ops.combine_recv(group, ids, w, stream=recv))
                one.sync(recv)
            return 0
        one.soft.trace(True)
        first = ops.dispatch_recv(group, stream=recv)
        one.sync(recv)
        second = ops.dispatch_recv(group, stream=recv)
        one.soft.timed_kernel(stream=work, microseconds=500, vector_cores=8)
        one.sync(work, 5000)
        for item in (first, second):
            if item is second:
                one.sync(recv)
            ops.combine_send(group, item.hidden_states, item.batch_info, stream=send)
            one.sync(send)
        kernel = next(k for k in one.soft.read_trace() if k.op == "aclnnXsdTimedKernel")
        return 0, (kernel.cores_ns - kernel.start_ns) / 1e6, 48


def blocked(rank: int, _: Any, folder: str) -> Any:
    """Shutdown while a receive spins, and a compute kernel waits for the cores it holds."""
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops = HostCamAsyncOps(one.library, t)
        recv, send = one.stream(), one.stream()
        if not t.is_ffn:
            one.meet("spinning")
            one.soft.abort(group, reason=3)
            with pytest.raises(AclError) as caught:
                x, ids, w = batch(1.0)
                one.keep(ops.combine_recv(group, ids, w, stream=recv))
                one.sync(recv)
            return caught.value.code
        item = ops.dispatch_recv(group, stream=recv)
        while one.soft.free_cores(rank)[0] != 0:
            time.sleep(0.001)
        info = torch.zeros(t.info_length(False), dtype=torch.int64)
        rows = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        ops.combine_send(group, rows, info, stream=send)  # waits for cores
        one.mark("spinning")
        codes = []
        for stream in (recv, send):
            with pytest.raises(AclError) as caught:
                one.sync(stream)
            codes.append(caught.value.code)
        assert item.batch_info.shape == info.shape  # kept until the kernel was gone
        with pytest.raises(CommError, match="aborted"):
            one.soft.ready(t, group)
        return codes, one.soft.free_cores(rank)[0]


def test_abort_releases_spinning_and_waiting_kernels_on_both_roles(tmp_path: Path) -> None:
    attn, (codes, free) = values(run_ranks(blocked, 2, str(tmp_path), group=False, env=ENV))
    assert attn == REMOTE
    assert codes == [REMOTE, REMOTE]
    assert free == 48


def stopped(rank: int, _: Any, folder: str) -> Any:
    """The operators' own stop buffer: a synthetic item that combine_send skips."""
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t, stream = topology(rank, dynamic_quant=True), one.stream()
        ops, stop = HostCamAsyncOps(one.library, t), StopBuffer(one.library)
        if not t.is_ffn:
            return None
        item = ops.dispatch_recv(group, stream=stream, stop=stop.tensor)
        while one.soft.free_cores(rank)[0] != 0:
            time.sleep(0.001)
        stop.write(one.stream(), layer=9)  # the receive holds its own stream
        rows = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        ops.combine_send(group, rows, item.batch_info, stream=stream)
        one.sync(stream)
        return item.batch_info.tolist(), item.tokens_per_expert.tolist(), float(item.scales[0])


def test_the_stop_buffer_ends_a_blocked_receive(tmp_path: Path) -> None:
    _, (info, counts, scale) = values(run_ranks(stopped, 2, str(tmp_path), group=False, env=ENV))
    assert info[:5] == [1, -1, 9, 0, 0]
    assert counts == [1, 0, 0, 0] and scale == 1.0


def silent(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops, stream = HostCamAsyncOps(one.library, t), one.stream()
        x, ids, w = batch(1.0)
        if t.is_ffn:
            item = ops.dispatch_recv(group, stream=stream)
            one.sync(stream)  # and never answers
            one.meet("gave up")
            return item.batch_info[2].item()
        ops.dispatch_send(group, x, ids, 0, stream=stream)
        one.keep(ops.combine_recv(group, ids, w, stream=stream))
        with pytest.raises(AclError) as caught:
            one.sync(stream)
        one.mark("gave up")
        return caught.value.code, caught.value.detail


def test_a_peer_that_never_answers_is_a_timeout_that_says_what_is_missing(tmp_path: Path) -> None:
    env = {**ENV, "XSD_WAIT_TIMEOUT_MS": "300"}
    (code, text), _ = values(run_ranks(silent, 2, str(tmp_path), group=False, env=env))
    assert code == VECTOR_TIMEOUT
    assert "status of all FFN ranks" in text


def dying(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops, stream = HostCamAsyncOps(one.library, t), one.stream()
        x, ids, w = batch(1.0)
        if t.is_ffn:
            item = ops.dispatch_recv(group, stream=stream)
            one.sync(stream)
            os._exit(17 + int(item.batch_info[2]))  # between receive and send
        ops.dispatch_send(group, x, ids, 0, stream=stream)
        one.keep(ops.combine_recv(group, ids, w, stream=stream))
        begin = time.monotonic()
        with pytest.raises(AclError) as caught:
            one.sync(stream)
        return caught.value.code, caught.value.detail, time.monotonic() - begin


def test_a_peer_that_dies_between_receive_and_send_ends_the_wait_at_once(tmp_path: Path) -> None:
    attn, ffn = run_ranks(dying, 2, str(tmp_path), group=False, env=ENV, check=False)
    assert ffn.exit_code == 17
    code, text, seconds = attn.value
    assert code == REMOTE
    assert "rank 1" in text
    assert seconds < 3


def refused(rank: int, _: Any, folder: str) -> list[str]:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops, stream = HostCamAsyncOps(one.library, t), one.stream()
        x, ids, w = batch(1.0)
        info = torch.zeros(t.info_length(False), dtype=torch.int64)
        if t.is_ffn:
            calls = [
                lambda: ops.dispatch_recv(group, stream=stream, stop=torch.zeros(16)),
                lambda: ops.dispatch_recv(group, stream=stream, out=ops.empty_item(7)),
                lambda: ops.combine_send(group, x.to(torch.int8), info, stream=stream),
                lambda: ops.combine_send(group, x[:0], info, stream=stream),
                lambda: ops.combine_send(group, x, info[:-1], stream=stream),
                lambda: ops.combine_send(group, x, info, stream=stream, shared_out=x),
                lambda: ops.dispatch_send(group, x, ids, 0, stream=stream),
            ]
        else:
            calls = [
                lambda: ops.dispatch_send("x", x, ids, 0, stream=stream),
                lambda: ops.dispatch_send(group, x[:0], ids[:0], 0, stream=stream),
                lambda: ops.dispatch_send(group, x, ids.long(), 0, stream=stream),
                lambda: ops.dispatch_send(group, x, ids, -1, stream=stream),
                lambda: ops.dispatch_send(group, x.float(), ids, 0, stream=stream),
                lambda: ops.combine_recv(group, ids, w.double(), stream=stream),
                lambda: ops.combine_recv(group, ids[:, :1], w, stream=stream),
            ]
        told = []
        for call in calls:
            with pytest.raises((AclError, ConfigError)) as caught:
                call()
            told.append(str(caught.value))
        one.sync(stream)
        return told


def test_bad_arguments_are_refused_before_anything_is_queued(tmp_path: Path) -> None:
    for told in values(run_ranks(refused, 2, str(tmp_path), group=False, env=ENV)):
        assert len(told) == 7
        assert all("allowed" in text or "no communicator" in text for text in told)


def test_an_expert_that_exceeds_the_capacity_is_reported(tmp_path: Path) -> None:
    env = {"BATCH_SIZE_FACTOR": "0.00001"}  # 2 rows
    _, text = values(run_ranks(too_many, 2, str(tmp_path), group=False, env=env))
    assert "one expert's rows do not fit the receive capacity of 2 rows" in text


def too_many(rank: int, _: Any, folder: str) -> str:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank)
        ops, stream = HostCamAsyncOps(one.library, t), one.stream()
        if not t.is_ffn:
            x, ids, _w = batch(1.0)
            ops.dispatch_send(group, x, ids, 0, stream=stream)
            one.sync(stream)
            return ""
        one.keep(ops.dispatch_recv(group, stream=stream))
        with pytest.raises(AclError) as caught:
            one.sync(stream)
        return caught.value.detail
