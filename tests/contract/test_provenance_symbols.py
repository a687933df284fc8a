# SPDX-License-Identifier: Apache-2.0
"""MegaMoe's symbols come from one file, of the first vendor, and nobody stands in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import acl_stubs
from support.acl_stubs import BOTH, LAUNCH, NEITHER, WORKSPACE, environment, make_vendor, run_child


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    return acl_stubs.make_toolkit(tmp_path / "cann", stub_base)


def chain(*vendors: Path) -> dict[str, str]:
    return {"ASCEND_CUSTOM_OPP_PATH": ":".join(map(str, vendors))}


def library(vendor: Path) -> str:
    return str(vendor / "op_api/lib/libcust_opapi.so")


def test_both_sides_are_recorded(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    seen = run_child("say(found())", environment(root, **chain(vendor)))
    file = library(vendor)
    assert seen["origins"] == [
        ["aclnnMegaMoe", file, None, True],
        ["aclnnMegaMoeGetWorkspaceSize", file, None, True],
    ]
    # The verified file itself in the global scope is fine.
    code = f"held = ctypes.CDLL({file!r}, os.RTLD_GLOBAL | os.RTLD_NOW)\nsay(found())"
    seen = run_child(code, environment(root, **chain(vendor)))
    assert seen["origins"][0] == ["aclnnMegaMoe", file, file, True]


def test_a_companion_behind_megamoe_is_fine_and_one_before_it_is_not(
    root: Path, tmp_path: Path
) -> None:
    mine = make_vendor(tmp_path / "mine", BOTH)
    companion = make_vendor(tmp_path / "companion", NEITHER)
    seen = run_child("say(found())", environment(root, **chain(mine, companion)))
    assert seen["code"] == "" and seen["library"] == library(mine)
    seen = run_child("say(found())", environment(root, **chain(companion, mine)))
    assert seen["code"] == "wrong_vendor"
    assert str(companion) in seen["text"] and library(mine) in seen["text"]


def test_a_first_vendor_without_a_library_is_no_excuse(root: Path, tmp_path: Path) -> None:
    mine, empty = make_vendor(tmp_path / "mine", BOTH), make_vendor(tmp_path / "empty", None)
    seen = run_child("say(found())", environment(root, **chain(empty, mine)))
    assert seen["code"] == "wrong_vendor"


def test_a_second_vendor_with_megamoe_is_shadowed(root: Path, tmp_path: Path) -> None:
    mine, older = make_vendor(tmp_path / "mine", BOTH), make_vendor(tmp_path / "older", BOTH)
    code = """
