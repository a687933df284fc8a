# SPDX-License-Identifier: Apache-2.0
"""P1 to P3: streams and cores. Rank functions run in forked ranks; the others judge."""

from __future__ import annotations

import time
from typing import Any

from xmoe.multistream import Capabilities
from xmoe.pipeline.adapters import camasync, camp2p
from xmoe.pipeline.probes.evidence import Evidence, judge
from xmoe.pipeline.probes.rank import ROWS, ProbeRank, probe_rank
from xmoe.ranks import RankContext

_BLOCKED_S = 0.3


def _is_ffn(one: ProbeRank, p2p: bool) -> bool:
    return one.rank == 0 if p2p else one.rank == one.context.size - 1


def _post_receive(one: ProbeRank, p2p: bool, stream: Any) -> Any:
    """Post the FFN side's receive; returns what holds its buffers."""
    if p2p:
        got: Any = one.p2p.a2e(one.name, None, ROWS, stream=stream.handle())
    else:
        got = one.asynchronous.dispatch_recv(one.name, stream=stream.handle())
    one.kept.append(got)
    return got


def _send(one: ProbeRank, p2p: bool, stream: Any) -> None:
    """Attention's side of the same."""
    x, ids, _ = one.batch(1.0)
    if p2p:
        one.kept.append(one.p2p.a2e(one.name, x, ROWS, stream=stream.handle()))
    else:
        one.asynchronous.dispatch_send(one.name, x, ids, 0, stream=stream.handle())


def _post_and_block(one: ProbeRank, p2p: bool, stream: Any) -> Any:
    """Post a receive for which nothing was sent, and let it start. Returns an event behind it."""
    _post_receive(one, p2p, stream)
    behind = one.event(stream)
    one.let_start(one.p2p.topology.aiv_num if p2p else None)
    return behind


def _send_when_told(one: ProbeRank, p2p: bool) -> dict[str, Any]:
    """The Attention rank of P1 and P2."""
    one.meet("measured")
    side = one.stream()
    _send(one, p2p, side)
    return {"code": one.code(side)[0]}


