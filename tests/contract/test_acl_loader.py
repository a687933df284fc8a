# SPDX-License-Identifier: Apache-2.0
"""Finding and loading: the chain follows the environment, and each failure has its own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import acl_stubs
from support.acl_stubs import BOTH, LAUNCH, NEITHER, WORKSPACE, environment, run_child
from xmoe.errors import ConfigError, LibraryNotFound
from xmoe.kernels.acl import toolkit


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    return acl_stubs.make_toolkit(tmp_path / "cann", stub_base)


def test_vendor_path_set_after_import_is_seen(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", BOTH)
    code = f"""
seen = [found()]
for value in (None, {str(vendor)!r}, None):
    os.environ.pop("ASCEND_CUSTOM_OPP_PATH", None)
    if value:
        os.environ["ASCEND_CUSTOM_OPP_PATH"] = value
    seen.append(found())
say(seen)
"""
    seen = run_child(code, environment(root))
    assert [s["code"] for s in seen] == ["file_missing", "file_missing", "", "file_missing"]
    assert seen[2]["library"] == str(vendor / "op_api/lib/libcust_opapi.so")


def test_a_vendor_installed_after_the_first_look_is_seen(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", BOTH)
    library = vendor / "op_api/lib/libcust_opapi.so"
    # First the folder is missing, then it is there without its library: the same chain as at the
    # end, so only a failure that was kept could still be seen then.
    code = f"""
os.environ["ASCEND_CUSTOM_OPP_PATH"] = {str(vendor)!r}
seen = [found()["code"]]
for source, target in {[("later", str(vendor)), ("library", str(library))]!r}:
    os.rename(os.path.join({str(tmp_path)!r}, source), target)
    seen.append(found()["code"])
say(seen)
"""
    library.rename(tmp_path / "library")
    vendor.rename(tmp_path / "later")
    assert run_child(code, environment(root)) == ["file_missing", "file_missing", ""]


def test_junk_in_the_vendor_path_is_skipped_and_listed(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", BOTH)
    (tmp_path / "file").write_text("x")
    link = tmp_path / "link"
    link.symlink_to(vendor)
    value = f":{tmp_path}/gone:{tmp_path}/file:{vendor}:{vendor}:{link}:"
    kit = toolkit.find_toolkit(root=root, environ={"ASCEND_CUSTOM_OPP_PATH": value})
    assert [v.path for v in kit.vendor_dirs] == [vendor]
    reasons = [s.reason for s in kit.skipped]
    assert reasons[:3] == ["empty entry", "does not exist", "is a file"]
    assert reasons[3:5] == ["already in the chain from ASCEND_CUSTOM_OPP_PATH"] * 2
    assert reasons[5:] == ["empty entry"]
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=value)
    assert run_child("say(found())", env)["code"] == ""


def test_chain_order_is_variable_then_priority_then_builtin(
    root: Path, stub_base: Path, tmp_path: Path
) -> None:
    custom = acl_stubs.make_vendor(tmp_path / "custom", None)
    for name in ("one", "two"):
        acl_stubs.make_vendor(root / "opp/vendors" / name, None)
    acl_stubs.compile_library(root / "lib64" / "libopapi_transformer.so", BOTH)
    ini = root / "opp/vendors/config.ini"
    ini.write_text("# made by an installer\r\nload_priority = two,,one,gone\r\n")
    kit = toolkit.find_toolkit(root=root, environ={"ASCEND_CUSTOM_OPP_PATH": f"{custom}:"})
    names = [(v.path.name, v.found_via, v.builtin) for v in kit.vendor_dirs]
    via = "opp/vendors/config.ini"
    assert names == [
        ("custom", "ASCEND_CUSTOM_OPP_PATH", False),
        ("two", via, False),
        ("one", via, False),
        ("lib64", "built-in", True),
    ]
    ini.write_text("priority=two\n")
    kit = toolkit.find_toolkit(root=root, environ={})
    assert [v.path.name for v in kit.vendor_dirs] == ["lib64"]
    assert kit.skipped[-1].reason == "has no load_priority line"


@pytest.mark.parametrize(
    ("source", "flags", "code", "words"),
    [
        (None, (), "file_missing", ["libcust_opapi.so is missing", "folder is empty"]),
        ("text", (), "not_elf", ["not an ELF file"]),
        ("cut", (), "not_elf", ["libcust_opapi.so"]),
        ("arm", (), "unloadable", ["built for aarch64"]),
        (BOTH + "int gone(void); int use(void) { return gone(); }", (), "unresolved_dependency",
         ["undefined symbol", "gone"]),
        ("needs", (), "unresolved_dependency", ["libneeded.so"]),
        (NEITHER, (), "no_symbols", ["neither", "aclnnMegaMoeGetWorkspaceSize"]),
        (LAUNCH, (), "only_launch_symbol", ["lacks aclnnMegaMoeGetWorkspaceSize"]),
        (WORKSPACE, (), "only_workspace_symbol", ["lacks aclnnMegaMoe"]),
        (BOTH, (), "", []),
    ],
)  # fmt: skip
def test_each_failure_has_its_own_reason(
    source: str | None, flags: tuple[str, ...], code: str, words: list[str], root: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    special = source in ("text", "cut", "arm", "needs")
    vendor = acl_stubs.make_vendor(tmp_path / "v", None if special else source, "9.1.0", *flags)
    library = vendor / "op_api/lib/libcust_opapi.so"
    if source == "text":
        library.write_text("#!/bin/sh\n# not a library\n")
    elif special:
        needed = acl_stubs.compile_library(tmp_path / "libneeded.so", "int needed;\n")
        acl_stubs.compile_library(library, BOTH, "-Wl,--no-as-needed", str(needed))
        if source == "cut":
            library.write_bytes(library.read_bytes()[:900])
        elif source == "arm":
            whole = bytearray(library.read_bytes())
            whole[18:20] = (183).to_bytes(2, "little")
            library.write_bytes(bytes(whole))
        else:
            needed.unlink()
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    seen = run_child("say(found())", env)
    assert seen["code"] == code, seen
    if code:
        assert str(library) in seen["text"]
        for word in words:
            assert word in seen["text"]
    error = run_child(
        """
