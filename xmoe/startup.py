# SPDX-License-Identifier: Apache-2.0
"""The check of the vendor chain that an engine makes before it loads weights.

report = xmoe.validate_vendor_chain()      a report, whatever is wrong; raises nothing for it
xmoe.check_vendor_chain()                  once per process: raises when MegaMoe cannot be used
xmoe.check_vendor_chain(group)             once per group: every rank raises the same error
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from typing import TYPE_CHECKING, Any

from xmoe.config import XmoeConfig
from xmoe.errors import LibraryError, XmoeError
from xmoe.kernels import capability
from xmoe.kernels.acl.problems import REMEDIES, Code, Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SOFTWARE_SENTENCE = "software device: nothing here was run on an NPU"

_EMPTY_CHAIN: dict[str, Any] = {
    "vendor_chain": [],
    "skipped": [],
    "not_in_chain": [],
    "builtin": [],
    "packages": {},
    "environment": {},
    "libraries": [],
    "interposed": [],
}


def validate_vendor_chain(
    device: str | None = None, *, abi_variant: str | None = None, root: str | None = None
) -> dict[str, Any]:
    """The vendor chain as it stands now: verdict, problems with remedies, and everything found.

    Local. Loads the libraries a launch would use; binds no device. JSON-able.

    Args:
        device: "auto", "soft" or "cann"; None reads XMOE_DEVICE.
        abi_variant: pinned ABI variant; None reads the configuration.
        root: an explicit toolkit folder.

    Returns:
        "verdict" is "valid" or "invalid"; "problems" lists code, text and remedy of what keeps
        MegaMoe from running; "warnings" are sentences about what does no harm by itself.

    Raises:
        ConfigError: an argument or an environment variable is not acceptable.
    """
    if abi_variant is None:
        abi_variant = XmoeConfig.resolve().abi_variant
    return describe(capability.probe(device, abi_variant=abi_variant, root=root))


def describe(found: capability.Capability) -> dict[str, Any]:
    """The report on a capability that was probed."""
    plain = found.to_dict()
    return {
        "verdict": "valid" if found.available else "invalid",
        "problems": [
            {"code": code, "text": text, "remedy": REMEDIES[Code(code)]}
            for code, text in found.problems
        ],
        "warnings": list(found.warnings),
        "device": {
            "kind": "software device" if found.identity else "vendor CANN",
            "identity": found.identity,
            "note": SOFTWARE_SENTENCE if found.identity else "",
            "soc": found.soc,
        },
        "toolkit": {
            "root": found.toolkit_root,
            "kind": found.toolkit_kind,
            "found_via": found.found_via,
            "version": found.cann_version,
            "version_files": [{"file": f, "version": v} for f, v in found.version_files],
        },
        **_EMPTY_CHAIN,
        **plain["chain"],
        "mega_moe": {
            "usable": found.mega_moe and found.abi_variant is not None,
            "vendor": found.vendor,
            "vendor_version": found.vendor_version,
            "abi_variant": found.abi_variant,
            "variant_source": found.variant_source,
            "witnesses": plain["variant_witnesses"],
            "callable_variants": list(found.callable_variants),
            "origins": list(plain["origins"]),
        },
        "comm": {"missing": list(found.missing_comm_symbols)},
        "fused_moe_on_npu": list(found.npu_operators),
    }


_lock = threading.Lock()
_checked: dict[tuple[str | None, ...], dict[str, Any]] = {}


def _renew_lock_in_child() -> None:
    # Another thread may have held it at fork; in the child nobody would release it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


def check_vendor_chain(
    group: ProcessGroup | None = None,
    *,
    device: str | None = None,
    abi_variant: str | None = None,
    found: capability.Capability | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Raise unless MegaMoe can be used; the report otherwise. COLLECTIVE when a group is given.

    The work is done once per process: a good answer is kept as long as the settings that lead to
    it stay the same, a bad one never. Any thread may call it.

    Args:
        group: also agree over its ranks, which must accept CPU tensors.
        device, abi_variant: as `validate_vendor_chain`; equal on all ranks.
        found: what this process has probed already; nothing is looked at again then.
        timeout_s: how long to wait for the other ranks.

    Raises:
        LibraryError: or a class of it; with a group the lowest failing rank's, the same text on
            every rank.
        ConfigError: an argument or an environment variable is not acceptable; with a group, of
            any rank, and on every rank.
        RankDisagreement: the ranks found different libraries or variants; on every rank.
    """
    error: Exception | None = None
    report: dict[str, Any] = {}
    try:
        report = _check_once(device, abi_variant) if found is None else _valid(found)
    except XmoeError as caught:
        error = caught
    if group is None:
        if error is not None:
            raise error
        return report
    from xmoe.comm.agree import agree_success, require_equal

    agree_success(group, "vendor chain", error, timeout_s)
    chosen = report["mega_moe"]
    equal = {
        "cann_version": report["toolkit"]["version"],
        "operator_version": chosen["vendor_version"],
        "abi_variant": chosen["abi_variant"],
        "library_digest": _digest(chosen["origins"][0]["resolved_path"]),
    }
    require_equal(group, "vendor chain", equal, timeout_s)
    return report


def _check_once(device: str | None, abi_variant: str | None) -> dict[str, Any]:
    with _lock:
        # What was found last time is looked up by what leads to it, so that a changed environment
        # is looked at again.
        config = XmoeConfig.resolve()
        pinned = config.abi_variant if abi_variant is None else abi_variant
        key = (device, pinned, *capability.search_key())
        kept = _checked.get(key)
        if kept is None:
            kept = _checked[key] = _valid(capability.probe(device, abi_variant=pinned))
        return copy.deepcopy(kept)


def _valid(found: capability.Capability) -> dict[str, Any]:
    """The report on a usable chain; the error of one that is not."""
    report = describe(found)
    if report["verdict"] != "valid":
        raise _error(report["problems"])
    return report


def _error(problems: list[dict[str, str]]) -> LibraryError:
    """The first problem's exception; how many more there are is added to its text."""
    first = problems[0]
    error = Problem(Code(first["code"]), first["text"]).error()
    if len(problems) == 1:
        return error
    more = ", ".join(problem["code"] for problem in problems[1:])
    return type(error)(f"{error} (also: {more}; run xmoe doctor)")


def _digest(path: str | None) -> str | None:
    """Of the library's content: equal versions may be different builds."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return None