kit = toolkit.find_toolkit()
say([found(), [e.verdict for e in vendor.inspect_chain(kit)]])
"""
    seen, verdicts = run_child(code, environment(root, **chain(mine, older)))
    assert seen["library"] == library(mine) and verdicts == ["provides MegaMoe", "shadowed"]


def test_one_symbol_here_and_one_there_is_named_mixed(root: Path, tmp_path: Path) -> None:
    first, second = make_vendor(tmp_path / "a", LAUNCH), make_vendor(tmp_path / "b", WORKSPACE)
    seen = run_child("say(found())", environment(root, **chain(first, second)))
    assert seen["code"] == "mixed_files"
    assert library(first) in seen["text"] and library(second) in seen["text"]


def test_a_symbol_out_of_a_dependency_is_named_mixed(root: Path, tmp_path: Path) -> None:
    other = acl_stubs.compile_library(tmp_path / "libother.so", WORKSPACE)
    flags = ("-Wl,--no-as-needed", str(other))
    vendor = make_vendor(tmp_path / "v", LAUNCH, "9.1.0", *flags)
    seen = run_child("say(found())", environment(root, **chain(vendor)))
    # A handle finds symbols of dependencies too: only the file of the address tells.
    assert seen["code"] == "mixed_files"
    assert str(other) in seen["text"] and "aclnnMegaMoeGetWorkspaceSize" in seen["text"]


@pytest.mark.parametrize("source", [BOTH, LAUNCH, WORKSPACE])
def test_a_preloaded_interposer_is_seen(source: str, root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    shadow = acl_stubs.compile_library(tmp_path / "libshadow.so", source)
    env = environment(root, LD_PRELOAD=str(shadow), **chain(vendor))
    seen = run_child("say(found())", env)
    assert seen["code"] == "interposed" and str(shadow) in seen["text"]


def test_a_globally_opened_interposer_is_seen(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    shadow = acl_stubs.compile_library(tmp_path / "libshadow.so", BOTH)
    code = f"held = ctypes.CDLL({str(shadow)!r}, os.RTLD_GLOBAL | os.RTLD_NOW)\nsay(found())"
    assert run_child(code, environment(root, **chain(vendor)))["code"] == "interposed"


def test_a_rival_copy_is_refused_and_a_companion_copy_is_not(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    rival, companion = make_vendor(tmp_path / "r", BOTH), make_vendor(tmp_path / "c", NEITHER)
    env = environment(root, **chain(vendor))
    seen = run_child(f"held = ctypes.CDLL({library(rival)!r})\nsay(found())", env)
    assert seen["code"] == "loaded_elsewhere" and library(rival) in seen["text"]
    seen = run_child(f"held = ctypes.CDLL({library(companion)!r})\nsay(found())", env)
    assert seen["code"] == ""


def test_the_builtin_library_counts_when_no_vendor_has_megamoe(root: Path, tmp_path: Path) -> None:
    builtin = acl_stubs.compile_library(root / "lib64/libopapi_transformer.so", BOTH)
    info = root / "share/info/ops_transformer/version.info"
    info.parent.mkdir(parents=True)
    info.write_text("version=9.1.0\n")
    companion = make_vendor(tmp_path / "c", NEITHER)
    seen = run_child("say(found())", environment(root, **chain(companion)))
    assert seen["library"] == str(builtin) and seen["variant"] == "B"


def test_an_expected_vendor_is_insisted_on(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "acme_transformer", BOTH)
    env = environment(root, **chain(vendor))
    assert run_child("say(found(expected_vendor='acme_transformer'))", env)["code"] == ""
    seen = run_child("say(found(expected_vendor='other_transformer'))", env)
    assert seen["code"] == "wrong_vendor" and "'other_transformer'" in seen["text"]


@pytest.mark.parametrize(
    ("info", "pin", "variant"),
    [
        ("Version=9.1.0\n", None, "B"),
        ("version = 9.1.0\r\n", None, "B"),
        ("Version=9.1.0-beta.3\n", None, None),
        ("Version=9.2.0\n", None, None),
        ("Version=9.10.0\n", None, None),
        ("nothing\n", None, None),
        ("Version=9.1.0-beta.3\n", "D", "D"),
        ("Version=9.1.0\n", "G", "G"),
        ("Version=9.2.0\nmega_moe_abi=H\n", None, "H"),
        ("Version=9.1.0\nmega_moe_abi=K\n", None, None),
    ],
)
def test_without_a_probe_the_variant_comes_from_pin_statement_or_release_only(
    info: str, pin: str | None, variant: str | None, root: Path, tmp_path: Path
) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    (vendor / "version.info").write_text(info)
    code = f"say(found(abi_variant={pin!r}))"
    seen = run_child(code, environment(root, XMOE_ABI_PROBE="off", **chain(vendor)))
    assert seen["code"] == "" and seen["variant"] == variant


def test_unidentified_library_is_never_called(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH, "9.2.0")
    code = """
from xmoe.errors import LibraryError
from xmoe.kernels.acl import op
runtime = loader.load(toolkit.find_toolkit())
try:
    op.prepare(runtime, runtime.mega_moe, {})
except LibraryError as error:
    say(str(error))
"""
    text = run_child(code, environment(root, XMOE_ABI_PROBE="off", **chain(vendor)))
    assert text.startswith("[variant_unknown]") and "abi_variant" in text
