# SPDX-License-Identifier: Apache-2.0
"""`xmoe conformance`: does the device that is there behave as this project takes it to?

Every case is one semantic of the vendor's interface that the software device imitates and the
product relies on. The list is the same on any device; each line of the report names the device it
was seen on. Cases that passed on the software device alone say nothing about an NPU.

    case      what a case is, and how it passes, fails or is skipped
    session   one rank's device, and handles over its memory
    cases_*   the cases
    run       carries them out in processes of their own, with a deadline
    report    the table and the JSON
"""

from __future__ import annotations

import argparse

from xmoe import arguments, env, outputs

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `xmoe conformance`."""
    parser.add_argument(
        "--ep",
        default=2,
        type=arguments.of(env.whole(2, 4, 8, 16, 32)),
        metavar="N",
        help="ranks for the cases that need a group: 2, 4, 8, 16 or 32 (default 2)",
    )
    parser.add_argument("--device", choices=("auto", "soft", "cann"), help="instead of XMOE_DEVICE")
    parser.add_argument(
        "--tensors",
        choices=("acl", "npu"),
        default="acl",
        help="whose memory and streams the cases use: ACL's own (default), or torch_npu's",
    )
    parser.add_argument("--list", action="store_true", help="print names and meanings, run nothing")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="a case, or a prefix such as event; may be repeated",
    )
    parser.add_argument(
        "--skip-harmful",
        action="store_true",
        help="leave out the cases that make the device report an error",
    )
    parser.add_argument(
        "--deadline",
        default=60.0,
        type=arguments.of(env.seconds()),
        metavar="S",
        help="seconds one case may take (default 60)",
    )
    outputs.add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Run the cases. Returns 0 when none failed, 1 otherwise."""
    from xmoe.conformance.run import command

    return command(args)
