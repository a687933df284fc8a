# SPDX-License-Identifier: Apache-2.0
"""`xmoe doctor`: which libraries would be used, where each symbol comes from, what would be chosen.

Exit codes: 0 the chain is valid, 1 it is not, 2 bad input.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from xmoe import __version__, arguments, outputs, startup
from xmoe.config import XmoeConfig
from xmoe.errors import UnsupportedError
from xmoe.facts import facts_of
from xmoe.kernels import capability
from xmoe.kernels.acl import libraries, toolkit
from xmoe.policy.select import select
from xmoe.types import MoeShape

if TYPE_CHECKING:
    from rich.tree import Tree

EXAMPLE_SHAPES = {
    "Qwen3.5-35B-A3B": MoeShape(hidden=2048, intermediate=512, num_experts=256, topk=8),
    "shipped example": MoeShape(hidden=1024, intermediate=512, num_experts=32, topk=4),
}


# torch alone may take long from a cold disk.
_IMPORT_S = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `xmoe doctor`."""
    outputs.add_json(parser)
    parser.add_argument("--device", choices=toolkit.DEVICES, help="instead of XMOE_DEVICE")
    parser.add_argument(
        "--ep",
        type=arguments.of(arguments.EP),
        default=8,
        metavar="N",
        help="EP size of the example (default 8)",
    )


def collect(device: str | None = None, ep_size: int = 8) -> dict[str, Any]:
    """The whole report as plain values. Local; loads the libraries a launch would use."""
    config = XmoeConfig.resolve()
    found = capability.probe(device, abi_variant=config.abi_variant)
    report = startup.describe(found)
    report["comm"]["needed"] = list(libraries.COMM_SYMBOLS)
    return {
        "valid": found.available,
        **report,
        "versions": _package_versions(),
        "torch_npu": _torch_npu(),
        "policy": {
            name: _decision(config, found, shape, ep_size) for name, shape in EXAMPLE_SHAPES.items()
        },
    }


