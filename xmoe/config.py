# SPDX-License-Identifier: Apache-2.0
"""One model's settings, and where each of them came from.

Precedence: explicit argument > environment (XMOE_*) > key "xmoe" of config.json > default.
Names, allowed values and defaults stand in the table of `xmoe.env`; this module adds none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from xmoe import env
from xmoe.errors import ConfigError
from xmoe.types import FenceMode, Mode

MODEL_KEY = "xmoe"
_VARIABLES: Mapping[str, env.Variable] = {row.setting: row for row in env.VARIABLES if row.setting}
_ENUMS: Mapping[str, type[Mode] | type[FenceMode]] = {"mode": Mode, "fence": FenceMode}


def _parse(name: str, value: object, origin: str) -> Any:
    row = _VARIABLES[name]
    if value is None:
        if row.default is None:
            return None
        value = row.default
    parsed = env.parse_as(row.kind, name, value, f"correct it where it was set ({origin})")
    return _ENUMS[name](parsed) if name in _ENUMS else parsed


@dataclass(frozen=True)
class XmoeConfig:
    """Settings of one model; immutable, hashable, checked on construction.

    Two configurations are equal when their values are, wherever the values came from.
    """

    mode: Mode = Mode.AUTO
    fence: FenceMode = FenceMode.STREAM
    deterministic: bool = True
    padding: str = "zero_weight"
    max_tokens_per_rank: int = 512
    profile: str | None = None
    abi_variant: str | None = None
    reuse_executor: bool = False
    validate_ids: str = "drop"
    fence_timeout_s: float = 60.0
    step_timeout_s: float = 120.0
    split_streams: str = "serial"
    split_chunk_tokens: int = 128
    ccl_buffer_mb: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        origins = dict(self.origins)
        for name, row in _VARIABLES.items():
            given = getattr(self, name)
            value = _parse(name, given, origins.get(name, "explicit"))
            object.__setattr__(self, name, value)
            if given is None or value == row.default:
                origins.setdefault(name, "default")
            origins.setdefault(name, "explicit")
        object.__setattr__(self, "origins", origins)

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The known setting names."""
        return tuple(f.name for f in fields(cls) if f.name != "origins")

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, object] | None, origin: str = "explicit"
    ) -> XmoeConfig:
        """Read settings from one mapping (JSON, keyword arguments, command line).

        None for a key means its default. Unknown keys, nested values and wrong types raise
        ConfigError.
        """
        return cls()._with(mapping, origin)

    @classmethod
    def resolve(
        cls,
        explicit: Mapping[str, object] | None = None,
        model_config: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> XmoeConfig:
        """The effective settings of one model.

        Args:
            explicit: what the caller or the command line set.
            model_config: the content of the model's config.json.
            environ: stands for os.environ, which is read when this is None.
        """
        config = cls()._with(model_section(model_config), "config.json")
        return config.merged(environ)._with(explicit, "explicit")

    def merged(self, environ: Mapping[str, str] | None = None) -> XmoeConfig:
        """These settings with the environment applied to all that were not set explicitly."""
        config = self
        for name, (value, variable) in env.settings(environ).items():
            if self.origin(name) != "explicit":
                config = config._with({name: value}, f"environment {variable}")
        return config

    def _with(self, mapping: Mapping[str, object] | None, origin: str) -> XmoeConfig:
        values: dict[str, Any] = {}
        origins = dict(self.origins)
        for key, value in _checked(mapping, origin).items():
            if value is not None:  # None leaves what a weaker source said
                values[key] = _parse(key, value, origin)
                origins[key] = origin
        return replace(self, **values, origins=origins)

    def origin(self, name: str) -> str:
        """Where the value of `name` came from: default, config.json, environment NAME, explicit."""
        return self.origins[name]

    def describe(self) -> tuple[tuple[str, str | int | float | bool | None, str], ...]:
        """(name, value, origin) of every setting, JSON-able, in the table's order."""
        rows = []
        for name in self.keys():
            value = getattr(self, name)
            rows.append((name, getattr(value, "value", value), self.origin(name)))
        return tuple(rows)

    def digest(self) -> str:
        """Equal on two ranks exactly when their settings are; origins do not count."""
        values = {name: value for name, value, _ in self.describe()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def model_section(model_config: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The "xmoe" object of a config.json, at the top or in its text_config."""
    if model_config is None:
        return None
    found = model_config.get(MODEL_KEY)
    inner = model_config.get("text_config")
    if isinstance(inner, Mapping) and MODEL_KEY in inner:
        if found is not None and found != inner[MODEL_KEY]:
            raise ConfigError(
                f'config.json has two different "{MODEL_KEY}" objects, {found!r} at the top and '
                f"{inner[MODEL_KEY]!r} in text_config; allowed: one; remove one of them"
            )
        found = inner[MODEL_KEY]
    if found is None:
        return None
    return _checked(found, "config.json")


def _checked(mapping: object, origin: str) -> Mapping[str, object]:
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"xmoe settings ({origin}) are {mapping!r}; allowed: an object with the keys "
            f"{', '.join(XmoeConfig.keys())}; write it as one"
        )
    known = XmoeConfig.keys()
    for key, value in mapping.items():
        if key not in known:
            raise ConfigError(
                f"unknown xmoe setting {key!r} ({origin}); nearest: "
                f"{env.nearest(str(key), known)}; known: {', '.join(known)}; correct or remove it"
            )
        if isinstance(value, (Mapping, list, tuple, set)):
            raise ConfigError(
                f"xmoe setting {key}={value!r} ({origin}) is nested; allowed: "
                f"{_VARIABLES[str(key)].values}; give one plain value"
            )
    return mapping
