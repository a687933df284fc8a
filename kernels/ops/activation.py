# SPDX-License-Identifier: Apache-2.0
"""Gated activations of the split path."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.kernels.capability import NpuOperators

# On CPU, torch splits elementwise work over threads from this many elements on.
_SERIAL_ELEMENTS = 32768
# A multiple of every vector width torch uses for float32, so that no element lands in a scalar
# tail, where another routine computes exp.
_VECTOR_ELEMENTS = 64

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
# Field values of model configurations for the gate function of a gated MLP.
_ALIASES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
LAYOUTS = ("concatenated", "interleaved")
_NO_OPERATORS = NpuOperators()


def activation_name(name: str) -> str:
    """The canonical name of a gated activation; ConfigError names what is known."""
    canonical = _ALIASES.get(name, name)
    if canonical not in _GATES:
        known = ", ".join(sorted([*_GATES, *_ALIASES]))
        raise ConfigError(
            f"activation={name!r} is not known to the split path; allowed: {known}; "
            "next: use one of these, or add the function to kernels/ops/activation.py"
        )
    return canonical


def is_plain_swiglu(activation: str, clamp: float | None, layout: str) -> bool:
    """Whether it is silu(gate) * up of two halves, without a clamp."""
    return activation_name(activation) == "swiglu" and not clamp and layout == "concatenated"


def gated_activation(
    gate_up: Tensor,
    activation: str = "swiglu",
    clamp: float | None = None,
    layout: str = "concatenated",
    operators: NpuOperators = _NO_OPERATORS,
) -> Tensor:
    """act(gate) * up for each row. Local.

    Computed in float32 and rounded once to the input's type. With a clamp c > 0:
    gate = min(gate, c) and up = clip(up, -c, c) before the activation. A row's bits do not depend
    on how many other rows there are.

    Args:
        gate_up: [R, 2I] model dtype.
        layout: "concatenated" (gate columns first) or "interleaved" (gate, up, gate, up, ...).
        operators: npu_swiglu does the plain form; its documents leave rounding open.

    Returns:
        [R, I] in the type of `gate_up`.
    """
    function = _GATES[activation_name(activation)]
    if operators.swiglu and is_plain_swiglu(activation, clamp, layout) and gate_up.numel():
        fused: Tensor = torch.ops.npu.npu_swiglu(gate_up, -1)
        return fused
    if layout == "concatenated":
        width = gate_up.shape[1] // 2
        gate, up = gate_up[:, :width], gate_up[:, width:]
    elif layout == "interleaved":
        gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
    else:
        raise ConfigError(
            f"gate_up_layout={layout!r}; allowed: {', '.join(LAYOUTS)}; next: correct the model's "
            "setting"
        )
    width = gate.shape[1]
    output = torch.empty(gate.shape, dtype=gate_up.dtype, device=gate_up.device)
    padded = -(-width // _VECTOR_ELEMENTS) * _VECTOR_ELEMENTS
    # One thread, no tail: the same routine computes each element wherever it stands.
    step = gate.shape[0] or 1
    if gate_up.device.type == "cpu" and torch.get_num_threads() > 1:
        step = max(1, _SERIAL_ELEMENTS // padded)
    for start in range(0, gate.shape[0], step):
        rows = slice(start, start + step)
        g, u = gate[rows].to(torch.float32), up[rows].to(torch.float32)
        if padded != width:
            g = F.pad(g, (0, padded - width))
        if clamp is not None and clamp > 0:
            g, u = g.clamp(max=clamp), u.clamp(min=-clamp, max=clamp)
        output[rows] = (function(g)[:, :width] * u).to(output.dtype)
    return output
