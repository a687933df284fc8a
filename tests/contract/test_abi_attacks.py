# SPDX-License-Identifier: Apache-2.0
"""Attempts to fool the vendor chain: by files, links, settings, other libraries of the process.

Each is looked at through `validate_vendor_chain`, which `xmoe doctor` prints; code and remedy have
to be right, and nothing may crash or hang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import acl_stubs
from support.acl_stubs import (
    BASE_SYMBOLS,
    BOTH,
    LAUNCH,
    NEITHER,
    WORKSPACE,
    compile_library,
    environment,
    make_vendor,
    run_child,
)

VALIDATE = """
import xmoe
def validate():
    report = xmoe.validate_vendor_chain()
    assert json.loads(json.dumps(report)) == report
    return report
"""
# The same checks with two parameters more: what variant D looks like from outside.
AS_D = BOTH.replace("float clamp, void* y", "float clamp, int64_t topo, int64_t rank, void* y")
LIBRARY = Path("op_api/lib/libcust_opapi.so")


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    return acl_stubs.make_toolkit(tmp_path / "cann", stub_base)


def validate(root: Path, code: str = "say(validate())", **env: str) -> Any:
    return run_child(VALIDATE + code, environment(root, **env))


def codes(report: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in report["problems"]]


def only_problem(report: dict[str, Any], code: str, *words: str) -> None:
    """One problem of that code, whose text holds the words, with a remedy."""
    assert report["verdict"] == "invalid" and codes(report) == [code], report["problems"]
    (problem,) = report["problems"]
    assert all(word in problem["text"] for word in words), problem["text"]
    assert problem["remedy"]


def warned(report: dict[str, Any], *words: str) -> bool:
    return any(all(word in text for word in words) for text in report["warnings"])


def chain(*vendors: Path | str) -> dict[str, str]:
    return {"ASCEND_CUSTOM_OPP_PATH": ":".join(map(str, vendors))}


def doctor(root: Path, *words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "xmoe", "doctor", *words],
        env=environment(root, **env), cwd="/", capture_output=True, timeout=120,
    )  # fmt: skip


# ---- the library that is verified is the library that is called


def test_a_file_changed_in_place_with_its_old_times_is_probed_again(
    root: Path, tmp_path: Path
) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    library, other = vendor / LIBRARY, compile_library(tmp_path / "d.so", AS_D)
    env = {**chain(vendor), "XMOE_ABI_CACHE": str(tmp_path / "kept")}
    assert validate(root, **env)["mega_moe"]["abi_variant"] == "B"
    before, data = library.stat(), other.read_bytes()
    with open(library, "r+b") as file:
        file.write(data)
        file.truncate(len(data))
    os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = library.stat()
    same = ("st_ino", "st_size", "st_mtime_ns")
    assert all(getattr(before, name) == getattr(after, name) for name in same)
    only_problem(validate(root, **env), "variant_unknown", "means variant B", "identified D")


@pytest.mark.parametrize("how", ["replaced", "linked elsewhere", "rewritten"])
@pytest.mark.parametrize("loaded_by", ["this package", "somebody else"])
def test_a_library_changed_after_it_was_loaded_is_not_called(
    how: str, loaded_by: str, root: Path, tmp_path: Path
) -> None:
    vendor, companion = make_vendor(tmp_path / "v", BOTH), make_vendor(tmp_path / "c", NEITHER)
    library, other = vendor / LIBRARY, compile_library(tmp_path / "d.so", AS_D)
    info = vendor / "version.info"
    info.write_text("Version=9.9.0\n")  # tells no variant, so that only the probe does
    (root / "version.info").write_text("Version=9.9.0\n")
    if how == "linked elsewhere":
        library.rename(tmp_path / "b.so")
        library.symlink_to(tmp_path / "b.so")
        change = f"os.unlink({str(library)!r}); os.symlink({str(other)!r}, {str(library)!r})"
    elif how == "replaced":
        change = f"os.replace({str(other)!r}, {str(library)!r})"
    else:
        # The bytes behind the last section are read by nobody.
        change = f"with open({str(library)!r}, 'ab') as file: file.write(b'x')"
    load = "first = validate()" if loaded_by == "this package" else (
        f"held, first = ctypes.CDLL({str(library)!r}), None"
    )  # fmt: skip
    code = f"""
{load}
{change}
os.environ["ASCEND_CUSTOM_OPP_PATH"] += {":" + str(companion)!r}  # a chain not looked at so far
say([first, validate()])
"""
    first, second = validate(root, code, **chain(vendor))
    if first is not None:
        assert first["mega_moe"]["abi_variant"] == "B"
    if (how, loaded_by) == ("rewritten", "somebody else"):
        assert second["mega_moe"]["abi_variant"] == "B"  # nobody can tell when that happened
    else:
        only_problem(second, "loaded_elsewhere", str(library))
        assert "new process" in second["problems"][0]["remedy"]


def test_a_file_that_is_loaded_twice_is_its_own_rival(root: Path, tmp_path: Path) -> None:
    vendor, other = make_vendor(tmp_path / "v", BOTH), compile_library(tmp_path / "n.so", BOTH)
    (tmp_path / "link").symlink_to(vendor)
    code = f"""
