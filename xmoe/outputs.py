# SPDX-License-Identifier: Apache-2.0
"""Where the commands' results go: files that are tried before a long run begins, and the standard
output.

Nothing else here writes to the standard output, so that a reader who went away, a closed or a full
one end every command alike. Messages beside the result are for people and never an error.

Standard library only until something is rendered: `--help` imports this.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from xmoe.errors import OutputError

STDOUT = "-"
# Off a terminal rich takes 80 columns, which cuts paths and sources to pieces.
_PLAIN_WIDTH = 200
_FOLDER = "a file in a folder that can be written to, or - for the standard output"


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that all commands with a result have."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the result as JSON; '-' or no FILE: to the standard output, instead of text",
    )


class Output:
    """A file to be written at the end of a command, or the standard output for "-".

    Args:
        option: what the user called it, for messages.
        where: the path as given; its folder is made.

    Raises:
        OutputError: it cannot be written; found here, before the work, not after it.
    """

    def __init__(self, option: str, where: str | Path) -> None:
        self.option = option
        self.path = Path(where)
        self._target: Path | None = None
        self._special: int | None = None
        if str(where) == STDOUT:
            return
        with self._named("cannot be written"):
            if not str(where):
                raise OSError("the name is empty")
            # Through a link, so that the file it names is replaced and not the link.
            self._target = Path(os.path.realpath(where))
            if _is_special(self.path):
                # Kept open, since a reader takes a pipe that is closed for one that ended.
                self._special = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
                os.set_blocking(self._special, True)
                return
            self._target.parent.mkdir(parents=True, exist_ok=True)
            if self._target.exists() and not os.access(self._target, os.W_OK):
                raise PermissionError("the file is write-protected")
            descriptor, part = _create_beside(self._target)
            os.close(descriptor)
            os.unlink(part)

    @property
    def is_stdout(self) -> bool:
        return self._target is None

    def is_file(self, path: Path) -> bool:
        """Whether it is the same file as an input of the command."""
        return self._target == Path(os.path.realpath(path))

    def write(self, data: str | bytes) -> None:
        """Write all of it. A file appears whole or not at all.

        Raises:
            OutputError: what was to be written is then kept in another file, which it names.
        """
        if self._target is None:
            say(data if isinstance(data, str) else data.decode(), end="")
            return
        raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        with self._named("could not be written", lambda: _keep(raw, self._target)):
            if self._special is not None:
                _write_all(self._special, raw)
                os.close(self._special)
                return
            descriptor, part = _create_beside(self._target)
            try:
                try:
                    with contextlib.suppress(FileNotFoundError):
                        os.fchmod(descriptor, stat.S_IMODE(os.stat(self._target).st_mode))
                    _write_all(descriptor, raw)
                finally:
                    os.close(descriptor)
                os.replace(part, self._target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise

    def write_json(self, document: Any) -> None:
        """`write` of a document as indented JSON."""
        import json

        # What an encoding has no character for would not be JSON when it is replaced.
        encoding = (sys.stdout.encoding or "") if self.is_stdout else "utf-8"
        plain = encoding.lower().replace("-", "") != "utf8"
        self.write(json.dumps(document, ensure_ascii=plain, indent=2) + "\n")

    @contextlib.contextmanager
    def _named(self, problem: str, rescue: Callable[[], str] | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            step = rescue() if rescue else "name another file"
            raise OutputError(
                f"{self.option} {self.path} {problem}: {error.strerror or error}; allowed: "
                f"{_FOLDER}; next: {step}"
            ) from error


def prepare(*wanted: tuple[str, str | Path | None]) -> list[Output | None]:
    """The outputs of a command by (option, path), checked; None for one that was not asked for.

    Raises:
        OutputError: one of them cannot be written, or two are the same.
    """
    made: list[Output | None] = []
    seen: dict[Path | None, str] = {}
    for option, where in wanted:
        output = None if where is None else Output(option, where)
        if output is not None:
            if output._target in seen:
                raise OutputError(
                    f"{option} and {seen[output._target]} both go to {where}; allowed: one result "
                    "in one place; next: name another file"
                )
            seen[output._target] = option
        made.append(output)
    return made


def deliver(*jobs: Callable[[], None]) -> None:
    """Do all of them: one that fails does not keep the results of the others back.

    Raises:
        OutputError, BrokenPipeError: the first failure.
    """
    failures: list[Exception] = []
    for job in jobs:
        try:
            job()
        except (OutputError, BrokenPipeError) as error:
            failures.append(error)
    if failures:
        raise failures[0]


def deliver_report(
    target: Output | None, document: Any, text: Callable[[], str], *others: Output | None
) -> None:
    """A command's whole result: text on the standard output, and JSON where `target` says.

    Args:
        text: made only if it is shown: a result on the standard output takes its place.
        others: further outputs of the command.

    Raises:
        As `deliver`.
    """
    jobs: list[Callable[[], None]] = []
    if target is not None:
        jobs.append(lambda: target.write_json(document))
    if not any(one is not None and one.is_stdout for one in (target, *others)):
        jobs.append(lambda: say(text(), end=""))
    deliver(*jobs)


def begin() -> None:
    """Look at the standard streams of a new process.

    Raises:
        OutputError: the standard output is closed, and the next file opened would take its number.
    """
    if sys.stderr is None:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, 2)
        if descriptor > 2:
            os.close(descriptor)
        sys.stderr = open(2, "w", closefd=False)
    if sys.stdout is None:
        raise OutputError(
            "the standard output is closed; allowed: an open one; next: redirect it to /dev/null "
            "when nobody is to read it"
        )
    for stream in (sys.stdout, sys.stderr):
        # A path may hold what the terminal's encoding has no character for.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


def say(text: str, end: str = "\n") -> None:
    """Write to the standard output, at once.

    Raises:
        BrokenPipeError: its reader went away. OutputError: it cannot be written for another reason.
    """
    with _standard_output():
        sys.stdout.write(text + end)
        sys.stdout.flush()


def flush() -> None:
    """What others wrote, argparse for one. Raises as `say` does."""
    with _standard_output():
        sys.stdout.flush()


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _drop_the_rest()
        raise
    except (OSError, ValueError) as error:  # ValueError: somebody closed the stream
        _drop_the_rest()
        raise OutputError(
            f"the standard output cannot be written: {getattr(error, 'strerror', None) or error}; "
            "allowed: an open one with room; next: send it elsewhere"
        ) from error


def _drop_the_rest() -> None:
    # Python would fail again when it flushes at exit.
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def note(text: str, end: str = "\n") -> None:
    """Write to the standard error; whether anybody reads it does not change a result."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + end)
        sys.stderr.flush()


