# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, as one plain value for policy and reports.

Whatever is wrong with the machine becomes a named problem with its text. Nothing is read or opened
at import.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xmoe import env
from xmoe.errors import ConfigError, LibraryError, LibraryNotFound
from xmoe.kernels.acl import chain, elf, loader, toolkit, versions
from xmoe.kernels.acl.problems import Code, Problem
from xmoe.kernels.acl.status import REPEAT_INITIALIZE
from xmoe.kernels.acl.vendor import MegaMoeSymbols

_SETTINGS = ("XMOE_DEVICE", "XMOE_ABI_PROBE", "XMOE_ABI_PROBE_TIMEOUT_S", "XMOE_ABI_CACHE")
_NOT_LIBRARY = {Code.COMM_SYMBOL_MISSING, Code.SOC_UNKNOWN, Code.VERSION_UNKNOWN}


@dataclass(frozen=True)
class SymbolOrigin:
    """Where one symbol comes from; see `xmoe.kernels.acl.provenance`."""

    symbol: str
    resolved_path: str | None
    global_path: str | None
    expected_path: str
    ok: bool


@dataclass(frozen=True)
class Capability:
    """Facts of this process and its toolkit. JSON-able through `to_dict`; None means not known.

    problems   (code, text) of everything that keeps MegaMoe from running here, most basic first
    warnings   sentences about things that look odd and do no harm by themselves
    variant_witnesses   what pin, metadata and return-code probe say of the ABI variant
    callable_variants   those this installation has compiled calls for
    npu_operators   one line for each operator of the split path on npu tensors: what runs it
    chain      the vendor chain and what lies around it, see `xmoe.kernels.acl.chain`
    identity   the software device's name for itself; None on a vendor's CANN. For reports only
    """

    toolkit_root: str | None = None
    toolkit_kind: str | None = None
    found_via: str | None = None
    soc: str | None = None
    cann_version: str | None = None
    vendor: str | None = None
    vendor_version: str | None = None
    abi_variant: str | None = None
    variant_source: str | None = None
    variant_witnesses: Mapping[str, str | None] = field(default_factory=dict)
    callable_variants: tuple[str, ...] = ()
    mega_moe: bool = False
    origins: tuple[SymbolOrigin, ...] = ()
    missing_comm_symbols: tuple[str, ...] = ()
    identity: str | None = None
    problems: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    version_files: tuple[tuple[str, str], ...] = ()
    npu_operators: tuple[str, ...] = ()
    chain: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def available(self) -> bool:
        """Whether nothing stands in the way of MegaMoe on this rank."""
        return self.mega_moe and not self.problems

    @property
    def library_problem(self) -> str | None:
        """The "code: text" of the first problem with toolkit, vendor or symbols; None when fine."""
        codes = {c.value for c in _NOT_LIBRARY}
        return next((f"{c}: {t}" for c, t in self.problems if c not in codes), None)

    @property
    def comm_problem(self) -> str | None:
        """The "code: text" of a missing communication symbol; None when fine."""
        wanted = Code.COMM_SYMBOL_MISSING.value
        return next((f"{c}: {t}" for c, t in self.problems if c == wanted), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and scalars."""
        return asdict(self)


def probe(
    device: str | None = None,
    *,
    abi_variant: str | None = None,
    root: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Capability:
    """Find out. Local; binds no device and allocates nothing. Looks again at each call.

    Never raises for what is wrong with the machine: that becomes a named problem.

    Args:
        device: as `find_toolkit`; None reads XMOE_DEVICE.
        abi_variant: ABI variant pinned by configuration, or None.
        root: an explicit toolkit folder.
        environ: the environment to read; None means the process's.

    Raises:
        ConfigError: `device` or an environment variable of the search is not acceptable.
    """
    toolkit.check_device(device)
    for name in _SETTINGS:
        env.get(name, environ)
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    try:
        _probe(found, problems, device, abi_variant, root, environ)
    except LibraryError as error:
        problems.append(_from_error(error))
    except Exception as error:  # whatever a half-installed machine throws means "not available"
        problems.append(Problem(Code.PROBE_FAILED, f"{type(error).__name__}: {error}"))
    return Capability(**found, problems=tuple((p.code.value, p.text) for p in problems))


def _probe(
    found: dict[str, Any],
    problems: list[Problem],
    device: str | None,
    abi_variant: str | None,
    root: str | None,
    environ: Mapping[str, str] | None,
) -> None:
    kit = toolkit.find_toolkit(device, root=root, environ=environ)
    found.update(toolkit_root=str(kit.root), toolkit_kind=kit.kind, found_via=kit.found_via)
    report = versions.toolkit_version(kit.root)
    warnings = [*report.warnings]
    if report.version is None:
        problems.append(Problem(Code.VERSION_UNKNOWN, "; ".join(report.warnings)))
    else:
        found["cann_version"] = str(report.version)
    found["version_files"] = report.found
    found["npu_operators"] = npu_operator_lines(kit)
    runtime, symbols = None, None
    try:
        runtime = loader.load(kit)
        symbols = _probe_runtime(found, problems, runtime, abi_variant)
    finally:
        # Also for a toolkit that cannot be loaded: the report shows why.
        around = chain.inspect(kit, runtime, symbols)
        found["chain"] = around.parts
        found["warnings"] = (*warnings, *around.warnings)
        problems.extend(around.problems)


def _probe_runtime(
    found: dict[str, Any], problems: list[Problem], runtime: loader.Runtime, pinned: str | None
) -> MegaMoeSymbols | None:
    found["identity"] = runtime.identity
    found["callable_variants"] = runtime.callable_variants()
    found["soc"] = soc_name(runtime)
    if found["soc"] is None:
        problems.append(Problem(Code.SOC_UNKNOWN, "aclrtGetSocName returned no name"))
    symbols = _probe_mega_moe(found, problems, runtime, pinned)
    missing = runtime.missing_comm_symbols()
    found["missing_comm_symbols"] = missing
    if missing:
        reasons = runtime.hccl.missing()
        why = sorted({reasons[s] for s in missing if s in reasons})
        problems.append(
            Problem(Code.COMM_SYMBOL_MISSING, f"{', '.join(missing)}: {'; '.join(why)}")
        )
    return symbols


def _probe_mega_moe(
    found: dict[str, Any], problems: list[Problem], runtime: loader.Runtime, pinned: str | None
) -> MegaMoeSymbols | None:
    try:
        symbols = runtime.find_mega_moe(pinned)
    except ConfigError as error:
        # A pinned variant that cannot be called, K for one.
        problems.append(Problem(Code.VARIANT_UNKNOWN, str(error)))
        return None
    if isinstance(symbols, Problem):
        problems.append(symbols)
        return None
    found["mega_moe"] = True
    found["vendor"] = str(symbols.vendor.path)
    found["vendor_version"] = symbols.vendor_version or None
    found["variant_source"] = symbols.variant_source
    found["origins"] = tuple(
        SymbolOrigin(p.symbol, p.resolved_path, p.global_path, p.expected_path, p.ok)
        for p in symbols.provenance
    )
    said = symbols.identified
    found["variant_witnesses"] = {
        "pin": said.pinned,
        "metadata": said.metadata,
        "metadata_source": said.metadata_source,
        "probe": str(said.probe),
    }
    if symbols.variant is not None:
        found["abi_variant"] = symbols.variant.id
    if said.problem is not None:
        problems.append(said.problem)
    return symbols


def search_key() -> tuple[str | None, ...]:
    """The environment that decides what a probe finds, as it stands now. Local."""
    names = ("XMOE_DEVICE", "XMOE_ABI_PROBE", *loader.CHAIN_VARIABLES)
    try:
        here: str | None = os.getcwd()  # what a relative entry is relative to
    except OSError:
        here = None
    return (here, *(env.text(name) for name in names))


def soc_name(runtime: loader.Runtime) -> str | None:
    """The chip's name as the runtime gives it, or None. May initialise the runtime (no device)."""
    acl, ffi = runtime.acl, runtime.ffi
    if not acl.has("aclrtGetSocName"):
        return None
    name = acl.aclrtGetSocName()
    if name == ffi.NULL:
        # Some releases answer only after initialisation. A second one is harmless.
        if acl.aclInit(ffi.NULL) not in (0, REPEAT_INITIALIZE):
            return None
        name = acl.aclrtGetSocName()
    return None if name == ffi.NULL else str(ffi.string(name).decode())


def _from_error(error: LibraryError) -> Problem:
    """The problem inside a loader's error; its text starts with the code in brackets."""
    text = str(error)
    if text.startswith("["):
        code, _, rest = text[1:].partition("] ")
        if code in {c.value for c in Code}:
            return Problem(Code(code), rest)
    return Problem(Code.PROBE_FAILED, text)


@dataclass(frozen=True)
class NpuOperators:
    """Which of torch_npu's operators the split path calls for npu tensors; none for others.

    Found once, before any step. Torch operators do what a missing one would have done.

    missing   (operator, why), by name, for reports
    """

    gating_top_k_softmax: bool = False
    init_routing: bool = False
    grouped_matmul: bool = False
    grouped_matmul_nz: bool = False
    swiglu: bool = False
    token_unpermute: bool = False
    dynamic_quant: bool = False
    dequant_swiglu_quant: bool = False
    missing: tuple[tuple[str, str], ...] = ()

    @property
    def integers(self) -> bool:
        """Whether experts with integer weights can run on these operators."""
        return self.grouped_matmul_nz and self.dynamic_quant

    def sentences(self) -> tuple[str, ...]:
        """One line for each operator: what runs it, and why when it is not the device's own."""
        reasons = dict(self.missing)
        return tuple(
            f"{name}: {operator}"
            if getattr(self, name)
            else f"{name}: torch operators, {reasons.get(name, 'for tensors of another device')}"
            for name, (operator, _) in NPU_OPERATORS.items()
        )


# What torch_npu calls each, and the C functions that torch_npu 2.13 needs for it: one of them.
# Source: op-plugin, op_plugin/ops/opapi.
NPU_OPERATORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gating_top_k_softmax": ("npu_moe_gating_top_k_softmax", ("aclnnMoeGatingTopKSoftmax",)),
    "init_routing": ("npu_moe_init_routing_v2", ("aclnnMoeInitRoutingV3",)),
    "grouped_matmul": ("npu_grouped_matmul", ("aclnnGroupedMatmulV4",)),
    "grouped_matmul_nz": ("npu_grouped_matmul", ("aclnnGroupedMatmulWeightNz",)),
    "swiglu": ("npu_swiglu", ("aclnnSwiGlu",)),
    "token_unpermute": ("npu_moe_token_unpermute", ("aclnnMoeTokenUnpermute",)),
    "dynamic_quant": ("npu_dynamic_quant", ("aclnnDynamicQuantV2", "aclnnDynamicQuant")),
    "dequant_swiglu_quant": (
        "npu_dequant_swiglu_quant",
        ("aclnnDequantSwigluQuantV2", "aclnnDequantSwigluQuant"),
    ),
}
# Where it looks for them besides the vendor chain.
_FRONT_ENDS = ("libopapi*.so", "libaclnn_*.so")


