# SPDX-License-Identifier: Apache-2.0
"""`import xmoe` costs nothing: no torch, no library, no write to the environment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, os, sys
def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if ".so" in line}
import importlib, typing  # what the interpreter itself may load on the way
before, environment = libraries(), dict(os.environ)
import xmoe
after = libraries()
print(json.dumps({
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "libraries": sorted(after - before),
    "environment": dict(os.environ) == environment,
    "version": xmoe.__version__,
}))
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_torch_and_opens_no_library() -> None:
    seen = json.loads(run(PROBE))
    assert not {"torch", "numpy", "transformers", "rich", "cffi"} & set(seen["modules"])
    assert seen["libraries"] == []
    assert seen["environment"] is True


def test_lazy_names_resolve_and_stay_lazy() -> None:
    seen = json.loads(
        run(
            "import json, sys, xmoe\n"
            "names = [n for n in xmoe.__all__ if getattr(xmoe, n) is None]\n"
            "print(json.dumps([names, 'torch' in sys.modules, xmoe.XmoeError.__module__]))"
        )
    )
    assert seen == [[], False, "xmoe.errors"]


def test_unknown_name_says_what_there_is() -> None:
    import xmoe

    with pytest.raises(AttributeError, match="no attribute 'MoeShap'.*MoeShape"):
        _ = xmoe.MoeShap  # type: ignore[attr-defined]


def test_dir_lists_the_lazy_names() -> None:
    import xmoe

    assert set(xmoe.__all__) <= set(dir(xmoe))


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError", "AttributeError"])
def test_import_works_beside_a_broken_device_package(tmp_path: object, error: str) -> None:
    # A half-installed torch_npu must not be touched by importing us.
    from pathlib import Path

    folder = Path(str(tmp_path)) / "torch_npu"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"raise {error}('broken on purpose')\n")
    out = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import xmoe; print('ok')")
    assert out.strip() == "ok"