held = ctypes.CDLL({str(tmp_path / "link" / LIBRARY)!r})
os.replace({str(other)!r}, {str(vendor / LIBRARY)!r})
say(validate())
"""
    only_problem(validate(root, code, **chain(vendor)), "loaded_elsewhere", "loaded twice")


@pytest.mark.parametrize("symbol", ["aclnnInnerMegaMoe", "aclnnInnerMegaMoeGetWorkspaceSize"])
def test_an_interposer_of_the_inner_calls_is_seen(symbol: str, root: Path, tmp_path: Path) -> None:
    inner = f"int {symbol}(void) {{ return 0; }}\n"
    vendor = make_vendor(tmp_path / "v", inner + BOTH)
    shadow = compile_library(tmp_path / "libshadow.so", inner)
    only_problem(
        validate(root, LD_PRELOAD=str(shadow), **chain(vendor)),
        "interposed", symbol, str(shadow), str(vendor),
    )  # fmt: skip
    assert validate(root, **chain(vendor))["verdict"] == "valid"
    # Of a vendor that has no such symbol nothing is shadowed.
    plain = make_vendor(tmp_path / "plain", BOTH)
    assert validate(root, LD_PRELOAD=str(shadow), **chain(plain))["verdict"] == "valid"


@pytest.mark.parametrize("name", ["libnnopbase.so", "libascendcl.so", "libhccl.so"])
def test_a_vendor_that_brings_its_own_runtime_is_refused(
    name: str, root: Path, tmp_path: Path
) -> None:
    other = compile_library(tmp_path / "own" / name, BASE_SYMBOLS[name])
    vendor = make_vendor(tmp_path / "v", BOTH, "9.1.0", "-Wl,--no-as-needed", str(other))
    only_problem(validate(root, **chain(vendor)), "loaded_elsewhere", str(other), str(root))


@pytest.mark.parametrize(
    ("body", "words"),
    [("*(volatile int*)8 = 1;", "killed by SIGSEGV"), ("for (;;) ;", "stands still")],
)
def test_a_library_that_ends_whoever_opens_it_is_a_verdict(
    body: str, words: str, root: Path, tmp_path: Path
) -> None:
    harm = f"__attribute__((constructor)) static void c(void) {{ {body} }}\n"
    vendor = make_vendor(tmp_path / "v", harm + BOTH)
    env = {**chain(vendor), "XMOE_ABI_PROBE_TIMEOUT_S": "3"}
    only_problem(validate(root, **env), "unloadable", str(vendor / LIBRARY), words)
    done = doctor(root, **env)
    assert done.returncode == 1 and words in done.stdout.decode()


def test_ld_audit_is_warned_of(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    audit = compile_library(
        tmp_path / "libaudit.so", "unsigned la_version(unsigned v) { return v; }\n"
    )
    report = validate(root, LD_AUDIT=str(audit), **chain(vendor))
    assert report["environment"]["LD_AUDIT"]["at_start"] == str(audit)
    assert warned(report, "LD_AUDIT", str(audit))


# ---- one symbol only, and libraries that are not asked


@pytest.mark.parametrize("half", [LAUNCH, WORKSPACE])
def test_a_companion_with_one_of_the_symbols(half: str, root: Path, tmp_path: Path) -> None:
    mine, companion = make_vendor(tmp_path / "m", BOTH), make_vendor(tmp_path / "c", half)
    neither = make_vendor(tmp_path / "n", NEITHER)
    report = validate(root, **chain(mine, companion))
    assert report["verdict"] == "valid" and report["mega_moe"]["vendor"] == str(mine)
    entry = report["vendor_chain"][1]
    assert entry["verdict"].startswith("only aclnnMegaMoe") and "out of the chain" in entry[
        "remedy"
    ]  # fmt: skip
    report = validate(root, **chain(companion, mine))
    only_problem(report, "mixed_files", str(companion), str(mine))
    code = "only_launch_symbol" if half == LAUNCH else "only_workspace_symbol"
    only_problem(validate(root, **chain(neither, companion)), code, str(companion))
    # With a whole vendor behind both, that one is the one to put first.
    report = validate(root, **chain(neither, companion, mine))
    only_problem(report, "wrong_vendor", str(neither), f"{mine / LIBRARY} does but")
    # One that is in the process already is a rival.
    code = f"held = ctypes.CDLL({str(companion / LIBRARY)!r})\nsay(validate())"
    only_problem(validate(root, code, **chain(mine)), "loaded_elsewhere", str(companion))


@pytest.mark.parametrize("name", ["libopapi_transformer.so", "libopapi_nn.so", "libopapi.so"])
def test_split_libraries_with_the_symbols(name: str, root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    builtin = compile_library(root / "lib64" / name, BOTH)
    report = validate(root, **chain(vendor))
    assert report["verdict"] == "valid"
    assert report["mega_moe"]["origins"][0]["resolved_path"] == str(vendor / LIBRARY)
    (row,) = report["builtin"]
    assert row["path"] == str(builtin) and len(row["symbols"]) == 2
    # In the global scope it would be called in the vendor's place.
    shadowed = validate(root, LD_PRELOAD=str(builtin), **chain(vendor))
    only_problem(shadowed, "interposed", str(builtin), str(vendor))
    alone = validate(root)
    if name == "libopapi_nn.so":
        only_problem(alone, "file_missing", "chain is empty")
        assert warned(alone, str(builtin), "not used", "libopapi_transformer.so and libopapi.so")
    else:
        assert alone["mega_moe"]["origins"][0]["resolved_path"] == str(builtin)
    # Its package's version is looked at as a vendor's is.
    info = root / "share/info/ops_transformer/version.info"
    info.parent.mkdir(parents=True)
    info.write_text("version=9.2.0\n")
    if name != "libopapi_nn.so":
        only_problem(validate(root), "version_mismatch", "9.2.0", "9.1.0")


def test_symbols_spread_over_split_libraries(root: Path) -> None:
    half = compile_library(root / "lib64/libopapi_transformer.so", LAUNCH)
    rest = compile_library(root / "lib64/libopapi_nn.so", WORKSPACE)
    report = validate(root)
    only_problem(report, "only_launch_symbol", str(half))
    assert warned(report, str(rest), "aclnnMegaMoeGetWorkspaceSize", "not used")


def test_vendors_in_reversed_order(root: Path, tmp_path: Path) -> None:
    new, old = make_vendor(tmp_path / "new", BOTH), make_vendor(tmp_path / "old", AS_D, "9.0.0")
    report = validate(root, **chain(new, old))
    assert report["verdict"] == "valid" and report["mega_moe"]["abi_variant"] == "B"
    report = validate(root, **chain(old, new))
    assert report["mega_moe"]["vendor"] == str(old), "the first one counts, right or wrong"
    assert report["mega_moe"]["abi_variant"] == "D"
    only_problem(report, "version_mismatch", str(old), "9.0.0", "9.1.0")
    assert report["vendor_chain"][1]["remedy"] == "nothing to do; to use this one, put it first"


def test_front_end_kernels_and_toolkit_of_three_releases(root: Path, tmp_path: Path) -> None:
    mine, other = make_vendor(tmp_path / "m", BOTH, "9.2.0"), make_vendor(tmp_path / "o", NEITHER)
    (mine / "version.info").write_text("Version=9.2.0\ncustom_opp_compiler_version=9.3.0\n")
    folder = other / "op_impl/ai_core/tbe/config/ascend910_93"
    folder.mkdir(parents=True)
    (folder / "aic-ascend910_93-ops-info.json").write_text('{"MegaMoe": {}}')
    report = validate(root, **chain(mine, other))
    assert codes(report) == ["version_mismatch", "mixed_packages"]
    packages = report["packages"]
    assert (packages["front_end"], packages["front_end_built_for"], packages["toolkit"]) == (
        "9.2.0", "9.3.0", "9.1.0",
    )  # fmt: skip
    assert len({problem["remedy"] for problem in report["problems"]}) == 2


# ---- paths


AS_NOBODY = """
import encodings.utf_8_sig, subprocess, pwd, xmoe.startup, xmoe.config, xmoe.kernels.capability
loader.native_module()
# As root, what is needed of Python is imported; nothing of the chain is loaded yet.
kept = os.environ.pop("ASCEND_CUSTOM_OPP_PATH", "")
validate()
os.environ["ASCEND_CUSTOM_OPP_PATH"] = kept
os.seteuid(65534)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def closed(path: Path) -> Path:
    """A folder or file that only its owner may look at; its parents may be passed."""
    path.chmod(0o700 if path.is_dir() else 0o600)
    for parent in path.parents:
        if str(parent).startswith("/tmp/") and parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o055)
    return path