def find_npu_operators(kit: toolkit.Toolkit) -> NpuOperators:
    """Read the files of a toolkit and its vendor chain; loads nothing. Local.

    When torch_npu is loaded, its own list of operators counts as well.
    """
    wanted = {name + end for _, names in NPU_OPERATORS.values() for name in names
              for end in ("", "GetWorkspaceSize")}  # fmt: skip
    defined = {name for path in _front_ends(kit) for name in elf.inspect(path, wanted).defined}
    # An empty folder of the name torch_npu is a module too, and brings no torch with it.
    torch = sys.modules.get("torch") if "torch_npu" in sys.modules else None
    known = None if torch is None else getattr(torch.ops, "npu", None)
    found: dict[str, bool] = {}
    missing = []
    for name, (operator, functions) in NPU_OPERATORS.items():
        if not any({each, each + "GetWorkspaceSize"} <= defined for each in functions):
            missing.append((name, f"no library of {kit.root} defines {' or '.join(functions)}"))
        elif known is not None and not hasattr(known, operator):
            missing.append((name, f"this torch_npu has no {operator}"))
        else:
            found[name] = True
    return NpuOperators(**found, missing=tuple(missing))


def npu_operator_lines(kit: toolkit.Toolkit) -> tuple[str, ...]:
    """What would run each step of the split path on npu tensors, for reports. Loads nothing."""
    if importlib.util.find_spec("torch_npu") is None:
        return ("torch operators; torch_npu is not installed",)
    return find_npu_operators(kit).sentences()


