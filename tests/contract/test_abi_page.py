# SPDX-License-Identifier: Apache-2.0
"""The page in docs/ is what the table says, and the command that writes it notices when not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support import abi_table
from support.tree import ROOT
from support.vendor import COUNTS
from xmoe.kernels.acl import abi_page
from xmoe.kernels.acl.variants import REFUSED, VARIANTS


def test_the_page_is_the_tables() -> None:
    page = ROOT / "docs" / "megamoe-abi.md"
    assert page == abi_page.PAGE
    hint = "run python -m xmoe.kernels.acl.abi_page"
    assert page.read_text(encoding="utf-8") == abi_page.render(), hint


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build variants with")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", ["A", "B", "J"])
def test_the_recorded_table_is_what_runs_give(variant: str, tmp_path: Path) -> None:
    # All letters are run in tests/ep/test_abi_variants.py and test_abi_detect.py.
    recorded = json.loads(abi_page.RECORD.read_text())["variants"]
    assert list(recorded) == list(VARIANTS)
    good = {"called": True, "right_pin_taken": True, "wrong_pins_detected": 9, "wrong_pins": 9}
    assert recorded == {letter: {**good, "detected": letter} for letter in VARIANTS}
    assert abi_table.row(variant, tmp_path) == recorded[variant]
    assert f"| {variant} | yes | {variant} | yes | 9 of 9 |" in abi_page.render()


def test_the_page_has_every_variant_and_every_parameter() -> None:
    text = abi_page.render()
    for variant in VARIANTS.values():
        assert f"### Variant {variant.id}, {COUNTS[variant.id]} parameters" in text
        _, _, rest = text.partition(f"### Variant {variant.id},")
        prototype = rest.partition("```c\n")[2].partition("```")[0]
        order = [line.split("//")[0].strip(" ,);").split()[-1] for line in
                 prototype.splitlines()[1:]]  # fmt: skip
        assert order == [p.name for p in variant.params]
    assert all(f"**{name}**" in text for name in REFUSED)


def test_the_command_compares_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert abi_page.main(["--check"]) == 0
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(abi_page, "PAGE", tmp_path / "docs" / "page.md")
    assert abi_page.main(["--check"]) == 1
    assert abi_page.main([]) == 0
    assert abi_page.main(["--check"]) == 0
    (tmp_path / "docs" / "page.md").write_text("other")
    assert abi_page.main(["--check"]) == 1
    assert "is not what the table says" in capsys.readouterr().out
