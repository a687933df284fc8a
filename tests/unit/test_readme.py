# SPDX-License-Identifier: Apache-2.0
"""The README says what is so: variables, commands, files."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex

import pytest

from support.tree import FOLDERS, ROOT
from xmoe import cli, env

README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_lines() -> list[str]:
    """Commands in the code blocks: all of a `bash` block, those after "$ " in a `console` one."""
    blocks = re.findall(r"^```(bash|console)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [
        line.removeprefix("$ ")
        for kind, text in blocks
        for line in text.splitlines()
        if line.strip() and (kind == "bash" or line.startswith("$ "))
    ]


def xmoe_lines() -> list[str]:
    """The `xmoe ...` command lines the README shows."""
    return sorted({line for line in code_lines() if line.startswith("xmoe ")})


def test_first_two_commands() -> None:
    assert code_lines()[:2] == ["bash ci/quickstart.sh", "bash ci/test.sh"]


def test_variable_table_is_the_one_in_env() -> None:
    table = env.markdown_table()
    assert table in README, f"put this into README.md:\n{table}"
    # And no variable is mentioned that does not exist.
    known = {row.name for row in env.VARIABLES}
    mentioned = set(re.findall(r"\bXMOE_[A-Z_]+\b", README))
    assert mentioned <= known


def test_scripts_named_exist() -> None:
    scripts = set(re.findall(r"\bbash ((?:\.?ci)/[\w./-]+)", README))
    assert {"ci/quickstart.sh", "ci/test.sh"} <= scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


def test_tests_readme_has_a_row_for_each_folder() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert folders == set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))


def test_what_the_scripts_run_is_what_is_said() -> None:
    script = (ROOT / "ci" / "test.sh").read_text(encoding="utf-8")
    (default,) = re.findall(r"\|\| set -- (check .*)", script)
    said = README.split("runs the checks and the tests in", 1)[1].split(";", 1)[0]
    assert ["check", *re.findall(r"`(\w+)`", said)] == default.split()
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert f"`bash ci/test.sh` runs `{default}`" in text
    runs = re.findall(r'^run \w+ \d+ "(.*)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    text = (ROOT / "ci" / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `../.ci/run` \|.*", text, re.MULTILINE)
    assert runs and [name for name in re.findall(r"`(bash [^`]*)`", row)] == runs


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert [name for name in targets if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("line", xmoe_lines())
def test_command_line_shown_is_accepted(line: str) -> None:
    words = shlex.split(line)[1:]
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version")
        return
    module = next(entry.module for entry in cli.COMMANDS if entry.name == words[0])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(module).add_arguments(parser)
    parser.parse_args(words[1:])


def test_every_command_is_shown() -> None:
    shown = {line.split()[1] for line in xmoe_lines()}
    assert {entry.name for entry in cli.COMMANDS} <= shown


@pytest.mark.parametrize("folder", ["kernels", "comm", "policy", "models", "tests", "ci"])
def test_each_folder_explains_itself(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    assert text.splitlines()[1].startswith(f"# {folder}")


def test_top_folders_hold_no_package_marker() -> None:
    # With one, `import kernels` from the root would shadow packages of other people.
    folders = [folder for folder in FOLDERS.values() if folder.name != "xmoe"]
    assert [str(f) for f in folders if (f / "__init__.py").exists()] == []
    assert all((ROOT / "xmoe" / folder.name).is_symlink() for folder in folders)