def _of_receiver(results: list[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in results if "op" in one)


def stream_honour(context: RankContext, tensors: str, p2p: bool) -> dict[str, Any]:
    """A receive blocks on a side stream; does an event on another stream come through?"""
    with probe_rank(context, tensors) as one:
        if not _is_ffn(one, p2p):
            return _send_when_told(one, p2p)
        if one.soft is not None:
            one.soft.trace(True)
        side, main = one.stream(), one.stream()
        behind = _post_and_block(one, p2p, side)
        begin = time.perf_counter()
        one.event(main).synchronize(5.0)
        found: dict[str, Any] = {
            "op": "a2e" if p2p else "dispatch_recv",
            "event_us": (time.perf_counter() - begin) * 1e6,
            "blocked": not behind.query(),
        }
        one.meet("measured")
        found["code"] = one.code(side)[0]
        if one.soft is not None:
            kernel = one.soft.read_trace()[0]
            found["streams"] = {
                "kernel_stream": kernel.stream,
                "given_stream": one.soft.stream_number(side.handle()),
                "other_stream": one.soft.stream_number(main.handle()),
            }
        return found


def judge_honour(results: list[dict[str, Any]]) -> Evidence:
    """P1. Without the software device's trace, the blocked stream itself is the evidence."""
    r = _of_receiver(results)
    streams = r.get("streams", {})
    ok = r["code"] == 0 and r["blocked"]
    if streams:
        ok = ok and streams["kernel_stream"] == streams["given_stream"] != streams["other_stream"]
    return judge(
        "P1", r["op"], ok,
        "runs on the stream it is given; an event on another stream is not held up while it waits",
        "does not keep to its stream",
        **streams, other_stream_event_us=round(r["event_us"]), code=r["code"],
    )  # fmt: skip


def occupancy(context: RankContext, tensors: str, p2p: bool) -> dict[str, Any]:
    """Does a small vector kernel on another stream run while a receive waits?"""
    with probe_rank(context, tensors) as one:
        if not _is_ffn(one, p2p):
            return _send_when_told(one, p2p)
        side, small = one.stream(), one.stream()
        one.vector_kernel(small)  # the first one may need to be loaded
        idle_code, _ = one.code(small)
        _post_and_block(one, p2p, side)
        free = one.free_cores()
        begin = time.perf_counter()
        one.vector_kernel(small)
        done = one.event(small)
        while not done.query() and time.perf_counter() - begin < _BLOCKED_S:
            time.sleep(0.0005)
        found: dict[str, Any] = {
            "op": "a2e" if p2p else "dispatch_recv",
            "starved": not done.query(),
            "ms": (time.perf_counter() - begin) * 1e3,
            "held": one.cores - free if one.cores else None,
            "declared": capabilities_of(one, p2p).recv_blocks_cores,
        }
        one.meet("measured")
        found["codes"] = [idle_code, *(one.code(s)[0] for s in (side, small))]
        return found


def capabilities_of(one: ProbeRank, p2p: bool) -> Capabilities:
    """What the adapters declare of these operators."""
    if p2p:
        return camp2p.capabilities(peer_abort=False)
    topology = one.asynchronous.topology
    return camasync.capabilities(topology, ready_probe=False, core_limits=False, peer_abort=False)


def judge_occupancy(results: list[dict[str, Any]]) -> Evidence:
    """P2: as the adapter declares."""
    r = _of_receiver(results)
    figures: dict[str, Any] = {"starved": r["starved"], "declared": r["declared"]}
    figures |= {"small_kernel_ms": round(r["ms"], 2), "waited_ms": round(_BLOCKED_S * 1e3)}
    if r["held"] is not None:
        figures["cores_held"] = r["held"]
    if r["declared"]:
        finding = "a receive that waits starves every vector kernel until its peer sends"
    else:
        finding = "a receive that waits leaves cores to compute"
    ok = not any(r["codes"]) and r["starved"] == r["declared"]
    return judge("P2", r["op"], ok, finding, "is not what the adapter declares", **figures)


LIMITS = {"aclnnA2e": 12, "aclnnAfdAsyncDispatchRecv": 16, "aclnnAfdAsyncCombineSend": 10}


def core_limit(context: RankContext, tensors: str, limited: bool) -> dict[str, Any]:
    """Cores of the FFN side's operators, without and with a limit. Software device only."""
    with probe_rank(context, tensors) as one:
        assert one.soft is not None
        a2e, recv, send = LIMITS.values() if limited else (8, None, None)
        one.soft.set_cores(recv, send)
        one.p2p = one.p2p_ops(a2e)
        one.soft.trace(True)
        stream = one.stream()
        for p2p in (True, False):
            if not _is_ffn(one, p2p):
                _send(one, p2p, stream)
                one.code(stream)
                continue
            got = _post_receive(one, p2p, stream)
            one.code(stream)
            if not p2p:
                rows = got.hidden_states[: max(1, int(got.tokens_per_expert.sum()))].contiguous()
                one.kept.append(rows)
                handle = stream.handle()
                one.asynchronous.combine_send(one.name, rows, got.batch_info, stream=handle)
        code, _ = one.code(stream)
        kernels = one.soft.read_trace()
        cores = {k.op: k.vector_cores for k in kernels if k.op in LIMITS}
        return {"code": code, "all": one.cores, "cores": cores}


def judge_limit(plain: list[dict[str, Any]], limited: list[dict[str, Any]]) -> Evidence:
    """P3."""
    before, after = ({**a["cores"], **b["cores"]} for a, b in (plain, limited))
    free = {**LIMITS, "aclnnA2e": 8, "aclnnAfdAsyncDispatchRecv": plain[0]["all"]}
    free["aclnnAfdAsyncCombineSend"] = 8
    ok = after == LIMITS and before == free and not any(r["code"] for r in (*plain, *limited))
    return judge(
        "P3", "operators of an FFN rank", ok,
        "keep to the core counts set for them by this device's own call and by a2e's argument; "
        "whether they follow a stream's limit (aclrtSetStreamResLimit) stays open",
        "core counts are not what was set",
        default=before, limited=after,
    )  # fmt: skip
