# SPDX-License-Identifier: Apache-2.0
"""Variant x {called, detected, wrong pins detected}, each from a real run on the software device.

    python tests/support/abi_table.py      # writes docs/benchmarks/abi-variants.json

The page docs/megamoe-abi.md shows what is recorded there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import abi_vendors
from support.abi_vendors import LETTERS
from support.acl_stubs import environment, run_child
from support.mega_moe import Rank, batch, check
from support.ranks import run_ranks, values
from support.tree import ROOT

RECORD = ROOT / "docs" / "benchmarks" / "abi-variants.json"
IDENTIFY = """
runtime = loader.load(toolkit.find_toolkit())
def identify(pin=None):
    got = runtime.find_mega_moe(pin)
    if isinstance(got, Problem):
        return [None, got.code.value]
    problem = got.identified.problem
    return [got.variant and got.variant.id, problem and problem.code.value]
"""


def detect(variant: str, vendor: Path) -> dict[str, Any]:
    """Which variant is found, and how many of the other letters are refused as a pin."""
    code = f"{IDENTIFY}say([identify(), {{p: identify(p) for p in {LETTERS!r}}}])"
    env = environment(None, XMOE_DEVICE="soft", ASCEND_CUSTOM_OPP_PATH=str(vendor))
    (found, problem), pins = run_child(code, env)
    refused = [p for p in LETTERS if pins[p] == [None, "variant_mismatch"]]
    return {
        "detected": found if problem is None else problem,
        "right_pin_taken": pins[variant] == [variant, None],
        "wrong_pins_detected": len([p for p in refused if p != variant]),
        "wrong_pins": len(LETTERS) - 1,
    }


def _call(rank: int, group: Any) -> Any:
    with Rank(rank, group, 4, 2, 4) as me:
        variant = me.device.runtime.mega_moe.variant
        return me.run(batch(4, 4, 2, seed=rank)), variant and variant.id


def called(variant: str, vendor: Path) -> bool:
    """Whether two ranks that call the library get what the float64 reference says."""
    env = {"XMOE_DEVICE": "soft", "ASCEND_CUSTOM_OPP_PATH": str(vendor)}
    ranks = values(run_ranks(_call, 2, env=env, deadline_s=120))
    check([y for y, _ in ranks], [batch(4, 4, 2, seed=r) for r in range(2)], 4)
    return [found for _, found in ranks] == [variant, variant]


def row(variant: str, folder: Path) -> dict[str, Any]:
    """One variant's row of the table."""
    vendor = abi_vendors.vendor_folder(folder / variant, variant)
    return {"called": called(variant, vendor), **detect(variant, vendor)}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="xmoe-abi-") as name:
        rows = {variant: row(variant, Path(name)) for variant in LETTERS}
    found = {"device": "software device; nothing here was run on an NPU", "variants": rows}
    RECORD.write_text(json.dumps(found, indent=2) + "\n")
    print(RECORD)


if __name__ == "__main__":
    main()
