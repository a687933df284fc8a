# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a regression run. Runs in a forked process; talks to the parent by reports."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError
from xmoe.layout import routed_weight_bytes_per_rank
from xmoe.models.qwen3_5.config import read_config
from xmoe.models.qwen3_5.engine_transformers import LoadedModel, load_model
from xmoe.models.qwen3_5.greedy import GreedySession
from xmoe.ranks import RankContext
from xmoe.regress.plan import Plan
from xmoe.runner import MoeLayer, MoeRunner
from xmoe.types import ExpertWeights, Mode, Path


@dataclass
class Capture:
    """One layer call of this rank, as float32/int numpy arrays: what went in and what came out."""

    path: str
    layer: int
    step: int
    hidden_states: Any
    topk_ids: Any
    topk_weights: Any
    output: Any


@dataclass
class RankReport:
    """What a rank hands back to the parent. Plain values only: it crosses a pipe."""

    rank: int
    ready_s: float
    identity: str = "CPU tensors, no device library (fused_moe only)"
    outputs: dict[str, list[list[tuple[str, list[int]]]]] = field(default_factory=dict)
    """path -> round -> wave -> (text, token ids); an empty shard's wave is ("", [])."""
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    dropped_ids: dict[str, int] = field(default_factory=dict)
    """path -> expert ids that were out of range or repeated in their row."""
    expert_bytes_read: int = 0
    other_bytes_read: int = 0
    expert_bytes_held: int = 0
    expert_bytes_once: int = 0
    """What this rank's experts take when each weight is stored once, in the sizes that run."""
    rss_peak_bytes: int = 0
    rss_load_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class _SwitchedLayer:
    """A layer of the model whose path can be changed between runs; records some calls.

    The weights exist once: both paths' layers are built over the same tensors.
    """

    def __init__(self, index: int, weights: ExpertWeights, state: _State) -> None:
        self.index = index
        self.weights = weights
        self._state = state
        self._layers: dict[Path, MoeLayer] = {}

    def __call__(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        state = self._state
        state.where(self.index)
        layer = self._layers.get(state.path)
        if layer is None:
            layer = state.runner.layer(self.weights, self.index)
            self._layers[state.path] = layer
        output = layer(hidden_states, topk_ids, topk_weights)
        if state.capturing and hidden_states.shape[0]:
            state.captures.append(
                Capture(
                    path=state.path.value,
                    layer=self.index,
                    step=state.step,
                    hidden_states=hidden_states.float().cpu().numpy(),
                    topk_ids=topk_ids.long().cpu().numpy(),
                    topk_weights=topk_weights.float().cpu().numpy(),
                    output=output.float().cpu().numpy(),
                )
            )
        return output


class _State:
    """What the layers of one rank need to know about the run in progress."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.runners: dict[Path, MoeRunner] = {}
        self.path = Path.FUSED_MOE
        self.round = 0
        self.step = 0
        self.capturing = False
        self.captures: list[Capture] = []

    @property
    def runner(self) -> MoeRunner:
        return self.runners[self.path]

    def where(self, layer: int) -> None:
        self._context.report(
            "layer", path=self.path.value, round=self.round, step=self.step, layer=layer
        )


def run_rank(context: RankContext, plan: Plan) -> RankReport:
    """Load the model, generate on every path and round, hand back outputs and captures.
    Collective.
    """
    begin = time.monotonic()
    _redirect(plan.log_dir, context.rank)
    group = context.init_process_group(plan.step_timeout_s)
    device = _torch_device(plan.device, context.rank)
    context.report("load")
    state = _State(context)
    before = _rss()
    layers: list[_SwitchedLayer] = []

    def make_layer(index: int, weights: ExpertWeights) -> _SwitchedLayer:
        context.report("load", layer=index)  # a large model takes longer than a rank may be silent
        layers.append(_SwitchedLayer(index, weights, state))
        return layers[-1]

    loaded = load_model(
        plan.model_dir,
        ep_rank=context.rank,
        ep_size=context.size,
        make_layer=make_layer,
        device=device,
        attention=plan.attention,
    )
    report = RankReport(
        rank=context.rank,
        ready_s=0.0,
        expert_bytes_read=loaded.bytes_read.experts,
        other_bytes_read=loaded.bytes_read.others,
        expert_bytes_held=sum(_bytes(layer.weights) for layer in layers),
        expert_bytes_once=routed_weight_bytes_per_rank(loaded.shape, context.size, len(layers)),
        rss_load_bytes=_rss() - before,
        captures=state.captures,
    )
    with contextlib.ExitStack() as runners:
        for path in plan.paths:
            context.report("init", path=path.value)
            mode = Mode.ON if path is Path.MEGA_MOE else Mode.OFF
            config = XmoeConfig.resolve(
                {"mode": mode, "fence": plan.fence, "step_timeout_s": plan.step_timeout_s},
                model_config=read_config(plan.model_dir),
            )
            runner = runners.enter_context(
                MoeRunner.create(loaded.shape, config, group=group, device=device)
            )
            state.runners[path] = runner
            report.decisions[path.value] = json.loads(runner.decision.to_json())
            if path is Path.MEGA_MOE:
                report.identity = runner.identity
        report.ready_s = time.monotonic() - begin
        context.report("ready", seconds=round(report.ready_s, 2))
        for path in plan.paths:
            state.path = path
            started = time.monotonic()
            report.outputs[path.value] = [
                _round(loaded, state, context, plan, number) for number in range(plan.rounds)
            ]
            report.seconds[path.value] = time.monotonic() - started
            report.dropped_ids[path.value] = state.runner.stats().dropped_ids
        context.report("close")
    report.rss_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return report


def _round(
    loaded: LoadedModel, state: _State, context: RankContext, plan: Plan, number: int
) -> list[tuple[str, list[int]]]:
    state.round = number
    answers = []
    for wave in range(plan.waves):
        state.capturing = number == 0 and wave == 0
        tokens = _generate(loaded, state, plan.prompt(context.rank, wave), plan.max_new_tokens)
        text = loaded.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        answers.append((text, tokens))
        context.report("answer", path=state.path.value, round=number, wave=wave, text=text)
    return answers


def _generate(
    loaded: LoadedModel, state: _State, prompt: str | None, max_new_tokens: int
) -> list[int]:
    """Greedy decoding in lockstep: every rank joins every step until no rank has tokens left."""
    session = GreedySession(loaded)
    if prompt is not None:
        session.start(encode(loaded.tokenizer, prompt), max_new_tokens)
    state.step = 0
    while True:
        with state.runner.step(session.num_pending) as counts:
            if not any(counts):
                return session.token_ids
            session.step()
        state.step += 1


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt as one user turn of the checkpoint's own chat template."""
    if tokenizer is None:
        raise ConfigError(
            "the checkpoint has no tokenizer_config.json; allowed: a checkpoint with its "
            "tokenizer; "
            "next: copy the tokenizer's files into the directory"
        )
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _torch_device(name: str, rank: int) -> torch.device:
    """This rank's device. torch_npu is initialised here, after the fork, never in the parent."""
    if name == "host":
        return torch.device("cpu")
    from xmoe.kernels.npu_device import torch_npu

    npu = torch_npu().npu
    index = rank % int(npu.device_count())
    npu.set_device(index)
    return torch.device("npu", index)


def _bytes(weights: ExpertWeights) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in (weights.gate_up, weights.down))


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _redirect(folder: str, rank: int) -> None:
    """Send everything this rank prints, native code included, to its own log for the error scan."""
    log = os.open(os.path.join(folder, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
