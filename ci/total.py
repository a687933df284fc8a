# SPDX-License-Identifier: Apache-2.0
"""Add up the result files pytest wrote into a folder, one per group, and print one closing line.

Fails when a test failed, and also when a group ran none: an empty run must not look green.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main(folder: Path) -> int:
    """Print a line per group and the sum; 1 if anything failed or a group was empty."""
    passed = failed = skipped = empty = 0
    for path in sorted(folder.glob("*.xml")):
        suite = ElementTree.parse(path).getroot().find("testsuite")
        if suite is None:
            raise SystemExit(f"{path}: no testsuite element; pytest was ended before it finished")
        tests, bad, skip = (
            int(suite.get("tests", 0)),
            int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
            int(suite.get("skipped", 0)),
        )
        good = tests - bad - skip
        seconds = float(suite.get("time", 0.0))
        print(f"{path.stem:<10}{good:>6} passed{bad:>5} failed{skip:>5} skipped{seconds:>8.0f} s")
        passed, failed, skipped = passed + good, failed + bad, skipped + skip
        empty += good + bad == 0
    if empty:
        print(f"{empty} group(s) ran no test")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or empty > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
