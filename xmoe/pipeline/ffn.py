# SPDX-License-Identifier: Apache-2.0
"""The FFN worker loop: take the adapter's items, hand them to the executor, wait where the settings
say so.

The loop is the same for both connectors. Whether the number of items is known in advance (CAMP2P)
or found out while receiving (CAMAsync) is the adapter's affair.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from xmoe.errors import AclError, ConfigError, PipelineStopped, XmoeError
from xmoe.kernels.device import Device, Stream
from xmoe.kernels.ops.torch_stream import on_stream
from xmoe.multistream import HostFence, MetadataRead, MultistreamConfig, PipelineShape
from xmoe.pipeline.adapters.base import Adapter, FfnAdapter, FfnInput, FfnModel, StepPlan
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem
from xmoe.pipeline.options import ExecutorOptions
from xmoe.pipeline.ticket import Ticket

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
        self._told = False
        self._unsent: tuple[Ticket, ...] = ()
        self.executor = StreamExecutor(
            device,
            ExecutorOptions.of(config, role, slots=slots),
            channels=adapter.channels(),
            translate=translate,
            on_failure=self._tell_peers,
            on_stall=on_stall,
        )

    def _tell_peers(self, error: BaseException, unsent: tuple[Ticket, ...]) -> None:
        # Whatever failed here, a peer that waits for this rank must not wait for ever.
        self._unsent = unsent
        self._told = self._peers.abort(ABORT_FAILED)

    def stop(self) -> None:
        """Ask the loop to end; see `StreamExecutor.request_stop`. Any thread."""
        self.executor.request_stop()

    def close(self) -> None:
        """Drain and release. Twice is harmless.

        Raises:
            XmoeError: something is pending although the loop ended well.
        """
        self._release()
        left = self._peers.leftovers()
        if left and self.executor.failed is None:
            raise XmoeError(
                f"closed with {', '.join(left)}; allowed: nothing pending; next: end the loop "
                "between two steps"
            )

    def _release(self) -> None:
        self.executor.close()

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
            self._release()


class _Answers:
    """The model, or, once it has failed, rows of NaN in its place."""

    def __init__(self, model: FfnModel) -> None:
        self._model = model
        self.poisoned = False

    @property
    def device_metadata(self) -> bool:
        return self._model.device_metadata

    def compute(self, item: FfnInput, out: Tensor, stream: int) -> None:
        if self.poisoned:
            with on_stream(out.device, stream):
                out.fill_(float("nan"))
        else:
            self._model.compute(item, out, stream)


class FfnLoop(RoleLoop):
    """The FFN side. `steps` and `items` count what was served.

    When the model raises and the connector has no abort word, the rest of the step is answered with
    NaN, one item at a time, so that no kernel of a peer spins for ever; the peers' loops take NaN
    for this rank's failure.

    Raises:
        ConfigError: also when the device has no stream left that can end a receive.
    """

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
        if config.metadata_read is MetadataRead.DEVICE and not model.device_metadata:
            raise ConfigError(
                f'metadata_read="device" with {type(model).__name__}, which wants layer and rows '
                "from the host; allowed: a model that reads them on the device; next: "
                'metadata_read="pinned_async"'
            )
        super().__init__(
            device, adapter, config, shape, "ffn", translate=translate, on_stall=on_stall
        )
        self._device = device
        self._adapter = adapter
        self._model = _Answers(model)
        self._stopper: Stream | None = None
        self._stop_lock = threading.Lock()
        self._over = False
        self.steps = 0
        self.items = 0
        if adapter.stoppable:
            with contextlib.ExitStack() as undo:
                undo.callback(self._release)
                self._make_stopper()
                undo.pop_all()

    def _make_stopper(self) -> None:
        with self._device.bind():
            self._stopper = self._device.create_stream()
            handle, used = self._stopper.handle(), self.executor.stream_handles
        # As with the executor's streams: on a receive's own stream the copies that end it would
        # be queued behind it. Devices without handles (0) run inline.
        if handle and handle in used.values():
            raise ConfigError(
                f"the device gave the stop buffer's stream the handle {handle}, and the executor "
                f"has {used}; allowed: a stream of its own; next: make the loop before the process "
                "has used up its stream pool"
            )

    def stop(self) -> None:
        """Ask the loop to end. Any thread; returns at once.

        Where the operators have a stop buffer, a receive that waits on the device ends with their
        shutdown item and the loop ends well; else see `StreamExecutor.request_stop`.
        """
        with self._stop_lock:
            if self._over:
                return
            if self._stopper is not None:
                with self._device.bind():
                    if self._adapter.stop(self._stopper.handle()):
                        return
        super().stop()

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            with self._stop_lock:
                self._over = True
                if self._stopper is not None:
                    with self._device.bind():
                        self._stopper.close()
                self._stopper = None

    def run_step(self, plan: StepPlan) -> None:
        """Serve one step. Returns when its items were issued, or, with a fence, are done.

        Raises:
            PipelineStopped: asked to stop between two items; all issued ones are kept.
            What an item raised; the peers have been told, and the loop is over.
        """
        executor, each = self.executor, self.config.fence is HostFence.ITEM
        items = self._adapter.items(plan, self._model)
        with executor.session():
            try:
                for item in items:
                    if executor.stopping:
                        raise PipelineStopped("stopped between two items; nothing was abandoned")
                    ticket = executor.submit(item)
                    self.items += 1
                    if each:
                        ticket.result()
                # The one host wait of a step, for its items' events. It bounds how far the host
                # runs ahead and is where errors surface; no buffer depends on it.
                if self.config.fence is HostFence.STEP:
                    executor.drain()
            except BaseException as error:
                self._answer_rest(items, error)
                raise
        self.steps += 1

    def _answer_rest(self, items: Iterator[WorkItem], error: BaseException) -> None:
        """See the class; does nothing after a device error, and when the peers know already."""
        executor = self.executor
        if executor.failed is None or self._told or isinstance(error, (AclError, PipelineStopped)):
            return
        # Only before compute is it certain what was queued.
        if any(ticket.unissued[0].kind is not PhaseKind.COMPUTE for ticket in self._unsent):
            return
        try:
            if not executor.settle():
                return
            self._adapter.settled()
            self._model.poisoned = True
            for ticket in self._unsent:
                self._answer(ticket.context, ticket.unissued)
            for item in items:
                self._wait_for_gate(item)
                context = PhaseContext(executor.stream, 0, item.layer, item.stage)
                self._answer(context, item.phases)
        except XmoeError as second:
            error.add_note(f"and then, while the peers were answered: {second}")

    def _answer(self, context: PhaseContext, phases: Sequence[Phase]) -> None:
        stream = self.executor.stream
        for phase in phases:
            context.stream = stream
            phase.run(context)
            stream.synchronize(self.config.wait_timeout_s)
            self._adapter.settled()

    def _wait_for_gate(self, item: WorkItem) -> None:
        deadline = time.monotonic() + self.config.wait_timeout_s
        while item.gate is not None and not item.gate():
            if time.monotonic() > deadline:
                raise XmoeError(
                    f"{item.op}: nothing came for {self.config.wait_timeout_s:g} s; allowed: the "
                    "rest of the step; next: look at the peers' own errors"
                )
            time.sleep(0.001)

    def serve(self, plan: StepPlan) -> int:
        """Serve items until `stop`; returns how many. For connectors that need no step plan."""
        before = self.items
        try:
            self.run_step(plan)
        except PipelineStopped:
            if self.executor.failed is not None:
                raise
        return self.items - before
