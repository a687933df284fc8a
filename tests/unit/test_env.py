# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables: strict parsing, read late, never written."""

from __future__ import annotations

import os

import pytest

from xmoe import env
from xmoe.errors import ConfigError


def test_names_are_unique_and_rows_complete() -> None:
    names = [row.name for row in env.VARIABLES]
    assert len(set(names)) == len(names)
    for row in env.VARIABLES:
        assert row.meaning and row.values
        # The last one is a vendor operator's, which carries no prefix.
        assert row.name.split("_")[0] in ("XMOE", "ASCEND", "HCCL") or (
            row.name == "BATCH_SIZE_FACTOR"
        )


@pytest.mark.parametrize("row", env.VARIABLES, ids=lambda row: row.name)
def test_default_is_a_value_the_variable_accepts(row: env.Variable) -> None:
    if row.default is not None:
        text = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
        assert env.read(row.name, {row.name: text}) == row.default
    assert env.get(row.name, {}) == row.default
    assert env.get(row.name, {row.name: ""}) == row.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("XMOE_DETERMINISTIC", "false", False),
        ("XMOE_DETERMINISTIC", "TRUE", True),
        ("XMOE_DETERMINISTIC", "0", False),
        ("XMOE_MODE", "on", "on"),
        ("XMOE_MAX_TOKENS_PER_RANK", "8", 8),
        ("XMOE_FENCE_TIMEOUT_S", "2.5", 2.5),
        ("XMOE_FENCE_TIMEOUT_S", "3", 3.0),
        ("HCCL_BUFFSIZE", "512", 512),
        ("ASCEND_CUSTOM_OPP_PATH", "/a:/b:", "/a:/b:"),
    ],
)
def test_good_values(name: str, text: str, value: object) -> None:
    assert env.read(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("XMOE_DETERMINISTIC", "yes", "true, false, 1, 0"),
        ("XMOE_DETERMINISTIC", "2", "true, false, 1, 0"),
        ("XMOE_MODE", "ON", "off, auto, on"),
        ("XMOE_MODE", "1", "off, auto, on"),
        ("XMOE_MAX_TOKENS_PER_RANK", "0", "a whole number, 1 to 1048576"),
        ("XMOE_MAX_TOKENS_PER_RANK", "8.0", "a whole number, 1 to 1048576"),
        ("XMOE_MAX_TOKENS_PER_RANK", "1e3", "a whole number, 1 to 1048576"),
        ("XMOE_MAX_TOKENS_PER_RANK", "８", "a whole number, 1 to 1048576"),
        ("XMOE_STEP_TIMEOUT_S", "inf", "a number of seconds above 0, up to 1000000"),
        ("XMOE_STEP_TIMEOUT_S", "0", "a number of seconds above 0, up to 1000000"),
        ("XMOE_STEP_TIMEOUT_S", "-1", "a number of seconds above 0, up to 1000000"),
        ("HCCL_BUFFSIZE", "200MB", "a whole number, 1 to 1048576"),
    ],
)
def test_bad_values_name_variable_value_and_allowed(name: str, text: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        env.read(name, {name: text})
    assert name in str(caught.value) and repr(text) in str(caught.value)
    assert f"allowed: {allowed}" in str(caught.value)


def test_reads_at_call_time_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMOE_MODE", "off")
    before = dict(os.environ)
    assert env.text("XMOE_MODE") == "off"
    monkeypatch.setenv("XMOE_MODE", "on")
    assert env.text("XMOE_MODE") == "on"
    assert {**before, "XMOE_MODE": "on"} == dict(os.environ)


def test_misspelt_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="XMOE_MAX_TOKEN_PER_RANK is unknown; nearest: XMOE_MAX_TOK"
    ):
        env.settings({"XMOE_MAX_TOKEN_PER_RANK": "8"})


def test_settings_maps_fields_to_values_and_variables() -> None:
    found = env.settings({"XMOE_MODE": "off", "XMOE_CCL_BUFFER_MB": "64", "HCCL_BUFFSIZE": "9"})
    assert found == {"mode": ("off", "XMOE_MODE"), "ccl_buffer_mb": (64, "XMOE_CCL_BUFFER_MB")}


def test_a_variable_outside_the_table_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        env.read("PATH", {})


def test_markdown_table_has_one_line_per_variable() -> None:
    lines = env.markdown_table().splitlines()
    assert len(lines) == len(env.VARIABLES) + 2
    for row, line in zip(env.VARIABLES, lines[2:], strict=True):
        assert line.startswith(f"| `{row.name}` | {row.values} |") and line.count("|") == 5
