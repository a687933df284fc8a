# SPDX-License-Identifier: Apache-2.0
"""Items and connector operators on the mock device, with the windows' rules watched.

`MockP2P` and `MockAsync` implement the operator protocols of xmoe.kernels.ops.cam on MockNpu; the
peers' side is an actor of the world. Every rule that real kernels do not enforce is checked when a
kernel starts or finishes, and goes into `world.problems`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.mock_stream import Kernel, MockNpu, World
from xmoe.kernels.ops.cam.protocols import A2EOutput, DispatchItem
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.pipeline.adapters.base import AttentionOutput, FfnInput
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem


def item_of(
    device: MockNpu,
    name: str,
    *kinds: PhaseKind,
    channel: str = "c",
    before: Callable[[PhaseKind, PhaseContext], None] | None = None,
    **kw: Any,
) -> WorkItem:
    """An item whose phases launch one kernel each, named `name.phase`."""

    def phase(kind: PhaseKind) -> Phase:
        def run(context: PhaseContext) -> None:
            if before is not None:
                before(kind, context)
            if kind is not PhaseKind.METADATA:
                device.launch(context.stream.handle(), Kernel(f"{name}.{kind.value}"))

        return Phase(kind, "compute" if kind is PhaseKind.COMPUTE else channel, run)

    return WorkItem(name, kw.pop("layer", 0), tuple(phase(kind) for kind in kinds), **kw)


class Memory:
    """Which item's data each slot buffer holds, by address; a reader or writer that is wrong is a
    violation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.owner: dict[int, str] = {}

    def receive(self, address: int, item: str) -> None:
        if address in self.owner:
            self.world.violation(f"{item} overwrites {self.owner[address]}, which was not sent")
        self.owner[address] = item

    def sent(self, address: int, item: str) -> None:
        if self.owner.pop(address, None) != item:
            self.world.violation(f"{item} sends a buffer that is not its own")


class MockCopy:
    """HostCopy on the mock device."""

    def __init__(self, device: MockNpu) -> None:
        self.device = device
        self.words: list[int] = []

    @property
    def arrived(self) -> bool:
        return bool(self.words)

    def queue(self, words: Tensor, stream: int) -> None:
        self.words = []

        def finish() -> None:
            self.words = words.tolist()

        self.device.launch(stream, Kernel("copy", 0, finish=finish))

    def read(self) -> list[int]:
        return self.words


class MockP2P:
    """a2e and e2a of an FFN rank. The peer sends layer L+1 of a group once layer L was answered."""

    def __init__(
        self,
        device: MockNpu,
        groups: tuple[str, ...],
        layers: int,
        topology: CamP2PTopology | None = None,
    ) -> None:
        self.topology = topology or CamP2PTopology(1, 1, 0, hidden=4)
        self.device = device
        self.world = device.world
        self.memory = Memory(device.world)
        self.running: dict[str, str] = {}
        self.arrived = dict.fromkeys(groups, 0)
        self.received = dict.fromkeys(groups, 0)
        self.answered = dict.fromkeys(groups, 0)
        self.issued = dict.fromkeys(groups, 0)
        self.values: list[float] = []
        self.sources: dict[int, int] = {}
        self.layers = layers
        self.alive = True
        self.world.actors.append(self._peer)

    def _peer(self) -> list[Callable[[], None]]:
        def send(group: str) -> None:
            self.arrived[group] += 1

        return [
            lambda group=group: send(group)  # type: ignore[misc]
            for group, count in self.arrived.items()
            if self.alive and count < self.layers and count == self.answered[group]
        ]

    def empty_a2e(self, num_tokens: int) -> A2EOutput:
        rows = torch.zeros(num_tokens, self.topology.hidden, dtype=torch.bfloat16)
        flat = torch.zeros(num_tokens, self.topology.topk)
        return A2EOutput(rows, flat.int(), flat, torch.zeros(1).int(), torch.zeros(1).bool())

    def _begin(self, group: str, name: str) -> None:
        if group in self.running:
            self.world.violation(f"{name} runs beside {self.running[group]} in group {group}")
        self.running[group] = name

    def a2e(
        self,
        group: str,
        hidden_states: Tensor | None,
        num_tokens: int,
        *,
        stream: int,
        out: A2EOutput | None = None,
    ) -> A2EOutput:
        assert out is not None
        address = out.hidden_states.data_ptr()
        number = self.received[group]
        name = f"a2e.{group}.{number}"
        self.received[group] += 1

        def start() -> None:
            self._begin(group, name)
            self.memory.receive(address, f"{group}.{number}")

        def finish() -> None:
            self.running.pop(group, None)
            out.hidden_states.fill_(number + 1)

        ready = lambda: self.arrived[group] > number  # noqa: E731
        self.device.launch(stream, Kernel(name, self.topology.aiv_num, start, ready, finish))
        return out

    def e2a(
        self, group: str, hidden_states: Tensor, atten_batch_size: Tensor, *, stream: int
    ) -> Tensor:
        number = self.issued[group]
        self.issued[group] += 1
        name = f"e2a.{group}.{number}"
        source = self.sources.pop(hidden_states.data_ptr(), 0)

        def finish() -> None:
            self.running.pop(group, None)
            self.values.append(float(hidden_states[0, 0]))
            if float(hidden_states[0, 0]) != number + 2:
                self.world.violation(f"{name} carries {float(hidden_states[0, 0])}")
            self.memory.sent(source, f"{group}.{number}")
            self.answered[group] += 1

        kernel = Kernel(
            name, self.topology.aiv_num, lambda: self._begin(group, name), finish=finish
        )
        self.device.launch(stream, kernel)
        return hidden_states


