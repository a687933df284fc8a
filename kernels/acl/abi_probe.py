# SPDX-License-Identifier: Apache-2.0
"""Finds out by return codes which argument list a MegaMoe library was compiled with.

The vendor's wrapper compares fixed pointers with null (161001) and then looks at moeExpertNum
(161002) before it creates or dereferences anything. A call with every slot filled, but always with
moeExpertNum zero wherever a variant has it, therefore ends in one of these two codes; which null
pointers turn 161002 into 161001 tells the list. The calls are made in a child process: a library of
another origin may do anything, and a crash is an answer.

Only for a library whose symbols were verified. Trailing arguments that the callee does not read are
harmless in the calling conventions of x86-64 and AArch64 and formally undefined in C, which is one
more reason for the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmoe.kernels.acl.variants import NULL_CHECKED_INPUTS, VARIANTS, Variant

NULL_POINTER, INVALID = 161001, 161002
SLOTS = 40
"""More than any known list has; the surplus is never read."""

PROBED = range(20, 37)
"""Slots set to null one at a time. Below lie slots that must stay null, above nothing is known."""

_CHILD = Path(__file__).with_name("abi_probe_child.py")
_TEXT_LIMIT = 200
_DONE = b'{"stage": "done"}\n'


def always_null() -> frozenset[int]:
    """Slots that are null in every call: moeExpertNum of each variant, and A's yOut.

    A's wrapper checks no integers, so a call of A with all pointers set would run the operator.
    """
    slots = {v.integer_slot("moeExpertNum") for v in VARIANTS.values()}
    return frozenset(slots | {v.integer_slot("yOut") for v in VARIANTS.values()
                              if not v.checks_integers})  # fmt: skip


def expected_flips(variant: Variant) -> frozenset[int]:
    """Probed slots whose null pointer turns 161002 into 161001 in this variant."""
    slots = (variant.integer_slot(key) for key in variant.null_checked())
    return frozenset(slot for slot in slots if slot in PROBED)


def plan() -> list[tuple[str, list[int]]]:
    """(name, null slots) of each call. Slots 0 and 4 are context and weight1 in every variant."""
    fixed = sorted(always_null())
    single = [0, NULL_CHECKED_INPUTS.index("weight1"), *PROBED]
    return [("base", fixed), *((f"slot{slot}", sorted({*fixed, slot})) for slot in single)]


@dataclass(frozen=True)
class Verdict:
    """What the probe says. JSON-able.

    status: identified   `variant` is the one list that fits
            ambiguous    only `variant` may fit, but a library that always answers alike would too
            foreign      it answered as none of the known variants does
            crashed, hung   inside a call; no known variant does that
            unavailable  the probe could not be made; says nothing about the library
            off          switched off by configuration
    """

    status: str
    variant: str | None = None
    reason: str = ""
    cached: bool = False

    @property
    def says_something(self) -> bool:
        """Whether it is evidence about the library."""
        return self.status not in ("unavailable", "off")

    def allows(self, variant_id: str) -> bool:
        """Whether a library with this argument list could have answered so."""
        return not self.says_something or self.variant == variant_id

    def __str__(self) -> str:
        found = f"{self.status} {self.variant}" if self.variant else self.status
        return f"{found} ({self.reason})" if self.reason else found


def judge(answers: Mapping[str, tuple[int, str]]) -> Verdict:
    """The verdict on a complete set of answers: call name -> (status, the vendor's text)."""
    base, _ = answers["base"]
    for name, (code, _) in answers.items():
        if code not in (NULL_POINTER, INVALID):
            return _foreign(f"call {name} returned {code}, not {NULL_POINTER} or {INVALID}")
    if base == NULL_POINTER:
        return _judge_without_integer_checks(answers)
    for name in ("slot0", "slot4"):
        if answers[name][0] != NULL_POINTER:
            return _foreign(f"call {name} returned {answers[name][0]} for a null input")
    flips = frozenset(s for s in PROBED if answers[f"slot{s}"][0] == NULL_POINTER)
    for variant in VARIANTS.values():
        if variant.checks_integers and flips == expected_flips(variant):
            return Verdict("identified", variant.id, f"null checks at slots {_list(flips)}")
    return _foreign(f"null checks at slots {_list(flips)}, which no known variant has")


def _judge_without_integer_checks(answers: Mapping[str, tuple[int, str]]) -> Verdict:
    """All calls of A end at a null pointer, so only its texts tell it from a constant answer."""
    odd = [name for name, (code, _) in answers.items() if code != NULL_POINTER]
    if odd:
        return _foreign(f"161001 for the base call, but {answers[odd[0]][0]} for call {odd[0]}")
    candidates = [v.id for v in VARIANTS.values() if not v.checks_integers]
    names = {"base": "yOut", "slot0": "context", "slot4": "weight1"}
    told = all(
        _names(answers[call][1], name)
        and not any(_names(answers[call][1], other) for other in names.values() if other != name)
        for call, name in names.items()
    )
    if len(candidates) != 1:
        return _foreign(f"no integer checks, as in each of {', '.join(candidates)}")
    if told:
        return Verdict("identified", candidates[0], "no integer checks, null pointers named")
    return Verdict(
        "ambiguous", candidates[0],
        "every call returned 161001 and the texts do not name the null pointer, which a library "
        "that always answers so does too",
    )  # fmt: skip


def _names(text: str, parameter: str) -> bool:
    return re.search(rf"\b{parameter}\b", text) is not None


def _foreign(reason: str) -> Verdict:
    return Verdict("foreign", None, reason)


def _list(slots: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(slots))) or "none"


