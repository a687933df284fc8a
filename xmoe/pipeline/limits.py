# SPDX-License-Identifier: Apache-2.0
"""Which numbers a run may be made of, for the command line and for everybody who starts ranks.

What the operators can take is narrower; their topologies check that.
"""

from __future__ import annotations

from collections.abc import Mapping

from xmoe import env

MAX_RANKS = 16
"""Devices that the software device has, and processes that a machine may well run."""

RUN: Mapping[str, env.Kind] = {
    "attn": env.integer(1, MAX_RANKS - 1),
    "ffn": env.integer(1, MAX_RANKS - 1),
    "layers": env.integer(1, 1024),
    "stages": env.integer(1, 2),
    "steps": env.integer(1, 100_000),
    "tokens": env.integer(1, 65536),
    "hidden": env.integer(1, 16384),
    "topk": env.integer(1, 64),
    "experts": env.integer(1, 4096),
    "tp_size": env.integer(1, MAX_RANKS - 1),
    "compute_us": env.integer(0, 10_000_000),
    "attention_us": env.integer(0, 10_000_000),
    "buffer_mb": env.integer(1, 16384),
    "timeout_s": env.seconds(),
}
ITEMS = env.integer(1, 10_000_000)
MILLISECONDS = env.number(0, 1e9)