@needs_root
@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        (".", "file_missing", "cannot be looked at: Permission denied"),
        ("v/op_api", "unreadable", "Permission denied"),
        (f"v/{LIBRARY}", "unreadable", "Permission denied"),
    ],
)
def test_what_this_user_may_not_read(
    what: str, code: str, words: str, root: Path, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    vendor, good = make_vendor(private / "v", BOTH), make_vendor(tmp_path / "good", BOTH)
    closed(root)
    root.chmod(0o755)
    closed(private / what)
    env = {**chain(vendor), "XMOE_ABI_PROBE": "off"}
    report = validate(root, AS_NOBODY + "say(validate())", **env)
    only_problem(report, code, str(vendor), words)
    if code == "unreadable":
        assert "let this user read" in report["problems"][0]["remedy"]
        return
    # What stands behind it is found.
    report = validate(root, AS_NOBODY + "say(validate())", **{**env, **chain(vendor, good)})
    assert report["verdict"] == "valid" and report["mega_moe"]["vendor"] == str(good)
    assert warned(report, str(vendor), "Permission denied", "never sees the entries behind it")


@needs_root
def test_a_config_ini_of_root_alone(root: Path, tmp_path: Path) -> None:
    make_vendor(root / "opp/vendors/v", BOTH)
    (root / "opp/vendors/config.ini").write_text("load_priority=v\n")
    closed(root / "opp/vendors/config.ini")
    root.chmod(0o755)
    env = {"XMOE_ABI_PROBE": "off"}
    report = validate(root, AS_NOBODY + "say(validate())", **env)
    only_problem(report, "file_missing", "config.ini", "cannot be read", "Permission denied")
    assert warned(report, "config.ini", "cannot be read")
    closed(root / "lib64")
    report = validate(root, AS_NOBODY.replace("\nvalidate()\n", "\n") + "say(validate())", **env)
    only_problem(report, "toolkit_missing", "cannot be listed", "Permission denied")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("/" + "x" * 300, "cannot be looked at: File name too long"),
        ("{tmp}/loop", "cannot be looked at: Too many levels of symbolic links"),
        ("~/v", "does not exist"),
    ],
)
def test_entries_that_cannot_be_followed(
    entry: str, reason: str, root: Path, tmp_path: Path
) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    entry = entry.format(tmp=tmp_path)
    report = validate(root, **chain(entry, vendor))
    assert report["verdict"] == "valid"
    (skipped,) = report["skipped"]
    assert skipped["entry"] == entry and skipped["reason"] == reason
    assert warned(report, entry, reason)
    only_problem(validate(root, **chain(entry)), "file_missing", repr(entry), reason)


