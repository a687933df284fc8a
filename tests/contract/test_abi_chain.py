# SPDX-License-Identifier: Apache-2.0
"""The vendor chain as a whole: what the report shows, what it refuses, what it warns of."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from support import acl_stubs
from support.acl_stubs import BOTH, NEITHER, compile_library, environment, make_vendor, run_child
from xmoe.kernels.acl import chain as chain_module
from xmoe.kernels.acl import toolkit

VALIDATE = """
import xmoe
def validate(**how):
    report = xmoe.validate_vendor_chain(**how)
    assert json.loads(json.dumps(report)) == report
    return report
def check():
    try:
        return xmoe.check_vendor_chain()["verdict"]
    except xmoe.XmoeError as error:
        return type(error).__name__ + ": " + str(error)
"""


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    return acl_stubs.make_toolkit(tmp_path / "cann", stub_base)


def validate(root: Path, code: str = "say(validate())", **env: str) -> Any:
    return run_child(VALIDATE + code, environment(root, **env))


def codes(report: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in report["problems"]]


def warned(report: dict[str, Any], *words: str) -> bool:
    return any(all(word in text for word in words) for text in report["warnings"])


# ---- verdict, report, start-up check


def test_a_good_chain_is_valid_and_quiet(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert report["verdict"] == "valid" and report["problems"] == []
    assert report["warnings"] == []
    assert report["packages"]["front_end"] == report["packages"]["toolkit"] == "9.1.0"
    assert report["mega_moe"]["witnesses"]["probe"].startswith("identified B")
    (entry,) = report["vendor_chain"]
    assert entry["verdict"] == "provides MegaMoe" and entry["owner"]
    assert report["mega_moe"]["callable_variants"] == list("ABCDEFGHIJ")


def test_the_start_up_check_names_code_and_remedy(root: Path, tmp_path: Path) -> None:
    vendor, companion = make_vendor(tmp_path / "v", BOTH), make_vendor(tmp_path / "c", NEITHER)
    code = f"""
seen = [check()]
for value in ({str(companion)!r} + ":" + {str(vendor)!r}, {str(vendor)!r}):
    os.environ["ASCEND_CUSTOM_OPP_PATH"] = value
    seen.append(check())
