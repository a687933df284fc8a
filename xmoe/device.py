# SPDX-License-Identifier: Apache-2.0
"""`xmoe device env`: shell lines that point a process at the software device shipped with xmoe."""

from __future__ import annotations

import argparse
import shlex

from xmoe import outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `xmoe device`."""
    parser.add_argument(
        "action", choices=("env",), help="env: print export lines, for eval in a shell"
    )


def main(args: argparse.Namespace) -> int:
    """Print the lines. Local; opens no library."""
    from xmoe.kernels.softdev import environment

    for name, value in sorted(environment().items()):
        outputs.say(f"export {name}={shlex.quote(str(value))}")
    return 0
