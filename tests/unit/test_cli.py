# SPDX-License-Identifier: Apache-2.0
"""The command line itself: laziness, exit codes, messages.

What a command does is tested with that command.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from xmoe import __version__, cli
from xmoe.errors import ConfigError

HEAVY = ("torch", "transformers", "numpy", "rich", "cffi", "safetensors")


def loaded_by(*words: str) -> dict[str, object]:
    """Run a command line in a fresh interpreter: exit code and the heavy modules it loaded."""
    code = (
        "import json, sys\nfrom xmoe.cli import main\n"
        f"code = main({list(words)!r})\n"
        f"print(json.dumps([code, [n for n in {HEAVY!r} if n in sys.modules]]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    exit_code, heavy = json.loads(done.stderr.splitlines()[-1])
    return {"exit": exit_code, "heavy": heavy, "out": done.stdout}


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([c.name, "--help"] for c in cli.COMMANDS)]
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    assert loaded_by(*words)["heavy"] == []
    assert loaded_by(*words)["exit"] == 0


def test_help_lists_every_command() -> None:
    out = str(loaded_by("--help")["out"])
    assert all(f"  {command.name}" in out and command.help in out for command in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"xmoe {__version__}\n"


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["doctr"], "unknown command 'doctr'; did you mean doctor?"),
        (["zzz"], f"allowed: {', '.join(entry.name for entry in cli.COMMANDS)}"),
        (["regress", "--rouds", "3"], "unknown argument '--rouds'; did you mean --rounds?"),
        (["regress", "--rouds=3"], "did you mean --rounds?"),
        (["--debgu", "doctor"], "did you mean --debug?"),
        (["device", "enf"], "invalid choice: 'enf'"),
        # An abbreviation that works today is another option tomorrow.
        (["regress", "--max-new", "3"], "did you mean --max-new-tokens?"),
    ],
)
def test_wrong_use_names_the_nearest(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Mounts a function as the command `probe`."""

    def mount(body: Callable[[argparse.Namespace], int]) -> None:
        module = types.ModuleType("probe_command")
        module.add_arguments = lambda parser: parser.add_argument("--n", type=int, default=0)  # type: ignore[attr-defined]
        module.main = body  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setattr(cli, "COMMANDS", (cli.Command("probe", "probe_command", "a probe"),))

    return mount


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def body(args: argparse.Namespace) -> int:
        raise error

    return body


@pytest.mark.parametrize("code", [0, 1])
def test_the_commands_own_code_is_returned(command: Callable[..., None], code: int) -> None:
    command(lambda args: code + args.n)
    assert cli.main(["probe"]) == code
    assert cli.main(["probe", "--n", "4"]) == code + 4


def test_known_error_is_one_message_and_code_2(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(ConfigError("ep=3; allowed: 2, 4, 8, 16; next: pass one of them")))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "xmoe: ep=3; allowed: 2, 4, 8, 16; next: pass one of them\n"


@pytest.mark.parametrize("words", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_adds_the_traceback(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    command(raising(ConfigError("wrong")))
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("xmoe: wrong\n")


def test_defect_is_told_apart_from_wrong_use(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(RuntimeError("boom")))
    assert cli.main(["probe"]) == cli.EXIT_DEFECT
    err = capsys.readouterr().err
    assert "RuntimeError: boom; this is a defect of xmoe; --debug shows where" in err
    assert "Traceback" not in err


class _Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_library_printed_and_nobody_can_write_is_an_error(
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command(lambda args: 0)
    monkeypatch.setattr(sys, "stdout", _Full())
    assert cli.main(["probe"]) == 2
    assert "the standard output cannot be written: No space left" in capsys.readouterr().err


def test_interrupt(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_reader_that_goes_away_is_no_traceback() -> None:
    xmoe = Path(sys.executable).parent / "xmoe"
    start = [str(xmoe)] if xmoe.exists() else [sys.executable, "-m", "xmoe"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*start, "device", "env"], stdout=write_end, stderr=subprocess.PIPE, text=True, cwd="/"
        )
    finally:
        os.close(write_end)
    assert done.returncode == cli.EXIT_BROKEN_PIPE
    assert done.stderr == ""


def test_device_env_prints_lines_a_shell_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["device", "env"]) == 0
    text = capsys.readouterr().out
    done = subprocess.run(
        ["bash", "-uc", f"set -e\n{text}\nenv"],
        capture_output=True,
        text=True,
        env={"PATH": "/bin"},
    )
    assert done.returncode == 0, done.stderr
    names = [line.split()[1].split("=")[0] for line in text.splitlines()]
    assert names
    assert all(f"\n{name}=" in f"\n{done.stdout}" for name in names)