say(seen)
"""
    missing, wrong, good = validate(root, code)
    assert missing.startswith("LibraryNotFound: [file_missing]")
    assert wrong.startswith("ProvenanceError: [wrong_vendor]") and "first" in wrong
    assert good == "valid", "no failure is kept over a change of the environment"


def test_the_start_up_check_works_once_for_all_threads(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    code = """
from xmoe import startup
from xmoe.kernels import capability
calls, original = [], capability.probe
capability.probe = lambda *a, **k: calls.append(1) or original(*a, **k)
answers = []
threads = [threading.Thread(target=lambda: answers.append(check())) for _ in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
answers.append(check())
report = xmoe.check_vendor_chain()
report["verdict"] = "changed by the caller"
say([len(calls), sorted(set(answers)), len(answers), check()])
"""
    assert validate(root, code, ASCEND_CUSTOM_OPP_PATH=str(vendor)) == [1, ["valid"], 17, "valid"]


def test_several_problems_are_all_named(root: Path, tmp_path: Path) -> None:
    (root / "lib64/libhccl_fwk.so").unlink()
    text = validate(root, "say(check())", ASCEND_CUSTOM_OPP_PATH=str(tmp_path / "none"))
    assert text.startswith("LibraryNotFound: [file_missing]")
    assert "also: comm_symbol_missing; run xmoe doctor" in text


def test_importing_the_names_loads_nothing() -> None:
    code = """
import xmoe
assert callable(xmoe.validate_vendor_chain) and callable(xmoe.check_vendor_chain)
with open("/proc/self/maps") as file:
    maps = file.read()
say([name for name in ("libascendcl", "libcust_opapi") if name in maps] +
    [name for name in ("torch", "numpy") if name in sys.modules])
"""
    assert run_child(code, environment(None)) == []


# ---- the search path


def test_separators_and_odd_entries_are_explained(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    value = f"{tmp_path}/gone::{vendor}:{vendor}/:{tmp_path}/a;{tmp_path}/b:{vendor}/version.info:"
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=value)
    assert report["verdict"] == "valid"
    reasons = [entry["reason"] for entry in report["skipped"]]
    assert reasons[:2] == ["does not exist", "empty entry"]
    assert reasons[2].startswith("already in the chain")
    assert reasons[3] == "does not exist; entries are separated by ':' only"
    assert reasons[4:] == ["is a file", "empty entry"]
    assert warned(report, f"'{tmp_path}/gone' does not exist", "stops there")


def test_a_relative_entry_is_warned_of(root: Path, tmp_path: Path) -> None:
    make_vendor(tmp_path / "v", BOTH)
    code = f"os.chdir({str(tmp_path)!r})\nsay(validate())"
    report = validate(root, code, ASCEND_CUSTOM_OPP_PATH="v")
    assert report["verdict"] == "valid" and warned(report, "'v' is relative")


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        ("load_priority=v\n", "valid", ()),
        ("load_priority = v\n", "valid", ("exactly 'load_priority='",)),
        ("load_priority=v\nload_priority=w\n", "valid", ("2 load_priority lines",)),
        ("\ufeffload_priority=gone, v,\r\n", "valid", ()),
        ("priority=v\n", "invalid", ()),
        ("", "invalid", ()),
    ],
)
def test_config_ini(
    text: str, verdict: str, words: tuple[str, ...], root: Path, tmp_path: Path
) -> None:
    make_vendor(root / "opp/vendors/v", BOTH)
    make_vendor(root / "opp/vendors/forgotten", NEITHER)
    (root / "opp/vendors/config.ini").write_text(text, encoding="utf-8")
    report = validate(root)
    assert report["verdict"] == verdict
    assert str(root / "opp/vendors/forgotten") in report["not_in_chain"]
    assert all(warned(report, word) for word in words)
    assert words or not warned(report, "load_priority")


def test_an_unreadable_config_ini_is_named(root: Path) -> None:
    (root / "opp/vendors/config.ini").mkdir()  # reads as an error whoever runs this
    report = validate(root)
    assert codes(report) == ["file_missing"]
    assert "cannot be read" in report["skipped"][0]["reason"]


def test_the_custom_path_beats_config_ini(root: Path, tmp_path: Path) -> None:
    make_vendor(root / "opp/vendors/v", BOTH)
    (root / "opp/vendors/config.ini").write_text("load_priority=v\n")
    mine = make_vendor(tmp_path / "mine", BOTH)
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=str(mine))
    assert report["mega_moe"]["vendor"] == str(mine)
    second = report["vendor_chain"][1]
    assert second["verdict"] == "shadowed" and "put it first" in second["remedy"]


# ---- files


def test_links_are_followed_and_shown(root: Path, tmp_path: Path) -> None:
    real = make_vendor(tmp_path / "real", BOTH)
    (tmp_path / "link").symlink_to(real)
    elsewhere = compile_library(tmp_path / "elsewhere" / "libcust_opapi.so", BOTH)
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=f"{tmp_path}/link:{real}")
    assert report["verdict"] == "valid"
    assert report["vendor_chain"][0]["realpath"] == str(real)
    assert report["skipped"][0]["reason"].startswith("already in the chain")
    assert report["vendor_chain"][0]["notes"] == []
    library = real / "op_api/lib/libcust_opapi.so"
    library.unlink()
    library.symlink_to(elsewhere)
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=str(real))
    assert report["verdict"] == "valid" and warned(report, "link out of the folder", str(elsewhere))
    assert report["mega_moe"]["origins"][0]["resolved_path"] == str(elsewhere)


def test_another_owner_is_warned_of_with_what_the_loader_does(tmp_path: Path) -> None:
    library = tmp_path / "libcust_opapi.so"
    library.write_bytes(b"")
    library.chmod(0o644)
    tmp_path.chmod(0o755)
    mine = os.stat(library).st_uid
    assert chain_module.file_notes(library, mine) == []
    if mine == 0:
        # Root's files are everybody's normal case; give it to somebody else.
        os.chown(library, 54321, -1)
        os.chown(tmp_path, 54321, -1)
        mine = 54321
    notes = chain_module.file_notes(library, mine + 1)
    assert len(notes) == 2 and all("loader takes it all the same" in note for note in notes)
    library.chmod(0o666)
    assert any("written by everybody" in note for note in chain_module.file_notes(library, mine))


def test_a_file_everybody_can_write_is_in_the_report(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    (vendor / "op_api/lib/libcust_opapi.so").chmod(0o777)
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert report["verdict"] == "valid" and warned(report, "written by everybody")


def test_a_library_replaced_after_loading_is_noticed(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    library = vendor / "op_api/lib/libcust_opapi.so"
    shutil.copy(library, tmp_path / "new.so")
    code = f"""
first = validate()
os.replace({str(tmp_path / "new.so")!r}, {str(library)!r})
say([first, validate()])
"""
    first, second = validate(root, code, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert not warned(first, "replaced on disk")
    assert warned(second, "replaced on disk", str(library))


# ---- built-in libraries


def test_the_umbrella_beside_the_split_libraries(root: Path, tmp_path: Path) -> None:
    split = compile_library(root / "lib64/libopapi_transformer.so", NEITHER)
    compile_library(root / "lib64/libopapi_math.so", NEITHER)
    umbrella = compile_library(root / "lib64/libopapi.so", BOTH)
    (root / "share/info/ops_transformer").mkdir(parents=True)
    (root / "share/info/ops_transformer/version.info").write_text("version=9.1.0\n")
    report = validate(root)
    assert report["mega_moe"]["origins"][0]["resolved_path"] == str(umbrella)
    assert [one["kind"] for one in report["builtin"]] == ["split", "split", "umbrella"]
    assert not warned(report, "must not be mixed")
    code = f"held = ctypes.CDLL({str(split)!r})\nsay(validate())"
    assert warned(validate(root, code), "both loaded", "must not be mixed")
    compile_library(split, BOTH)
    report = validate(root)
    assert report["mega_moe"]["origins"][0]["resolved_path"] == str(split)
    assert warned(report, "both define MegaMoe", "must not be mixed")


# ---- packages of one release


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ("Version=9.1.0\n", None),
        ("Version=9.1\ncustom_opp_compiler_version=9.1.0\n", None),
        ("Version=9.1.0-beta.3\n", None),
        ("Version=9.2.0\n", "version_mismatch"),
        ("Version=9.10.0\n", "version_mismatch"),
        ("Version=9.1.0\ncustom_opp_compiler_version=9.2.0\n", "version_mismatch"),
        ("nothing\n", None),
    ],
)
def test_front_end_and_toolkit_are_compared(
    info: str, problem: str | None, root: Path, tmp_path: Path
) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    (vendor / "version.info").write_text(info)
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert codes(report) == ([problem] if problem else [])
    if problem:
        assert "561114" in report["problems"][0]["text"] and report["problems"][0]["remedy"]


def kernels(vendor: Path, attributes: str | None) -> None:
    folder = vendor / "op_impl/ai_core/tbe/config/ascend910_93"
    folder.mkdir(parents=True)
    content = {"Other": {}} if attributes is None else {"MegaMoe": {"attr": {"list": attributes}}}
    (folder / "aic-ascend910_93-ops-info.json").write_text(json.dumps(content))


def test_kernels_of_another_package_are_refused(root: Path, tmp_path: Path) -> None:
    mine, other = make_vendor(tmp_path / "mine", BOTH), make_vendor(tmp_path / "other", NEITHER)
    kernels(other, "moe_expert_num,ep_world_size")
    chain = f"{mine}:{other}"
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=chain)
    assert codes(report) == ["mixed_packages"]
    assert all(str(path) in report["problems"][0]["text"] for path in (mine, other))
    kernels(mine, "moe_expert_num,ep_world_size")
    assert validate(root, ASCEND_CUSTOM_OPP_PATH=chain)["verdict"] == "valid"


def test_kernels_of_another_variant_are_hinted_at(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    kernels(vendor, "moe_expert_num, topo_type, rank_num_per_server")
    report = validate(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert report["verdict"] == "valid", "inferred from attribute names: a hint only"
    assert warned(report, "topo_type, rank_num_per_server", "ABI variant B", "561114")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"MegaMoe": 3}', '{"MegaMoe": {"attr": []}}'])
def test_damaged_kernel_files_do_no_harm(content: str, root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    kernels(vendor, "x")
    next(vendor.glob("op_impl/**/*.json")).write_text(content)
    assert validate(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))["verdict"] == "valid"


# ---- the process


def test_a_change_of_the_environment_is_warned_of(root: Path, tmp_path: Path) -> None:
    first, second = make_vendor(tmp_path / "a", BOTH), make_vendor(tmp_path / "b", NEITHER)
    code = f"""
import xmoe
os.environ["ASCEND_CUSTOM_OPP_PATH"] = {str(first)!r}
late = validate()
os.environ["ASCEND_CUSTOM_OPP_PATH"] = {f"{first}:{second}"!r}
say([late, validate()])
"""
    late, changed = validate(root, code)
    assert late["verdict"] == "valid"
    assert warned(late, "ASCEND_CUSTOM_OPP_PATH was None when this process started", "op-plugin")
    assert not warned(late, "first loaded")
    assert warned(changed, f"was {str(first)!r} when libraries were first loaded")
    row = changed["environment"]["ASCEND_CUSTOM_OPP_PATH"]
    assert row == {"at_start": None, "at_load": str(first), "now": f"{first}:{second}"}


def test_interposers_are_found_from_both_sides(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    chain = {"ASCEND_CUSTOM_OPP_PATH": str(vendor)}
    shadow = compile_library(tmp_path / "libshadow.so", BOTH)
    report = validate(root, LD_PRELOAD=str(shadow), **chain)
    assert codes(report) == ["interposed"]
    assert report["environment"]["LD_PRELOAD"]["at_start"] == str(shadow)
    # One of the runtime's functions: what it does is unknown, so it is shown and not judged.
    tool = compile_library(tmp_path / "libtool.so", "int aclrtMalloc(void) { return 0; }\n")
    report = validate(root, LD_PRELOAD=str(tool), **chain)
    assert report["verdict"] == "valid" and warned(report, "aclrtMalloc is shadowed", str(tool))
    # Loaded before by somebody else, the same file: fine, and shown.
    library = vendor / "op_api/lib/libcust_opapi.so"
    code = f"held = ctypes.CDLL({str(library)!r})\nsay(validate())"
    report = validate(root, code, **chain)
    assert report["verdict"] == "valid"
    (entry,) = [x for x in report["libraries"] if x["path"] == str(library)]
    assert entry["already_loaded"] is True


def test_a_chain_without_toolkit_is_a_report_too(tmp_path: Path) -> None:
    env = environment(None, ASCEND_HOME_PATH=str(tmp_path))
    report = run_child(VALIDATE + "say(validate())", env)
    assert report["verdict"] == "invalid" and codes(report) == ["toolkit_missing"]
    assert report["vendor_chain"] == [] and report["problems"][0]["remedy"]


def test_the_split_library_comes_before_the_umbrella() -> None:
    assert toolkit.BUILTIN_LIBRARIES == ("libopapi_transformer.so", "libopapi.so")
