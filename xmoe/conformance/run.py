# SPDX-License-Identifier: Apache-2.0
"""Carries cases out in processes of their own. This process never touches the device.

Cases share a process as long as they pass. One that fails, dies or stands still ends its process
(or its group), is recorded, and the cases behind it start in a new one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from xmoe import arguments, outputs
from xmoe.conformance.case import Case, Deviation, NotHere, Result, Verdict, all_cases
from xmoe.errors import ConfigError, XmoeError
from xmoe.kernels.capability import require_torch
from xmoe.ranks import RankContext, RanksFailed, run_ranks

SOFTWARE = "software device"


def command(args: argparse.Namespace) -> int:
    """The command line. Returns the exit code."""
    from xmoe.conformance import report

    cases = choose(all_cases(), args.only)
    for option in ("json", "skip_harmful"):
        word = "--" + option.replace("_", "-")
        arguments.need(word, getattr(args, option), not args.list, "without --list")
    if args.list:
        report.print_list(cases)
        return 0
    require_torch()
    (target,) = outputs.prepare(("--json", args.json))
    begin = time.monotonic()
    device = identify(args.device, args.deadline, args.tensors)
    results = run_cases(
        cases,
        device,
        args.device,
        args.ep,
        args.deadline,
        args.skip_harmful,
        report.progress(),
        args.tensors,
    )
    document = report.document(device, args.tensors, args.ep, results, time.monotonic() - begin)
    outputs.deliver_report(target, document, lambda: report.table(document))
    return 0 if document["passed"] else 1


def choose(cases: Sequence[Case], only: Sequence[str]) -> tuple[Case, ...]:
    """Cases by name or prefix; all when nothing is named."""
    if not only:
        return tuple(cases)
    chosen = []
    for word in only:
        hits = [c for c in cases if c.name == word or c.name.startswith(f"{word}.")]
        if not hits:
            import difflib

            near = difflib.get_close_matches(word, [c.name for c in cases], n=1)
            raise ConfigError(
                f"--only {word}: no such case; allowed: a name or prefix of `xmoe conformance "
                f"--list`; next: {f'did you mean {near[0]}?' if near else 'look there'}"
            )
        chosen += hits
    return tuple(case for case in cases if case in chosen)


def identify(device: str | None, deadline_s: float = 60.0, tensors: str = "acl") -> str:
    """What the results are to be attributed to: the software device, or the SoC's name.

    Raises:
        XmoeError: no device, or it does not answer; no torch_npu where its tensors are wanted.
    """
    name: str = run_ranks(_identify, 1, device, tensors, silence_s=deadline_s)[0]
    return name


def _identify(context: RankContext, device: str | None, tensors: str) -> str:
    from xmoe.conformance.session import Session

    if tensors == "npu":
        from xmoe.kernels.npu_device import torch_npu

        torch_npu()
    session = Session(device)
    if session.soft:
        return SOFTWARE
    name = session.runtime.acl.aclrtGetSocName()
    return str(session.ffi.string(name).decode()) if name != session.ffi.NULL else "unknown SoC"


def run_cases(
    cases: Sequence[Case],
    label: str,
    device: str | None = None,
    ranks: int = 2,
    deadline_s: float = 60.0,
    skip_harmful: bool = False,
    on_result: Callable[[Result], None] = lambda result: None,
    tensors: str = "acl",
) -> list[Result]:
    """Run the cases and return their results in the same order. Never raises for a case."""
    results: dict[str, Result] = {}

    def keep(result: Result) -> None:
        results[result.name] = result
        on_result(result)

    for together in (False, True):
        todo = [c for c in cases if c.ranks == together and not c.harmful]
        while todo:
            size = ranks if together else 1
            done = _run_batch(todo, label, device, size, deadline_s, tensors)
            for result in done:
                keep(result)
            todo = todo[len(done) :]
    for one in (c for c in cases if c.harmful):
        if skip_harmful:
            keep(Result(one.name, label, Verdict.SKIP, "left out by --skip-harmful", 0.0))
        else:
            size = ranks if one.ranks else 1
            keep(_run_batch([one], label, device, size, deadline_s, tensors)[0])
    return [results[c.name] for c in cases]


class _Progress:
    """What the ranks of one batch reported: begun and ended cases."""

    def __init__(self, size: int) -> None:
        self.begun = [-1] * size
        self.ended: dict[int, dict[int, dict[str, Any]]] = {}

    def __call__(self, rank: int, phase: str, details: dict[str, object]) -> None:
        number = details["number"]
        assert isinstance(number, int)
        if phase == "begin":
            self.begun[rank] = number
        else:
            self.ended.setdefault(number, {})[rank] = details


def _run_batch(
    cases: Sequence[Case],
    label: str,
    device: str | None,
    size: int,
    deadline_s: float,
    tensors: str,
) -> list[Result]:
    """Results of the first cases of the list, at least one."""
    seen = _Progress(size)
    error: RanksFailed | None = None
    names = [one.name for one in cases]
    try:
        run_ranks(_rank, size, device, names, tensors, silence_s=deadline_s, on_report=seen)
    except RanksFailed as caught:
        error = caught
    results = []
    for number, one in enumerate(cases):
        ended = seen.ended.get(number, {})
        complete = len(ended) == size
        if not complete and error is None:
            break
        if not complete and number > max(0, *seen.begun, -1):
            break
        result = _judge(one, label, size, ended, error, deadline_s)
        results.append(result)
        if result.verdict is Verdict.FAIL:
            break
    return results


def _judge(
    one: Case,
    label: str,
    size: int,
    ended: dict[int, dict[str, Any]],
    error: RanksFailed | None,
    deadline_s: float,
) -> Result:
    """One result of what the ranks said of a case."""
    seconds = max((float(d["seconds"]) for d in ended.values()), default=deadline_s)
    for verdict in (Verdict.FAIL, Verdict.SKIP):
        said = {
            r: str(d["text"]) for r, d in sorted(ended.items()) if d["verdict"] == verdict.value
        }
        if said:
            rank, text = next(iter(said.items()))
            where = f"rank {rank}: " if size > 1 else ""
            return Result(one.name, label, verdict, f"{where}{text}", seconds)
    if len(ended) < size:
        lost = [r for r in range(size) if r not in ended]
        # Deaths come first there; the others of the group merely waited for that rank.
        told = [(e.rank, e.message) for e in (error.errors if error else ()) if e.rank in lost]
        rank, why = told[0] if told else (lost[0], "it did not come to an end")
        where = f"rank {rank}: " if size > 1 else ""
        return Result(one.name, label, Verdict.FAIL, f"{where}{why}", seconds)
    return Result(one.name, label, Verdict.PASS, str(ended[0]["text"]), seconds)


class _Ended(XmoeError):
    """Ends a rank after a case that failed: what it left behind is not to be trusted."""


def _rank(context: RankContext, device: str | None, names: Sequence[str], tensors: str) -> None:
    """One rank's part: the cases in order, until one fails."""
    by_name = {one.name: one for one in all_cases()}
    session: Any = None
    for number, name in enumerate(names):
        one = by_name[name]
        context.report("begin", number=number, name=name)
        begin = time.perf_counter()
        if session is None:
            session = _session(context, device, one.ranks, tensors)
        verdict, text = attempt(one, session)
        seconds = time.perf_counter() - begin
        context.report("end", number=number, verdict=verdict.value, text=text, seconds=seconds)
        if verdict is Verdict.FAIL or one.harmful:
            raise _Ended(f"{name} ended this process; allowed: -; next: read its evidence")
    if session is not None:
        session.close()


def _session(context: RankContext, device: str | None, together: bool, tensors: str) -> Any:
    if together:
        from xmoe.conformance.cases_group import GroupSession

        return GroupSession(device, context, tensors)
    from xmoe.conformance.session import Session

    return Session(device, context.rank, tensors)


def attempt(one: Case, session: Any) -> tuple[Verdict, str]:
    """Run one case in this process."""
    try:
        with session.scope():
            return Verdict.PASS, one.fn(session)
    except NotHere as reason:
        return Verdict.SKIP, str(reason)
    except Deviation as evidence:
        return Verdict.FAIL, str(evidence)
    except (XmoeError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        return Verdict.FAIL, f"{type(error).__name__}: {error}"
