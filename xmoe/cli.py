# SPDX-License-Identifier: Apache-2.0
"""The `xmoe` command: finds the sub-command, imports only that one, turns errors into exit codes.

Exit codes: 0 yes; 1 the command ran and its answer is no (a check failed); 2 wrong use or a known
error, a result that cannot be written among them; 70 a defect of xmoe; 130 interrupted; 141 the
reader of our output went away. A command may have further ones and then says so in its help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from xmoe import __version__, outputs
from xmoe.errors import XmoeError

EXIT_USAGE = 2
EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class Command(NamedTuple):  # a dataclass would cost each start the import of inspect
    """One sub-command.

    `module` has `add_arguments(parser)` and `main(args) -> int`. It is imported only when the
    command is selected, so that no other command pays for it.
    """

    name: str
    module: str
    help: str


COMMANDS = (
    Command(
        "doctor", "xmoe.doctor", "show libraries, vendor chain and symbol origins; are they valid?"
    ),
    Command(
        "explain", "xmoe.explain", "show every check of a model at an EP size, and what would run"
    ),
    Command("regress", "xmoe.regress", "generate at an EP size on both paths; do answers repeat?"),
    Command(
        "pipeline",
        "xmoe.pipeline.command",
        "run Attention and FFN ranks through the stream pipeline; are serial and overlap equal?",
    ),
    Command(
        "conformance",
        "xmoe.conformance",
        "try on this device what the software device assumes of a real one",
    ),
    Command("device", "xmoe.device", "print the environment that selects the software device"),
)


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest option to an unknown one."""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(words)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(_unknown("argument", unknown[0], options))
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse takes no notice of a message that cannot be written.
        if file is sys.stdout:
            outputs.say(message, end="")
        else:
            outputs.note(message, end="")


def _unknown(kind: str, got: str, allowed: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(got.split("=", 1)[0], allowed, n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(allowed)}"
    return f"unknown {kind} {got!r}; {hint}"


def _top_parser() -> _Parser:
    listing = "\n".join(f"  {command.name:<13}{command.help}" for command in COMMANDS)
    parser = _Parser(
        prog="xmoe",
        usage="xmoe [-h] [--version] [--debug] COMMAND ...",
        description="Fused mixture-of-experts for Qwen3.5-MoE through aclnnMegaMoe.",
        epilog=f"commands:\n{listing}\n\n'xmoe COMMAND --help' shows the options of one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"xmoe {__version__}")
    _add_debug(parser)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Global options before the command name, and the rest."""
    for index, word in enumerate(argv):
        if not word.startswith("-"):
            return list(argv[:index]), list(argv[index:])
    return list(argv), []


def _run(argv: Sequence[str]) -> int:
    before, rest = _split(argv)
    top = _top_parser()
    debug = top.parse(before).debug
    if not rest:
        top.print_help(sys.stderr)
        return EXIT_USAGE
    command = next((entry for entry in COMMANDS if entry.name == rest[0]), None)
    if command is None:
        top.error(_unknown("command", rest[0], [entry.name for entry in COMMANDS]))
    parser = _Parser(prog=f"xmoe {command.name}", description=command.help, allow_abbrev=False)
    module = importlib.import_module(command.module)
    module.add_arguments(parser)
    _add_debug(parser)
    args = parser.parse(rest[1:])
    args.debug = debug or args.debug
    return int(module.main(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's) and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in words
    try:
        outputs.begin()
        try:
            code = _run(words)
        except SystemExit as stop:  # argparse: help, version or wrong use
            code = stop.code if isinstance(stop.code, int) else EXIT_USAGE
        outputs.flush()
        return code
    except KeyboardInterrupt:
        outputs.note("xmoe: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except XmoeError as error:
        _report(f"xmoe: {error}", debug)
        return EXIT_USAGE
    except (
        Exception
    ) as error:  # the one place that may: a defect still ends in a message and a code
        note = "this is a defect of xmoe" + ("" if debug else "; --debug shows where")
        _report(f"xmoe: {type(error).__name__}: {error}; {note}", debug)
        return EXIT_DEFECT


def _report(message: str, debug: bool) -> None:
    if debug:
        import traceback

        outputs.note(traceback.format_exc(), end="")
    outputs.note(message)
