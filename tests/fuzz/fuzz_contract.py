# SPDX-License-Identifier: Apache-2.0
"""Fuzz the contract layer, the compiled launch plan and the software vendor behind them.

    python tests/fuzz/fuzz_contract.py --target plan --count 101000 --seed 6 --json plan.json

Argument sets run in child processes, in batches: a child that dies or stands still is a finding,
and the set it was at is printed with the seed of its batch. Exit code 0 without findings, 1 with.
Nothing here is run on an NPU; the vendor's library is not fuzzed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings

from support import abi_vendors
from support.fuzz_cases import TARGETS, Case, families
from support.fuzz_plan_cases import PlanCase

BATCH = 2000
STILL_S = 60.0
SETS_PER_EXAMPLE = 6  # about what one drawn example yields
FINDINGS_KEPT = 20  # of one batch
PAGE = 1 << 20
ENVIRONMENT = {
    "XSD_WAIT_TIMEOUT_MS": "50",
    "HCCL_CONNECT_TIMEOUT": "60",  # or joining a group would have to be as quick on a busy machine
    "XSD_MEMORY_BYTES": str(1 << 36),
    "HCCL_BUFFSIZE": "16",
    "XMOE_ABI_PROBE": "off",  # one process per batch and variant: the pin is enough here
    "XMOE_DEVICE": "soft",
    "ASCEND_HOME_PATH": "",
}


@dataclass
class Batch:
    """One child: what it was asked and what became of it."""

    target: str
    variant: str
    seed: int
    count: int
    ran: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def run_batch(batch: Batch, folder: Path, still_s: float = STILL_S) -> Batch:
    """Fork a child for the batch, watch it, and fill in the result. Local."""
    shared = mmap(-1, PAGE)
    result = folder / f"{batch.target}-{batch.variant}-{batch.seed}"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(batch, folder, shared, result)
    at, since, killed = -1, time.monotonic(), False
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        now = int.from_bytes(shared[:8], "little")
        if now != at:
            at, since = now, time.monotonic()
        elif time.monotonic() - since > still_s and not killed:
            os.kill(pid, signal.SIGKILL)
            killed = True
        time.sleep(0.02)
    batch.ran = int.from_bytes(shared[:8], "little")
    if result.exists():
        batch.outcomes, batch.findings = pickle.loads(result.read_bytes())
        return batch
    how = f"stood still for {still_s:g} s" if killed else _ended(status)
    length = int.from_bytes(shared[8:16], "little")
    last = bytes(shared[16 : 16 + length]).decode(errors="replace")
    batch.findings.append(f"the process {how} at set {batch.ran} of seed {batch.seed}: {last}")
    return batch


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with {os.WEXITSTATUS(status)} and no result"


def _child(batch: Batch, folder: Path, shared: mmap, result: Path) -> None:
    try:
        os.environ.update(ENVIRONMENT)
        os.environ["XSD_SHM_PREFIX"] = f"{os.environ.get('XSD_SHM_PREFIX', 'xmoe-fuzz-')}"
        os.environ["ASCEND_CUSTOM_OPP_PATH"] = str(folder / batch.variant)
        outcomes, findings = _execute(batch, folder, shared)
        part = result.with_suffix(".part")
        part.write_bytes(pickle.dumps((outcomes, findings)))
        part.rename(result)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)


def _execute(batch: Batch, folder: Path, shared: mmap) -> tuple[Counter[str], list[str]]:
    from support.fuzz_values import Finding

    library = folder / batch.variant / "op_api" / "lib" / "libcust_opapi.so"
    target = _target(batch.target, batch.variant, library)
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    ran = 0

    def attempt(case: Case | PlanCase) -> None:
        nonlocal ran
        text = repr(case).encode()[: PAGE - 16]
        shared[8:16] = len(text).to_bytes(8, "little")
        shared[16 : 16 + len(text)] = text
        ran += 1
        shared[:8] = ran.to_bytes(8, "little")
        try:
            outcomes[target.run(case)] += 1
            return
        except Finding as error:
            said = str(error)
        except Exception as error:
            # A refusal has a name of this project's; anything else is a hole in the checks.
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        outcomes["finding"] += 1
        if len(findings) < FINDINGS_KEPT:
            findings.append(f"{said}: {case!r}")

    seen: set[bytes] = set()

    def family(members: tuple[Case | PlanCase, ...]) -> None:
        for case in members:
            mark = hashlib.sha256(repr(case).encode()).digest()[:8]
            if mark not in seen and ran < batch.count:
                seen.add(mark)
                attempt(case)

    wanted = settings(
        max_examples=max(1, batch.count // SETS_PER_EXAMPLE),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    wanted(seed(batch.seed)(given(families(batch.target, batch.variant))(family)))()
    return outcomes, findings


def _target(name: str, variant: str, library: Path) -> Any:
    """What carries the cases out; loads the libraries, so in a child process only."""
    if name == "vendor":
        from support.fuzz_vendor_target import Vendor

        return Vendor(variant, library)
    if name == "plan":
        from support.fuzz_plan_target import Plan

        return Plan(variant)
    from support.fuzz_contract_target import Contract

    return Contract(variant)


def turns(targets: tuple[str, ...], variants: str) -> list[tuple[str, str]]:
    """(target, variant) of batches in turn; B, the release's variant, as often as all others."""
    turn = [(t, v) for v in variants for t in targets]
    if len(variants) > 1 and "B" in variants:
        turn += [(t, "B") for t in targets] * (len(variants) // 2)
    return turn


def place_vendors(folder: Path, variants: str) -> None:
    """A vendor folder per ABI variant, with the software vendor built as that variant."""
    for variant in variants:
        library = folder / variant / "op_api" / "lib" / "libcust_opapi.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(abi_vendors.library(variant), library)
        (folder / variant / "version.info").write_text(f"Version=9.1.0\nmega_moe_abi={variant}\n")


def fuzz(
    count: int,
    start: int = 1,
    targets: tuple[str, ...] = TARGETS,
    variants: str = abi_vendors.LETTERS,
    batch: int = BATCH,
    progress: bool = False,
    still_s: float = STILL_S,
) -> dict[str, Any]:
    """Run at least `count` different argument sets and say what became of them."""
    begin = time.monotonic()
    done: list[Batch] = []
    with tempfile.TemporaryDirectory(prefix="xmoe-fuzz-") as name:
        folder = Path(name)
        place_vendors(folder, variants)
        turn, ran = turns(targets, variants), 0
        while ran < count:
            target, variant = turn[len(done) % len(turn)]
            number = start * 1_000_003 + len(done)
            one = run_batch(Batch(target, variant, number, min(batch, count)), folder, still_s)
            done.append(one)
            ran += one.ran
            if progress:
                found = sum(len(b.findings) for b in done)
                print(f"{ran} sets, {found} findings", file=sys.stderr, flush=True)
                for text in one.findings:
                    print(f"{target} {variant}: {text}", file=sys.stderr, flush=True)
    return summary(done, start, time.monotonic() - begin)


def summary(done: list[Batch], start: int, seconds: float) -> dict[str, Any]:
    """Counts by target, variant and outcome, and every finding."""
    by_target = {t: Counter[str]() for t in TARGETS}
    by_variant: Counter[str] = Counter()
    for one in done:
        by_target[one.target].update(one.outcomes)
        by_variant[one.variant] += one.ran
    return {
        "device": "software device; nothing here was run on an NPU",
        "sets": sum(one.ran for one in done),
        "processes": len(done),
        "seed": start,
        "seconds": round(seconds, 1),
        "variants": dict(sorted(by_variant.items())),
        "outcomes": {t: dict(found.most_common()) for t, found in by_target.items()},
        "findings": [f"{b.target} {b.variant}: {text}" for b in done for text in b.findings],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Fuzz contract layer, launch plan and software vendor."
    )
    parser.add_argument("--count", type=int, default=100_000, help="argument sets (100000)")
    parser.add_argument("--seed", type=int, default=1, help="start of all batches' seeds (1)")
    parser.add_argument("--target", choices=TARGETS, help="only one of them")
    parser.add_argument("--variants", default=abi_vendors.LETTERS, help="ABI variants")
    parser.add_argument("--batch", type=int, default=BATCH, help="sets per child process")
    parser.add_argument("--json", type=Path, help="file to write the counts to")
    options = parser.parse_args()
    targets = (options.target,) if options.target else TARGETS
    found = fuzz(
        options.count, options.seed, targets, options.variants, options.batch, progress=True
    )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "findings"}, indent=2))
    for text in found["findings"][:50]:
        print(f"finding: {text}")
    print(f"{found['sets']} sets, {len(found['findings'])} findings, {found['seconds']} s")
    return int(bool(found["findings"]))


if __name__ == "__main__":
    sys.exit(main())
