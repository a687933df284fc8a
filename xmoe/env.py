# SPDX-License-Identifier: Apache-2.0
"""The only reader of XMOE_*, ASCEND_* and HCCL_* environment variables.

`VARIABLES` is the one table of them. A variable is read when it is asked for, never at import, so a
value set late still counts. An unset or empty variable means its default. Nothing is ever written.

The kinds below also parse configuration mappings and command lines, so that "false", "8" or "auto"
mean the same wherever they are written.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from xmoe.errors import ConfigError

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Kind:
    """How a value is parsed, and the words that tell a user what is allowed.

    `refused` says of values that somebody may well try why they are not.
    """

    values: str
    parse: Callable[[object], Scalar]
    refused: Mapping[str, str] = field(default_factory=dict)


def _parse_boolean(value: object) -> bool:
    # bool("false") is True, so text is compared, never converted.
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    raise ValueError


BOOLEAN = Kind("true, false, 1, 0", _parse_boolean)


def integer(low: int, high: int) -> Kind:
    """A whole number from `low` to `high` inclusive; text only in plain decimal digits."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError
        if not low <= value <= high:
            raise ValueError
        return value

    return Kind(f"a whole number, {low} to {high}", parse)


def whole(*values: int) -> Kind:
    """One of the given whole numbers, in plain decimal digits."""
    within = integer(min(values), max(values))

    def parse(value: object) -> Scalar:
        parsed = within.parse(value)
        if parsed not in values:
            raise ValueError
        return parsed

    return Kind(", ".join(map(str, values)), parse)


def number(low: float, high: float) -> Kind:
    """A number from `low` to `high` inclusive; text only in decimal notation."""
    return Kind(f"a number, {low:g} to {high:g}", lambda value: _parse_number(value, low, high))


MOST_SECONDS = 1_000_000
"""ACL's time limits are int32 milliseconds, 24 days."""


def seconds() -> Kind:
    """A positive number of seconds that every clock and runtime call can hold."""

    def parse(value: object) -> float:
        parsed = _parse_number(value, 0, MOST_SECONDS)
        if parsed == 0:
            raise ValueError
        return parsed

    return Kind(f"a number of seconds above 0, up to {MOST_SECONDS}", parse)


def _parse_number(value: object, low: float, high: float) -> float:
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?", value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    if not low <= value <= high:  # compared before it is converted, which too large a number is not
        raise ValueError
    return float(value)


def choice(*values: str, refused: Mapping[str, str] = {}) -> Kind:
    """One of the given words, spelt exactly so."""

    def parse(value: object) -> str:
        # An enum member whose value is text counts as that text.
        text = getattr(value, "value", value)
        if isinstance(text, str) and text in values:
            return str(text)
        raise ValueError

    return Kind(", ".join(values), parse, refused)


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return value