def run(
    library: Path, identity: Sequence[int], base_libraries: Sequence[Path], timeout_s: float
) -> Verdict:
    """Probe one file in a child process. Local; blocks until the child ended.

    Args:
        library: the verified file.
        identity: numbers of `FileIdentity` that it must still have.
        base_libraries: the toolkit's own, opened first so that the library binds to these.
        timeout_s: after which the child is killed.
    """
    ended = _in_child(library, identity, base_libraries, timeout_s, plan())
    return Verdict("unavailable", None, ended) if isinstance(ended, str) else _conclude(ended)


def opening_harm(
    library: Path, identity: Sequence[int], base_libraries: Sequence[Path], timeout_s: float
) -> str:
    """What opening a file does to a child process, arguments as `run`: empty when nothing, or when
    that cannot be told. Local; blocks until the child ended."""
    ended = _in_child(library, identity, base_libraries, timeout_s, [])
    if isinstance(ended, str) or not ended.lines or ended.lines[-1].get("stage") != "started":
        return ""
    if not ended.in_time:
        return f"stands still (no end within {timeout_s:g} s)"
    return f"is {_how(ended.returncode)}"


@dataclass(frozen=True)
class _Ended:
    """A child's answers and its end."""

    lines: list[dict[str, Any]]
    in_time: bool
    returncode: int | None
    timeout_s: float


def _in_child(
    library: Path,
    identity: Sequence[int],
    base_libraries: Sequence[Path],
    timeout_s: float,
    calls: Sequence[tuple[str, list[int]]],
) -> _Ended | str:
    """Open the file and make the calls in a child; a sentence part when there is no child."""
    python = _interpreter()
    if python is None or not _CHILD.is_file():
        missing = "Python interpreter" if python is None else _CHILD.name
        return f"no {missing} to run it with"
    request = {
        "library": str(library),
        "identity": list(identity),
        "base_libraries": [str(path) for path in base_libraries],
        "slots": SLOTS,
        "calls": calls,
        "timeout_s": timeout_s,
    }
    reader, writer = os.pipe()
    try:
        try:
            child = subprocess.Popen(
                # Isolated: no PYTHON* variable, no user site and no current folder may change it.
                [python, "-I", "-S", str(_CHILD), str(writer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writer,),
                start_new_session=True,
            )
        except OSError as error:
            return f"the child could not be started: {error}"
        finally:
            os.close(writer)
        try:
            lines, in_time = _converse(child, reader, json.dumps(request).encode(), timeout_s)
        except BaseException:
            _end(child, grace_s=0.0)
            raise
        _end(child, grace_s=1.0 if in_time else 0.0)
    finally:
        os.close(reader)
    return _Ended(lines, in_time, child.returncode, timeout_s)


def _interpreter() -> str | None:
    """A Python to start. In a program that embeds one, sys.executable may be that program."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, os.path.join(sys.base_exec_prefix, "bin", version)):
        if path and re.fullmatch(r"python[\d.]*", os.path.basename(path)) and os.path.isfile(path):
            return path
    return None


def _converse(
    child: subprocess.Popen[bytes], reader: int, request: bytes, timeout_s: float
) -> tuple[list[dict[str, Any]], bool]:
    """(answers, whether it ended in time). Stops reading at "done" or at the end of the pipe."""
    assert child.stdin is not None
    deadline = time.monotonic() + timeout_s
    # A child that died at once has closed its end; its missing answer tells.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(request)
        child.stdin.close()
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while not data.endswith(_DONE):
            left = deadline - time.monotonic()
            if left <= 0:
                return _lines(data), False
            # Looked at before the pipe: what an ended child wrote is in it by then. The end of the
            # pipe alone would not do, since a process forked meanwhile may hold it open.
            ended = child.poll() is not None
            part = (
                os.read(reader, 1 << 16) if selector.select(0 if ended else min(left, 0.2)) else b""
            )
            data += part
            if not part and (ended or selector.select(0)):
                break
    return _lines(data), True


def _lines(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # a line cut short by a crash
            found.append(json.loads(line))
    return found


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Let the child end by itself, then kill its session (the library may have started something
    there), and reap it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    child.wait()


def _conclude(ended: _Ended) -> Verdict:
    lines, in_time, returncode = ended.lines, ended.in_time, ended.returncode
    timeout_s = ended.timeout_s
    stage = lines[-1].get("stage") if lines else None
    if stage == "done":
        answers = {
            one["name"]: (int(one["code"]), str(one["text"]))
            for one in lines
            if one.get("stage") == "called"
        }
        return judge(answers) if answers.keys() == {name for name, _ in plan()} else _foreign(
            "the answers are incomplete"
        )  # fmt: skip
    if stage == "not_opened":
        text = str(lines[-1].get("text", ""))[:_TEXT_LIMIT]
        return Verdict("unavailable", None, f"the child could not open it: {text}")
    if stage == "calling":
        where = f"in call {lines[-1]['name']}"
        if not in_time:
            return Verdict("hung", None, f"no answer within {timeout_s:g} s {where}")
        return Verdict("crashed", None, f"{_how(returncode)} {where}")
    if not in_time:
        return Verdict("unavailable", None, f"the child was not ready within {timeout_s:g} s")
    if stage == "started":
        # The parent opened the same file without harm.
        return Verdict("unavailable", None, f"{_how(returncode)} while the child opened it")
    return Verdict("unavailable", None, f"{_how(returncode)} without an answer")


def _how(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