def test_a_relative_entry_in_a_folder_that_is_gone(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    (tmp_path / "here").mkdir()
    code = f"os.chdir({str(tmp_path / 'here')!r}); os.rmdir({str(tmp_path / 'here')!r})\n"
    report = validate(root, code + "say(validate())", **chain("v", vendor))
    assert report["verdict"] == "valid"
    assert report["skipped"][0]["reason"] == "is relative, and the current folder is gone"


def test_the_start_up_check_follows_the_current_folder(root: Path, tmp_path: Path) -> None:
    for name, source in (("a", BOTH), ("b", NEITHER)):
        make_vendor(tmp_path / name / "v", source)
    code = f"""
seen = []
for name in "ab":
    os.chdir({str(tmp_path)!r} + "/" + name)
    try:
        seen.append(xmoe.check_vendor_chain()["mega_moe"]["vendor"])
    except xmoe.XmoeError as error:
        seen.append(str(error))
say(seen)
"""
    first, second = validate(root, code, **chain("v"))
    assert first == str(tmp_path / "a/v") and second.startswith("[no_symbols]")


def test_blanks_around_an_entry(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    report = validate(root, **chain(f" {vendor} "))
    assert report["verdict"] == "valid" and warned(report, "without the blanks", f"' {vendor} '")


@pytest.mark.parametrize("name", ["vé東 x", "v\udcff\udcfe", "v[red]x[/]"])
def test_names_of_any_characters(name: str, root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / name, BOTH)
    env = chain(vendor)
    report = validate(root, **env)
    assert report["verdict"] == "valid" and report["mega_moe"]["vendor"] == str(vendor)
    assert report["mega_moe"]["witnesses"]["probe"].startswith("identified B")
    # Whatever the terminal can show. Without UTF-8 a locale's own encoding names the files.
    for settings in ({}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "utf-8:strict"},
                     {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):  # fmt: skip
        done = doctor(root, **env, **settings)
        assert done.returncode == 0, (settings, done.stdout[-500:], done.stderr[-500:])
        done = doctor(root, "--json", **env, **settings)
        assert json.loads(done.stdout)["valid"] is True, settings
    if "[" in name:
        assert name in doctor(root, COLUMNS="400", **env).stdout.decode()


def test_pipes_in_the_place_of_files(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", None)
    os.mkfifo(vendor / LIBRARY)
    only_problem(validate(root, **chain(vendor)), "not_elf", "not a regular file")
    vendor = make_vendor(tmp_path / "w", BOTH)
    (vendor / "version.info").unlink()
    os.mkfifo(vendor / "version.info")
    kernels = vendor / "op_impl/ai_core/tbe/config/soc"
    kernels.mkdir(parents=True)
    os.mkfifo(kernels / "aic-soc-ops-info.json")
    report = validate(root, **chain(vendor))
    assert report["verdict"] == "valid" and report["mega_moe"]["vendor_version"] is None
    os.mkfifo(root / "opp/vendors/config.ini")
    report = validate(root)
    only_problem(report, "file_missing", "config.ini", "not a regular file")


# ---- config.ini and other settings


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("../evil", "is not the name of a folder in opp/vendors"),
        ("{tmp}/evil", "is not the name of a folder in opp/vendors"),
        ("a/../../evil", "is not the name of a folder in opp/vendors"),
        (".", "is not the name of a folder in opp/vendors"),
        ("a:b", "does not exist; entries are separated by ',' only"),
        ("a;b", "does not exist; entries are separated by ',' only"),
        ('"a"', "does not exist; names stand there without quotes"),
        ("", "empty entry"),
        ("A", "does not exist"),
    ],
)
def test_a_load_priority_that_names_no_vendor(
    text: str, reason: str, root: Path, tmp_path: Path
) -> None:
    text = text.format(tmp=tmp_path)
    for name in ("a", "b"):
        make_vendor(root / "opp/vendors" / name, BOTH)
    make_vendor(root / "opp/evil", BOTH)
    make_vendor(tmp_path / "evil", BOTH)
    (root / "opp/vendors/config.ini").write_text(f"load_priority={text}\n")
    report = validate(root)
    only_problem(report, "file_missing", repr(text), reason)
    assert [one["reason"] for one in report["skipped"]] == [reason]
    assert len(report["not_in_chain"]) == 2


def test_a_load_priority_in_another_encoding(root: Path) -> None:
    make_vendor(root / "opp/vendors/v\udcff", BOTH)
    (root / "opp/vendors/config.ini").write_bytes(b"load_priority=v\xff\n")
    report = validate(root)
    assert report["verdict"] == "valid"
    assert report["mega_moe"]["vendor"] == str(root / "opp/vendors/v\udcff")


def test_an_opp_path_that_is_not_there(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    report = validate(root, ASCEND_OPP_PATH=str(tmp_path / "gone"), **chain(vendor))
    assert report["verdict"] == "valid"
    assert warned(report, "ASCEND_OPP_PATH", "does not exist", str(root / "opp"))


@pytest.mark.parametrize(
    "setting",
    [
        {"XMOE_DEVICE": "npu"},
        {"XMOE_ABI_PROBE": "maybe"},
        {"XMOE_ABI_PROBE_TIMEOUT_S": "-1"},
        {"XMOE_ABI_VARIANT": "K"},
    ],
)
def test_a_bad_setting_is_named_and_no_verdict(
    setting: dict[str, str], root: Path, tmp_path: Path
) -> None:
    vendor = make_vendor(tmp_path / "v", BOTH)
    (name, value), env = next(iter(setting.items())), {**setting, **chain(vendor)}
    code = """
seen = []
for call in (xmoe.validate_vendor_chain, xmoe.check_vendor_chain):
    try:
        seen.append(call())
    except xmoe.XmoeError as error:
        seen.append(type(error).__name__ + ": " + str(error))
say(seen)
"""
    for text in validate(root, code, **env):
        assert text.startswith(f"ConfigError: environment variable {name}={value!r}")
        assert "allowed: " in text
    done = doctor(root, "--json", **env)
    assert done.returncode == 2 and name in done.stderr.decode() and not done.stdout
