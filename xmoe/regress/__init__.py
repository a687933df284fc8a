# SPDX-License-Identifier: Apache-2.0
"""`xmoe regress`: generate with a real checkpoint at an EP size and prove the answers repeat.

Attention is data parallel (DP = EP), experts are expert parallel, one process per rank. `plan`
says what to run, `rank` is one rank's part, `checks` judges what the ranks returned, `report`
prints it.
"""

from __future__ import annotations

import argparse

from xmoe.regress.plan import add_arguments

__all__ = ["add_arguments", "main"]


def main(args: argparse.Namespace) -> int:
    """Run the regression. Returns 0 when every check passed, 1 otherwise.

    Raises:
        XmoeError: it could not be run, or a rank of it failed.
    """
    from xmoe.kernels.capability import require_torch

    require_torch()
    from xmoe.regress.command import run

    return run(args)
