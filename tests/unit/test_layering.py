# SPDX-License-Identifier: Apache-2.0
"""Imports go down only, and each layer uses only the outside packages it may.

Also kept out: catching everything, and reading the environment in more than one place.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support.tree import modules

VALUES = frozenset(
    {
        "xmoe.types",
        "xmoe.errors",
        "xmoe.env",
        "xmoe.config",
        "xmoe.layout",
        "xmoe.multistream",
        "xmoe.arguments",
        "xmoe.inputs",
        "xmoe.outputs",
    }
)
ACL = frozenset({"xmoe.kernels.acl"})
KERNELS = ACL | {
    "xmoe.kernels.ops",
    "xmoe.kernels.device",
    "xmoe.kernels.npu_device",
    "xmoe.kernels.capability",
    "xmoe.kernels.softdev",
}
COMM = frozenset({"xmoe.comm"})
PIPELINE = frozenset({"xmoe.pipeline"})
EXECUTOR = PIPELINE | {"xmoe.executor"}
DEPLOYMENT = frozenset(
    f"xmoe.pipeline.{name}" for name in ("deployment", "run", "report", "command", "more", "probes")
)
RUNNER = frozenset({"xmoe.runner", "xmoe.layer", "xmoe.fused", "xmoe.split", "xmoe.prepare"})
TORCH = frozenset({"torch"})
EVERYTHING = frozenset({"*"})


@dataclass(frozen=True)
class Layer:
    """What a unit may import of this package, and of packages that are not Python's own."""

    inside: frozenset[str]
    outside: frozenset[str] = frozenset()


TOP = Layer(EVERYTHING, TORCH | {"numpy", "rich", "safetensors", "transformers"})
LAYERS = {
    **{unit: Layer(VALUES) for unit in VALUES},
    "xmoe.reference": Layer(frozenset(), frozenset({"numpy"})),
    "xmoe.policy": Layer(VALUES | {"xmoe.policy"}),
    "xmoe.kernels.acl": Layer(VALUES | ACL, frozenset({"cffi"})),
    **{unit: Layer(VALUES | KERNELS, TORCH) for unit in KERNELS - ACL},
    "xmoe.kernels.npu_device": Layer(VALUES | KERNELS, TORCH | {"torch_npu"}),
    "xmoe.comm": Layer(VALUES | KERNELS | COMM, TORCH),
    "xmoe.ranks": Layer(VALUES, TORCH),
    "xmoe.startup": Layer(VALUES | KERNELS | COMM, TORCH),
    "xmoe.executor": Layer(PIPELINE),
    # Executor, adapters and loops know protocols and a device, not where either comes from.
    "xmoe.pipeline": Layer(VALUES | PIPELINE | {"xmoe.kernels.ops", "xmoe.kernels.device"}, TORCH),
    # The deployment of the command is a composition root of its own, like the runner.
    **{
        unit: Layer(
            VALUES
            | KERNELS
            | COMM
            | PIPELINE
            | DEPLOYMENT
            | {"xmoe.ranks", "xmoe.pipeline.timeline"},
            TORCH,
        )
        for unit in DEPLOYMENT
    },
    "xmoe.outputs": Layer(VALUES, frozenset({"rich"})),
    "xmoe.pipeline.timeline": Layer(VALUES | PIPELINE, frozenset({"matplotlib"})),
    "xmoe.facts": Layer(VALUES | ACL | {"xmoe.kernels.capability", "xmoe.policy"}),
    **{
        unit: Layer(
            VALUES
            | KERNELS
            | COMM
            | EXECUTOR
            | RUNNER
            | {"xmoe.policy", "xmoe.facts", "xmoe.startup"},
            TORCH,
        )
        for unit in RUNNER
    },
    "xmoe.models": Layer(
        VALUES | RUNNER | {"xmoe.models"}, TORCH | {"numpy", "safetensors", "tokenizers"}
    ),
    **{
        f"xmoe.{name}": TOP
        for name in (
            "cli",
            "conformance",
            "device",
            "doctor",
            "explain",
            "regress",
            "__main__",
            "__init__",
        )
    },
}
# Engines bring much with them: only models load them, and only inside the function that needs them.
ENGINES = frozenset({"transformers", "vllm"})
MAY_LOAD_ENGINES = {"xmoe.models", "xmoe.regress"}
# Build scripts run without the package installed and are no part of it at run time.
BUILD_SCRIPTS = {"xmoe.kernels.acl.build", "xmoe.kernels.softdev.build"}
# Who may do what is otherwise kept to one place, and why.
MAY_CATCH_ALL = {
    "xmoe.cli": "turns every failure into a message and an exit code",
    "xmoe.ranks": "a rank hands any failure of its own to the parent",
    "xmoe.kernels.capability": "whatever a probe throws means that the device is not available",
}
MAY_READ_ENVIRONMENT = {
    "xmoe.env": "the one reader",
    "xmoe.kernels.softdev": "prepends to the loader's search path, which is no setting of ours",
}
MAY_WRITE_ENVIRONMENT = {"xmoe.ranks": "gloo's interface, in a process made for one rank"}


