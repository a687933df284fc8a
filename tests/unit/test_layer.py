# SPDX-License-Identifier: Apache-2.0
"""What a layer refuses before anything is launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from xmoe.errors import ConfigError
from xmoe.kernels.device import InlineDevice
from xmoe.layer import Shared, TwoPathLayer, _problem
from xmoe.types import MoeShape, TokenBatch

SHAPE = MoeShape(hidden=8, intermediate=4, num_experts=4, topk=2)
CPU = torch.device("cpu")


def _batch(device: str = "cpu", id_dtype: torch.dtype = torch.int64) -> TokenBatch:
    ids = torch.tensor([[0, 1], [2, 3]], dtype=id_dtype)
    hidden = torch.zeros(2, 8, dtype=torch.bfloat16, device=device)
    return TokenBatch(hidden, ids, torch.ones(2, 2))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_a_good_batch_is_accepted(id_dtype: torch.dtype) -> None:
    batch = _batch(id_dtype=id_dtype)
    assert _problem(batch, None, SHAPE, 2, CPU) is None
    assert _problem(batch, torch.empty_like(batch.hidden_states), SHAPE, 2, CPU) is None


def test_tensors_elsewhere_than_the_weights_are_refused() -> None:
    problem = _problem(_batch("meta"), None, SHAPE, 2, CPU)
    assert "hidden_states on meta" in str(problem) and "allowed: cpu" in str(problem)


def test_other_rows_than_announced_are_refused() -> None:
    problem = _problem(_batch(), None, SHAPE, 3, CPU)
    assert "3 tokens were announced" in str(problem)


@pytest.mark.parametrize("id_dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_ids_of_other_types_are_refused(id_dtype: torch.dtype) -> None:
    problem = _problem(_batch(id_dtype=id_dtype), None, SHAPE, 2, CPU)
    assert "int32 or int64" in str(problem) and str(id_dtype) in str(problem)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(3, 8, dtype=torch.bfloat16),
        torch.zeros(2, 8),
        torch.zeros(2, 8, dtype=torch.bfloat16, device="meta"),
        torch.zeros(8, 2, dtype=torch.bfloat16).t(),
    ],
    ids=["rows", "dtype", "device", "strides"],
)
def test_an_output_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    problem = _problem(_batch(), out, SHAPE, 2, CPU)
    assert str(problem).startswith(f"out is {list(out.shape)}") and "empty_like" in str(problem)


def test_an_output_that_this_mode_may_not_write_to_is_refused_before_the_launch() -> None:
    with torch.inference_mode():
        out = torch.zeros(2, 8, dtype=torch.bfloat16)
        assert _problem(_batch(), out, SHAPE, 2, CPU) is None
    assert "made in inference mode" in str(_problem(_batch(), out, SHAPE, 2, CPU))


class _Capturing(InlineDevice):
    def capturing(self) -> bool:
        return True


@pytest.mark.parametrize("device", [_Capturing(), InlineDevice()], ids=["captured", "eager"])
def test_a_call_during_graph_capture_is_refused_before_anything_is_said(device: Any) -> None:
    said: list[int] = []

    def counts(tokens: int) -> tuple[int, ...]:
        said.append(tokens)
        raise ConfigError("the peers were asked")

    shared = SimpleNamespace(split=SimpleNamespace(device=device), counts=counts)
    layer = TwoPathLayer(cast(Shared, shared), cast(Any, None), 7, cast(Any, object()))
    batch = _batch()
    with pytest.raises(ConfigError) as caught:
        layer(batch.hidden_states, batch.topk_ids, batch.topk_weights)
    if device.capturing():
        text = str(caught.value)
        assert text.startswith("layer 7 was called while the current stream is captured")
        assert "allowed: eager calls" in text and "next: " in text and not said
    else:
        assert said == [2]
