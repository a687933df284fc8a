# SPDX-License-Identifier: Apache-2.0
"""Report files and functions that have grown past what one sitting can hold.

The guide figures only print a note: some long things are one thing. Past the limits the check
fails, since nothing that long has yet been one thing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_GUIDE, FILE_LIMIT = 400, 700
FUNCTION_GUIDE, FUNCTION_LIMIT = 60, 120
SOURCE_SUFFIXES = {".py", ".c", ".h", ".cpp", ".hpp", ".sh"}
SOURCE_FOLDERS = ("xmoe", "kernels", "policy", "comm", "models", "tests", "ci")


def sources() -> list[Path]:
    """Source files that git tracks or would track, each once under its real path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCE_FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        names = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:  # an unpacked archive
        names = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(
        {
            path.resolve()
            for path in names
            if path.suffix in SOURCE_SUFFIXES and path.is_file() and "_native.c" != path.name
        }
    )


def measure(path: Path, text: str) -> list[tuple[int, int, int, str]]:
    """(lines, guide, limit, what) of the file and of each of its functions."""
    found = [(text.count("\n"), FILE_GUIDE, FILE_LIMIT, str(path))]
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((lines, FUNCTION_GUIDE, FUNCTION_LIMIT, f"{path}:{node.name}"))
    return found


def main() -> int:
    """Print what is past its guide, longest first; 1 if anything is past its limit."""
    rows = [
        row
        for path in sources()
        for row in measure(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
        if row[0] > row[1]
    ]
    for lines, guide, limit, what in sorted(rows, reverse=True):
        verdict = f"FAIL, limit {limit}" if lines > limit else f"note, guide {guide}"
        print(f"{lines:>6} lines  {what}  ({verdict})")
    failed = sum(lines > limit for lines, _, limit, _ in rows)
    print(f"size: {len(rows)} past the guide, {failed} past the limit")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
