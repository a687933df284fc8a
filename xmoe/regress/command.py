# SPDX-License-Identifier: Apache-2.0
"""The parent's side of `xmoe regress`: start the ranks, judge, report."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace

from xmoe.config import XmoeConfig
from xmoe.ranks import RanksFailed, run_ranks
from xmoe.regress import checks, report
from xmoe.regress.plan import Plan, plan_from_args
from xmoe.regress.stored import StoredExperts


def run(args: argparse.Namespace) -> int:
    """Run the regression described by the options. Returns the exit code."""
    plan = plan_from_args(args)
    # Imported here, once: the ranks are forked from this process and inherit it.
    from xmoe.models.qwen3_5.config import experts_of_rank, read_config
    from xmoe.models.qwen3_5.engine_transformers import preload
    from xmoe.models.qwen3_5.weights import open_checkpoint
    from xmoe.regress.rank import run_rank

    # Settings and headers only: what is wrong is said once, before any rank exists.
    XmoeConfig.resolve(model_config=read_config(plan.model_dir))
    shape = open_checkpoint(plan.model_dir).shape
    experts_of_rank(shape.num_experts, 0, plan.ep_size)
    preload()
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
            print(f"xmoe regress: {error}", file=sys.stderr)
            _print_logs(folder)
            verdicts = [checks.Verdict("ranks", "", False, str(error))]
            verdicts += [checks.check_logs(folder), checks.check_released(prefix, pids)]
            if args.json:
                wall_s = time.monotonic() - begin
                report.write_json(report.to_json(plan, [], verdicts, wall_s), args.json)
            return 1
        verdicts = checks.check_outputs(plan, reports)
        stored = StoredExperts(plan.model_dir)
        captures = [capture for r in reports for capture in r.captures]
        verdicts += checks.check_reference(captures, stored, shape)
        verdicts += checks.check_ids(reports)
        verdicts += checks.check_memory(plan, reports, stored.total_bytes)
        verdicts.append(checks.check_logs(folder))
        verdicts.append(checks.check_released(prefix, pids))
        document = report.to_json(plan, reports, verdicts, time.monotonic() - begin)
    if args.json:
        report.write_json(document, args.json)
    report.print_table(document)
    return 0 if document["passed"] else 1


def _announce(plan: Plan) -> None:
    paths = " and ".join(path.value for path in plan.paths)
    print(
        f"[regress] EP{plan.ep_size}, {len(plan.requests)} requests x {plan.rounds} rounds, "
        f"{paths}, "
        f"fence {plan.fence.value}, model {plan.model_dir}",
        file=sys.stderr,
        flush=True,
    )


def _print_logs(folder: str) -> None:
    """The last lines of each rank's own log: the cause is often there."""
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), errors="replace") as file:
            lines = file.read().strip().splitlines()[-5:]
        for line in lines:
            print(f"  {name}: {line}", file=sys.stderr)
