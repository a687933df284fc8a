# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of `xmoe pipeline run`; refuses before any of them exists."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

from xmoe import env
from xmoe.errors import ConfigError
from xmoe.multistream import StreamMode
from xmoe.pipeline.deployment import CONNECTORS, DEVICES, RankRun, RunSpec, rank_main, vector_cores
from xmoe.pipeline.limits import MAX_RANKS, RUN
from xmoe.ranks import run_ranks


def check(spec: RunSpec, modes: Sequence[StreamMode]) -> None:
    """Refuse what cannot run. Local.

    Raises:
        ConfigError: with every reason.
    """
    if spec.connector not in CONNECTORS:
        raise ConfigError(
            f"connector={spec.connector!r}; allowed: {', '.join(CONNECTORS)}; next: correct it"
        )
    if spec.device not in DEVICES:
        raise ConfigError(
            f"device={spec.device!r}; allowed: {', '.join(DEVICES)}; next: correct it"
        )
    if spec.device == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            'device="npu" without torch_npu; allowed: an environment that has it; next: pip '
            "install 'xmoe[npu]', or take host"
        )
    for name, kind in RUN.items():
        env.parse_as(kind, name, getattr(spec, name), "next: correct it")
    if spec.size > MAX_RANKS:
        raise ConfigError(
            f"attn={spec.attn} ffn={spec.ffn}; allowed: {MAX_RANKS} ranks at most; next: correct it"
        )
    for rank in range(spec.size):  # each refuses what its operators cannot take
        topology = spec.p2p_topology if spec.connector == "camp2p" else spec.async_topology
        topology(rank)
    for mode in modes:
        config = replace(spec.config, mode=mode)
        config.validate(spec.capabilities(), spec.shape())
    c = spec.config
    if (c.recv_cores, c.compute_cores, c.send_cores) != (None, None, None):
        cores = run_ranks(vector_cores, 1, silence_s=spec.timeout_s)[0]
        c.validate(spec.capabilities(), spec.shape(cores))


def run(spec: RunSpec, modes: tuple[StreamMode, ...]) -> list[list[RankRun]]:
    """Run the modes one after the other in the same ranks; results by rank, then mode.

    Raises:
        RanksFailed: with each rank's own account.
    """
    silence = spec.timeout_s * 3
    return run_ranks(rank_main, spec.size, spec, modes, silence_s=silence)
