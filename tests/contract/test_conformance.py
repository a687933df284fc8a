# SPDX-License-Identifier: Apache-2.0
"""`xmoe conformance` on the software device, and what it says when a device behaves differently."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xmoe.conformance import case as cases_module
from xmoe.conformance.case import Case, Deviation, NotHere, Result, Verdict, all_cases
from xmoe.conformance.run import SOFTWARE, choose, run_cases
from xmoe.errors import ConfigError
from xmoe.kernels.acl.toolkit import SOFTWARE_ROOT

pytestmark = [pytest.mark.ep, pytest.mark.timeout(300)]


NEEDS_FOUR = "2 ranks have one FFN rank, which every row goes to; it needs 4 or more"


def conformance(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xmoe", "conformance", "--device", "soft", *words],
        capture_output=True, text=True, timeout=280, env={**os.environ, **env},
    )  # fmt: skip


def test_whole_list_passes_and_says_where(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = conformance("--json", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert [r["name"] for r in found["results"]] == [c.name for c in all_cases()]
    assert {r["device"] for r in found["results"]} == {SOFTWARE}
    skipped = {r["name"]: r["evidence"] for r in found["results"] if r["verdict"] == "skip"}
    assert skipped == {"cam_async.empty_ranks": "rank 0: " + NEEDS_FOUR}
    assert found["counts"] == {"pass": len(all_cases()) - 1, "fail": 0, "skip": 1}
    assert all(r["evidence"] for r in found["results"])
    assert "nothing here was run on an NPU" in done.stdout and "nothing here" in found["note"]


def test_every_case_says_what_is_assumed_and_who_relies_on_it() -> None:
    assert len({one.name for one in all_cases()}) == len(all_cases()) >= 100
    assert all(one.meaning and one.relies for one in all_cases())
    done = conformance("--list", "--only", "event")
    assert done.returncode == 0 and "event.wait_unrecorded" in done.stdout
    assert "stream.fifo" not in done.stdout


def test_a_device_that_differs_is_found(tmp_path: Path) -> None:
    # Another operator build and another chip, of which the software device knows enough to differ.
    done = conformance("--only", "accept", "--json", "-", XSD_MEGAMOE_PROFILE="9.1.0")
    found = {r["name"]: r for r in json.loads(done.stdout)["results"]}
    assert done.returncode == 1
    assert found["accept.inter_512"]["verdict"] == "fail"
    assert "561002" in found["accept.inter_512"]["evidence"]
    others = [r["verdict"] for name, r in found.items() if name != "accept.inter_512"]
    assert set(others) == {"pass"}


def test_cam_cases_are_skipped_by_name_without_the_operators(tmp_path: Path) -> None:
    home = tmp_path / "toolkit"
    (home / "opp" / "vendors").mkdir(parents=True)
    for part in SOFTWARE_ROOT.iterdir():
        if part.name != "opp":
            (home / part.name).symlink_to(part)
    vendor = "xmoe_transformer"  # MegaMoe's alone
    (home / "opp" / "vendors" / vendor).symlink_to(SOFTWARE_ROOT / "opp" / "vendors" / vendor)
    (home / "opp" / "vendors" / "config.ini").write_text(f"load_priority={vendor}\n")
    words = ("--device", "cann", "--only", "camp2p", "--only", "cam_async", "--only", "comm")
    done = conformance(*words, "--json", "-", ASCEND_HOME_PATH=str(home))
    found = {r["name"]: r for r in json.loads(done.stdout)["results"]}
    cam = {name: r for name, r in found.items() if name.startswith("cam")}
    assert done.returncode == 0 and len(cam) >= 11
    assert {r["verdict"] for r in cam.values()} == {"skip"}
    for name, symbol in (("camp2p", "aclnnA2e"), ("cam_async", "aclnnAfdAsyncDispatchSend")):
        texts = [r["evidence"] for key, r in cam.items() if key.startswith(f"{name}.")]
        assert all("no CAM operator library" in text and symbol in text for text in texts)
    assert {found[name]["verdict"] for name in found if name.startswith("comm.")} == {"pass"}


def test_wrong_use_is_named() -> None:
    done = conformance("--only", "event.wait_unrecordet")
    assert done.returncode == 2 and "did you mean event.wait_unrecorded" in done.stderr
    done = conformance("--ep", "3")
    assert done.returncode == 2 and "allowed: 2, 4, 8, 16, 32" in done.stderr


def test_only_takes_names_and_prefixes() -> None:
    chosen = [one.name for one in choose(all_cases(), ["stream.fifo", "context"])]
    assert chosen == ["stream.fifo", "context.made"]
    with pytest.raises(ConfigError, match="no such case"):
        choose(all_cases(), ["stream.fif"])


# ---- cases that fail, hang and die


def _raise(error: Exception) -> Callable[[Any], str]:
    def run(session: Any) -> str:
        raise error

    return run


def _die(session: Any) -> str:
    faulthandler.disable()  # pytest's would print the stacks of this process
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def _die_on_one(session: Any) -> str:
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return ""


def _hang(session: Any) -> str:
    time.sleep(600)
    return ""


def _counter(session: Any) -> str:
    session.seen = getattr(session, "seen", 0) + 1
    return f"{session.seen}"


MADE_UP = [
    Case("made.first", "m", "r", _counter),
    Case("made.second", "m", "r", _counter),
    Case("made.differs", "m", "r", _raise(Deviation("it was 3"))),
    Case("made.absent", "m", "r", _raise(NotHere("no such call"))),
    Case("made.dies", "m", "r", _die),
    Case("made.breaks", "m", "r", _raise(RuntimeError("out of luck"))),
    Case("made.hangs", "m", "r", _hang),
    Case("made.last", "m", "r", _counter),
    Case("made.group_dies", "m", "r", _die_on_one, ranks=True),
    Case("made.group_goes_on", "m", "r", _counter, ranks=True),
    Case("made.harmful", "m", "r", lambda s: "done", harmful=True),
]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    all_cases()  # the real ones are registered first
    monkeypatch.setattr(cases_module, "CASES", [*cases_module.CASES, *MADE_UP])
    return MADE_UP


def test_failures_are_results_and_the_rest_goes_on(made_up: list[Case]) -> None:
    shown: list[Result] = []
    begin = time.monotonic()
    results = run_cases(made_up, "here", "soft", 2, deadline_s=4.0, on_result=shown.append)
    assert time.monotonic() - begin < 60
    got = {r.name: (r.verdict.value, r.evidence) for r in results}
    assert got["made.first"] == ("pass", "1") and got["made.second"] == ("pass", "2")
    assert got["made.differs"] == ("fail", "it was 3")
    assert got["made.absent"] == ("skip", "no such call")
    assert got["made.dies"][0] == "fail" and "SIGSEGV" in got["made.dies"][1]
    assert got["made.breaks"] == ("fail", "RuntimeError: out of luck")
    assert got["made.hangs"][0] == "fail" and "4 s" in got["made.hangs"][1]
    assert got["made.last"] == ("pass", "1"), "it starts in a new process"
    assert got["made.group_dies"][0] == "fail" and "rank 1" in got["made.group_dies"][1]
    assert "SIGKILL" in got["made.group_dies"][1]
    assert got["made.group_goes_on"] == ("pass", "1")
    assert got["made.harmful"] == ("pass", "done")
    assert [r.name for r in results] == [c.name for c in made_up]
    assert len(shown) == len(made_up) and {r.device for r in results} == {"here"}


def test_harmful_cases_can_be_left_out(made_up: list[Case]) -> None:
    result = run_cases(made_up[-1:], "here", "soft", skip_harmful=True)[0]
    assert result.verdict is Verdict.SKIP and "--skip-harmful" in result.evidence