class Lines:
    """Prints the lines of a long run as they come.

    A reader who goes away ends the run, unless its result goes somewhere else too; then `finish`
    tells of it.

    Args:
        result: where the whole result goes; the lines make way for JSON on the standard output.
    """

    def __init__(self, result: Output | None) -> None:
        self._result = result
        self._aside = result is not None and result.is_stdout
        self._failed: Exception | None = None

    def __call__(self, line: str) -> None:
        if self._aside:
            note(line)
            return
        if self._failed is not None:
            return
        try:
            say(line)
        except (OutputError, BrokenPipeError) as error:
            if self._result is None:
                raise
            self._failed = error

    def finish(self) -> None:
        """Raise what printing a line met."""
        if self._failed is not None:
            raise self._failed


class _Text(io.StringIO):
    """Text that looks like one of the standard streams to rich, and cannot fail as they do."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()


def render(*what: Any, stderr: bool = False) -> str:
    """What rich makes of it for one of the standard streams, as text that ends a line."""
    from rich.console import Console

    text = _Text(sys.stderr if stderr else sys.stdout)
    console = Console(file=text, width=None if text.isatty() else _PLAIN_WIDTH, highlight=False)
    for one in what:
        console.print(one)
    return text.getvalue()


def _is_special(path: Path) -> bool:
    """A device or a pipe: written to, not replaced."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError("it is a folder")
    return not stat.S_ISREG(mode)


def _create_beside(target: Path) -> tuple[int, str]:
    part = str(target.parent / f".xmoe-{os.getpid()}-{os.urandom(4).hex()}.part")
    return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), part


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _keep(data: bytes, target: Path | None) -> str:
    """Put it where there may be room; returns the next step."""
    import tempfile

    suffix = target.suffix if target is not None else ""
    try:
        descriptor, name = tempfile.mkstemp(prefix="xmoe-result-", suffix=suffix)
    except OSError as error:
        return f"make room and run it again, {tempfile.gettempdir()} has none either ({error})"
    try:
        _write_all(descriptor, data)
    except OSError as error:
        os.unlink(name)
        return f"make room and run it again, {name} has none either ({error.strerror})"
    finally:
        os.close(descriptor)
    return f"take it from {name}"
