# SPDX-License-Identifier: Apache-2.0
"""JSON files that a user names: what is wrong with one is one error, and nothing is waited for."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from xmoe.errors import ConfigError

_MOST_BYTES = 1 << 30


def read_json(
    path: Path,
    next_step: str,
    *,
    error: type[ConfigError] = ConfigError,
    most_bytes: int = _MOST_BYTES,
) -> Any:
    """The value in a regular file of UTF-8 JSON. Local.

    Args:
        next_step: the last part of the message. error: raised for everything that is wrong.
        most_bytes: a larger file is refused unread.

    Raises:
        `error`; FileNotFoundError.
    """
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):
            # A pipe would be waited for without end.
            raise OSError("it is not a regular file")
        if state.st_size > most_bytes:
            raise OSError(f"it has {state.st_size} bytes, more than {most_bytes}")
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as caught:
        raise error(
            f"{path} cannot be read as JSON: {getattr(caught, 'strerror', None) or caught}; "
            f"allowed: a file with JSON text; next: {next_step}"
        ) from caught


def parse_json(text: str) -> Any:
    """`json.loads`, whose only error is ValueError, for nesting without end too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
