# SPDX-License-Identifier: Apache-2.0
"""Packages, folder mapping and native parts. Metadata and tool settings are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# Folder of each package. The four top-level folders have no __init__.py of their own, so that
# `import kernels` from the repository root never shadows an installed package of that name.
# tests/unit/test_packaging.py compares this table with the tree and with the built wheel.
PACKAGES = {
    "xmoe": "xmoe",
    "xmoe.pipeline": "xmoe/pipeline",
    "xmoe.pipeline.adapters": "xmoe/pipeline/adapters",
    "xmoe.pipeline.probes": "xmoe/pipeline/probes",
    "xmoe.regress": "xmoe/regress",
    "xmoe.conformance": "xmoe/conformance",
    "xmoe.kernels": "kernels",
    "xmoe.kernels.acl": "kernels/acl",
    "xmoe.kernels.ops": "kernels/ops",
    "xmoe.kernels.ops.cam": "kernels/ops/cam",
    "xmoe.kernels.softdev": "kernels/softdev",
    "xmoe.policy": "policy",
    "xmoe.comm": "comm",
    "xmoe.models": "models",
    "xmoe.models.checkpoints": "models/checkpoints",
    "xmoe.models.qwen3_5": "models/qwen3_5",
    "xmoe.models.qwen3_5.train": "models/qwen3_5/train",
}

PACKAGE_DATA = {
    "xmoe": ["py.typed"],
    "xmoe.kernels.acl": ["*.pyi"],
    "xmoe.kernels.softdev": ["ascend/**/*"],
    "xmoe.models.checkpoints": ["**/*"],
    "xmoe.policy": ["**/*.json"],
}


class BuildPackage(build_py):
    """Builds the software device beside its sources, then collects it as package data.

    One output place serves wheels and editable installs alike. Build scripts stay out of the wheel:
    what they build from isn't in it.
    """

    def run(self) -> None:
        subprocess.run([sys.executable, ROOT / "kernels" / "softdev" / "build.py"], check=True)
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if entry[1] != "build"]


setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data=PACKAGE_DATA,
    exclude_package_data={
        "": ["*.pyc", "*/__pycache__/*", "README.md"],
        # Works with one torch only; see kernels/softdev/build.py.
        "xmoe.kernels.softdev": ["ascend/lib64/libopapi.so"],
    },
    include_package_data=False,
    cffi_modules=["kernels/acl/build.py:ffibuilder"],
    cmdclass={"build_py": BuildPackage},
)
