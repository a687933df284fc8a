# SPDX-License-Identifier: Apache-2.0
"""Where results go: files that are tried first, appear whole and are never lost."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xmoe import outputs
from xmoe.errors import OutputError
from xmoe.outputs import Lines, Output, deliver, prepare


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_folder_is_made_and_nothing_is_there_before_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "result.json"
    output = Output("--json", target)
    assert names(target.parent) == []
    output.write_json({"a": "加\udc80"})  # a path may hold what is no character
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": "加\udc80"}
    assert "加" in target.read_text(encoding="utf-8") and names(target.parent) == ["result.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder, "it is a folder"),
        (lambda folder: "", "the name is empty"),
        (lambda folder: _file(folder) / "below.json", "Not a directory|File exists"),
        (lambda folder: folder / ("n" * 300) / "r.json", "File name too long"),
        (lambda folder: "/proc/xmoe-none/r.json", "No such file"),
        (lambda folder: "/proc/self/r.json", "No such file|not permitted|denied"),
        (lambda folder: _pipe(folder), "No such device"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], Any], reason: str
) -> None:
    where = make(tmp_path)
    with pytest.raises(OutputError, match=reason) as caught:
        Output("--json", where)
    text = str(caught.value)
    assert text.startswith("--json ") and "; allowed: " in text and "; next: " in text


def _file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")  # nobody reads it: opening it in the plain way would never return
    return folder / "pipe"


def test_a_write_protected_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(OutputError, match="write-protected"):
        Output("--json", _file(tmp_path))


def test_a_pipe_with_a_reader_is_written_to(tmp_path: Path) -> None:
    pipe = _pipe(tmp_path)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output = Output("--json", pipe)
    with pytest.raises(BlockingIOError):  # nothing yet, and not its end, which a reader would take
        os.read(reading, 100)
    output.write("text")
    assert os.read(reading, 100) == b"text" and os.read(reading, 100) == b""
    os.close(reading)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_a_shell_puts_in_a_files_place_is_written_to(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    Output("--json", f"/dev/fd/{writing}").write("text")
    os.close(writing)
    assert os.read(reading, 100) == b"text" and os.read(reading, 100) == b""
    os.close(reading)
    Output("--json", os.devnull).write("text")


def test_an_old_file_is_replaced_through_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old and longer")
    real.chmod(0o640)
    link.symlink_to(real)
    Output("--json", link).write("new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_failure_at_the_end_keeps_the_old_file_and_the_new_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "kept"))
    target = tmp_path / "out" / "result.json"
    target.parent.mkdir()
    target.write_text("old")
    output = Output("--json", target)
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(OutputError, match="No space left") as caught:
        output.write("new")
    assert target.read_text() == "old" and names(target.parent) == ["result.json"]
    (kept,) = (tmp_path / "kept").iterdir()
    assert f"next: take it from {kept}" in str(caught.value) and kept.read_text() == "new"


def _full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_two_results_in_one_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "r")
    for one, other in (("-", "-"), (tmp_path / "r", tmp_path / "link")):
        with pytest.raises(OutputError, match="--trace and --json both go to"):
            prepare(("--json", one), ("--trace", other))
    assert prepare(("--json", None), ("--trace", None)) == [None, None]


def test_everything_is_delivered_before_the_first_failure_is_told() -> None:
    done: list[str] = []

    def fail(error: Exception) -> None:
        done.append("failed")
        raise error

    with pytest.raises(BrokenPipeError):
        deliver(
            lambda: fail(BrokenPipeError()),
            lambda: fail(OutputError("second")),
            lambda: done.append("last"),
        )
    assert done == ["failed", "failed", "last"]


class _Stream(io.StringIO):
    """A standard output that fails from the second line on."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        if self.getvalue():
            raise self.error
        return super().write(text)


def test_lines_go_on_when_the_result_goes_elsewhere_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _Stream(BrokenPipeError())
    monkeypatch.setattr(sys, "stdout", stream)
    lines = Lines(Output("--json", tmp_path / "r"))
    for text in ("first", "second", "third"):
        lines(text)
    with pytest.raises(BrokenPipeError):
        lines.finish()
    assert stream.getvalue() == "first\n"
    alone = Lines(None)
    with pytest.raises(BrokenPipeError):
        alone("fourth")


def test_lines_make_way_for_json_on_the_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(Output("--json", "-"))
    lines("for people")
    lines.finish()
    Output("--json", "-").write_json([1])
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [1] and captured.err == "for people\n"


def test_a_standard_output_without_the_characters_still_gets_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    Output("--json", "-").write_json({"é": "加\udc80"})
    assert json.loads(raw.getvalue()) == {"é": "加\udc80"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), ValueError("closed file")])
def test_other_failures_of_the_standard_output_are_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stream = _Stream(error)
    monkeypatch.setattr(sys, "stdout", stream)
    outputs.say("first")
    with pytest.raises(OutputError, match="the standard output cannot be written"):
        outputs.say("second")


def test_a_note_that_nobody_reads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Stream(OSError(errno.ENOSPC, "full"))
    monkeypatch.setattr(sys, "stderr", stream)
    outputs.note("first")
    outputs.note("second")
    assert stream.getvalue() == "first\n"
