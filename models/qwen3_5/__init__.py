# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-MoE: configuration, checkpoint, exact widening, and the transformers engine."""

from __future__ import annotations

from pathlib import Path


def shipped_checkpoint() -> Path:
    """Directory of the small trained checkpoint that comes with the package."""
    return Path(__file__).resolve().parent.parent / "checkpoints" / "qwen3_5_sums"
