# SPDX-License-Identifier: Apache-2.0
"""Where the executor is imported from; it lives in `xmoe.pipeline`."""

from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, TraceEntry, WorkItem
from xmoe.pipeline.options import ExecutorOptions
from xmoe.pipeline.schedules import prefetch
from xmoe.pipeline.ticket import Ticket

__all__ = [
    "ChannelRule",
    "ExecutorOptions",
    "Phase",
    "PhaseContext",
    "PhaseKind",
    "StreamExecutor",
    "Ticket",
    "TraceEntry",
    "WorkItem",
    "prefetch",
]
