# SPDX-License-Identifier: Apache-2.0
"""The parent's side of `xmoe regress`: start the ranks, judge, report."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from xmoe import env, outputs
from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError, OutputError
from xmoe.kernels.capability import leave_alone_if_broken
from xmoe.kernels.npu_device import torch_npu
from xmoe.ranks import RanksFailed, run_ranks
from xmoe.regress import checks, report
from xmoe.regress.plan import Plan, plan_from_args
from xmoe.regress.stored import StoredExperts
from xmoe.types import Path as MoePath


def run(args: argparse.Namespace) -> int:
    """Run the regression described by the options. Returns the exit code."""
    plan = plan_from_args(args)
    (target,) = outputs.prepare(("--json", args.json))
    # Imported here, once: the ranks are forked from this process and inherit it.
    from xmoe.models.qwen3_5.config import experts_of_rank, read_config
    from xmoe.models.qwen3_5.engine_transformers import preload
    from xmoe.models.qwen3_5.weights import open_checkpoint
    from xmoe.regress.rank import run_rank

    # transformers imports torch_npu wherever it is found, so that is tried before.
    if plan.device == "npu":
        torch_npu()
    else:
        leave_alone_if_broken("torch_npu")
    # Settings and headers only: what is wrong is said once, before any rank exists.
    config = XmoeConfig.resolve(model_config=read_config(plan.model_dir))
    shape = open_checkpoint(plan.model_dir).shape
    experts_of_rank(shape.num_experts, 0, plan.ep_size)
    preload()
    _check_prompts(plan, config)
    with tempfile.TemporaryDirectory(prefix="xmoe-regress-") as folder:
        plan = replace(plan, log_dir=folder)
        _announce(plan)
        begin = time.monotonic()
        # A name of this run's own, so that other jobs' files are not taken for what it left.
        prefix = f"xmoe-regress-{os.getpid()}-"
        pids: list[int] = []
        try:
            reports = run_ranks(
                run_rank,
                plan.ep_size,
                plan,
                silence_s=plan.step_timeout_s,
                on_report=report.Progress(plan.ep_size),
                on_start=pids.append,
                environ={"XSD_SHM_PREFIX": prefix, "XSD_SHM_DIR": checks.SHARED_MEMORY},
            )
        except RanksFailed as error:
            _print_logs(folder)
            verdicts = [checks.Verdict("ranks", "", False, str(error))]
            verdicts += [checks.check_logs(folder), checks.check_released(prefix, pids)]
            document = report.to_json(plan, [], verdicts, time.monotonic() - begin)
            if target is not None:
                try:
                    target.write_json(document)
                except (OutputError, BrokenPipeError) as failure:
                    outputs.note(f"xmoe: {failure}")
            raise
        verdicts = checks.check_outputs(plan, reports)
        stored = StoredExperts(plan.model_dir)
        captures = [capture for r in reports for capture in r.captures]
        verdicts += checks.check_reference(captures, stored, shape)
        verdicts += checks.check_ids(reports)
        verdicts += checks.check_memory(plan, reports, stored.total_bytes)
        verdicts.append(checks.check_logs(folder))
        verdicts.append(checks.check_released(prefix, pids))
        document = report.to_json(plan, reports, verdicts, time.monotonic() - begin)
    # The text goes to the standard error, which needs no way out of JSON's way.
    outputs.note(report.table(document), end="")
    if target is not None:
        target.write_json(document)
    return 0 if document["passed"] else 1


def _check_prompts(plan: Plan, config: XmoeConfig) -> None:
    """Refuse a prompt that no rank could bring to the fused path in one step."""
    from xmoe.models.qwen3_5.engine_transformers import load_tokenizer
    from xmoe.regress.rank import encode

    tokenizer, _ = load_tokenizer(Path(plan.model_dir))
    most = config.max_tokens_per_rank
    for prompt in dict.fromkeys(plan.requests):
        tokens = len(encode(tokenizer, prompt))
        if MoePath.MEGA_MOE in plan.paths and tokens > most:
            raise ConfigError(
                f"--prompt {env.shown(prompt)} has {tokens} tokens; allowed: up to {most}, "
                "max_tokens_per_rank, with mega_moe; next: shorten it, raise "
                "XMOE_MAX_TOKENS_PER_RANK, or take --path fused_moe"
            )


def _announce(plan: Plan) -> None:
    paths = " and ".join(path.value for path in plan.paths)
    outputs.note(
        f"[regress] EP{plan.ep_size}, {len(plan.requests)} requests x {plan.rounds} rounds, "
        f"{paths}, fence {plan.fence.value}, model {plan.model_dir}"
    )


def _print_logs(folder: str) -> None:
    """The last lines of each rank's own log: the cause is often there."""
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), errors="replace") as file:
            lines = file.read().strip().splitlines()[-5:]
        for line in lines:
            outputs.note(f"  {name}: {line}")