from xmoe.errors import LibraryError
try:
    loader.load(toolkit.find_toolkit()).mega_moe
    say("no error")
except LibraryError as error:
    say([type(error).__name__, str(error)])
""",
        env,
    )
    if not code:
        assert error == "no error"
    else:
        symbol_missing = code in ("no_symbols", "only_launch_symbol", "only_workspace_symbol")
        assert error[0] == ("SymbolMissing" if symbol_missing else "LibraryNotFound")
        assert error[1].startswith(f"[{code}] ") and "; " in error[1]


def test_sixteen_threads_load_once(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(
        tmp_path / "v",
        BOTH + "int loads; __attribute__((constructor)) static void c(void) { loads++; }",
    )
    code = """
barrier, seen = threading.Barrier(16), []
def one():
    barrier.wait()
    runtime = loader.load(toolkit.find_toolkit())
    seen.append((id(runtime), id(runtime.find_mega_moe()), id(runtime.acl)))
threads = [threading.Thread(target=one) for _ in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
library = str(loader.load(toolkit.find_toolkit()).mega_moe.library.path)
pid = os.fork()
if pid == 0:
    os._exit(0 if found()["code"] == "" else 9)
child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
say([len(seen), len(set(seen)), ctypes.c_int.in_dll(ctypes.CDLL(library), "loads").value, child])
"""
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert run_child(code, env) == [16, 1, 1, 0]


def test_a_lock_held_at_fork_does_not_stop_the_child(root: Path) -> None:
    code = """
import signal, time
loader.load(toolkit.find_toolkit())
inside = threading.Event()
def hold():
    with loader._lock:
        inside.set(); time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
inside.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    os._exit(0 if loader.load(toolkit.find_toolkit()) else 9)
start = time.monotonic()
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
say([code, time.monotonic() - start < 15])
"""
    assert run_child(code, environment(root)) == [0, True]


def test_a_missing_base_library_is_fatal_only_if_everything_needs_it(
    root: Path, stub_base: Path, tmp_path: Path
) -> None:
    (root / "lib64" / "libhccl_fwk.so").unlink()
    code = """
runtime = loader.load(toolkit.find_toolkit())
from xmoe.errors import SymbolMissing
try:
    runtime.hccl.HcclCommGetHandleWithName
except SymbolMissing as error:
    text = str(error)
say([runtime.missing_comm_symbols(), text, [p.code.value for p in runtime.problems]])
"""
    missing, text, problems = run_child(code, environment(root))
    assert missing == ["HcclGetRemoteIpcHcclBuf", "HcclCommGetHandleWithName"]
    assert "libhccl_fwk.so is missing" in text and problems == ["file_missing"]
    (root / "lib64" / "libnnopbase.so").unlink()
    code = """
from xmoe.errors import LibraryNotFound
try:
    loader.load(toolkit.find_toolkit())
except LibraryNotFound as error:
    say(str(error))
"""
    text = run_child(code, environment(root))
    assert "libnnopbase.so is missing" in text and "folder holds libascendcl.so" in text


def test_another_copy_of_a_base_library_is_refused(root: Path, stub_base: Path) -> None:
    code = f"""
from xmoe.errors import ProvenanceError
other = ctypes.CDLL({str(stub_base / "libascendcl.so")!r})
try:
    loader.load(toolkit.find_toolkit())
except ProvenanceError as error:
    say(str(error))
"""
    text = run_child(code, environment(root))
    assert text.startswith("[loaded_elsewhere]") and str(stub_base / "libascendcl.so") in text


def test_found_via_and_already_loaded_are_recorded(root: Path) -> None:
    code = f"""
held = ctypes.CDLL({str(root / "lib64/libascendcl.so")!r})
runtime = loader.load(toolkit.find_toolkit())
say([[x.name, x.already_loaded, x.found_via] for x in runtime.libraries])
"""
    seen = run_child(code, environment(root))
    assert seen[0] == ["libascendcl.so", True, "ASCEND_HOME_PATH"]
    assert seen[1] == ["libnnopbase.so", False, "ASCEND_HOME_PATH"]


def test_importing_the_layer_opens_no_library() -> None:
    code = """
import xmoe.kernels.acl.op, xmoe.kernels.capability
with open("/proc/self/maps") as file:
    maps = file.read()
say([name for name in ("libascendcl", "_native", "torch") if name in maps])
"""
    assert run_child(code, environment(None)) == []


def test_toolkit_search_steps(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = toolkit.find_toolkit
    soft = tmp_path / "soft"
    monkeypatch.setattr(toolkit, "SOFTWARE_ROOT", soft)
    home = {"ASCEND_HOME_PATH": str(root)}
    assert find(environ=home).found_via == "ASCEND_HOME_PATH"
    assert find(environ={"ASCEND_TOOLKIT_HOME": str(root)}).found_via == "ASCEND_TOOLKIT_HOME"
    assert find(root=root, environ={}).kind == "explicit"
    soft.symlink_to(root)
    assert find(environ={}).kind == "soft"
    assert find(environ={**home, "XMOE_DEVICE": "soft"}).kind == "soft"
    assert find("cann", environ=home).kind == "cann"
    assert find(environ={**home, "ASCEND_HOME_PATH": ""}).kind == "soft"
    with pytest.raises(ConfigError, match="XMOE_DEVICE"):
        find(environ={"XMOE_DEVICE": "npu"})
    with pytest.raises(ConfigError, match="device argument='npu'"):
        find("npu", environ={})
    with pytest.raises(LibraryNotFound, match="ASCEND_HOME_PATH: not set"):
        find("cann", environ={})


def test_a_named_but_broken_cann_never_becomes_the_software_device(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit, "SOFTWARE_ROOT", root)
    (tmp_path / "broken" / "bin").mkdir(parents=True)
    with pytest.raises(LibraryNotFound, match=r"broken.*folder holds bin"):
        toolkit.find_toolkit(environ={"ASCEND_HOME_PATH": str(tmp_path / "broken")})


def test_opp_path_of_a_cann_is_honoured(root: Path, tmp_path: Path) -> None:
    acl_stubs.make_vendor(tmp_path / "opp/vendors/late", None)
    (tmp_path / "opp/vendors/config.ini").write_text("load_priority=late\n")
    environ = {"ASCEND_HOME_PATH": str(root), "ASCEND_OPP_PATH": str(tmp_path / "opp")}
    kit = toolkit.find_toolkit(environ=environ)
    assert [v.path.name for v in kit.vendor_dirs] == ["late"]