def unit_of(name: str) -> str | None:
    """The entry of LAYERS that `name` belongs to, None for the bare package."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in LAYERS:
            return prefix
    return None


def violations(name: str, source: str, filename: str = "module.py") -> list[str]:
    """What is wrong with the imports and habits of one module, as `line: sentence`."""
    if name in BUILD_SCRIPTS:
        return []
    unit = unit_of(name if name != "xmoe" else "xmoe.__init__")
    if unit is None:
        return [f"{name} belongs to no layer; add it to LAYERS in tests/unit/test_layering.py"]
    tree = ast.parse(source, filename)
    found = [*_imports(name, unit, tree), *_habits(name, tree)]
    return [f"{name}:{line}: {text}" for line, text in sorted(found)]


def _imports(name: str, unit: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    layer = LAYERS[unit]
    typing_only = _typing_only(tree)
    late = _inside_functions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import; write `from xmoe.…`"
            continue
        for target in _targets(node):
            line = node.lineno  # type: ignore[attr-defined]
            top = target.split(".")[0]
            if top == "xmoe":
                other = unit_of(target)
                if other is None or EVERYTHING <= layer.inside or other in layer.inside:
                    continue
                yield line, f"{unit} may not import {other} ({target})"
            elif top in sys.stdlib_module_names or top in layer.outside - ENGINES:
                continue
            elif node in typing_only and top == "torch":
                continue
            elif top in ENGINES and node in late and unit in MAY_LOAD_ENGINES:
                continue
            else:
                yield line, f"{unit} may not import {top}"


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _typing_only(tree: ast.Module) -> set[ast.AST]:
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _inside_functions(tree: ast.Module) -> set[ast.AST]:
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }


def _habits(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and name not in MAY_CATCH_ALL:
            caught = "everything" if node.type is None else ast.unparse(node.type)
            broad = caught in ("everything", "Exception", "BaseException")
            if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield node.lineno, f"catches {caught} and goes on; catch what can be handled"
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                if name not in MAY_READ_ENVIRONMENT and name not in MAY_WRITE_ENVIRONMENT:
                    yield node.lineno, f"uses os.{node.attr}; only xmoe.env reads the environment"


@pytest.mark.parametrize("name", sorted(modules()))
def test_module_keeps_to_its_layer(name: str) -> None:
    path = modules()[name]
    assert violations(name, path.read_text(encoding="utf-8"), str(path)) == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("xmoe.types", "import torch", "xmoe.types may not import torch"),
        ("xmoe.policy.select", "from xmoe.kernels.acl import loader", "xmoe.kernels.acl"),
        ("xmoe.policy.select", "def f():\n    import xmoe.comm.fence", "xmoe.comm"),
        ("xmoe.policy.facts", "import os\nx = os.environ['A']", "only xmoe.env"),
        ("xmoe.policy.facts", "import torch", "may not import torch"),
        ("xmoe.kernels.acl.loader", "from xmoe import policy", "xmoe.policy"),
        ("xmoe.kernels.ops.mega_moe", "from xmoe.runner import x", "xmoe.runner"),
        ("xmoe.comm.resource", "import xmoe.executor as e", "xmoe.executor"),
        ("xmoe.executor", "from xmoe.policy.select import select", "xmoe.policy"),
        ("xmoe.models.qwen3_5.engine_vllm", "import vllm", "may not import vllm"),
        ("xmoe.runner", "def f():\n    import transformers", "may not import transformers"),
        ("xmoe.models.qwen3_5.config", "from xmoe.kernels.acl import op", "xmoe.kernels.acl"),
        ("xmoe.reference", "from xmoe.errors import XmoeError", "xmoe.errors"),
        ("xmoe.runner", "try:\n    f()\nexcept Exception:\n    pass", "catches Exception"),
        ("xmoe.runner", "try:\n    f()\nexcept:\n    pass", "catches everything"),
        ("xmoe.comm.fence", "from .resource import x", "relative import"),
        ("xmoe.novel", "", "belongs to no layer"),
    ],
)
def test_a_wrong_import_is_caught(name: str, source: str, expected: str) -> None:
    assert any(expected in text for text in violations(name, source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("xmoe.types", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("xmoe.runner", "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
        ("xmoe.models.qwen3_5.engine_transformers", "def f():\n    import transformers"),
        ("xmoe.comm.resource", "import torch.distributed\nfrom xmoe.kernels.acl import handles"),
    ],
)
def test_a_right_import_is_accepted(name: str, source: str) -> None:
    assert violations(name, source) == []


def test_every_layer_has_a_module() -> None:
    missing = [unit for unit in LAYERS if unit != "xmoe.__init__" and not _exists(unit)]
    assert missing == [], "a layer without a module is a leftover of a rename"


def _exists(unit: str) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for name in modules())
