# SPDX-License-Identifier: Apache-2.0
"""Tests over the unmodified torch_npu wheel.

Each body runs in a forked child, which initialises the device for itself: threads of a device do
not survive a fork, so pytest's own process never does.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# The wheel says so once, at the first call of some operators; it is no fault of the caller.
WHEEL_WARNING = "Cannot create tensor with internal format"
ACTIVATE = 'eval "$(xmoe device env)" in the shell that starts pytest'


def _reason() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; pip install 'xmoe[npu]' and run ci/test.sh npu"
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if not home or not any(
        part.startswith(home) for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    ):
        return f"no CANN environment is active; {ACTIVATE}"
    if not (Path(home) / "lib64" / "libopapi.so").exists():
        return f"{home} has no general operators; run kernels/softdev/build.py --opapi"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = _reason()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{WHEEL_WARNING}"))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
