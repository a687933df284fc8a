# SPDX-License-Identifier: Apache-2.0
"""What all commands share: number arguments, results, the standard streams, exit codes."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tree import modules
from xmoe import cli, env
from xmoe.kernels.acl.variants import REFUSED

XMOE = [sys.executable, "-c", "from xmoe.cli import main; raise SystemExit(main())"]
QWEN = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 512,
    "num_experts": 256, "num_experts_per_tok": 8, "hidden_act": "silu", "num_hidden_layers": 4,
    "full_attention_interval": 4, "dtype": "bfloat16",
}  # fmt: skip
TOO_LONG = "9" * 5000
NO_NUMBERS = ("-1", "nan", "inf", "1e300", "9" * 30, TOO_LONG, "x", "", "1.5e0", "٣")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused is refused before a rank exists."""

    def started(*args: Any, **kw: Any) -> None:
        raise AssertionError("a rank was started")

    for module in (
        "xmoe.pipeline.run", "xmoe.pipeline.probes.table", "xmoe.conformance.run",
        "xmoe.regress.command",
    ):  # fmt: skip
        monkeypatch.setattr(f"{module}.run_ranks", started)


def parsers() -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """The words that lead to each parser, and it."""
    for command in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(command.module).add_arguments(parser)
        yield [command.name], parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    yield [command.name, name], inner


NEEDED = {
    "explain": ["--model", "x", "--ep", "8"],
    "pipeline run": ["--connector", "camasync"],
    "pipeline timeline": ["trace.json", "picture.png"],
}
NUMBERS = [
    (words, action.option_strings[-1])
    for words, parser in parsers()
    for action in parser._actions
    if action.type not in (None, Path)
]


def test_every_number_is_of_a_shared_kind() -> None:
    """A bare int or float takes numbers that nothing can do anything with."""
    for words, parser in parsers():
        for action in parser._actions:
            if action.type not in (None, Path):
                where = getattr(action.type, "__qualname__", "")
                assert where == "of.<locals>.parse", (words, action.option_strings)
    assert len(NUMBERS) > 20