TEXT = Kind("a non-empty text", _parse_text)
PATH = Kind("a directory", _parse_text)
PATH_LIST = Kind("directories separated by ':'", _parse_text)


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    `setting` names the XmoeConfig field it overrides, or is empty. `default` None means "not set":
    then `meaning` says what happens.
    """

    name: str
    meaning: str
    kind: Kind
    default: Scalar | None
    setting: str = ""

    @property
    def values(self) -> str:
        return self.kind.values


# As in xmoe.kernels.acl.variants, which is loaded without this package; a test compares them.
REFUSED_VARIANTS: Mapping[str, str] = {
    "K": "a document names its attribute combine_comm_mode, but no source read gives the position "
    "of the new parameter in the argument list",
    "P0": "a prototype header without weights; no library with it is known",
}

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "XMOE_MODE",
        "off: fused_moe only. auto: mega_moe if every check passes, else fused_moe. "
        "on: mega_moe, or an error that lists every failed check",
        choice("off", "auto", "on"),
        "auto",
        "mode",
    ),
    Variable(
        "XMOE_FENCE",
        "how launches that share one communication resource are ordered",
        choice("stream", "host", "off"),
        "stream",
        "fence",
    ),
    Variable(
        "XMOE_DETERMINISTIC",
        "fixed summation order in fused_moe: the same bits for every EP size",
        BOOLEAN,
        True,
        "deterministic",
    ),
    Variable(
        "XMOE_PADDING",
        "how rows added to reach the group's row count are kept out of the result",
        choice("mask", "zero_weight"),
        "zero_weight",
        "padding",
    ),
    Variable(
        "XMOE_MAX_TOKENS_PER_RANK",
        "largest number of tokens each rank may bring to mega_moe in a step; not the group's sum",
        integer(1, 1 << 20),
        512,
        "max_tokens_per_rank",
    ),
    Variable(
        "XMOE_PROFILE",
        "name of the limit profile to use; not set: chosen from SoC and operator version",
        TEXT,
        None,
        "profile",
    ),
    Variable(
        "XMOE_ABI_VARIANT",
        "ABI variant of aclnnMegaMoe; not set: as found out by the library layer",
        choice("A", "B", "C", "D", "E", "F", "G", "H", "I", "J", refused=REFUSED_VARIANTS),
        None,
        "abi_variant",
    ),
    Variable(
        "XMOE_ABI_PROBE",
        "auto: the ABI variant is checked by return codes, in a child process. "
        "off: configuration and package metadata are taken at their word",
        choice("auto", "off"),
        "auto",
    ),
    Variable(
        "XMOE_ABI_PROBE_TIMEOUT_S",
        "after which a probe of the ABI variant counts as hung",
        seconds(),
        20.0,
    ),
    Variable(
        "XMOE_ABI_CACHE",
        "folder, writable by its owner only, where probe results are kept per library file; "
        "not set: for the process only",
        PATH,
        None,
    ),
    Variable(
        "XMOE_REUSE_EXECUTOR",
        "keep the vendor's op_executor of mega_moe for all launches of one shape; only for an "
        "operator known to allow it, which CANN's documents leave open",
        BOOLEAN,
        False,
        "reuse_executor",
    ),
    Variable(
        "XMOE_VALIDATE_IDS",
        "expert ids that are out of range or repeated in their row. drop: left out, and counted on "
        "the device. checked: an error on all ranks, for a host read and a collective a layer call",
        choice("drop", "checked"),
        "drop",
        "validate_ids",
    ),
    Variable(
        "XMOE_FENCE_TIMEOUT_S",
        "how long a launch waits for the one before it on the same resource",
        seconds(),
        60.0,
        "fence_timeout_s",
    ),
    Variable(
        "XMOE_STEP_TIMEOUT_S",
        "how long one step may take before it is reported with rank, layer and phase",
        seconds(),
        120.0,
        "step_timeout_s",
    ),
    Variable(
        "XMOE_SPLIT_STREAMS",
        "fused_moe's dispatch, experts and combine: serial, or overlap in chunks on three streams; "
        "the same bits with XMOE_DETERMINISTIC",
        choice("serial", "overlap"),
        "serial",
        "split_streams",
    ),
    Variable(
        "XMOE_SPLIT_CHUNK_TOKENS",
        "overlap: tokens of a chunk on the rank that has most; all ranks have as many chunks",
        integer(1, 1 << 20),
        128,
        "split_chunk_tokens",
    ),
    Variable(
        "XMOE_CCL_BUFFER_MB",
        "size of each half of the communicator's buffer in MiB; not set: HCCL_BUFFSIZE",
        integer(1, 1 << 20),
        None,
        "ccl_buffer_mb",
    ),
    Variable(
        "XMOE_DEVICE",
        "auto: the CANN named by ASCEND_HOME_PATH if set, else the software device",
        choice("auto", "soft", "cann"),
        "auto",
    ),
    Variable("XMOE_STRICT", "tests that would be skipped fail instead", BOOLEAN, False),
    Variable("XMOE_PYTHON", "ci scripts: interpreter that makes the environment", TEXT, None),
    Variable("XMOE_VENV", "ci scripts: where the environment is made", PATH, None),
    Variable("XMOE_NPU_VENV", "ci scripts: where the one with torch_npu is made", PATH, None),
    Variable("XMOE_EXTRAS", "ci scripts: extras to install; not set: test", TEXT, None),
    Variable("XMOE_BIN", "ci scripts: set by them, the environment's bin directory", PATH, None),
    Variable("ASCEND_HOME_PATH", "root of the CANN toolkit; not set: no CANN", PATH, None),
    Variable("ASCEND_TOOLKIT_HOME", "as ASCEND_HOME_PATH, read when that is not set", PATH, None),
    Variable("ASCEND_OPP_PATH", "operator packages; not set: opp below the toolkit", PATH, None),
    Variable(
        "ASCEND_CUSTOM_OPP_PATH",
        "vendor operator packages, first one first; not set: vendors/config.ini decides",
        PATH_LIST,
        None,
    ),
    Variable(
        "HCCL_BUFFSIZE",
        "HCCL: size of each half of a communicator's buffer in MiB",
        integer(1, 1 << 20),
        200,
    ),
    Variable(
        "HCCL_OP_EXPANSION_MODE",
        "HCCL: where collectives are expanded; with AIV only one communicator may use it",
        TEXT,
        None,
    ),
    Variable("HCCL_DETERMINISTIC", "HCCL: fixed order in reductions", TEXT, None),
    Variable(
        "BATCH_SIZE_FACTOR",
        "CAMAsync operators: receive outputs have floor(262144 * this) rows, above 0 and up to 1",
        TEXT,
        None,
    ),
)

_BY_NAME: Mapping[str, Variable] = {variable.name: variable for variable in VARIABLES}


_MOST_SHOWN = 200


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`; for messages."""
    return max(known, key=lambda name: difflib.SequenceMatcher(None, word, name).ratio())


