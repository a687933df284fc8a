# SPDX-License-Identifier: Apache-2.0
"""Fused mixture-of-experts for Qwen3.5-MoE on Ascend through the aclnnMegaMoe C ABI.

Importing this package loads no torch, opens no library and reads no environment variable. The
public names below are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xmoe.config import XmoeConfig as XmoeConfig
    from xmoe.errors import XmoeError as XmoeError
    from xmoe.startup import check_vendor_chain as check_vendor_chain
    from xmoe.startup import validate_vendor_chain as validate_vendor_chain
    from xmoe.types import FenceMode as FenceMode
    from xmoe.types import Mode as Mode
    from xmoe.types import MoeShape as MoeShape
    from xmoe.types import Path as Path
    from xmoe.types import TokenBatch as TokenBatch

_HOME = {
    "FenceMode": "xmoe.types",
    "Mode": "xmoe.types",
    "MoeShape": "xmoe.types",
    "Path": "xmoe.types",
    "TokenBatch": "xmoe.types",
    "XmoeConfig": "xmoe.config",
    "XmoeError": "xmoe.errors",
    "check_vendor_chain": "xmoe.startup",
    "validate_vendor_chain": "xmoe.startup",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'xmoe' has no attribute {name!r}; it has {sorted(_HOME)}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
