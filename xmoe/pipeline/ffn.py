# SPDX-License-Identifier: Apache-2.0
"""The FFN worker loop: take the adapter's items, hand them to the executor, wait where the settings
say so.

The loop is the same for both connectors. Whether the number of items is known in advance (CAMP2P)
or found out while receiving (CAMAsync) is the adapter's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from xmoe.errors import PipelineStopped, XmoeError
from xmoe.kernels.device import Device
from xmoe.multistream import HostFence, MultistreamConfig, PipelineShape
from xmoe.pipeline.adapters.base import Adapter, FfnAdapter, FfnModel, StepPlan
from xmoe.pipeline.executor import ExecutorOptions, StreamExecutor
from xmoe.pipeline.items import PhaseContext

ABORT_FAILED = 1


class RoleLoop:
    """What both roles' loops share: settings checked, executor made, peers told of a failure.

    Args:
        device: of this rank. adapter: of this role and connector.
        config, shape: equal on all ranks; see `MultistreamConfig.digest`.
        role: "ffn" or "attention". slots: where the role's schedule needs more than the settings
            say.
        translate: turns a device error into the error to raise.
        on_stall: told of waits that take long.

    Raises:
        ConfigError: the combination is not supported; nothing was made.
    """

    def __init__(
        self,
        device: Device,
        adapter: Adapter,
        config: MultistreamConfig,
        shape: PipelineShape,
        role: str,
        *,
        slots: int | None = None,
        translate: Callable[[Exception], Exception] | None = None,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        config.validate(adapter.capabilities, shape)
        self.config = config
        self._peers = adapter
        self.executor = StreamExecutor(
            device,
            ExecutorOptions.of(config, role, slots=slots),
            channels=adapter.channels(),
            translate=translate,
            on_failure=self._tell_peers,
            on_stall=on_stall,
        )

    def _tell_peers(self, error: BaseException, unsent: tuple[PhaseContext, ...]) -> None:
        # Whatever failed here, a peer that waits for this rank must not wait for ever.
        self._peers.abort(ABORT_FAILED)

    def stop(self) -> None:
        """Ask the loop to end; see `StreamExecutor.request_stop`. Any thread."""
        self.executor.request_stop()

    def close(self) -> None:
        """Drain and release. Twice is harmless.

        Raises:
            XmoeError: something is pending although the loop ended well.
        """
        self.executor.close()
        left = self._peers.leftovers()
        if left and self.executor.failed is None:
            raise XmoeError(
                f"closed with {', '.join(left)}; allowed: nothing pending; next: end the loop "
                "between two steps"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.executor.close()


class FfnLoop(RoleLoop):
    """The FFN side. `steps` and `items` count what was served."""

    def __init__(
        self,
        device: Device,
        adapter: FfnAdapter,
        model: FfnModel,
        config: MultistreamConfig,
        shape: PipelineShape,
        *,
        translate: Callable[[Exception], Exception] | None = None,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            device, adapter, config, shape, "ffn", translate=translate, on_stall=on_stall
        )
        self._adapter = adapter
        self._model = model
        self.steps = 0
        self.items = 0

    def run_step(self, plan: StepPlan) -> None:
        """Serve one step. Returns when its items were issued, or, with a fence, are done.

        Raises:
            PipelineStopped: asked to stop between two items; all issued ones are kept.
            What an item raised; the peers have been told, and the loop is over.
        """
        executor, each = self.executor, self.config.fence is HostFence.ITEM
        with executor.session():
            for item in self._adapter.items(plan, self._model):
                if executor.stopping:
                    raise PipelineStopped("stopped between two items; nothing was abandoned")
                ticket = executor.submit(item)
                self.items += 1
                if each:
                    ticket.result()
            # The one host wait of a step, for its items' events. It bounds how far the host runs
            # ahead and is where errors surface; no buffer depends on it.
            if self.config.fence is HostFence.STEP:
                executor.drain()
        self.steps += 1

    def serve(self, plan: StepPlan) -> int:
        """Serve items until `stop`; returns how many. For connectors that need no step plan."""
        before = self.items
        try:
            self.run_step(plan)
        except PipelineStopped:
            if self.executor.failed is not None:
                raise
        return self.items - before
