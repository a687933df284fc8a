# SPDX-License-Identifier: Apache-2.0
"""The checkout as the tests see it: its root and the Python modules of the package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Where each part of the package really lives. Written again here, not taken from setup.py, so that
# a folder forgotten there is noticed.
FOLDERS = {
    "xmoe": ROOT / "xmoe",
    "xmoe.kernels": ROOT / "kernels",
    "xmoe.policy": ROOT / "policy",
    "xmoe.comm": ROOT / "comm",
    "xmoe.models": ROOT / "models",
}


def is_checkpoint_file(path: Path) -> bool:
    """Whether a file belongs to a checkpoint: data, even where it is Python."""
    checkpoints = ROOT / "models" / "checkpoints"
    return path.is_relative_to(checkpoints) and path.parent != checkpoints


def modules() -> dict[str, Path]:
    """Dotted name -> source file of every module of the package in this checkout."""
    found: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            # Some versions of rglob follow links; those in xmoe/ must not count twice anywhere.
            relative = path.relative_to(folder)
            if any((folder / part).is_symlink() for part in relative.parts[:1]):
                continue
            if is_checkpoint_file(path):
                continue
            parts = list(relative.with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join([package, *parts])] = path
    return found