def parse_as(kind: Kind, name: str, value: object, next_step: str) -> Scalar:
    """Parse `value`, or raise a ConfigError that names `name`, the value and what is allowed."""
    try:
        return kind.parse(value)
    except ValueError:
        why = f": {kind.refused[value]}" if isinstance(value, str) and value in kind.refused else ""
        raise ConfigError(
            f"{name}={shown(value)} is not acceptable{why}; allowed: {kind.values}; {next_step}"
        ) from None


def shown(value: object) -> str:
    """A value for a message, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number of very many digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def variable(name: str) -> Variable:
    """The row of the table for `name`; KeyError for a name that is not in it."""
    return _BY_NAME[name]


def read(name: str, environ: Mapping[str, str] | None = None) -> Scalar | None:
    """The parsed value of a variable, or None when it is unset or empty. Reads at call time.

    Raises ConfigError when the text is not acceptable, KeyError when `name` is not in the table.
    """
    row = _BY_NAME[name]
    text = (os.environ if environ is None else environ).get(name, "")
    if text == "":
        return None
    return parse_as(row.kind, f"environment variable {name}", text, "correct or unset it")


def get(name: str, environ: Mapping[str, str] | None = None) -> Scalar | None:
    """As `read`, with the table's default in place of None."""
    value = read(name, environ)
    return _BY_NAME[name].default if value is None else value


def text(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """As `get`, for variables whose values are words or paths."""
    value = get(name, environ)
    return None if value is None else str(value)


def check_names(environ: Mapping[str, str] | None = None) -> None:
    """Refuse XMOE_ variables that do not exist: a misspelt switch must not be silently dead."""
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith("XMOE_") and name not in _BY_NAME:
            known = [row.name for row in VARIABLES if row.name.startswith("XMOE_")]
            raise ConfigError(
                f"environment variable {name} is unknown; nearest: {nearest(name, known)}; "
                f"known: {', '.join(known)}; correct or unset it"
            )


def settings(environ: Mapping[str, str] | None = None) -> dict[str, tuple[Scalar, str]]:
    """Settings given by the environment: XmoeConfig field -> (value, variable name)."""
    check_names(environ)
    found: dict[str, tuple[Scalar, str]] = {}
    for row in VARIABLES:
        value = read(row.name, environ) if row.setting else None
        if value is not None:
            found[row.setting] = (value, row.name)
    return found


def at_process_start(name: str) -> str | None:
    """A variable's text when this process started, whatever was set since; None if unset then.

    Linux keeps it; where it cannot be read the answer is None too.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    prefix = os.fsencode(name) + b"="
    return next((os.fsdecode(e[len(prefix) :]) for e in entries if e.startswith(prefix)), None)


def markdown_table() -> str:
    """The table as the README prints it."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for row in VARIABLES:
        default = "-" if row.default is None else str(row.default).lower()
        lines.append(f"| `{row.name}` | {row.values} | {default} | {row.meaning} |")
    return "\n".join(lines)
