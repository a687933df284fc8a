# SPDX-License-Identifier: Apache-2.0
"""The stream that torch operators run on, named by its raw handle.

An executor hands raw handles to phases; a phase that calls torch operators, or allocates with them,
makes that stream the current one for as long. CPU tensors know no streams.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from xmoe.kernels.npu_device import torch_npu


def on_stream(device: torch.device, handle: int) -> AbstractContextManager[None]:
    """Torch operators of the block run on the stream `handle` of `device`, and memory that they
    allocate belongs to it. Read the handle just before; this thread only.

    On an npu the stream counts as external: it must stay alive, and torch_npu refuses events and
    record_stream on it.
    """
    if device.type != "npu":
        return contextlib.nullcontext()
    npu = torch_npu().npu
    context: AbstractContextManager[None] = npu.stream(
        npu.ExternalStream(handle, device=device.index)
    )
    return context
