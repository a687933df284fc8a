# SPDX-License-Identifier: Apache-2.0
"""P5, P7, P8: what happens when the protocol is broken, and how a blocked receive ends."""

from __future__ import annotations

import time
from typing import Any

import torch

from xmoe.kernels.ops.cam.host_memory import StopBuffer
from xmoe.pipeline.probes.evidence import Evidence, judge
from xmoe.pipeline.probes.rank import HIDDEN, ROWS, ProbeRank, probe_rank
from xmoe.ranks import RankContext

VECTOR_TIMEOUT, VECTOR_FAULT, REMOTE, TIMEOUT = 507034, 507035, 507057, 507046
HANG_S = 5.0


def _receive(one: ProbeRank, stream: Any) -> Any:
    item = one.asynchronous.dispatch_recv(one.name, stream=stream.handle())
    one.kept.append(item)
    return item


def credit(context: RankContext, tensors: str) -> dict[str, Any]:
    """Attention dispatches twice before it combines; what comes back for the first?"""
    with probe_rank(context, tensors) as one:
        t, ops, stream = one.async_topology(), one.asynchronous, one.stream()
        if t.is_ffn:
            one.meet("sent")
            item = _receive(one, stream)
            one.code(stream)
            rows = item.hidden_states[: max(1, int(item.tokens_per_expert.sum()))].contiguous()
            ops.combine_send(one.name, rows, item.batch_info, stream=stream.handle())
            code, _ = one.code(stream)
            return {"layer": int(item.batch_info[2]), "code": code}
        (x1, ids1, w), (x2, ids2, _) = one.batch(1.0), one.batch(2.0, first=1)
        ops.dispatch_send(one.name, x1, ids1, 1, stream=stream.handle())
        ops.dispatch_send(one.name, x2, ids2, 2, stream=stream.handle())
        code, _ = one.code(stream)
        one.meet("sent")
        again = one.stream()
        got = ops.combine_recv(one.name, ids1, w, stream=again.handle())
        one.code(again)
        counters = None if one.soft is None else one.soft.counters(one.name)
        counted = None if counters is None else counters.credit_violations
        return {"code": code, "value": float(got[0, 0]), "violations": counted}


def judge_credit(results: list[dict[str, Any]], strict: bool) -> Evidence:
    """P5."""
    attention, ffn = results
    figures = {
        "second_dispatch_code": attention["code"],
        "violations": attention["violations"],
        "sent_first": 1.0,
        "came_back_for_first": attention["value"],
    }
    if strict:
        ok = attention["code"] == VECTOR_FAULT and attention["value"] == 1.0
        finding = "the strict device refuses a second dispatch; the first is unharmed"
    else:
        ok = attention["code"] == 0 and attention["value"] == 2.0 and ffn["layer"] == 2
        finding = "nothing stops a second dispatch: the first one's caller gets the second's rows"
    ok = ok and attention["violations"] in (None, 1)  # hardware counts nothing
    subject = f"credit, {'strict' if strict else 'as on hardware'}"
    return judge("P5", subject, ok, finding, "a second dispatch does neither", **figures)


def parity(context: RankContext, tensors: str) -> dict[str, Any]:
    """Attention launches two operators of the group where the FFN side launches one."""
    with probe_rank(context, tensors) as one:
        t, ops, stream = one.p2p_topology(), one.p2p, one.stream()
        x, _, _ = one.batch(1.0)
        if t.is_ffn:
            one.meet("sent")
            begin = time.perf_counter()
            one.kept.append(ops.a2e(one.name, None, ROWS, stream=stream.handle()))
            code, text = one.code(stream, HANG_S)
            took = time.perf_counter() - begin
            one.hung = code == TIMEOUT  # the host gave up, the kernel did not
            one.meet("gave up")
            lines = text.strip().splitlines() or ["the host's wait ended, the kernel did not"]
            return {"code": code, "text": lines[0][:200], "seconds": took}
        for _ in range(2):
            one.kept.append(ops.a2e(one.name, x, ROWS, stream=stream.handle()))
        code, _ = one.code(stream)
        one.meet("sent")
        one.meet("gave up")
        counters = None if one.soft is None else one.soft.counters(one.name)
        counted = None if counters is None else counters.order_violations
        return {"code": code, "violations": counted}


