# SPDX-License-Identifier: Apache-2.0
"""Named reasons why the vendor chain cannot be used. Plain values; callers decide to raise."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from xmoe.errors import LibraryError, LibraryNotFound, ProvenanceError, SymbolMissing


class Code(enum.StrEnum):
    """What is wrong. The values are stable: they appear in reports, facts and policy reasons."""

    TOOLKIT_MISSING = "toolkit_missing"
    FILE_MISSING = "file_missing"
    UNREADABLE = "unreadable"
    NOT_ELF = "not_elf"
    UNLOADABLE = "unloadable"
    UNRESOLVED_DEPENDENCY = "unresolved_dependency"
    NO_SYMBOLS = "no_symbols"
    ONLY_LAUNCH_SYMBOL = "only_launch_symbol"
    ONLY_WORKSPACE_SYMBOL = "only_workspace_symbol"
    WRONG_VENDOR = "wrong_vendor"
    MIXED_FILES = "mixed_files"
    INTERPOSED = "interposed"
    LOADED_ELSEWHERE = "loaded_elsewhere"
    VARIANT_UNKNOWN = "variant_unknown"
    VARIANT_MISMATCH = "variant_mismatch"
    VERSION_MISMATCH = "version_mismatch"
    MIXED_PACKAGES = "mixed_packages"
    VERSION_UNKNOWN = "version_unknown"
    COMM_SYMBOL_MISSING = "comm_symbol_missing"
    SOC_UNKNOWN = "soc_unknown"
    PROBE_FAILED = "probe_failed"


REMEDIES: Mapping[Code, str] = MappingProxyType({
    Code.TOOLKIT_MISSING: "source the toolkit's set_env.sh, or set XMOE_DEVICE=soft",
    Code.FILE_MISSING: "install the operator package, or put its folder first in "
    "ASCEND_CUSTOM_OPP_PATH",
    Code.UNREADABLE: "let this user read the file and every folder above it, or start as a user "
    "who may",
    Code.NOT_ELF: "reinstall the package that owns the file",
    Code.UNLOADABLE: "install the package built for this machine",
    Code.UNRESOLVED_DEPENDENCY: "install the missing dependency, or a package built for this CANN",
    Code.NO_SYMBOLS: "install an operator package that contains MegaMoe",
    Code.ONLY_LAUNCH_SYMBOL: "reinstall the operator package: its front end is incomplete",
    Code.ONLY_WORKSPACE_SYMBOL: "reinstall the operator package: its front end is incomplete",
    Code.WRONG_VENDOR: "put MegaMoe's vendor folder first in ASCEND_CUSTOM_OPP_PATH",
    Code.MIXED_FILES: "keep one vendor that exports both symbols, first in ASCEND_CUSTOM_OPP_PATH",
    Code.INTERPOSED: "remove the interposing library from LD_PRELOAD and from earlier loads",
    Code.LOADED_ELSEWHERE: "start a new process in which only one copy is loaded "
    "(see LD_LIBRARY_PATH and LD_PRELOAD)",
    Code.VARIANT_UNKNOWN: 'set "abi_variant" to the letter that belongs to the operator package',
    Code.VARIANT_MISMATCH: 'correct or remove "abi_variant" (XMOE_ABI_VARIANT); if the letter is '
    "surely right, XMOE_ABI_PROBE=off takes your word for it",
    Code.VERSION_MISMATCH: "install toolkit and operator package of one release",
    Code.MIXED_PACKAGES: "put front end and kernels of one operator package first in "
    "ASCEND_CUSTOM_OPP_PATH; a mixture ends in 561114, 561115 or lost attributes",
    Code.VERSION_UNKNOWN: "reinstall the toolkit, or make its version.info readable",
    Code.COMM_SYMBOL_MISSING: "install the HCCL package of CANN 9.1.0 or later",
    Code.SOC_UNKNOWN: "check that the driver is installed and a device is visible",
    Code.PROBE_FAILED: "run xmoe doctor and read the text of the failure",
})  # fmt: skip

_SYMBOL_CODES = {Code.NO_SYMBOLS, Code.ONLY_LAUNCH_SYMBOL, Code.ONLY_WORKSPACE_SYMBOL}
_ORIGIN_CODES = {Code.WRONG_VENDOR, Code.MIXED_FILES, Code.INTERPOSED, Code.LOADED_ELSEWHERE}
_FILE_CODES = {
    Code.TOOLKIT_MISSING,
    Code.FILE_MISSING,
    Code.UNREADABLE,
    Code.NOT_ELF,
    Code.UNLOADABLE,
    Code.UNRESOLVED_DEPENDENCY,
}


@dataclass(frozen=True)
class Problem:
    """One reason, with the sentence for people. `text` names files and symbols."""

    code: Code
    text: str

    @property
    def remedy(self) -> str:
        """The next step."""
        return REMEDIES[self.code]

    def __str__(self) -> str:
        return f"[{self.code.value}] {self.text}; {self.remedy}"

    def error(self) -> LibraryError:
        """The exception that stands for this problem."""
        if self.code in _SYMBOL_CODES:
            return SymbolMissing(str(self))
        if self.code in _ORIGIN_CODES:
            return ProvenanceError(str(self))
        if self.code in _FILE_CODES:
            return LibraryNotFound(str(self))
        return LibraryError(str(self))
