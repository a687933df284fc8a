# SPDX-License-Identifier: Apache-2.0
"""Small runs of both connectors on forked ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xmoe.multistream import HostFence, MultistreamConfig, RecvGate, StreamMode
from xmoe.pipeline.deployment import RunSpec


def spec(connector: str, **kw: Any) -> RunSpec:
    p2p = connector == "camp2p"
    config = MultistreamConfig(
        mode=StreamMode.OVERLAP,
        roles=kw.pop("roles", frozenset({"ffn"})),
        max_inflight=kw.pop("slots", 3),
        recv_gate=RecvGate.NONE if p2p else RecvGate.READY_PROBE,
        memory_budget_bytes=None if p2p else 1 << 30,
        fence=kw.pop("fence", HostFence.STEP),
        wait_timeout_s=kw.pop("wait_s", 20.0),
        trace=kw.pop("trace", True),
    )
    given = {"attn": 2, "ffn": 1, "layers": 3, "stages": 2 if p2p else 1, "steps": 2, "tokens": 9}
    given |= {"hidden": 32, "compute_us": 50, "attention_us": 50, "timeout_s": 30.0}
    return RunSpec(connector=connector, config=config, **{**given, **kw})


def in_cores_of_its_own(s: RunSpec, **kw: Any) -> RunSpec:
    config = replace(
        s.config, recv_gate=RecvGate.CORE_PARTITION, recv_cores=16, compute_cores=24, send_cores=8,
        **kw,
    )  # fmt: skip
    return replace(s, config=config)
