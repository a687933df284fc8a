# SPDX-License-Identifier: Apache-2.0
"""How an executor runs, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from xmoe.errors import ConfigError
from xmoe.multistream import MAX_INFLIGHT, MultistreamConfig, StreamMode


@dataclass(frozen=True)
class ExecutorOptions:
    """How an executor runs.

    Attributes:
        mode: serial or overlap.
        max_inflight: slots, 1..4.
        timeout_s: for one item; shutdown_timeout_s: for streams to stop after a failure.
        stall_warn_s: after which `on_stall` is told of a wait.
        trace: keep TraceEntry objects.
    """

    mode: StreamMode = StreamMode.SERIAL
    max_inflight: int = 1
    timeout_s: float = 60.0
    shutdown_timeout_s: float | None = None
    stall_warn_s: float = 30.0
    trace: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_inflight <= MAX_INFLIGHT:
            raise ConfigError(
                f"max_inflight={self.max_inflight}; allowed: 1..{MAX_INFLIGHT}; next: correct the "
                "setting"
            )
        if self.mode is StreamMode.OFF:
            raise ConfigError(
                'mode="off" of an executor; allowed: serial, which is the same, or overlap; next: '
                "ExecutorOptions.of reads settings"
            )

    @classmethod
    def of(cls, config: MultistreamConfig, role: str, *, slots: int | None = None) -> Self:
        """What the settings say for `role`; `slots` where a schedule needs more than one."""
        mode = config.mode_of(role)
        count = config.max_inflight if mode is StreamMode.OVERLAP else 1
        return cls(
            mode=StreamMode.SERIAL if mode is StreamMode.OFF else mode,
            max_inflight=max(count, slots or 1),
            timeout_s=config.wait_timeout_s,
            shutdown_timeout_s=config.shutdown_timeout_s,
            stall_warn_s=config.stall_warn_s,
            trace=config.trace,
        )
