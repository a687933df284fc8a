# SPDX-License-Identifier: Apache-2.0
"""Where the software device is. Importing this opens no library and needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

_LIBRARIES = (
    "lib64/libascendcl.so",
    "lib64/libnnopbase.so",
    "lib64/libhccl.so",
    "lib64/libhccl_fwk.so",
    "opp/vendors/config.ini",
)


def root() -> Path:
    """Folder of the software device's tree, laid out as a CANN installation; may not exist yet."""
    return Path(__file__).resolve().parent / "ascend"


def is_built() -> bool:
    """Whether the runtime libraries are there; `python kernels/softdev/build.py` makes them."""
    return all((root() / name).is_file() for name in _LIBRARIES)


def environment() -> dict[str, str]:
    """Variables that make another program find the software device as its CANN.

    They must be set before that program starts: the loader reads LD_LIBRARY_PATH once. The present
    LD_LIBRARY_PATH is kept behind ours; ASCEND_CUSTOM_OPP_PATH is emptied, because an entry there
    would come before the vendor of this tree.
    """
    tree = root()
    search = [str(tree / "lib64"), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "ASCEND_HOME_PATH": str(tree),
        "ASCEND_OPP_PATH": str(tree / "opp"),
        "ASCEND_CUSTOM_OPP_PATH": "",
        "LD_LIBRARY_PATH": os.pathsep.join(part for part in search if part),
    }