@pytest.mark.parametrize(("words", "option"), NUMBERS, ids=[" ".join([*w, o]) for w, o in NUMBERS])
def test_what_is_no_such_number_is_refused_with_what_is_allowed(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in NO_NUMBERS:
        assert cli.main([*words, *NEEDED.get(" ".join(words), []), f"{option}={text}"]) == 2
        captured = capsys.readouterr()
        assert f"argument {option}: " in captured.err and "allowed: " in captured.err
        assert captured.out == "" and len(captured.err) < 3000


RESULTS = [
    ("doctor", "--json"),
    ("explain --model {model} --ep 8", "--json"),
    ("regress", "--json"),
    ("pipeline run --connector camp2p", "--json"),
    ("pipeline run --connector camp2p", "--trace"),
    ("pipeline probe", "--json"),
    ("conformance", "--json"),
]


def test_every_command_with_a_result_is_listed_here() -> None:
    have = {
        (" ".join(words), option)
        for words, parser in parsers()
        for action in parser._actions
        for option in action.option_strings
        if option in ("--json", "--trace")
    }
    listed = {(" ".join(w for w in line.split(" --")[0].split()), o) for line, o in RESULTS}
    assert have == listed


@pytest.mark.parametrize(("line", "option"), RESULTS)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    line: str, option: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.format(model=model).split()
    (model / "file").write_text("")
    for where in (model, model / "file" / "below.json"):
        assert cli.main([*words, option, str(where)]) == 2
        captured = capsys.readouterr()
        assert f"xmoe: {option} {where} cannot be written: " in captured.err and not captured.out


def test_a_picture_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = small_trace(tmp_path)
    (tmp_path / "file").write_text("")
    assert cli.main(["pipeline", "timeline", str(trace), str(tmp_path / "file" / "x.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    picture = tmp_path / "x.png"
    picture.write_text(trace.read_text())
    assert cli.main(["pipeline", "timeline", str(picture), str(picture)]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert picture.read_text() == trace.read_text()
    words = ["--from-ms", "5", "--to-ms", "1"]
    assert cli.main(["pipeline", "timeline", str(trace), str(tmp_path / "y.png"), *words]) == 2
    assert "allowed: a part of some length" in capsys.readouterr().err


def small_trace(folder: Path) -> Path:
    from xmoe.pipeline.trace import SCHEMA, Span, Trace, write

    args = {
        "item": 0, "order": 0, "phase": "recv", "slot": 0, "layer": 0, "stage": 0, "step": 0,
        "channel": "afd", "connector": "camp2p",
    }  # fmt: skip
    spans = [Span("recv", "work", 0, "recv", 0.0, 5.0, args)]
    path = folder / "trace.json"
    process = {"rank": 0, "role": "ffn", "mode": "serial"}
    write(Trace(spans, {0: process}, {"schema": SCHEMA}), path)
    return path


def test_a_picture_goes_into_a_new_folder_and_its_title_is_no_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = small_trace(tmp_path), tmp_path / "new" / "x.png"
    words = ["pipeline", "timeline", str(trace), str(picture), "--title", r"$\frac{$"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- --json -----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["doctor", "explain --model {model} --ep 8"])
def test_json_goes_where_it_is_told(
    line: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.format(model=model).split()
    code = cli.main(words)
    text = capsys.readouterr().out
    for option in (["--json"], ["--json", "-"]):
        assert cli.main([*words, *option]) == code
        document = json.loads(capsys.readouterr().out)
        assert isinstance(document, dict)
    target = model / "new" / "r.json"
    assert cli.main([*words, "--json", str(target)]) == code
    assert json.loads(target.read_text()) == document
    assert capsys.readouterr().out == text
    assert not Path("-").exists()


# ---- standard streams -------------------------------------------------------------------------

PRINTING = [
    "--help", "--version", "doctor", "doctor --json", "explain --model {model} --ep 8",
    "device env", "conformance --list", "pipeline run --help", "pipeline timeline {trace} {png}",
]  # fmt: skip


# Without a buffer the write itself fails, not the flush at the end.
@pytest.mark.parametrize(
    ("line", "unbuffered"),
    [*((line, "") for line in PRINTING), ("--help", "1"), ("doctor", "1")],
)
def test_a_standard_output_that_takes_nothing(line: str, unbuffered: str, model: Path) -> None:
    if "timeline" in line:
        pytest.importorskip("matplotlib")
    names = {"model": model, "trace": small_trace(model), "png": model / "p.png"}
    words = [word.format(**names) for word in line.split()]
    around = {**os.environ, "PYTHONUNBUFFERED": unbuffered}

    def run(way: str) -> tuple[int, str]:
        """With the standard output as the shell makes it."""
        command = ["bash", "-c", f'"$@" {way}', "bash", *XMOE, *words]
        done = subprocess.run(command, capture_output=True, text=True, env=around, cwd="/")
        return done.returncode, done.stderr

    code, said = run(">/dev/full")
    assert code == 2 and said.count("\n") == 1, said
    assert said.startswith("xmoe: the standard output cannot be written: No space left")
    code, said = run(">&-")
    assert code == 2 and said.startswith("xmoe: the standard output is closed; allowed: "), said
    assert run("2>/dev/full >/dev/null") == run("2>&- >/dev/null") == (0, "")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*XMOE, *words], stdout=writing, stderr=subprocess.PIPE, text=True, env=around, cwd="/"
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (cli.EXIT_BROKEN_PIPE, "")


# Children of a command, which nobody but the command reads.
PRINT_TO_A_PARENT = {"xmoe.pipeline.probes.queue"}
COMMANDS = ("xmoe.cli", "xmoe.device", "xmoe.doctor", "xmoe.explain", "xmoe.conformance",
            "xmoe.pipeline", "xmoe.regress")  # fmt: skip


def test_only_one_module_writes_to_the_standard_streams() -> None:
    for name, path in modules().items():
        if not name.startswith(COMMANDS) or name in PRINT_TO_A_PARENT:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "Console", "sys.stdout.write", "sys.stderr.write"), (
                    f"{name}:{node.lineno} uses {called}; use xmoe.outputs"
                )


# ---- exit codes and bad input -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("XMOE_DEVICE", "bogus"), ("XMOE_ABI_VARIANT", "K"), ("XMOE_ABI_PROBE_TIMEOUT_S", "1e999")],
)
def test_a_bad_variable_is_wrong_use(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert f"{name}={value!r}" in said or f"='{value}'" in said
    assert "allowed: " in said and "xmoe doctor" not in said


def test_a_variant_that_is_known_and_refused_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dict(env.REFUSED_VARIANTS) == dict(REFUSED)
    monkeypatch.setenv("XMOE_ABI_VARIANT", "K")
    assert cli.main(["doctor"]) == 2
    assert REFUSED["K"] in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 200_000, TOO_LONG, '{"a":' * 100_000, "NaN,", "\0"])
def test_bad_json_is_no_defect(text: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text(text)
    assert cli.main(["explain", "--model", str(model), "--ep", "8"]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
    words = ["pipeline", "timeline", str(model / "config.json"), str(model / "p.png")]
    assert cli.main(words) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
    assert cli.main(["pipeline", "run", "--connector", "camp2p", "--multistream", text]) == 2
    said = capsys.readouterr().err
    assert "is not JSON" in said and "allowed: an object" in said and len(said) < 1000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_what_is_no_plain_file_is_not_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with open(file, "wb") as made:
            made.truncate(1 << 40)
    assert cli.main(["explain", "--model", str(tmp_path), "--ep", "8"]) == 2
    assert "not a regular file" in capsys.readouterr().err or kind == "huge"
    assert cli.main(["pipeline", "timeline", str(file), str(tmp_path / "p.png")]) == 2
    assert cli.main(["regress", "--model", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("camp2p --multistream 5", "is no object; allowed: an object"),
        ("camp2p --multistream [1]", "is no object; allowed: an object"),
        ('camp2p --multistream ""', "is no object"),
        ('camp2p --multistream {"mode":"off"}', "next: use --mode instead"),
        ('camp2p --multistream {"max_inflight":1}', "next: use --max-inflight instead"),
        ('camp2p --multistream {"wait_timeout_s":1}', "next: use --timeout instead"),
        ('camp2p --multistream {"stall_warn_s":1e308}', "a number of seconds above 0, up to"),
        ('camasync --multistream {"recv_cores":1' + "0" * 400 + "}", "1 to 1024"),
        ('camasync --multistream {"event_ring":12}', "next: remove it"),
        ("camp2p --tp 2", "--tp has no effect here; allowed: with --connector camasync"),
        ("camp2p --experts 4", "--experts has no effect here"),
        ("camp2p --routing mixed", "--routing has no effect here"),
        ("camasync --mode serial --gate none", "--gate has no effect here; allowed: with --mode"),
        ("camp2p --mode serial --roles both", "--roles has no effect here"),
        ("camp2p --mode serial --max-inflight 2", "--max-inflight has no effect here"),
        ("camasync --topk 5 --experts 4", "topk=5"),
        ("camasync --attn 3 --tp 2", "tp_size=2"),
        ("camasync --attn 2 --tp 4", "tp_size=4"),
        ("camp2p --attn 2 --ffn 3", "attn_size=2"),
        ("camasync --attn 15 --ffn 2", "16 ranks at most"),
    ],
)
def test_what_has_no_effect_or_cannot_run_is_refused_before_a_rank(
    line: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pipeline", "run", "--connector", *line.split()]) == 2
    assert reason in capsys.readouterr().err


def test_probe_items_go_with_the_probes_that_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pipeline", "probe", "P1", "--items", "5"]) == 2
    assert "--items has no effect here; allowed: with P4, P6 or all" in capsys.readouterr().err


def test_a_run_that_the_interface_describes_is_checked_alike() -> None:
    from dataclasses import replace

    from xmoe.errors import ConfigError
    from xmoe.multistream import StreamMode
    from xmoe.pipeline.deployment import RunSpec
    from xmoe.pipeline.limits import RUN
    from xmoe.pipeline.run import check

    good = RunSpec("camasync", 2, 1, 2)
    check(good, (StreamMode.SERIAL,))
    for name in RUN:
        with pytest.raises(ConfigError, match=f"{name}=-5 is not acceptable.*allowed: a"):
            check(replace(good, **{name: -5}), (StreamMode.SERIAL,))


def test_tokens_per_second_are_those_that_were_sent() -> None:
    from xmoe.multistream import StreamMode
    from xmoe.pipeline.deployment import RankRun, RunSpec
    from xmoe.pipeline.report import report

    spec = RunSpec("camp2p", 3, 1, 2, stages=2, tokens=10, uneven=True)
    results = [[RankRun("attention", "serial", seconds=[1.0, 1.0])] for _ in range(4)]
    results[0][0] = RankRun("ffn", "serial")
    found = report(spec, (StreamMode.SERIAL,), results)
    # Ranks 1 to 3 send, those with an odd number a token less, in two stages.
    assert found["modes"]["serial"]["tokens_per_s"] == 2 * (9 + 10 + 9)


def test_a_run_whose_figures_fail_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xmoe.pipeline.deployment import RankRun

    def run(spec: Any, modes: Any) -> Any:
        roles = ("attention", "attention", "ffn")
        return [[RankRun(role, "serial", seconds=[1.0])] for role in roles]

    monkeypatch.setattr("xmoe.pipeline.run.run", run)
    files = {"--trace": tmp_path / "a" / "t.json", "--json": tmp_path / "b" / "r.json"}
    words = [str(word) for pair in files.items() for word in pair]
    line = ["pipeline", "run", "--connector", "camasync", "--mode", "serial", *words]
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert "no device work with phases" in captured.err and "ms a step" in captured.out
    assert all(json.loads(file.read_text()) for file in files.values())


def test_a_probe_that_hangs_is_evidence_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from xmoe.pipeline.probes import queue

    def hang(command: list[str], timeout: float, **kw: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(queue.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(queue.subprocess, "run", hang)
    (found,) = queue.probe()
    assert found.outcome == "unexpected" and "did not end in 120 s" in found.finding


def test_options_without_effect_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, reason in (
        ("conformance --list --json", "--json has no effect here; allowed: without --list"),
        ("conformance --list --skip-harmful", "--skip-harmful has no effect here"),
        ("regress --path fused_moe --fence host", "--fence has no effect here; allowed: with"),
    ):
        assert cli.main(line.split()) == 2
        assert reason in capsys.readouterr().err


def test_a_folder_that_is_gone_is_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["doctor", "--json", "r.json"]) == 2
    assert "--json r.json cannot be written: No such file" in capsys.readouterr().err


def test_messages_have_no_other_way_than_the_standard_error() -> None:
    command = ["bash", "-c", '"$@" 2>&-', "bash", *XMOE, "bogus"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (2, "")
