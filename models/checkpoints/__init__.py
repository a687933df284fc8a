# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that ship with the project."""

from __future__ import annotations

from pathlib import Path

SUMS = "qwen3_5_sums"


def shipped_checkpoint(name: str = SUMS) -> Path:
    """The directory of a shipped checkpoint.

    Raises:
        ConfigError: no checkpoint of that name ships.
    """
    directory = Path(__file__).resolve().parent / name
    if name in ("", ".", "..") or Path(name).name != name or not directory.is_dir():
        from xmoe.errors import ConfigError

        raise ConfigError(
            f"no shipped checkpoint {name!r}; {SUMS!r} ships with this package; "
            "give the path of a model directory instead"
        )
    return directory
