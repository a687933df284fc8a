# SPDX-License-Identifier: Apache-2.0
"""P1 to P3: streams and cores. Rank functions run in forked ranks; the others judge."""

from __future__ import annotations

import time
from typing import Any

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


def _receive_blocked(one: ProbeRank, p2p: bool) -> bool:
    """The receive runs: it holds its cores."""
    free = one.soft.free_cores(one.rank)[0]
    return free == (one.cores - one.p2p_topology().aiv_num if p2p else 0)


def stream_honour(context: RankContext, p2p: bool) -> dict[str, Any]:
    """A receive blocks on a side stream; does an event on another stream come through?"""
    with probe_rank(context) as one:
        if not _is_ffn(one, p2p):
            one.meet("blocked")
            one.meet("measured")
            side = one.stream()
            _send(one, p2p, side)
            return {"code": one.code(side)[0]}
        one.soft.trace(True)
        side, main = one.stream(), one.stream()
        _post_receive(one, p2p, side)
        one.wait_until(lambda: _receive_blocked(one, p2p))
        one.meet("blocked")
        begin = time.perf_counter()
        one.soft.timed_kernel(stream=main.handle(), microseconds=100)
        event = one.device.create_event()
        event.record(main)
        event.synchronize(5.0)
        took = (time.perf_counter() - begin) * 1e6
        blocked = _receive_blocked(one, p2p)
        one.meet("measured")
        code = one.code(side)[0]
        kernel = next(k for k in one.soft.read_trace() if "Timed" not in k.op)
        event.close()
        return {
            "event_us": took,
            "blocked": blocked,
            "code": code,
            "op": kernel.op,
            "stream": kernel.stream,
            "side": one.soft.stream_number(side.handle()),
            "main": one.soft.stream_number(main.handle()),
        }


def judge_honour(results: list[dict[str, Any]]) -> Evidence:
    """P1."""
    r = next(one for one in results if "op" in one)
    ok = r["stream"] == r["side"] != r["main"] and r["code"] == 0 and r["blocked"]
    return judge(
        "P1", r["op"], ok,
        "runs on the stream it is given; an event on another stream is not held up while it waits",
        "does not keep to its stream",
        kernel_stream=r["stream"], given_stream=r["side"], other_stream=r["main"],
        other_stream_event_us=round(r["event_us"]),
    )  # fmt: skip


def occupancy(context: RankContext, p2p: bool) -> dict[str, Any]:
    """How long do vector kernels on another stream wait for cores while a receive waits?"""
    with probe_rank(context) as one:
        if not _is_ffn(one, p2p):
            one.meet("blocked")
            time.sleep(_BLOCKED_S)
            side = one.stream()
            _send(one, p2p, side)
            return {"code": one.code(side)[0]}
        one.soft.trace(True)
        side, small, full = one.stream(), one.stream(), one.stream()
        _post_receive(one, p2p, side)
        one.wait_until(lambda: _receive_blocked(one, p2p))
        one.soft.timed_kernel(stream=small.handle(), microseconds=200, vector_cores=8, tag=8)
        if not p2p:
            # Cores go in order of arrival; the smaller kernel must be in line first.
            time.sleep(0.02)
        else:
            one.code(small)
        one.soft.timed_kernel(stream=full.handle(), microseconds=200, vector_cores=48, tag=48)
        one.meet("blocked")
        codes = [one.code(s)[0] for s in (side, small, full)]
        waits = {}
        cores = 0
        op = ""
        for kernel in one.soft.read_trace():
            if "Timed" in kernel.op:
                waits[kernel.tag] = (kernel.cores_ns - kernel.start_ns) / 1e6
            else:
                cores, op = kernel.vector_cores, kernel.op
        return {"op": op, "cores": cores, "codes": codes, "waits": waits}


def judge_occupancy(results: list[dict[str, Any]]) -> Evidence:
    """P2."""
    r = next(one for one in results if "op" in one)
    small, full = r["waits"][8], r["waits"][48]
    starved = small > _BLOCKED_S * 500
    all_core = r["cores"] == 48
    figures = {
        "cores_held": r["cores"],
        "wait_8_core_kernel_ms": round(small, 2),
        "wait_48_core_kernel_ms": round(full, 2),
        "peer_silent_ms": round(_BLOCKED_S * 1e3),
    }
    if all_core:
        finding = "a receive that waits starves every vector kernel until its peer sends"
    else:
        finding = "a receive that waits leaves the other cores to compute"
    ok = not any(r["codes"]) and starved == all_core
    return judge("P2", r["op"], ok, finding, "cores are not held as its launch says", **figures)


def core_limit(context: RankContext) -> dict[str, Any]:
    """Block counts of the operators, without and with a limit."""
    with probe_rank(context) as one:
        has = one.library.has("aclrtSetStreamResLimit")
        stream = one.stream()
        if not _is_ffn(one, False):
            _send(one, False, stream)
            return {"code": one.code(stream)[0]}
        one.soft.trace(True)
        _post_receive(one, False, stream)
        code = one.code(stream)[0]
        return {"cores": one.soft.read_trace()[-1].vector_cores, "code": code, "limit": has}


def judge_limit(plain: list[dict[str, Any]], limited: list[dict[str, Any]], cores: int) -> Evidence:
    """P3."""
    a = next(one for one in plain if "cores" in one)
    b = next(one for one in limited if "cores" in one)
    ok = b["cores"] == cores and a["cores"] == 48 and not a["limit"]
    return judge(
        "P3", "aclnnAfdAsyncDispatchRecv", ok,
        "keeps to the core count set for it by this device's own variable; this runtime has no "
        "aclrtSetStreamResLimit, so whether the operators follow that on hardware stays open",
        "core counts are not what was set",
        cores_default=a["cores"], cores_limited=b["cores"], stream_limit_call=a["limit"],
    )  # fmt: skip