class PlusOne:
    """FFN compute: every row plus one, by a kernel that reads when it runs."""

    device_metadata = True

    def __init__(self, device: MockNpu, ops: Any, cores: int = 16) -> None:
        self.device = device
        self.ops = ops
        self.cores = cores
        self.layers: list[int] = []
        self.items: list[FfnInput] = []

    def compute(self, item: FfnInput, out: Tensor, stream: int) -> None:
        self.layers.append(item.layer)
        self.items = [*self.items[-3:], item]
        self.ops.sources[out.data_ptr()] = item.hidden_states.data_ptr()
        source = item.hidden_states

        def finish() -> None:
            out.copy_(source.float() + 1)

        self.device.launch(stream, Kernel(f"ffn.{item.layer}", self.cores, finish=finish))


class MockAsync:
    """The four asynchronous operators. Attention groups are actors: one dispatch, then its answer.

    `rows[g][layer]` tokens of group g reach this rank, split into `chunks` items at most.
    """

    shared_expert = False

    def __init__(
        self,
        device: MockNpu,
        groups: int,
        layers: int,
        experts: int = 2,
        chunks: int = 1,
        **place: Any,
    ) -> None:
        self.topology = CamAsyncTopology(
            **{"attn_size": groups, "ffn_size": 1, "rank": groups, "hidden": 4, "topk": 1,
               "experts_per_rank": experts, "max_seq_len": 8} | place
        )  # fmt: skip
        self.device = device
        self.world = device.world
        self.memory = Memory(device.world)
        self.layers = layers
        self.experts = experts
        self.chunks = chunks
        self.sent = [0] * groups  # dispatches of each group
        self.flag = [-1] * groups  # layer waiting in the window
        self.status = [0] * groups  # answers since the last combine
        self.part = 0
        self.cursor = 0
        self.alive = True
        self.stop = False
        self.answers: list[tuple[int, int]] = []
        self.values: list[float] = []
        self.sources: dict[int, int] = {}
        self.world.actors.append(self._attention)

    def rows(self, group: int, layer: int) -> int:
        return (group + layer) % 3  # also none

    def _attention(self) -> list[Callable[[], None]]:
        found = []
        for g in range(len(self.sent)):
            if self.alive and self.sent[g] < self.layers and self._free(g):
                found.append(lambda g=g: self._dispatch(g))  # type: ignore[misc]
        return found

    def _free(self, g: int) -> bool:
        return self.sent[g] == 0 or self.status[g] > 0

    def _dispatch(self, g: int) -> None:
        self.status[g] = 0
        self.flag[g] = self.sent[g]
        self.sent[g] += 1

    def ready(self, topology: CamAsyncTopology, group: str) -> int:
        self.world.step()  # time passes while the host asks
        return sum(layer >= 0 for layer in self.flag)

    def empty_item(self, capacity: int | None = None) -> DispatchItem:
        rows = torch.zeros(capacity or 8, self.topology.hidden, dtype=torch.bfloat16)
        info = torch.zeros(self.topology.info_length(False), dtype=torch.int64)
        return DispatchItem(rows, torch.ones(8), info, torch.zeros(self.experts, dtype=torch.int64))

    def dispatch_recv(
        self,
        group: str,
        *,
        stream: int,
        out: DispatchItem | None = None,
        stop: Tensor | None = None,
    ) -> DispatchItem:
        assert out is not None
        address = out.hidden_states.data_ptr()

        def take() -> None:
            if self.stop:
                out.tokens_per_expert.zero_()
                out.batch_info.zero_()
                out.batch_info[:2] = torch.tensor([1, -1])
                self.memory.owner[address] = "stop"
                return
            g = next(
                (self.cursor + i) % len(self.flag)
                for i in range(len(self.flag))
                if self.flag[(self.cursor + i) % len(self.flag)] >= 0
            )
            layer, experts = self.flag[g], self.experts
            first = self.part * experts // self.chunks
            last = (self.part + 1) * experts // self.chunks - 1
            self.part = (self.part + 1) % self.chunks
            self.cursor = g  # stays there until the last part
            if self.part == 0:
                self.flag[g] = -1
                self.cursor = (g + 1) % len(self.flag)
            rows = self.rows(g, layer)
            out.tokens_per_expert.zero_()
            if last == experts - 1:
                out.tokens_per_expert[-1] = rows
            out.hidden_states.fill_(layer + 1)
            out.batch_info[:5] = torch.tensor([rows, g, layer, first, last])
            out.batch_info[-1] = rows  # all to the last expert
            self.memory.owner[address] = f"{g}.{layer}.{last}"

        def start() -> None:
            self.memory.receive(address, "a receive")

        ready = lambda: self.stop or any(layer >= 0 for layer in self.flag)  # noqa: E731
        cores = self.device.total_cores
        self.device.launch(stream, Kernel("recv", cores, start, ready, take))
        return out

    def combine_send(
        self,
        group: str,
        expert_out: Tensor,
        batch_info: Tensor,
        *,
        stream: int,
        shared_out: Tensor | None = None,
    ) -> None:
        if expert_out.dtype != torch.bfloat16 or expert_out.shape[0] < 1:
            raise AssertionError(f"combine_send of {expert_out.dtype} {expert_out.shape}")
        address = self.sources.pop(expert_out.data_ptr(), None)

        def finish() -> None:
            rows, g, layer, _, last = batch_info[:5].tolist()
            if g < 0:  # the shutdown item
                self.memory.owner.clear()
                return
            self.values.append(float(expert_out[0, 0]))
            if address is not None:
                self.memory.sent(address, f"{g}.{layer}.{last}")
                if float(expert_out[0, 0]) != layer + 2:
                    self.world.violation(f"answer of {g}.{layer} carries {expert_out[0, 0]}")
            else:
                owner = [a for a, o in self.memory.owner.items() if o == f"{g}.{layer}.{last}"]
                self.memory.sent(owner[0] if owner else -1, f"{g}.{layer}.{last}")
            if last == self.experts - 1:
                self.status[g] += 1
                if self.status[g] > 1:
                    self.world.violation(f"group {g} is answered twice")
                self.answers.append((g, layer))

        self.device.launch(stream, Kernel("send", 8, finish=finish))


