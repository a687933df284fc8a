# SPDX-License-Identifier: Apache-2.0
"""Command line arguments of the kinds in `xmoe.env`: refused while they are parsed, and with what
is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from xmoe import env

EP = env.integer(1, 65536)


def of(kind: env.Kind) -> Callable[[str], Any]:
    """For `type=` of an option."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{env.shown(text)} is not acceptable; allowed: {kind.values}; next: correct it"
            ) from None

    return parse


def need(option: str, given: object, ok: bool, only_with: str) -> None:
    """Refuse an option that would have no effect.

    Raises:
        ConfigError: it was given although not `ok`.
    """
    if given is not None and given is not False and not ok:
        from xmoe.errors import ConfigError

        raise ConfigError(f"{option} has no effect here; allowed: {only_with}; next: leave it out")