def _package_versions() -> dict[str, str | None]:
    """Installed versions from package metadata; importing torch would take seconds."""
    found: dict[str, str | None] = {"python": platform.python_version(), "xmoe": __version__}
    for name in ("torch", "transformers", "torch_npu", "cann_ops_transformer"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _torch_npu() -> dict[str, Any]:
    """Whether torch_npu is there, and whether it can be imported.

    Tried in a process of its own: it takes torch with it, and a broken one may do anything.
    """
    try:
        spec = importlib.util.find_spec("torch_npu")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return {"found": False, "usable": False, "problem": "not installed"}
    if spec.origin is None:  # it could be imported, and would hold nothing
        return {"found": True, "usable": False, "problem": "an empty folder, not a package"}
    command = [sys.executable, "-P", "-c", "import torch_npu"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"its import did not end in {_IMPORT_S} s"
    else:
        said = done.stderr.strip().splitlines() or [f"its import ended with {done.returncode}"]
        problem = said[-1] if done.returncode else ""
    return {"found": True, "usable": not problem, "problem": problem}


def _decision(
    config: XmoeConfig, found: capability.Capability, shape: MoeShape, ep_size: int
) -> dict[str, Any]:
    """What would be chosen for a shape on this machine, and why."""
    facts = facts_of(config, found, ep_size, assumed=("ranks", "ccl_buffer_bytes"))
    base = {"shape": asdict(shape), "ep_size": ep_size, "mode": config.mode.value}
    try:
        decision = select(config.mode, facts, shape, config.profile)
    except UnsupportedError as error:
        return {**base, "path": None, "reasons": list(error.rejections)}
    return {**base, "path": decision.path.value, "reasons": list(decision.reasons)}


def main(args: argparse.Namespace) -> int:
    """Print the report; 0 when the chain is valid, else 1."""
    (target,) = outputs.prepare(("--json", args.json))
    report = collect(args.device, args.ep)
    outputs.deliver_report(target, report, lambda: outputs.render(_tree(report)))
    return 0 if report["valid"] else 1


def _tree(report: dict[str, Any]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    def add(parent: Tree, text: str, style: str = "") -> Tree:
        return parent.add(Text(text, style=style))  # Text: paths may hold brackets

    ok = report["valid"]
    root = Tree(Text(f"xmoe doctor: {'valid' if ok else 'NOT VALID'}", "green" if ok else "red"))
    for problem in report["problems"]:
        node = add(root, f"{problem['code']}: {problem['text']}", "red")
        add(node, f"next step: {problem['remedy']}")
    for warning in report["warnings"]:
        add(root, f"warning: {warning}", "yellow")
    packages = [f"{n} {v or 'not installed'}" for n, v in report["versions"].items()]
    add(root, ", ".join(packages))
    module = report["torch_npu"]
    if module["found"] and not module["usable"]:
        node = add(root, f"torch_npu cannot be imported: {module['problem']}", "yellow")
        add(node, "next step: repair it, or set the CANN environment it was built for; only npu "
            "tensors need it")  # fmt: skip
    _add_device(add, root, report)
    _add_chain(add, root, report)
    node = add(root, "policy")
    for name, choice in report["policy"].items():
        title = f"{name} at EP{choice['ep_size']}, mode {choice['mode']}: "
        entry = add(node, title + (choice["path"] or "error"))
        for reason in choice["reasons"]:
            add(entry, reason)
    return root


def _add_device(add: Any, root: Tree, report: dict[str, Any]) -> None:
    device, kit = report["device"], report["toolkit"]
    if kit["root"] is None:
        add(root, "toolkit: none")
        return
    node = add(root, f"toolkit {kit['root']} (found via {kit['found_via']})")
    add(node, f"version {kit['version'] or 'unknown'}")
    for file in kit["version_files"]:
        add(node, f"{file['version']} in {file['file']}")
    title = f"device: {device['identity'] or device['kind']}, SoC {device['soc'] or 'unknown'}"
    node = add(root, title)
    if device["note"]:
        add(node, device["note"], "yellow")
    node = add(root, "libraries")
    for lib in report["libraries"]:
        extra = ", already loaded by someone else" if lib["already_loaded"] else ""
        entry = add(node, f"{lib['name']}: {lib['path']} (via {lib['found_via']}{extra})")
        for copy in lib["other_copies"]:
            add(entry, f"also loaded: {copy}", "yellow")
    for shadow in report["interposed"]:
        add(node, f"{shadow['function']} is shadowed by {shadow['file']}", "yellow")


def _add_chain(add: Any, root: Tree, report: dict[str, Any]) -> None:
    node = add(root, "vendor chain")
    for place, entry in enumerate(report["vendor_chain"], 1):
        version = entry["version"] or "unknown"
        item = add(node, f"{place}. {entry['path']} (via {entry['found_via']}, version {version})")
        if entry["realpath"] != entry["path"]:
            add(item, f"really {entry['realpath']}")
        step = f"; {entry['remedy']}" if entry["remedy"] else ""
        add(item, f"{entry['verdict']}{step}")
        for note in entry["notes"]:
            add(item, note, "yellow")
    for entry in report["skipped"]:
        add(node, f"skipped {entry['entry']!r} ({entry['found_via']}): {entry['reason']}")
    for path in report["not_in_chain"]:
        add(node, f"installed but not in the chain: {path}")
    packages = report["packages"]
    if packages.get("front_end_built_for"):
        add(node, f"front end built for {packages['front_end_built_for']}")
    for path, attributes in packages.get("kernels", {}).items():
        add(node, f"kernels of MegaMoe in {path}: {', '.join(attributes)}")
    _add_mega_moe(add, root, report)


def _add_mega_moe(add: Any, root: Tree, report: dict[str, Any]) -> None:
    mega_moe = report["mega_moe"]
    variant = mega_moe["abi_variant"] or "unknown"
    source = mega_moe["variant_source"] or "no symbols"
    node = add(root, f"MegaMoe: ABI variant {variant} ({source})")
    said = mega_moe["witnesses"]
    if said:
        add(node, f"pin: {said['pin'] or 'none'}")
        add(node, f"metadata: {said['metadata'] or 'none'} ({said['metadata_source']})")
        add(node, f"probe: {said['probe']}")
    for origin in mega_moe["origins"]:
        elsewhere = origin["global_path"] or "nothing"
        item = add(node, f"{origin['symbol']} from {origin['resolved_path']}")
        add(item, f"process-wide look-up finds {elsewhere}; {'ok' if origin['ok'] else 'NOT OK'}")
    missing = report["comm"]["missing"]
    count = len(report["comm"]["needed"])
    comm = f"{len(missing)} of {count} missing: {', '.join(missing)}" if missing else f"all {count}"
    add(root, f"communication symbols: {comm}")
    node = add(root, "fused_moe on npu tensors")
    for line in report["fused_moe_on_npu"]:
        add(node, line)
