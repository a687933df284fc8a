# SPDX-License-Identifier: Apache-2.0
"""One rank of a regression run without its neighbours: signs of life, and what is closed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xmoe.errors import CommError
from xmoe.regress import rank
from xmoe.regress.plan import Plan
from xmoe.types import ExpertWeights, FenceMode, MoeShape
from xmoe.types import Path as MoePath

SHAPE = MoeShape(hidden=8, intermediate=4, num_experts=4, topk=2)
LAYERS = 3


class _Context:
    """A RankContext that keeps what is reported."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, object]]] = []

    def report(self, phase: str, **details: object) -> None:
        self.said.append((phase, details))

    def init_process_group(self, timeout_s: float) -> None:
        return None


class _Runner:
    """A MoeRunner that cannot be closed."""

    identity = "none"

    def __init__(self) -> None:
        self.closed = 0
        self.decision = SimpleNamespace(to_json=lambda: "{}")

    def stats(self) -> Any:
        return SimpleNamespace(dropped_ids=0)

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1
        raise CommError(f"closing number {self.closed}")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[_Runner]:
    runners: list[_Runner] = []

    def load(*_: object, make_layer: Any, **__: object) -> Any:
        for index in range(LAYERS):
            make_layer(index, ExpertWeights(torch.zeros(2, 8, 8), torch.zeros(2, 4, 8)))
        return SimpleNamespace(shape=SHAPE, bytes_read=SimpleNamespace(experts=0, others=0))

    def create(*_: object, **__: object) -> _Runner:
        runners.append(_Runner())
        return runners[-1]

    monkeypatch.setattr(rank, "load_model", load)
    monkeypatch.setattr(rank, "read_config", lambda folder: {})
    monkeypatch.setattr(rank, "MoeRunner", SimpleNamespace(create=create))
    monkeypatch.setattr(rank, "_redirect", lambda folder, number: None)
    monkeypatch.setattr(rank, "_round", lambda *_: [("579", [5])])
    return runners


def _plan(folder: Path) -> Plan:
    both = (MoePath.MEGA_MOE, MoePath.FUSED_MOE)
    return Plan(str(folder), 2, 1, ("a", "b"), 8, both, FenceMode.STREAM, 10.0, str(folder))


def test_every_layer_that_is_loaded_is_a_sign_of_life(made: list[_Runner], tmp_path: Path) -> None:
    """Else a large model would take longer than a rank may be silent."""
    context = _Context()
    with pytest.raises(CommError):
        rank.run_rank(context, _plan(tmp_path))  # type: ignore[arg-type]
    loads = [details.get("layer") for phase, details in context.said if phase == "load"]
    assert loads == [None, 0, 1, 2]


def test_every_runner_is_closed_whatever_the_others_do(made: list[_Runner], tmp_path: Path) -> None:
    with pytest.raises(CommError):
        rank.run_rank(_Context(), _plan(tmp_path))  # type: ignore[arg-type]
    assert [runner.closed for runner in made] == [1, 1]
