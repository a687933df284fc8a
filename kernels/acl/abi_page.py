# SPDX-License-Identifier: Apache-2.0
"""Writes docs/megamoe-abi.md out of the variant table: `python -m xmoe.kernels.acl.abi_page`.

Outside a checkout it prints the page. With `--check` it only compares, and says with exit code 1
that the page is not the table's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from xmoe.kernels.acl import abi_probe
from xmoe.kernels.acl.variants import (
    CTYPES,
    LAUNCH_CTYPES,
    NEUTRAL,
    REFUSED,
    RELEASES,
    VARIANTS,
    Variant,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megamoe-abi.md"
RECORD = PAGE.parent / "benchmarks" / "abi-variants.json"
_HEAD = """<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by python -m xmoe.kernels.acl.abi_page; do not edit. -->
# ABI variants of aclnnMegaMoe

The vendor changed the parameter list of `aclnnMegaMoeGetWorkspaceSize` many times under one symbol
name. There is no version symbol, so a caller has to know which list a library was compiled with.
The letters are this project's own. This page and the compiled calls come from one table,
`kernels/acl/variants.py`. Nothing here was run on an NPU; each variant was called in a software
vendor library that was compiled with it.
"""
_DETECTION = """
## How the variant is found out

1. A pin: the setting `abi_variant` (`XMOE_ABI_VARIANT`).
2. Metadata: what the operator package's `version.info` says, if both symbols come from that
   package's verified library. Releases whose variant public source shows: {releases}.
3. The return-code probe (`XMOE_ABI_PROBE`), in a child process. Slots count integers and pointers
   from 0; floats travel elsewhere. In every call slots {null} are null, so that
   each variant stops at a check before it creates or reads anything: 161001 for a null pointer,
   161002 for `moeExpertNum` 0. Then one slot after another is set to null.

The first that speaks decides, but a list that the probe excludes is never called: a pin against
the probe is `variant_mismatch`, metadata against the probe is `variant_unknown`, and so is a
library that crashes, hangs or answers as no known variant does. Unknown means the split path, or an
error in mode `on`.

| variant | slot of moeExpertNum | null checks among slots {first}-{last} |
|---|---|---|
"""


_RUNS = """
## What runs gave

On the software device, whose vendor library was compiled as each variant (`python
tests/support/abi_table.py`). Called: two ranks, through the operator, equal to the float64
reference within the tolerance. Detected: by the probe alone, from a package that does not tell.
Wrong pins: each of the other letters set as `abi_variant` is refused as `variant_mismatch`.

| variant | called | detected as | right pin taken | wrong pins detected |
|---|---|---|---|---|
"""


def _runs() -> str:
    """The recorded table; empty where the record is not at hand."""
    try:
        rows = json.loads(RECORD.read_text(encoding="utf-8"))["variants"]
    except OSError:
        return ""
    lines = [
        f"| {variant} | {'yes' if row['called'] else 'NO'} | {row['detected']} | "
        f"{'yes' if row['right_pin_taken'] else 'NO'} | {row['wrong_pins_detected']} of "
        f"{row['wrong_pins']} |\n"
        for variant, row in rows.items()
    ]
    return _RUNS + "".join(lines)


def render() -> str:
    """The page's text."""
    parts = [_HEAD, "\n| variant | parameters | change | source | notes |\n|---|---|---|---|---|\n"]
    before: Variant | None = None
    for variant in VARIANTS.values():
        change = _change(before, variant)
        row = (variant.id, str(len(variant.params)), change, variant.source, variant.notes)
        parts.append(f"| {' | '.join(row)} |\n")
        before = variant
    parts.append("\nKnown by name and never called:\n\n")
    parts += [f"- **{name}**: {reason}.\n" for name, reason in REFUSED.items()]
    parts.append(
        f"\nPhase two is the same everywhere: `aclnnMegaMoe({', '.join(LAUNCH_CTYPES)})` with "
        f"workspace, workspaceSize, executor and stream.\n"
    )
    parts.append(
        _DETECTION.format(
            releases=", ".join(f"{release} is {v}" for release, v in RELEASES.items()),
            null=", ".join(map(str, sorted(abi_probe.always_null()))),
            first=abi_probe.PROBED[0],
            last=abi_probe.PROBED[-1],
        )
    )
    parts += [_slots(variant) for variant in VARIANTS.values()]
    parts.append(_runs())
    parts.append("\n## Parameters\n\nThe number is the 1-based position.\n\n")
    parts.append(_parameters())
    parts.append(
        '\nA variant without a parameter is called only with the value that means "not used":\n\n'
    )
    parts += [f"- `{key}`: {_values(values)}\n" for key, values in NEUTRAL.items()]
    parts += [_prototype(variant) for variant in VARIANTS.values()]
    return "".join(parts)


