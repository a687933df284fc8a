# SPDX-License-Identifier: Apache-2.0
"""What the hardware kit needs, and which fact is missing where it cannot run."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from xmoe.errors import XmoeError
from xmoe.kernels.acl.toolkit import SOFTWARE_ROOT


def missing_toolkit(environ: dict[str, str] | None = None) -> str:
    """Why there is no vendor's CANN here; empty when there is one."""
    value = (os.environ if environ is None else environ).get("ASCEND_HOME_PATH", "")
    if not value:
        return "no vendor's CANN: ASCEND_HOME_PATH is not set; source the toolkit's set_env.sh"
    root = Path(value)
    if not root.is_dir():
        return f"no vendor's CANN: ASCEND_HOME_PATH={value} is no folder"
    if root.resolve() == SOFTWARE_ROOT.resolve():
        return "no vendor's CANN: ASCEND_HOME_PATH names the software device"
    return ""


@cache
def missing_device(ranks: int) -> str:
    """Why `ranks` devices of an Atlas A3 are not there; empty when they are."""
    missing = missing_toolkit()
    if missing:
        return missing
    from xmoe.conformance.run import SOFTWARE, run_ranks

    try:
        label, count = run_ranks(_look, 1, silence_s=60.0)[0]
    except XmoeError as error:
        return f"the device does not answer: {error}"
    if label == SOFTWARE:
        return f"the toolkit {os.environ['ASCEND_HOME_PATH']} is a copy of the software device"
    if not label.startswith("Ascend910_93"):
        return f"no Atlas A3: the chip is {label}, needed is Ascend910_93"
    if count < ranks:
        return f"only {count} devices; needed are {ranks}"
    return ""


def _look(context: object) -> tuple[str, int]:
    from xmoe.conformance.run import SOFTWARE
    from xmoe.conformance.session import Session

    session = Session("cann")
    out = session.ffi.new("uint32_t*")
    session.runtime.acl.aclrtGetDeviceCount(out)
    if session.soft:
        return SOFTWARE, int(out[0])
    return session.ffi.string(session.runtime.acl.aclrtGetSocName()).decode(), int(out[0])