def _front_ends(kit: toolkit.Toolkit) -> Iterator[Path]:
    yield from (vendor.library for vendor in kit.vendor_dirs if vendor.library.exists())
    for folder in kit.lib_dirs:
        for pattern in _FRONT_ENDS:
            yield from folder.glob(pattern)


_npu_operators: list[NpuOperators] = []


def npu_operators() -> NpuOperators:
    """Those of this process' toolkit; the same answer at each call. Local.

    Ask after torch_npu was imported. Never raises: without a toolkit, or with a wrong setting for
    it, all are missing and say why.
    """
    with _states_lock:
        if not _npu_operators:
            try:
                _npu_operators.append(find_npu_operators(toolkit.find_toolkit()))
            except (ConfigError, LibraryError) as error:
                missing = tuple((name, str(error)) for name in NPU_OPERATORS)
                _npu_operators.append(NpuOperators(missing=missing))
        return _npu_operators[0]


@dataclass(frozen=True)
class ModuleState:
    """Whether a Python module can be used, with the original error text when not."""

    name: str
    available: bool
    error: str = ""


_states: dict[str, ModuleState] = {}
_states_lock = threading.Lock()


def _renew_lock_in_child() -> None:
    # Another thread may have held it at fork; in the child nobody would release it.
    global _states_lock
    _states_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


