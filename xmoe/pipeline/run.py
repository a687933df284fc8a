# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of `xmoe pipeline run`; refuses before any of them exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xmoe.errors import ConfigError
from xmoe.multistream import Capabilities, MetadataRead, StreamMode
from xmoe.pipeline.deployment import CONNECTORS, RankRun, RunSpec, rank_main
from xmoe.ranks import run_ranks

MAX_RANKS = 16


def software_capabilities(connector: str) -> Capabilities:
    """What the adapters declare over the software device, for a check before they exist."""
    p2p = connector == "camp2p"
    return Capabilities(
        connector="CAMP2P" if p2p else "CAMAsync",
        roles=frozenset({"ffn", "attention"}),
        honours_current_stream=True,
        recv_send_same_channel_exclusive=p2p,
        recv_blocks_cores=not p2p,
        host_metadata=not p2p,
        metadata_reads=frozenset({MetadataRead.BLOCKING}),
        graph_safe=False,
        max_outstanding_per_channel=1,
        ready_probe=not p2p,
        core_limits=True,
        peer_abort=True,
    )


def check(spec: RunSpec, modes: Sequence[StreamMode]) -> None:
    """Refuse what cannot run. Local.

    Raises:
        ConfigError: with every reason.
    """
    if spec.connector not in CONNECTORS:
        raise ConfigError(
            f"connector={spec.connector!r}; allowed: {', '.join(CONNECTORS)}; next: correct it"
        )
    counts = (spec.attn, spec.ffn, spec.layers, spec.steps, spec.tokens, spec.hidden)
    if min(counts) < 1 or spec.size > MAX_RANKS:
        raise ConfigError(
            f"attn={spec.attn} ffn={spec.ffn} layers={spec.layers} steps={spec.steps} "
            f"tokens={spec.tokens} hidden={spec.hidden}; allowed: 1 or more of each, "
            f"{MAX_RANKS} ranks at most; next: correct it"
        )
    for mode in modes:
        config = replace(spec.config, mode=mode)
        config.validate(software_capabilities(spec.connector), spec.shape())


def run(spec: RunSpec, modes: tuple[StreamMode, ...]) -> list[list[RankRun]]:
    """Run the modes one after the other in the same ranks; results by rank, then mode.

    Raises:
        RanksFailed: with each rank's own account.
    """
    silence = spec.timeout_s * 3
    return run_ranks(rank_main, spec.size, spec, modes, silence_s=silence)
