# SPDX-License-Identifier: Apache-2.0
"""The exception tree of xmoe.

    XmoeError
    |-- ConfigError (also ValueError)      a setting, file or argument is wrong
    |   `-- CheckpointError                a model directory is incomplete or mislabelled
    |-- OutputError                      a result cannot be written where it should go
    |-- UnsupportedError                   the fused path was demanded and a check rejects it
    |-- LibraryError
    |   |-- LibraryNotFound                no file, or it cannot be loaded
    |   |-- SymbolMissing                  loaded, but a needed symbol is absent
    |   `-- ProvenanceError                a symbol comes from a library it must not come from
    |-- AclError                           a vendor call returned a status other than zero
    |-- PipelineStopped                    the pipeline was asked to stop while it waited
    `-- CommError
        |-- WindowTooSmall                 the communicator's window cannot hold the batch
        |-- FenceTimeout                   an earlier launch did not finish in time
        |-- PeerLost                       another rank of the group died or stopped answering
        `-- RankDisagreement               ranks of one group hold different facts

Every message has four parts: what failed, the value got, the values allowed, the next step.
"""

from __future__ import annotations

from collections.abc import Sequence


class XmoeError(Exception):
    """Base of all errors raised by xmoe."""


class ConfigError(XmoeError, ValueError):
    """A setting or an argument is not acceptable."""


class CheckpointError(ConfigError):
    """A model directory is incomplete, damaged or not the model it claims to be."""


class OutputError(XmoeError):
    """A result cannot be written where it should go."""


class UnsupportedError(XmoeError):
    """MegaMoe was demanded (`mode="on"`) and at least one check rejects it."""

    def __init__(self, message: str, rejections: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.rejections: tuple[str, ...] = tuple(rejections)


class LibraryError(XmoeError):
    """A vendor library is missing, unusable or not the expected one."""


class LibraryNotFound(LibraryError):
    """No usable file was found in any place searched."""


class SymbolMissing(LibraryError):
    """A library was loaded but lacks a required symbol."""


class ProvenanceError(LibraryError):
    """A symbol resolves into a library other than the verified one."""


class AclError(XmoeError):
    """A vendor call failed.

    Attributes:
        call: the C function.
        code: its status.
        name: the status' symbolic name, or "UNKNOWN".
        detail: the vendor's own recent error text, possibly empty.
    """

    def __init__(self, call: str, code: int, name: str, detail: str, hint: str = "") -> None:
        text = f"{call} returned {code} ({name})"
        if detail:
            text += f": {detail}"
        if hint:
            text += f"; {hint}"
        super().__init__(text)
        self.call = call
        self.code = code
        self.name = name
        self.detail = detail


class ProcessLost(XmoeError):
    """Device work of this process failed; nothing it computes on the device can be trusted."""


class PipelineStopped(XmoeError):
    """A wait of the stream pipeline ended because somebody asked it to stop."""


class CommError(XmoeError):
    """A communication resource cannot be built or used."""


class WindowTooSmall(CommError):
    """The communicator's window is smaller than the batch needs."""


class FenceTimeout(CommError):
    """An earlier launch on the same resource did not finish in time."""


class PeerLost(CommError):
    """A rank of the group died or did not answer within the deadline."""


class RankDisagreement(CommError):
    """Ranks of one group hold different values where equal ones are required."""
