# SPDX-License-Identifier: Apache-2.0
"""XmoeConfig: strict, the same from every source, with a precedence that can be read back."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from xmoe import env
from xmoe.config import XmoeConfig, model_section
from xmoe.errors import ConfigError
from xmoe.types import FenceMode, Mode


def test_defaults_agree_with_the_table() -> None:
    config = XmoeConfig()
    rows = {row.setting: row for row in env.VARIABLES if row.setting}
    assert set(rows) == set(XmoeConfig.keys())
    for name, value, origin in config.describe():
        assert value == rows[name].default and origin == "default"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(False, False), ("false", False), ("False", False), ("0", False), (0, False), ("true", True)],
)
def test_booleans_mean_the_same_from_json_environment_and_command_line(
    given: object, expected: bool
) -> None:
    assert XmoeConfig.from_mapping({"deterministic": given}).deterministic is expected
    if isinstance(given, str):
        environ = {"XMOE_DETERMINISTIC": given}
        assert XmoeConfig.resolve(environ=environ).deterministic is expected


@pytest.mark.parametrize("value", ["2", "yes", 3, 2, "", 1.0, {"a": 1}, [True], "on"])
def test_other_booleans_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="deterministic"):
        XmoeConfig.from_mapping({"deterministic": value})


def test_none_means_default() -> None:
    config = XmoeConfig.from_mapping({"deterministic": None, "mode": None, "ccl_buffer_mb": None})
    assert config == XmoeConfig() and config.origin("mode") == "default"


@pytest.mark.parametrize("value", [True, "on ", "ON", 1, "yes", {"mode": "on"}])
def test_mode_is_one_of_three_words(value: object) -> None:
    with pytest.raises(ConfigError, match="mode"):
        XmoeConfig.from_mapping({"mode": value})


@pytest.mark.parametrize(
    ("value", "fine"), [(8, 1), ("8", 1), (8.0, 0), (True, 0), ("8 ", 0), (0, 0)]
)
def test_integers(value: object, fine: int) -> None:
    if fine:
        assert XmoeConfig.from_mapping({"max_tokens_per_rank": value}).max_tokens_per_rank == 8
    else:
        with pytest.raises(ConfigError, match="max_tokens_per_rank=.*1 to 1048576"):
            XmoeConfig.from_mapping({"max_tokens_per_rank": value})


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("max_tokens_per_ranks", "max_tokens_per_rank"),
        ("mega_moe_max_token", "max_tokens_per_rank"),
        ("fense", "fence"),
        ("Mode", "mode"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*nearest: {near};.*known: mode, fence"):
        XmoeConfig.from_mapping({key: 8})


@pytest.mark.parametrize("section", ["on", 3, [], True])
def test_section_must_be_an_object(section: object) -> None:
    with pytest.raises(ConfigError, match="allowed: an object"):
        XmoeConfig.resolve(model_config={"xmoe": section}, environ={})


def test_nested_value_is_refused_as_such() -> None:
    with pytest.raises(ConfigError, match="fence=.* is nested; allowed: stream, host, off"):
        XmoeConfig.from_mapping({"fence": {"mode": "host"}})


@pytest.mark.parametrize(
    ("explicit", "environment", "model"),
    list(itertools.product((None, "on"), (None, "off"), (0, 1))),
)
def test_precedence_and_origin(explicit: str | None, environment: str | None, model: int) -> None:
    config = XmoeConfig.resolve(
        explicit={"mode": explicit},
        model_config={"xmoe": {"mode": "auto"}} if model else {},
        environ={"XMOE_MODE": environment} if environment else {},
    )
    if explicit:
        expected = (Mode.ON, "explicit")
    elif environment:
        expected = (Mode.OFF, "environment XMOE_MODE")
    else:
        expected = (Mode.AUTO, "config.json" if model else "default")
    assert (config.mode, config.origin("mode")) == expected
    assert ("mode", expected[0].value, expected[1]) in config.describe()


def test_an_explicit_default_still_beats_the_environment() -> None:
    config = XmoeConfig.resolve({"mode": "auto"}, {"xmoe": {"mode": "on"}}, {"XMOE_MODE": "off"})
    assert (config.mode, config.origin("mode")) == (Mode.AUTO, "explicit")


def test_merged_leaves_explicit_values_alone() -> None:
    config = XmoeConfig.from_mapping({"fence": "host"})
    merged = config.merged({"XMOE_FENCE": "off", "XMOE_MODE": "on"})
    assert (merged.fence, merged.mode) == (FenceMode.HOST, Mode.ON)
    assert merged.origin("mode") == "environment XMOE_MODE"


def test_bad_environment_value_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="XMOE_FENCE='none'.*stream, host, off"):
        XmoeConfig.resolve(environ={"XMOE_FENCE": "none"})


def test_models_in_one_process_have_their_own_settings() -> None:
    main = XmoeConfig.resolve(model_config={"xmoe": {"mode": "on"}}, environ={})
    draft = XmoeConfig.resolve(model_config={"xmoe": {"mode": "off"}}, environ={})
    assert (main.mode, draft.mode) == (Mode.ON, Mode.OFF)


def test_section_in_text_config() -> None:
    section = {"mode": "off"}
    assert model_section({"text_config": {"xmoe": section}}) == section
    assert model_section({"xmoe": section, "text_config": {"xmoe": section}}) == section
    with pytest.raises(ConfigError, match="two different"):
        model_section({"xmoe": section, "text_config": {"xmoe": {"mode": "on"}}})


def test_frozen_checked_and_compared_by_value() -> None:
    config = XmoeConfig(mode="on")  # type: ignore[arg-type]
    assert config.mode is Mode.ON and config.origin("mode") == "explicit"
    assert config == XmoeConfig.resolve(environ={"XMOE_MODE": "on"})
    assert hash(config) == hash(XmoeConfig(mode=Mode.ON))
    assert config.digest() == XmoeConfig(mode=Mode.ON).digest() != XmoeConfig().digest()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = Mode.OFF  # type: ignore[misc]
    with pytest.raises(ConfigError, match="padding"):
        XmoeConfig(padding="none")