def _change(before: Variant | None, now: Variant) -> str:
    if before is None:
        return "first with weights in the list"
    old, new = {p.key for p in before.params}, {p.key for p in now.params}
    added = [p.name for p in now.params if p.key not in old]
    gone = [p.name for p in before.params if p.key not in new]
    names = {p.key: p.name for p in before.params}
    renamed = [f"{names[p.key]} is called {p.name}" for p in now.params
               if names.get(p.key, p.name) != p.name]  # fmt: skip
    words = [f"+ {', '.join(added)}"] if added else []
    words += [f"- {', '.join(gone)}"] if gone else []
    return "; ".join([*words, *renamed])


def _slots(variant: Variant) -> str:
    flips = ", ".join(map(str, sorted(abi_probe.expected_flips(variant))))
    if not variant.checks_integers:
        flips += " (no check of integers: told by its texts only)"
    return f"| {variant.id} | {variant.integer_slot('moeExpertNum')} | {flips} |\n"


def _parameters() -> str:
    # In the order of the last variant that has a parameter, each parameter once.
    keys: list[str] = []
    for variant in reversed(list(VARIANTS.values())):
        for place, param in enumerate(variant.params):
            if param.key not in keys:
                earlier = [p.key for p in variant.params[:place]]
                at = max((keys.index(k) for k in earlier if k in keys), default=-1) + 1
                keys.insert(at, param.key)
    kinds = {p.key: p.kind for v in VARIANTS.values() for p in v.params}
    optional = {p.key for v in VARIANTS.values() for p in v.params if p.optional}
    letters = list(VARIANTS)
    rows = [
        f"| parameter | C type | may be null | {' | '.join(letters)} |\n",
        f"|---|---|---|{'---|' * len(letters)}\n",
    ]
    for key in keys:
        places = [str(v.position(key)) if v.has(key) else "" for v in VARIANTS.values()]
        null = "yes" if key in optional else ""
        rows.append(f"| `{key}` | `{CTYPES[kinds[key]]}` | {null} | {' | '.join(places)} |\n")
    return "".join(rows)


def _values(values: tuple[object, ...]) -> str:
    words = ["null" if v is None else "an empty list" if v == () else repr(v) for v in values]
    return ", ".join(words)


def _prototype(variant: Variant) -> str:
    lines = [
        f"    {CTYPES[p.kind]} {p.name}{',' if p is not variant.params[-1] else ''}"
        f"{'  // may be null' if p.optional else ''}"
        for p in variant.params
    ]
    head = f"\n### Variant {variant.id}, {len(variant.params)} parameters\n\n```c\n"
    return head + "aclnnStatus aclnnMegaMoeGetWorkspaceSize(\n" + "\n".join(lines) + ");\n```\n"


def main(argv: Sequence[str]) -> int:
    """Write the page, or compare it with `--check`."""
    text = render()
    if list(argv) == ["--check"]:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE} {'is' if same else 'is not'} what the table says")
        return 0 if same else 1
    if not (PAGE.parents[1] / "pyproject.toml").is_file():
        print(text)  # an installed package has no docs folder to write to
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
