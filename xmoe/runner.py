# SPDX-License-Identifier: Apache-2.0
"""The one place where policy, communication and kernels meet.

    facts of all ranks -> one Decision -> communication resource -> executor, launch rows -> layers

A MoeRunner serves all MoE layers of one model on one EP group. The path is decided once, before
the first collective of any layer; a step may leave it only by a rule that looks at numbers equal
on every rank. Nothing falls back after a launch.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import SupportsIndex, TypeVar

import torch
from torch.distributed import ProcessGroup

from xmoe.comm.agree import (
    agree_success,
    compare_digest,
    exchange_step,
    gather_facts,
    group_rank,
    group_size,
    require_equal,
)
from xmoe.comm.resource import MegaMoeCommResource
from xmoe.comm.resource_core import ResourceSpec, RuntimeDevice
from xmoe.comm.transport import CollectiveTransport
from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError, XmoeError
from xmoe.executor import (
    ExecutorOptions,
    StreamExecutor,
)
from xmoe.facts import facts_of
from xmoe.fused import FusedStep
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.quant_modes import quant_mode
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.capability import Capability, NpuOperators, npu_operators, probe
from xmoe.kernels.device import Device, HostDevice, InlineDevice
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.kernels.ops.quant import check_experts
from xmoe.layer import MoeLayer as MoeLayer
from xmoe.layer import Shared, TwoPathLayer
from xmoe.multistream import StreamMode
from xmoe.policy.decision import Decision
from xmoe.policy.facts import merge_facts
from xmoe.policy.profiles import profile_named
from xmoe.policy.select import select
from xmoe.split import SplitPath
from xmoe.startup import check_vendor_chain
from xmoe.types import ExpertWeights, Mode, MoeShape, Path

T = TypeVar("T")
_MOST_TOKENS = 2**31 - 1
# What making a device's streams, events and memory can fail with.
_DEVICE_FAILURES = (XmoeError, OSError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class RunnerStats:
    """What a runner did so far.

    launches: layer calls by path. dropped_ids: expert ids of this rank that were out of range or
    repeated in their row, and so left out.
    """

    launches: Mapping[Path, int]
    dropped_ids: int


class MoeRunner:
    """Runs a model's MoE layers on the decided path. Make one with `create`; `close` it.

    Attributes:
        decision: what was decided, with every check.
        shape: the model's MoE layers.
        config: the effective settings.
        capability: what the probe found on this rank; empty in mode off, which probes nothing.
        launches: layer calls so far by path.
    """

    def __init__(
        self,
        shape: MoeShape,
        config: XmoeConfig,
        group: ProcessGroup | None,
        decision: Decision,
        capability: Capability,
    ) -> None:
        self.shape = shape
        self.config = config
        self.decision = decision
        self.capability = capability
        self.launches = dict.fromkeys(Path, 0)
        self._group = group
        self._fused: FusedStep | None = None
        self._dropped_reported = 0
        self._sequence = 0
        self._counts: tuple[int, ...] | None = None
        self._closers = contextlib.ExitStack()
        self._layers = contextlib.ExitStack()
        self._closed = False

    @classmethod
    def create(
        cls,
        shape: MoeShape,
        config: XmoeConfig | None = None,
        *,
        group: ProcessGroup | None = None,
        device: RuntimeDevice | torch.device | None = None,
        role: str = "main",
    ) -> MoeRunner:
        """Gather facts, decide, and build what the decided path needs. COLLECTIVE.

        Args:
            shape: equal on all ranks.
            config: equal on all ranks; None reads the environment.
            group: the EP group, which must accept CPU tensors; None for a single rank.
            device: an adaptor, or the torch device of the tensors that layers will be called with;
                None means CPU tensors. An adaptor over the toolkit that is found is then made when
                the path needs it.
            role: models that run concurrently on one group need different roles.

        Raises:
            RankDisagreement: shape or settings differ between ranks.
            UnsupportedError: mode on and a check rejects; the same on every rank, nothing was
            built. ConfigError, CommError, LibraryError, AclError: on every rank.
        """
        error: XmoeError | None = None
        try:
            config = XmoeConfig.resolve() if config is None else config
        except XmoeError as caught:  # a bad variable of this rank's environment
            error = caught
        # With the default limit: a rank without settings has no other.
        agree_success(group, "settings", error)
        assert config is not None
        timeout_s = config.step_timeout_s
        require_equal(group, "MoeRunner", {"shape": shape, "settings": config.digest()}, timeout_s)
        capability, own = Capability(), None
        try:
            if config.mode is not Mode.OFF:
                capability = probe(abi_variant=config.abi_variant)
            own = facts_of(config, capability, group_size(group))
        except XmoeError as caught:
            error = caught
        agree_success(group, "facts", error, timeout_s)
        assert own is not None
        facts = merge_facts(gather_facts(group, own, timeout_s))
        decision = select(config.mode, facts, shape, config.profile)
        compare_digest(group, decision.digest(), "decision", timeout_s)
        quant_mode(shape.quant)  # otherwise no path could compute with the weights
        runner = cls(shape, config, group, decision, capability)
        try:
            runner._build(device, role)
        except BaseException:
            runner._closers.close()
            raise
        return runner

    def _agreed(self, what: str, make: Callable[[], T]) -> T:
        """What `make` gives, if it went well on all ranks; else one error on all. COLLECTIVE."""
        error: Exception | None = None
        made: list[T] = []
        try:
            made.append(make())
        except _DEVICE_FAILURES as caught:
            error = caught
        agree_success(self._group, what, error, self.config.step_timeout_s)
        return made[0]

    def _build(self, device: RuntimeDevice | torch.device | None, role: str) -> None:
        config = self.config
        self._operators = self._agreed("operators", lambda: _operators_of(device))
        self._resource: MegaMoeCommResource | None = None
        if self.decision.path is not Path.MEGA_MOE:
            self._device: Device = InlineDevice()
            if not _is_cpu(device):
                self._device = self._open_device(device)
            self._transport = self._make_transport()
            self._executor = self._make_executor(
                lambda: _split_executor_on(self._device, config), self._transport.translate
            )
            return
        # All ranks must call the same operator: equal versions may be different builds.
        check_vendor_chain(self._group, found=self.capability, timeout_s=config.step_timeout_s)
        self._device = self._runtime_device = self._open_device(device)
        self._transport = self._make_transport()
        assert self.decision.profile is not None
        profile = profile_named(self.decision.profile)
        spec = ResourceSpec(
            shape=self.shape,
            capacity=config.max_tokens_per_rank,
            role=role,
            fence=config.fence,
            soc_family=profile.soc_family,
            ccl_buffer_mb=config.ccl_buffer_mb,
            flag_min_bytes=profile.flag_min_bytes,
            fence_timeout_s=config.fence_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )
        resource = MegaMoeCommResource.acquire(self._group, self._device, spec)
        self._resource = self._closers.enter_context(resource)
        # Closed in reverse: launches (drained), executor, layers' descriptors, resource, device.
        self._closers.enter_context(self._layers)
        self._executor = self._make_executor(
            lambda: _executor_on(self._device, config.step_timeout_s), resource.translate
        )

        def make_rows() -> FusedStep:
            made = FusedStep(self.shape, config, self._device, resource)
            self._closers.callback(made.close)
            return made

        self._fused = self._agreed("launch rows", make_rows)

    def _make_transport(self) -> CollectiveTransport:
        made = CollectiveTransport(
            self._group,
            self.shape.num_experts,
            validate_ids=self.config.validate_ids,
            timeout_s=self.config.step_timeout_s,
            operators=self._operators,
            device=self._device,
        )
        self._closers.callback(made.close)
        return made

    def _make_executor(
        self,
        where: Callable[[], tuple[Device, ExecutorOptions]],
        translate: Callable[[Exception], Exception] | None = None,
    ) -> StreamExecutor:
        def make() -> StreamExecutor:
            executor = StreamExecutor(*where(), translate=translate)
            return self._closers.enter_context(executor)

        return self._agreed("executor", make)

    def _open_device(self, device: RuntimeDevice | torch.device | None) -> RuntimeDevice:
        """The caller's device, or one of our own; all ranks learn of a rank that has none."""

        def make() -> RuntimeDevice:
            if device is not None and not isinstance(device, torch.device):
                return device
            made = _adaptor(device)
            self._closers.callback(made.close)
            return made

        return self._agreed("device", make)

    def layer(self, weights: ExpertWeights, index: int) -> MoeLayer:
        """A layer over this rank's experts, on the decided path. Local.

        Args:
            weights: of the kind that the shape's quant names; held, not copied.
            index: for reports and errors.
        """
        self._refuse_if_closed()
        if weights.quant != self.shape.quant:
            raise ConfigError(
                f"layer {index} has {weights.quant} weights, the model's shape says quant "
                f"{self.shape.quant}; allowed: the same; next: prepare the weights with "
                "quantise_experts, or correct the shape"
            )
        check_experts(weights)
        fused = None
        if self._resource is not None:
            runtime = self._runtime_device.runtime
            with self._device.bind():
                fused = MegaMoe(
                    runtime,
                    self._resource.handle,
                    weights,
                    self.shape.num_experts,
                    self._resource.workspace,
                    symbols=runtime.require_mega_moe(self.config.abi_variant),
                    activation=self.shape.activation,
                    activation_clamp=self.shape.activation_clamp,
                    reuse_executor=self.config.reuse_executor,
                )
            self._layers.callback(fused.close)
        shared = Shared(
            shape=self.shape,
            config=self.config,
            group=self._group,
            rank=group_rank(self._group),
            decision=self.decision,
            counts=self._counts_now,
            launches=self.launches,
            split=SplitPath(
                shape=self.shape,
                config=self.config,
                device=self._device,
                executor=self._executor,
                transport=self._transport,
                operators=self._operators,
            ),
            fused=self._fused,
        )
        return TwoPathLayer(shared, weights, index, fused)

    @contextlib.contextmanager
    def step(self, num_tokens: int) -> Iterator[tuple[int, ...]]:
        """One step of the engine: every layer call inside brings `num_tokens` rows. COLLECTIVE.

        The token counts are exchanged once here instead of in every layer. Yields all ranks'
        counts. Every rank takes part in every step, with 0 when it has nothing.

        Raises:
            RankDisagreement: a rank skipped a step; raised on every rank, naming it. AclError,
            ProcessLost, CommError: a rank's earlier launches failed; raised on every rank.
        """
        self._refuse_if_closed()
        self._counts = self._exchange(num_tokens)
        try:
            yield self._counts
        finally:
            self._counts = None

    def drain(self) -> None:
        """Wait until all launches so far are done, and warn when ids were dropped. Local.

        Raises:
            AclError, PeerLost: a launch failed on the device. FenceTimeout.
        """
        self._refuse_if_closed()
        self._report_dropped()

    def stats(self) -> RunnerStats:
        """What was done so far. Local; waits for the launches, since the device counts.

        Raises:
            As `drain`.
        """
        self._refuse_if_closed()
        return self._stats()

    def _stats(self) -> RunnerStats:
        dropped = 0
        if self.config.validate_ids == "drop":  # else they are an error of the call
            dropped = self._transport.dropped_slots
        if self._fused is not None:
            dropped += self._fused.dropped()
        return RunnerStats(dict(self.launches), dropped)

    def _report_dropped(self) -> None:
        found = self._stats().dropped_ids
        new, self._dropped_reported = found - self._dropped_reported, found
        if new:
            warnings.warn(
                f"{new} expert ids were out of range or repeated in their row on rank "
                f"{group_rank(self._group)}, and were left out; allowed: distinct ids in [0, "
                f"{self.shape.num_experts}), or -1; next: repair the router; "
                'validate_ids="checked" names the first such row',
                RuntimeWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Drain, then release layers, executor, communication resource and device. Twice is
        harmless. Warns as `drain` does.

        COLLECTIVE after a good run, local after a failure.

        Raises:
            AclError, PeerLost, FenceTimeout: a launch that nobody has waited for failed.
        """
        if self._closed:
            return
        self._closed = True
        with self._closers:
            if self._resource is None or self._resource.failed is None:
                self._report_dropped()

    def __enter__(self) -> MoeRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def identity(self) -> str:
        """What runs MegaMoe here, for reports."""
        found = self.capability
        return found.identity or (
            f"{found.soc} (CANN {found.cann_version})" if found.soc else "none"
        )

    def _exchange(self, num_tokens: int) -> tuple[int, ...]:
        self._sequence += 1
        error: Exception | None = None
        count = 0
        try:
            count = _token_count(num_tokens)
            self._device.check()
            if self._resource is not None:
                self._resource.require_usable()
        except XmoeError as caught:
            error = caught
        return exchange_step(self._group, count, self._sequence, error, self.config.step_timeout_s)

    def _counts_now(self, num_tokens: int) -> tuple[int, ...]:
        """All ranks' token counts: those of the step, or exchanged here for one layer alone."""
        self._refuse_if_closed()
        return self._counts if self._counts is not None else self._exchange(num_tokens)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise XmoeError(
                "MoeRunner is closed; allowed: use before close(); next: create a new one on "
                "every rank"
            )


def _token_count(num_tokens: SupportsIndex) -> int:
    try:
        count = operator.index(num_tokens)
    except TypeError:
        count = -1
    if 0 <= count <= _MOST_TOKENS:
        return count
    raise ConfigError(
        f"a step of {num_tokens!r} tokens; allowed: whole numbers from 0 to {_MOST_TOKENS}; next: "
        "pass this rank's number of rows, 0 when it has none"
    )


def _is_cpu(device: RuntimeDevice | torch.device | None) -> bool:
    return device is None or (isinstance(device, torch.device) and device.type == "cpu")


def _operators_of(device: RuntimeDevice | torch.device | None) -> NpuOperators:
    """What the split path may call besides torch operators; looked up once a process."""
    if device is None:
        return NpuOperators()
    where = device if isinstance(device, torch.device) else device.torch_device
    return npu_operators() if where.type == "npu" else NpuOperators()


def _adaptor(device: torch.device | None) -> RuntimeDevice:
    """The adaptor for tensors of a torch device. Local."""
    if device is None or device.type == "cpu":
        return HostDevice(load(find_toolkit()))
    if device.type == "npu":
        from xmoe.kernels.npu_device import NpuDevice

        return NpuDevice(device.index)
    raise ConfigError(
        f"device={device}; allowed: cpu, npu; next: move the model there, or pass an adaptor"
    )


def _executor_on(device: Device, timeout_s: float) -> tuple[Device, ExecutorOptions]:
    """Where and how an executor runs: with a framework's tensors, on its current stream."""
    options = ExecutorOptions(timeout_s=timeout_s)
    if device.torch_device.type == "cpu":
        return device, options
    from xmoe.kernels.npu_device import on_current_stream

    return on_current_stream(device), options


def _split_executor_on(device: Device, config: XmoeConfig) -> tuple[Device, ExecutorOptions]:
    """The split path's executor: one stream, or three of its own with a chunk ahead.

    On npu tensors overlap relies on HCCL running a group's collectives in the order of issue
    whatever stream they follow; seen on the software device only.
    """
    where, options = _executor_on(device, config.step_timeout_s)
    if config.split_streams == "serial":
        return where, options
    return device, replace(options, mode=StreamMode.OVERLAP, max_inflight=2)
