# SPDX-License-Identifier: Apache-2.0
"""Trains the small Qwen3.5-MoE checkpoint on addition.

    python -m xmoe.models.qwen3_5.train --out DIR [--minutes 52] [--processes 2]

A usable model is in DIR from the first save on; the run may be interrupted at any time. Processes
of one thread each split a batch and average gradients once a step: on a busy machine that is faster
than threads, which wait for each other at every operation.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xmoe.models.qwen3_5.train.data import Batch, Encoder, batches
from xmoe.models.qwen3_5.train.fast import Recorder, fast_training
from xmoe.models.qwen3_5.train.tokenizer import END, PAD, build_tokenizer, save_tokenizer


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes a run. `minutes` bounds it; the learning rate follows the clock, so
    that it is near zero when time is up, however fast the machine is."""

    minutes: float = 52.0
    max_steps: int = 1_000_000
    batch: int = 128
    digits: int = 3
    learning_rate: float = 1.5e-3
    final_rate: float = 2e-5
    warmup_steps: int = 100
    weight_decay: float = 0.02
    balance: float = 0.01
    router_z: float = 1e-3
    seed: int = 20
    report_every: int = 200


def model_config(tokenizer: Any, **changes: Any) -> Any:
    """The configuration of the shipped model; `changes` make smaller ones for tests."""
    from transformers import Qwen3_5MoeTextConfig

    values: dict[str, Any] = dict(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=256,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        initializer_range=0.04,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        tie_word_embeddings=False,
    )
    values.update(changes)
    return Qwen3_5MoeTextConfig(**values)


def answer_logits(model: Any, batch: Batch, recorder: Recorder) -> tuple[Tensor, Tensor]:
    """Logits and targets at the positions where an answer token comes next."""
    recorder.router.clear()
    recorder.rows = batch.mask.flatten().nonzero().flatten()
    recorder.last_rows = (batch.targets.flatten() >= 0).nonzero().flatten()
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    scored = hidden.flatten(0, 1).index_select(0, recorder.last_rows)
    return model.lm_head(scored), batch.targets.flatten()[recorder.last_rows]


def step_loss(model: Any, batch: Batch, recorder: Recorder, recipe: Recipe) -> Tensor:
    """Loss of one batch: answer tokens, plus the two small router terms."""
    logits, targets = answer_logits(model, batch, recorder)
    loss = F.cross_entropy(logits.float(), targets)
    loss = loss + recipe.balance * recorder.balance_loss(model.config.num_experts)
    return loss + recipe.router_z * recorder.router_z_loss()


@torch.no_grad()
def exact_rate(model: Any, source: Iterator[Batch], count: int, recorder: Recorder) -> float:
    """Share of sums of which every answer token is the most likely one, given the right ones
    before it; equal to the share of right greedy answers."""
    right = total = 0
    while total < count:
        batch = next(source)
        logits, targets = answer_logits(model, batch, recorder)
        wrong = torch.zeros(batch.targets.shape, dtype=torch.bool)
        wrong[batch.targets >= 0] = logits.argmax(-1) != targets
        right += int((~wrong.any(1)).sum())
        total += batch.ids.shape[0]
    return right / total


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and the embedding do not."""
    decay: list[Any] = []
    rest: list[Any] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and "embed" not in name and "conv1d" not in name
        (decay if matrix else rest).append(parameter)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def average_gradients(model: Any, progress: float) -> float:
    """Averages gradients over the processes, and returns the first process' progress, so that all
    take the next step at the same rate and stop together."""
    if not dist.is_initialized():
        return progress
    gradients = [parameter.grad for parameter in model.parameters()]
    own = torch.tensor([progress if dist.get_rank() == 0 else 0.0])
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), own])
    dist.all_reduce(flat)
    parts = flat[:-1].div_(dist.get_world_size()).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return float(flat[-1])


def train(
    model: Any,
    encoder: Encoder,
    recipe: Recipe,
    save: Callable[[Any], None] | None = None,
    report: Callable[[str], None] = print,
) -> list[float]:
    """Trains in place and returns the loss of every step."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    source = batches(encoder, recipe.seed + 100 * rank, recipe.batch // size, recipe.digits)
    unseen = batches(encoder, recipe.seed + 1, 256, recipe.digits, unseen=True)
    losses: list[float] = []
    start = time.monotonic()
    done = 0.0
    with fast_training(model) as recorder:
        for step in range(recipe.max_steps):
            elapsed = (time.monotonic() - start) / 60
            if done >= 1:
                break
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            rate = recipe.final_rate + (recipe.learning_rate - recipe.final_rate) * cosine
            rate *= min(1.0, (step + 1) / recipe.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = step_loss(model, next(source), recorder, recipe)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            done = average_gradients(
                model, max(elapsed / recipe.minutes, (step + 1) / recipe.max_steps)
            )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if rank == 0 and (step + 1) % recipe.report_every == 0:
                mean = sum(losses[-recipe.report_every :]) / recipe.report_every
                rate_unseen = exact_rate(model, unseen, 512, recorder)
                report(
                    f"step {step + 1} minute {elapsed:.1f} loss {mean:.4f} "
                    f"unseen {rate_unseen:.4f} lr {rate:.2e}"
                )
                if save is not None and (step + 1) % (5 * recipe.report_every) == 0:
                    save(model)
    if save is not None and rank == 0:
        save(model)
    return losses


def save_checkpoint(model: Any, tokenizer: Any, directory: Path) -> None:
    """Writes config, bf16 weights and tokenizer; the weights in training stay float32."""
    import copy

    directory.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    # safetensors makes the file readable by its owner only; this one is to be shipped.
    (directory / "model.safetensors").chmod(0o644)


def start_processes(count: int) -> int:
    """Forks `count - 1` helpers, joins all into one group, and returns this process' rank."""
    if count == 1:
        return 0
    meeting = Path(tempfile.mkdtemp(prefix="xmoe-train-"), "store")
    rank = 0
    for other in range(1, count):
        if os.fork() == 0:
            rank = other
            break
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(meeting.parent)
    return rank


def main() -> None:
    """Command line of the training run."""
    from transformers import Qwen3_5MoeForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, prog="xmoe.models.qwen3_5.train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--max-steps", type=int, default=Recipe.max_steps)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(
        minutes=arguments.minutes,
        max_steps=arguments.max_steps,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    start_processes(arguments.processes)
    tokenizer = build_tokenizer()
    torch.manual_seed(recipe.seed)
    model = Qwen3_5MoeForCausalLM(model_config(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(
        model,
        Encoder(tokenizer),
        recipe,
        save=lambda trained: save_checkpoint(trained, tokenizer, arguments.out),
        report=lambda line: print(line, flush=True),
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
