# SPDX-License-Identifier: Apache-2.0
"""One MegaMoe launch of a layer call: rows in, launch, rows out, in stream order.

    npu tensors   everything is queued on the caller's current stream, in one lease of the fence, so
                  the caller's next operator sees the output and the host waits for nothing. When
                  another stream launched last, the fence makes this one wait for it on the device,
                  before the shared rows are written. What fails on the device surfaces at the next
                  reading of a stream: the next layer call, `step`, `drain`, `close`, or the
                  caller's own synchronisation; the process counts as lost then.
    CPU tensors   the engine reads them at once, so the host has to wait for the launch: once a
                  layer call, for the launch's event, and nowhere else.

All layers of a runner share the rows. They are made once; a launch has addresses of these, of the
weights and of the resource only, never of a caller's tensor.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from xmoe.comm.resource import MegaMoeCommResource
from xmoe.config import XmoeConfig
from xmoe.errors import AclError, FenceTimeout
from xmoe.kernels.device import Device, Stream
from xmoe.kernels.ops.launch_rows import LaunchRows
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.types import MoeShape, TokenBatch

# Memory that a device may still use after a failure lives as long as the process.
_KEPT: list[object] = []


class FusedStep:
    """Runs launches one after the other; see the module's text. Any thread may call it.

    Args:
        device: of the resource. config: capacity, padding and time limit.
    """

    def __init__(
        self, shape: MoeShape, config: XmoeConfig, device: Device, resource: MegaMoeCommResource
    ) -> None:
        self._resource = resource
        self._device = device
        self._timeout_s = config.step_timeout_s
        self._host = device.torch_device.type == "cpu"
        self._lock = threading.Lock()
        self._closed = False
        # Whatever mode the caller is in now, later calls may be in another.
        with device.bind(), torch.inference_mode(False):
            self._rows = LaunchRows(
                config.max_tokens_per_rank,
                shape.hidden,
                shape.topk,
                shape.num_experts,
                local_experts=shape.num_experts // resource.handle.ep_size,
                padding=config.padding,
                dtype=getattr(torch, shape.dtype),
                device=device.torch_device,
            )
            # A stream of one's own needs a wait before the caller may read; the caller's does not.
            self._stream = device.create_stream() if self._host else device.current_stream()
            self._stream.synchronize(self._timeout_s)  # the first call may be on another stream

    @property
    def rows(self) -> LaunchRows:
        """The shared memory of all launches."""
        return self._rows

    def run(
        self, op: MegaMoe, batch: TokenBatch | None, rows: int, out: Tensor | None, layer: int
    ) -> Tensor | None:
        """Launch `rows` rows with the batch's T tokens. COLLECTIVE.

        Args:
            batch: as `LaunchRows.fill` takes it; None takes part without tokens.
            out: [T, H] to write to; None only without a batch.

        Returns:
            `out`; on CPU tensors it is written, on npu tensors it will be in stream order.

        Raises:
            ConfigError, CommError: nothing was launched. FenceTimeout, AclError, PeerLost: the
            resource is unusable from now on.
        """
        resource = self._resource
        try:
            if not self._host:
                resource.launch(
                    self._stream, lambda stream: self._queue(op, batch, rows, out, stream)
                )
                return out
            with self._lock:  # until the rows were read, no other call may fill them
                resource.launch(
                    self._stream, lambda stream: self._queue(op, batch, rows, None, stream)
                )
                what = f"mega_moe, layer {layer}"
                resource.wait(self._stream, self._timeout_s, what)  # the one host wait
                with torch.no_grad():
                    return None if out is None else self._rows.finish(out)
        except (AclError, FenceTimeout) as error:
            translated = resource.translate(error)
            if resource.failed is not None:
                _KEPT.extend((self._rows, op, out))
            if translated is error:
                raise
            raise translated from error

    def _queue(
        self,
        op: MegaMoe,
        batch: TokenBatch | None,
        rows: int,
        out: Tensor | None,
        stream: Stream,
    ) -> None:
        """Between `acquire` and `record` of the fence: what uses the rows is ordered with it."""
        shared = self._rows
        with torch.no_grad():  # shared memory has no history
            launch = shared.fill(batch, rows)
            op.launch(
                launch.batch,
                stream,
                launch.mask,
                output=launch.output,
                counts=shared.tokens_per_expert,
            )
            if out is not None:
                shared.finish(out)
                # torch_npu may still hold these operators in its host queue. The fence's event is
                # recorded past that queue, and must cover them: read a handle to empty it.
                stream.handle()

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all launches so far are done. Local. Raises as `run` does."""
        self._resource.drain(self._timeout_s if timeout_s is None else timeout_s)

    def dropped(self) -> int:
        """Ids so far that were out of range or repeated in their row. Drains. Local. Raises as
        `run` does, also for other failed work on the current stream."""
        self.drain()
        with self._device.bind():
            self._stream.synchronize(self._timeout_s)
            return self._rows.dropped()

    def close(self) -> None:
        """Drain, then give the stream back. Twice is harmless.

        After a failure, whoever met it, all memory that launches have addresses of is kept: the
        device may go on.

        Raises:
            What `drain` raises, when nothing had failed before.
        """
        if self._closed:
            return
        self._closed = True
        drained = False
        try:
            if self._resource.failed is None:
                self.drain()
                drained = True
        finally:
            if not drained:
                _KEPT.extend((self._rows, self._resource.handle, self._resource.workspace))
            self._stream.close()
