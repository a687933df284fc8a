# SPDX-License-Identifier: Apache-2.0
"""What each build of the MegaMoe operator accepts on each SoC: data, one row per (build, SoC).

Public sources disagree about the limits, above all about the lower bound of the intermediate size,
so no number is a constant of the code. A row is chosen by SoC and operator version, or by name. A
version that no row lists is *unsupported*: it is taken neither for an old build nor for the newest.

Sources (repositories cann/ops-transformer and hicann/ops-transformer, directory mc2/mega_moe):

    R910     branch 9.1.0, tip 06be6c2ca (2026-07-21), arch22 and arch35 tiling
    M21      master at 3a280bcc3 (2026-07-21)
    HIC-TIL  hicann 12c31dbd4, mega_moe_tiling_arch22.cpp
    HIC-DOC  hicann 2abd43b1, torch_extension mega_moe.md
    DOC-NEW  a later copy of the same document
    SEED     xLLM PR 1989 with ops-transformer PR 8966: A3 accepts 512, A2 keeps 1024

No limit here has been confirmed on hardware; the operator's own first phase is the last judge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xmoe.env import nearest
from xmoe.errors import ConfigError
from xmoe.policy.limits import Limit, OneOf, Span


@dataclass(frozen=True)
class LimitProfile:
    """Limits of one operator build on one SoC family.

    `operator_versions` are the vendor package versions that choose this row by themselves; empty
    means the row must be named. `clamp_applied` says whether the kernel really applies an
    activation clamp. `window` names the size formula of `xmoe.layout`, None when the build's own is
    not published.
    """

    name: str
    soc_family: str
    operator_build: str
    operator_versions: tuple[str, ...]
    abi_variants: OneOf
    tokens_per_rank: Span
    hidden: Limit
    intermediate: Limit
    topk: Limit
    local_experts: Span
    num_experts: Span
    ep_size: Limit
    dtype: OneOf
    quant: OneOf
    activation: OneOf
    clamp_applied: bool
    clamp_source: str
    window: str | None
    flag_min_bytes: int = 0

    @property
    def title(self) -> str:
        return f"{self.name} ({self.soc_family}, {self.operator_build})"


_R910 = "R910 arch22 tiling"
_A3_GA = LimitProfile(
    name="a3-9.1.0-ga",
    soc_family="A3",
    operator_build="CANN 9.1.0 release branch as published",
    operator_versions=(),
    abi_variants=OneOf(("B",), "R910 op_api"),
    tokens_per_rank=Span(1, 4096, 1, _R910),
    hidden=Span(1024, 8192, 512, _R910),
    intermediate=Span(1024, 3072, 512, _R910),
    topk=Span(1, 16, 1, _R910),
    local_experts=Span(1, 128, 1, _R910 + ", length of the weight list"),
    num_experts=Span(1, 1024, 1, _R910),
    ep_size=OneOf((2, 4, 8, 16, 32), _R910),
    dtype=OneOf(("bfloat16",), _R910),
    quant=OneOf(("none", "w8a8", "w4a8"), "R910 documentation, weights by mode"),
    activation=OneOf(("swiglu",), _R910),
    clamp_applied=True,
    clamp_source="R910 arch22 kernel",
    window="A3",
)
_A2_GA = replace(_A3_GA, name="a2-9.1.0-ga", soc_family="A2", window="A2")

_SEED_VERSIONS = ("9.1.0", "9.1.0-beta.3")
_SEED_ABI = OneOf(("B", "D"), "R910 op_api (B); SEED calls D under the version text 9.1.0-beta.3")
_A3_SEED = replace(
    _A3_GA,
    name="a3-seed",
    operator_build="9.1.0 with per-SoC lower bound",
    operator_versions=_SEED_VERSIONS,
    abi_variants=_SEED_ABI,
    intermediate=Span(512, 3072, 512, "SEED for the lower bound, R910 for the rest"),
)
_A2_SEED = replace(
    _A2_GA,
    name="a2-seed",
    operator_build="9.1.0 with per-SoC lower bound",
    operator_versions=_SEED_VERSIONS,
    abi_variants=_SEED_ABI,
    intermediate=Span(1024, 3072, 512, "SEED for the lower bound, R910 for the rest"),
)

_M21_EP = OneOf((2, 4, 8, 16, 32, 64, 128), "M21 arch22 tiling")
_M21_ABI = OneOf(("E",), "M21 op_api")
_A3_M21 = replace(
    _A3_GA,
    name="a3-master-2026-07-21",
    operator_build="master 3a280bcc3",
    abi_variants=_M21_ABI,
    ep_size=_M21_EP,
)
_A2_M21 = replace(_A3_M21, name="a2-master-2026-07-21", soc_family="A2", window="A2")

# Variants C and D stood on master between R910 and M21, F between M21 and the source of HIC-TIL. Of
# each pair of neighbours the narrower limits are taken; nobody read the tilings in between.
_A3_MID = replace(
    _A3_GA,
    name="a3-master-2026-07-01",
    operator_build="master from 4cccb6393 to before b88c404e3",
    abi_variants=OneOf(("C", "D"), "op_api history; limits inferred, the narrower of R910 and M21"),
)
_A2_MID = replace(_A3_MID, name="a2-master-2026-07-01", soc_family="A2", window="A2")
_A3_F = replace(
    _A3_M21,
    name="a3-hicann-24d42e043",
    operator_build="hicann 24d42e043",
    abi_variants=OneOf(("F",), "op_api history; limits inferred, the narrower of M21 and HIC-TIL"),
    flag_min_bytes=512 * 1024,
)
_A2_F = replace(_A3_F, name="a2-hicann-24d42e043", soc_family="A2", window="A2")

_A3_HIC = replace(
    _A3_M21,
    name="a3-hicann-12c31dbd4",
    operator_build="hicann 12c31dbd4",
    abi_variants=OneOf(("G", "H", "I", "J"), "HIC-TIL, activation parameters are a list"),
    intermediate=Span(512, None, 512, "HIC-TIL"),
    ep_size=OneOf((2, 4, 8, 16, 32, 64, 128), "HIC-TIL"),
    activation=OneOf(("swiglu", "swiglustep", "swigluoai", "situglu"), "HIC-TIL"),
    clamp_source="HIC-TIL",
    flag_min_bytes=512 * 1024,
)
_A2_HIC = replace(_A3_HIC, name="a2-hicann-12c31dbd4", soc_family="A2", window="A2")

_A3_DOC = replace(
    _A3_HIC,
    name="a3-doc-newest",
    operator_build="newest published document",
    tokens_per_rank=Span(1, None, 1, "DOC-NEW"),
    hidden=Span(1024, 8192, 512, "DOC-NEW"),
    intermediate=Span(512, 3072, 256, "DOC-NEW"),
    local_experts=Span(1, 128, 1, "HIC-TIL; DOC-NEW states none"),
    num_experts=Span(1, 1024, 1, "HIC-TIL; DOC-NEW states none"),
    ep_size=OneOf((2, 4, 8, 16, 32, 48, 64, 96, 128), "DOC-NEW"),
    activation=OneOf(("swiglu", "swiglustep", "swigluoai", "situglu"), "DOC-NEW"),
)
_A2_DOC = replace(_A3_DOC, name="a2-doc-newest", soc_family="A2", window="A2")

_R910_A5 = "R910 arch35 tiling"
_A5_GA = LimitProfile(
    name="a5-9.1.0",
    soc_family="A5",
    operator_build="CANN 9.1.0 release branch as published",
    operator_versions=("9.1.0",),
    abi_variants=OneOf(("B",), "R910 op_api"),
    tokens_per_rank=Span(1, 512, 1, _R910_A5),
    hidden=OneOf((4096, 5120, 7168), _R910_A5),
    # The tiling lists 2I, the width of weight1: 1024, 2048, 3072, 4096, 7168.
    intermediate=OneOf((512, 1024, 1536, 2048, 3584), _R910_A5),
    topk=OneOf((6, 8), _R910_A5),
    local_experts=Span(1, 16, 1, _R910_A5),
    num_experts=Span(2, 1024, 1, _R910_A5),
    ep_size=Span(2, 768, 1, _R910_A5),
    dtype=OneOf(("bfloat16",), _R910_A5),
    quant=OneOf(("mxfp8",), "R910 documentation; the tiling also takes FP4 weights"),
    activation=OneOf(("swiglu",), _R910_A5),
    clamp_applied=False,
    clamp_source="R910 arch35 kernel accepts a clamp and does not apply it",
    window="A5",
)
_A5_MXFP = ("mxfp8", "mxfp8_w4", "mxfp4")
_A5_HIC = replace(
    _A5_GA,
    name="a5-hicann-2abd43b1",
    operator_build="hicann 2abd43b1, document",
    operator_versions=(),
    abi_variants=OneOf(("G", "H", "I", "J"), "HIC-DOC"),
    tokens_per_rank=Span(1, None, 1, "HIC-DOC, large batches are cut by the operator"),
    hidden=Span(1024, 8192, 1024, "HIC-DOC"),
    topk=Span(1, 32, 1, "HIC-DOC"),
    local_experts=Span(1, 1024, 1, "HIC-DOC"),
    num_experts=Span(2, 2048, 1, "HIC-DOC"),
    ep_size=Span(2, 1024, 1, "HIC-DOC"),
    quant=OneOf(_A5_MXFP, "HIC-DOC"),
    clamp_source="HIC-DOC states nothing",
    window=None,
)
_A5_DOC = replace(
    _A5_HIC,
    name="a5-doc-newest",
    operator_build="newest published document",
    hidden=Span(1024, 8192, 64, "DOC-NEW"),
    intermediate=Span(256, 4096, 128, "DOC-NEW"),
    clamp_applied=True,
    clamp_source="DOC-NEW, activation_clamp",
)

PROFILES: tuple[LimitProfile, ...] = (
    _A3_SEED,
    _A2_SEED,
    _A3_GA,
    _A2_GA,
    _A3_MID,
    _A2_MID,
    _A3_M21,
    _A2_M21,
    _A3_F,
    _A2_F,
    _A3_HIC,
    _A2_HIC,
    _A3_DOC,
    _A2_DOC,
    _A5_GA,
    _A5_HIC,
    _A5_DOC,
)

WITHOUT_LIMITS = {
    "A": "it was published for Atlas A5 alone (9.1.0-beta.2 and -beta.3, no arch22 sources), and "
    "no source that was read states its limits; only the operator itself can be called with it",
}
"""ABI variants that are callable and that no row can accept, with the reason."""

_SOC_PREFIXES = (("ascend910_93", "A3"), ("ascend910b", "A2"), ("ascend950", "A5"))


def soc_family(soc: str | None) -> str | None:
    """A2, A3 or A5 for a device's full name (or the family itself); None for any other."""
    if not soc:
        return None
    if soc.upper() in ("A2", "A3", "A5"):
        return soc.upper()
    for prefix, family in _SOC_PREFIXES:
        if soc.lower().startswith(prefix):
            return family
    return None


def profile_named(name: str) -> LimitProfile:
    """The row called `name`; ConfigError for any other name."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    names = [profile.name for profile in PROFILES]
    raise ConfigError(
        f"limit profile {name!r} is unknown; nearest: {nearest(name, names)}; "
        f"known: {', '.join(names)}; correct the setting 'profile' or remove it"
    )


def profile_for(soc: str | None, operator_version: str | None) -> LimitProfile | None:
    """The row that SoC and operator version choose, or None: unknown is never guessed."""
    family = soc_family(soc)
    if family is None or operator_version is None:
        return None
    version = operator_version.strip().lower()
    for profile in PROFILES:
        if profile.soc_family == family and version in profile.operator_versions:
            return profile
    return None
