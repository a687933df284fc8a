# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of `xmoe pipeline run`; refuses before any of them exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xmoe.errors import ConfigError
from xmoe.multistream import StreamMode
from xmoe.pipeline.deployment import CONNECTORS, RankRun, RunSpec, rank_main
from xmoe.ranks import run_ranks

MAX_RANKS = 16


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
        config.validate(spec.capabilities(), spec.shape())


def run(spec: RunSpec, modes: tuple[StreamMode, ...]) -> list[list[RankRun]]:
    """Run the modes one after the other in the same ranks; results by rank, then mode.

    Raises:
        RanksFailed: with each rank's own account.
    """
    silence = spec.timeout_s * 3
    return run_ranks(rank_main, spec.size, spec, modes, silence_s=silence)