def module_state(name: str) -> ModuleState:
    """Import a device module if it is there. Never raises; the same answer at each call. Local.

    Finding a module's spec says nothing: a package can be found and still fail to load its
    libraries, so it is really imported. A second import of a half-loaded package may even succeed,
    so the first answer stands for the process.
    """
    with _states_lock:
        state = _states.get(name)
        if state is None:
            state = _states[name] = _import_state(name)
        return state


def require_module(name: str, next_step: str) -> None:
    """Raise LibraryNotFound, with the original error text, unless `module_state` says yes."""
    state = module_state(name)
    if not state.available:
        raise LibraryNotFound(
            f"{name} cannot be imported: {state.error}; allowed: a complete installation; next: "
            f"{next_step}"
        )


def require_torch() -> None:
    """For a command that needs it, before it imports anything that imports torch. Local.

    torch loads device backends while it is imported, and fails with a broken one.
    """
    require_module(
        "torch",
        "repair what it names; TORCH_DEVICE_BACKEND_AUTOLOAD=0 leaves a broken torch_npu alone",
    )


def leave_alone_if_broken(name: str) -> ModuleState:
    """Make a module that is found and cannot be imported look absent to everybody. Local.

    For a run that does not need it: libraries try to import what they find and do not expect it to
    fail.
    """
    state = module_state(name)
    if not state.available:
        sys.modules[name] = None  # type: ignore[assignment]
    return state


def _causes(error: BaseException | None) -> Iterator[str]:
    """An error and what it was raised from: torch does not say why a device backend failed."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__


def _import_state(name: str) -> ModuleState:
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        return ModuleState(name, False, "; ".join(_causes(error)))
    if getattr(module, "__file__", None) is None:
        # A bare folder imports as a namespace and holds nothing.
        return ModuleState(name, False, f"{name} is an empty folder, not an installed package")
    return ModuleState(name, True)