class MockAttentionOps:
    """Both connectors' Attention operators: launches only, with the outstanding ones counted."""

    shared_expert = False

    def __init__(
        self, device: MockNpu, topology: CamP2PTopology | CamAsyncTopology, limit: int = 1
    ) -> None:
        self.topology = topology
        self.device = device
        self.outstanding: dict[str, int] = {}
        self.limit = limit
        self.fail_next = False

    def _count(self, group: str, by: int) -> None:
        count = self.outstanding[group] = self.outstanding.get(group, 0) + by
        if not 0 <= count <= self.limit:
            self.device.world.violation(f"{count} unanswered in {group}")

    def _launch(self, stream: int, name: str, group: str, by: int) -> None:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("launch refused")
        begin = (lambda: self._count(group, by)) if by > 0 else (lambda: None)
        end = (lambda: self._count(group, by)) if by < 0 else (lambda: None)

        def early() -> None:
            if by < 0 and self.outstanding.get(group, 0) == 0:
                self.device.world.violation(f"{name} waits before its dispatch is on its way")
            begin()

        self.device.launch(stream, Kernel(name, 8, early, finish=end))

    def empty_a2e(self, num_tokens: int) -> A2EOutput:
        one = torch.zeros(1, 1)
        return A2EOutput(one, one.int(), one, one.int(), one.bool())

    def empty_item(self, capacity: int | None = None) -> DispatchItem:
        raise AssertionError("the Attention side receives no items")

    def a2e(self, group, hidden_states, num_tokens, *, stream, out=None):
        self._launch(stream, f"a2e.{group}", group, 1)
        return self.empty_a2e(num_tokens)

    def e2a(self, group, hidden_states, atten_batch_size, *, stream):
        self._launch(stream, f"e2a.{group}", group, -1)
        return hidden_states.clone()

    def dispatch_send(self, group, hidden_states, topk_ids, layer, *, stream):
        self._launch(stream, f"S.{layer}", group, 1)

    def combine_recv(self, group, topk_ids, topk_weights, *, stream):
        self._launch(stream, "R", group, -1)
        return torch.zeros(topk_ids.shape[0], self.topology.hidden, dtype=torch.bfloat16)

    def dispatch_recv(self, *args: Any, **kw: Any) -> DispatchItem:
        raise AssertionError("the Attention side receives no items")

    def combine_send(self, *args: Any, **kw: Any) -> None:
        raise AssertionError("the Attention side sends no results")


class MockAttention:
    """Attention compute: one kernel; ids and weights as the connector wants them."""

    def __init__(self, device: MockNpu, topk: int | None = None) -> None:
        self.device = device
        self.topk = topk

    def compute(
        self, hidden_states: Tensor, layer: int, stage: int, stream: int
    ) -> AttentionOutput:
        self.device.launch(stream, Kernel(f"A{stage}.{layer}", 8))
        if self.topk is None:
            return AttentionOutput(hidden_states.clone())
        ids = torch.zeros(hidden_states.shape[0], self.topk, dtype=torch.int32)
        return AttentionOutput(hidden_states.clone(), ids, ids.float())
