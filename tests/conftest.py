# SPDX-License-Identifier: Apache-2.0
"""What holds for every test.

It ends, it leaves nothing behind, and it imports modules by one name only.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from support import leftovers
from xmoe import env

ROOT = Path(__file__).resolve().parent.parent
# The software device names its shared files with this prefix; ours differs per session, so that the
# check at the end neither blames this session for another's files nor misses its own.
SHM_PREFIX = f"xmoe-test-{os.getpid()}-"
TOP_NAMES = {"kernels", "policy", "comm", "models"}

_probes = pytest.StashKey[str]()
_stderr = pytest.StashKey[int]()
_problems = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    # pytest-timeout fails a test in Python; a test stuck in a C call never gets there. This much
    # later the watchdog prints all stacks and ends the process.
    parser.addini(
        "watchdog_grace", "seconds between a test's timeout and the end of pytest", default="60"
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("XSD_SHM_PREFIX", SHM_PREFIX)
    # Ranks of all tests share one probe of each library's ABI variant.
    if "XMOE_ABI_CACHE" not in os.environ:  # a session inside a session uses the outer one's
        config.stash[_probes] = tempfile.mkdtemp(prefix="xmoe-test-probes-")
        os.environ["XMOE_ABI_CACHE"] = config.stash[_probes]
    # Output capture has its own file behind 2 while a test runs; stacks must reach the real one.
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    config.stash[_problems] = []
    _load_hypothesis_profile()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _probes in config.stash:
        shutil.rmtree(config.stash[_probes], ignore_errors=True)
    os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker and marker.args else item.config.getini("timeout")
    faulthandler.dump_traceback_later(
        float(limit or 180) + float(item.config.getini("watchdog_grace")),
        exit=True,
        file=item.config.stash[_stderr],
    )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and env.get("XMOE_STRICT"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"XMOE_STRICT is set, so this may not be skipped: {reason}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    problems = session.config.stash[_problems]
    problems += [f"module imported twice: {name}" for name in modules_under_wrong_name()]
    problems += [f"process left behind: {entry}" for entry in leftovers.processes(grace_s=3.0)]
    prefix = os.environ.get("XSD_SHM_PREFIX", SHM_PREFIX)
    problems += [f"shared memory left behind: {path}" for path in leftovers.shared_memory(prefix)]
    if problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    problems = terminalreporter.config.stash[_problems]
    if problems:
        terminalreporter.section("left behind by this session", red=True)
        for problem in problems:
            terminalreporter.line(problem)


def modules_under_wrong_name() -> list[str]:
    """Modules of this checkout loaded as `comm.x` instead of `xmoe.comm.x`.

    They would be second copies: other classes under the same names, other caches and locks.
    """
    found = []
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if (
            name.split(".")[0] in TOP_NAMES
            and origin
            and Path(origin).resolve().is_relative_to(ROOT)
        ):
            found.append(f"{name} from {origin}; import xmoe.{name}")
    return sorted(found)


def _load_hypothesis_profile() -> None:
    from hypothesis import settings

    # Repeatable, and no limit per example: the machine may be busy.
    settings.register_profile("xmoe", deadline=None, derandomize=True, database=None)
    settings.load_profile("xmoe")