def judge_parity(results: list[dict[str, Any]], timeout_s: float) -> Evidence:
    """P7."""
    ffn, attention = results
    hung = ffn["code"] in (VECTOR_TIMEOUT, TIMEOUT)
    ok = hung and ffn["seconds"] >= timeout_s * 0.9
    return judge(
        "P7", "group parity", ok,
        "one launch too many and the peer's flag never matches: it waits until something else ends "
        "it, here the software device's timeout or the end of the process",
        "an extra launch does not hang the peer",
        code=ffn["code"], hung_s=round(ffn["seconds"], 2),
        order_violations=attention["violations"], text=ffn["text"],
    )  # fmt: skip


def abort(context: RankContext, tensors: str) -> dict[str, Any]:
    """A receive is blocked and a kernel waits for its cores; the peer writes the abort word."""
    with probe_rank(context, tensors) as one:
        t, recv, send = one.async_topology(), one.stream(), one.stream()
        if not t.is_ffn:
            one.meet("blocked")
            assert one.soft is not None
            one.soft.abort(one.name, reason=3)
            one.meet("aborted")
            return {"state": one.soft.abort_state(one.name)}
        _receive(one, recv)
        one.let_start()
        info = torch.zeros(t.info_length(False), dtype=torch.int64)
        rows = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        one.kept.append((info, rows))
        one.asynchronous.combine_send(one.name, rows, info, stream=send.handle())
        one.meet("blocked")
        begin = time.perf_counter()
        codes = [one.code(recv)[0], one.code(send)[0]]
        took = (time.perf_counter() - begin) * 1e3
        one.meet("aborted")
        return {"codes": codes, "ms": took, "held": one.cores - one.free_cores()}


def judge_abort(results: list[dict[str, Any]]) -> Evidence:
    """P8, abort word."""
    ffn = results[1]
    ok = ffn["codes"] == [REMOTE, REMOTE] and ffn["held"] == 0 and ffn["ms"] < 5000
    return judge(
        "P8", "abort word", ok,
        "a peer's abort word ends a blocked receive, and a kernel that waits for its cores; no "
        "operator library on an NPU has such a word",
        "a blocked receive is not released", codes=ffn["codes"], released_ms=round(ffn["ms"], 1),
        cores_still_held=ffn["held"],
    )  # fmt: skip


def stop(context: RankContext, tensors: str) -> dict[str, Any]:
    """A receive is blocked; this host writes the operators' own stop buffer."""
    with probe_rank(context, tensors) as one:
        stream = one.stream()
        if not one.async_topology().is_ffn:
            return {}
        buffer, ops = StopBuffer(one.library, device=one.where), one.async_ops(dynamic_quant=True)
        one.here()
        item = ops.dispatch_recv(one.name, stream=stream.handle(), stop=buffer.tensor)
        one.kept.append((item, buffer))
        event = one.event(stream)
        one.let_start()
        reached = event.query()
        begin = time.perf_counter()
        buffer.write(one.stream().handle())
        code, _ = one.code(stream)
        took = (time.perf_counter() - begin) * 1e3
        return {"code": code, "ms": took, "rank": int(item.batch_info[1]), "event": reached}


def judge_stop(results: list[dict[str, Any]]) -> Evidence:
    """P8, stop buffer."""
    ffn = results[1]
    ok = ffn["code"] == 0 and ffn["rank"] == -1 and not ffn["event"]
    return judge(
        "P8", "stop buffer", ok,
        "the routed-only operators' stop buffer ends a blocked receive with a synthetic item "
        "(rank -1); an event behind it cannot",
        "the stop buffer does not end the receive", code=ffn["code"],
        released_ms=round(ffn["ms"], 1), attention_rank=ffn["rank"],
    )  # fmt: skip
