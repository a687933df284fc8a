# SPDX-License-Identifier: Apache-2.0
"""Which ABI variant a library has: every variant told apart, strangers and wrong pins refused.

`pytest -s -k table` prints the table of variants.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from support import abi_vendors, acl_stubs
from support.abi_vendors import FAKE_LAUNCH, LETTERS, STRANGERS, UNTOLD_VERSION
from support.acl_stubs import environment, run_child
from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError
from xmoe.kernels.acl import abi_detect, abi_probe, variants
from xmoe.kernels.acl.abi_probe import Verdict

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build with")

IDENTIFY = """
from xmoe.errors import XmoeError
kit = toolkit.find_toolkit()
runtime = loader.load(kit)
def identify(pin=None):
    got = runtime.find_mega_moe(pin)
    if isinstance(got, Problem):
        return {"variant": None, "problem": got.code.value, "text": got.text}
    problem = got.identified.problem
    return {"variant": got.variant and got.variant.id, "source": got.variant_source,
            "problem": problem and problem.code.value, "text": problem and str(problem),
            "probe": got.identified.probe.status, "cached": got.identified.probe.cached}
"""


# ---- the plan, against the numbers of the documents


def test_slots_are_those_of_the_documents() -> None:
    slot = {v: variants.VARIANTS[v].integer_slot("moeExpertNum") for v in LETTERS}
    assert slot == {"A": 10, **dict.fromkeys("BCD", 11), **dict.fromkeys("EFG", 17),
                    "H": 18, "I": 18, "J": 19}  # fmt: skip
    assert abi_probe.always_null() == {10, 11, 17, 18, 19}
    flips = {v: set(abi_probe.expected_flips(variants.VARIANTS[v])) for v in LETTERS}
    assert flips == {
        "A": {20}, "B": {21, 22}, "C": {22, 23}, "D": {23, 24}, "E": {29, 30}, "F": {30, 31},
        "G": {26, 27, 31, 32}, "H": {27, 28, 32, 33}, "I": {28, 29, 33, 34}, "J": {29, 30, 34, 35},
    }  # fmt: skip
    assert len({max(f) for v, f in flips.items() if v != "A"}) == 9


def test_every_call_stops_before_the_operator_runs() -> None:
    for name, null in abi_probe.plan():
        for variant in variants.VARIANTS.values():
            stops = {variant.integer_slot(key) for key in variant.null_checked()}
            if variant.checks_integers:
                stops.add(variant.integer_slot("moeExpertNum"))
            assert stops & set(null), f"{name} would run variant {variant.id}"


def answers(variant: str, text: bool = True) -> dict[str, tuple[int, str]]:
    """What a library of this variant answers, by its documented checks."""
    table = variants.VARIANTS[variant]
    found = {}
    for name, null in abi_probe.plan():
        first = next((k for k in table.null_checked() if table.integer_slot(k) in null), None)
        if first is not None:
            found[name] = (161001, f"EZ1001: {first} must not be nullptr." if text else "EZ1001")
        else:
            found[name] = (161002, "EZ1001: moeExpertNum=0")
    return found


@pytest.mark.parametrize("variant", LETTERS)
def test_judgement_of_documented_answers(variant: str) -> None:
    assert abi_probe.judge(answers(variant)).variant == variant
    silent = abi_probe.judge(answers(variant, text=False))
    if variant == "A":
        assert (silent.status, silent.variant) == ("ambiguous", "A")
    else:
        assert (silent.status, silent.variant) == ("identified", variant)


@pytest.mark.parametrize("variant", LETTERS)
def test_one_wrong_answer_makes_it_foreign(variant: str) -> None:
    good = answers(variant)
    for name, (code, text) in good.items():
        for other in {0, 161001, 161002, 561002} - {code}:
            found = abi_probe.judge({**good, name: (other, text)})
            assert found.variant is None or (found.variant != variant), (name, other)
            assert found.status == "foreign" or name == "base", (name, other, found)


def _conclude(pin: str | None, metadata: str | None, verdict: Verdict) -> abi_detect.Identified:
    table = variants.VARIANTS
    return abi_detect.conclude(
        Path("lib.so"), pin and table[pin], metadata and table[metadata], "version.info", verdict
    )  # fmt: skip


UNAVAILABLE, OFF = Verdict("unavailable", None, "x"), Verdict("off", None, "x")
IS_D, MAYBE_A = Verdict("identified", "D", "x"), Verdict("ambiguous", "A", "x")
FOREIGN, CRASHED, HUNG = (Verdict(s, None, "x") for s in ("foreign", "crashed", "hung"))


@pytest.mark.parametrize(
    ("pin", "metadata", "verdict", "variant", "problem"),
    [
        ("D", None, IS_D, "D", None),
        ("D", "B", IS_D, "D", None),  # a pin beats metadata
        ("B", "B", IS_D, None, "variant_mismatch"),  # nothing beats the probe
        ("B", None, CRASHED, None, "variant_mismatch"),
        ("B", None, HUNG, None, "variant_mismatch"),
        ("B", None, FOREIGN, None, "variant_mismatch"),
        ("B", None, MAYBE_A, None, "variant_mismatch"),
        ("A", None, MAYBE_A, "A", None),
        ("B", None, UNAVAILABLE, "B", None),
        ("B", "D", OFF, "B", None),
        (None, "D", IS_D, "D", None),
        (None, "B", IS_D, None, "variant_unknown"),
        (None, "B", CRASHED, None, "variant_unknown"),
        (None, "B", HUNG, None, "variant_unknown"),
        (None, "B", FOREIGN, None, "variant_unknown"),
        (None, "B", UNAVAILABLE, "B", None),
        (None, "B", OFF, "B", None),
        (None, None, IS_D, "D", None),
        (None, None, MAYBE_A, None, "variant_unknown"),
        (None, None, FOREIGN, None, "variant_unknown"),
        (None, None, CRASHED, None, "variant_unknown"),
        (None, None, UNAVAILABLE, None, "variant_unknown"),
        (None, None, OFF, None, "variant_unknown"),
    ],
)
def test_witnesses_are_weighed(
    pin: str | None, metadata: str | None, verdict: Verdict, variant: str | None,
    problem: str | None,
) -> None:  # fmt: skip
    found = _conclude(pin, metadata, verdict)
    assert (found.variant and found.variant.id) == variant
    assert (found.problem and found.problem.code.value) == problem
    if problem == "variant_mismatch":
        assert found.problem is not None
        assert f"abi_variant={pin}" in found.problem.text and str(verdict) in found.problem.text


# ---- for real: the software vendor as each variant


def _row(variant: str, folder: Path) -> dict[str, Any]:
    vendor = abi_vendors.vendor_folder(folder / variant, variant)
    code = (
        IDENTIFY
        + f"""
say([identify(), {{pin: identify(pin) for pin in {LETTERS!r}}}])
"""
    )
    detected, pinned = run_child(
        code, environment(None, XMOE_DEVICE="soft", ASCEND_CUSTOM_OPP_PATH=str(vendor))
    )
    return {"variant": variant, "detected": detected, "pinned": pinned}


@needs_compiler
def test_table_every_variant_is_detected_and_every_wrong_pin_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [_row(variant, tmp_path) for variant in LETTERS]
    lines = ["variant  detected  right pin  wrong pins refused"]
    for row in rows:
        letter, pinned = row["variant"], row["pinned"]
        refused = [p for p in LETTERS if pinned[p]["problem"] == "variant_mismatch"]
        right = pinned[letter]["variant"]
        lines.append(
            f"{letter:<9}{row['detected']['variant']!s:<10}{right!s:<11}{len(refused)} of 9"
        )
        assert row["detected"]["variant"] == letter and row["detected"]["problem"] is None
        assert right == letter and "confirmed" in pinned[letter]["source"]
        assert refused == [p for p in LETTERS if p != letter]
        for pin in refused:
            text = pinned[pin]["text"]
            assert f"abi_variant={pin}" in text and f"identified {letter}" in text
            assert pinned[pin]["variant"] is None
    with capsys.disabled():
        print("\n" + "\n".join(lines))


@needs_compiler
def test_metadata_against_probe(tmp_path: Path) -> None:
    as_b = abi_vendors.vendor_folder(tmp_path / "b", "B", "9.1.0")
    as_d = abi_vendors.vendor_folder(tmp_path / "d", "D", "9.1.0")  # a custom vendor's version
    told = abi_vendors.vendor_folder(tmp_path / "h", "H", "9.9.0", abi="H")
    wrong = abi_vendors.vendor_folder(tmp_path / "i", "I", "9.9.0", abi="H")
    wanted = [("B", None), (None, "variant_unknown"), ("H", None), (None, "variant_unknown")]
    for vendor, (variant, problem) in zip((as_b, as_d, told, wrong), wanted, strict=True):
        env = environment(None, XMOE_DEVICE="soft", ASCEND_CUSTOM_OPP_PATH=str(vendor))
        found = run_child(IDENTIFY + "say(identify())", env)
        assert (found["variant"], found["problem"]) == (variant, problem), found
        if vendor == as_d:
            assert "means variant B" in found["text"] and "identified D" in found["text"]
            assert run_child(IDENTIFY + "say(identify('D'))", env)["variant"] == "D"


# ---- libraries of another family


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    return acl_stubs.make_toolkit(tmp_path / "cann", stub_base)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("crash", "crashed", "SIGSEGV in call base"),
        ("abort", "crashed", "SIGABRT"),
        ("exit", "crashed", "ended with status 0 in call base"),
        ("hang", "hung", "no answer within"),
        ("fork_hang", "hung", "no answer within"),
        ("zero", "foreign", "returned 0"),
        ("other_code", "foreign", "returned 561002"),
        ("noisy", "foreign", "returned 7"),
        ("always_null", "ambiguous", "always answers so"),
        ("always_invalid", "foreign", "call slot0 returned 161002"),
        ("later", "foreign", "null checks at slots 35, 36"),
    ],
)
def test_a_stranger_is_unknown_with_the_reason(
    name: str, status: str, words: str, root: Path, tmp_path: Path
) -> None:
    # Its package even claims to be release 9.1.0, whose variant is known.
    vendor = acl_stubs.make_vendor(tmp_path / "v", FAKE_LAUNCH + STRANGERS[name])
    code = (
        IDENTIFY
        + """
from xmoe.kernels import capability
from xmoe.kernels.acl import op
found, pinned, again = identify(), identify("B"), identify()
try:
    op.prepare(runtime, runtime.mega_moe, {})
except XmoeError as error:
    refused = type(error).__name__ + ": " + str(error)
say([found, pinned, again, refused, capability.probe().library_problem])
"""
    )
    timeout = "1.5" if "hang" in name else "30"
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_PROBE_TIMEOUT_S=timeout)
    found, pinned, again, refused, library = run_child(code, env)
    assert found["probe"] == status and words in found["text"], found
    assert found["variant"] is None and found["problem"] == "variant_unknown"
    assert pinned["variant"] is None and pinned["problem"] == "variant_mismatch"
    assert again["cached"] is True
    assert refused.startswith("LibraryError: [variant_unknown]")
    assert library.startswith("variant_unknown: ")


def test_the_probe_can_be_switched_off(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", FAKE_LAUNCH + STRANGERS["crash"])
    code = (
        IDENTIFY
        + """
seen = [identify(), identify("D")]
os.environ["XMOE_ABI_PROBE"] = "auto"
say([*seen, identify("D")])
"""
    )
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_PROBE="off")
    told, pinned, switched_on = run_child(code, env)
    assert told["variant"] == "B" and told["probe"] == "off"
    assert pinned["variant"] == "D" and "not confirmed" in pinned["source"]
    assert switched_on["variant"] is None and switched_on["problem"] == "variant_mismatch"


def test_an_unverified_library_is_never_probed(root: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    spy = (
        f"#include <fcntl.h>\nint aclnnMegaMoeGetWorkspaceSize(void) "
        f'{{ open("{touched}", O_CREAT | O_WRONLY, 0600); return 161002; }}\n'
    )
    vendor = acl_stubs.make_vendor(tmp_path / "v", FAKE_LAUNCH + spy)
    shadow = acl_stubs.compile_library(tmp_path / "libshadow.so", FAKE_LAUNCH + spy)
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    assert run_child(IDENTIFY + "say(identify())", {**env, "LD_PRELOAD": str(shadow)})[
        "problem"
    ] == "interposed"  # fmt: skip
    assert not touched.exists()
    assert run_child(IDENTIFY + "say(identify())", env)["probe"] == "foreign"
    assert touched.exists(), "the spy works"


@pytest.mark.parametrize(
    "disturbance",
    [
        {"PYTHONHOME": "/nonexistent", "PYTHONSTARTUP": "/x", "PYTHONSAFEPATH": "1"},
        {"PYTHONWARNINGS": "error", "PYTHONMALLOC": "debug", "PYTHONHASHSEED": "7"},
    ],
)
def test_python_settings_do_not_reach_the_child(
    disturbance: dict[str, str], root: Path, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the real one')\n")
    disturbance = {**disturbance, "PYTHONPATH": str(tmp_path)}
    vendor = acl_stubs.make_vendor(tmp_path / "v", acl_stubs.BOTH)
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    code = IDENTIFY + f"os.environ.update({disturbance!r})\nsay(identify())"
    found = run_child(code, env)
    assert found["variant"] == "B" and found["probe"] == "identified", found


def test_no_interpreter_means_no_evidence(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", acl_stubs.BOTH)
    # A program that embeds Python may be what sys.executable names: never start a second one.
    engine, started = tmp_path / "engine", tmp_path / "started"
    engine.write_text(f"#!/bin/sh\ntouch {started}\n")
    engine.chmod(0o755)
    code = f"""{IDENTIFY}
prefix, sys.base_exec_prefix = sys.base_exec_prefix, "/no/such"
seen = []
for sys.executable in ("/no/such/python3", "", {str(engine)!r}):
    seen.append(identify())
seen.append(identify("D"))
sys.base_exec_prefix = prefix
say([*seen, identify("C")])
"""
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    *unavailable, pinned, found = run_child(code, env)
    for one in unavailable:
        assert one["variant"] == "B" and one["probe"] == "unavailable"
        assert "no Python interpreter" in one["source"]
    assert pinned["variant"] == "D" and pinned["probe"] == "unavailable"
    assert not started.exists()
    assert found["problem"] == "variant_mismatch", "the prefix's own interpreter was used"


def test_a_crash_is_seen_although_a_fork_holds_the_pipe_open(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", FAKE_LAUNCH + STRANGERS["crash"])
    code = f"""{IDENTIFY}
import signal, time
original, forked = os.pipe, []
def pipe():
    ends = original()
    if not forked:  # the probe's own pipe; those that start the child come later
        forked.append(os.fork())
        if forked == [0]:
            time.sleep(60)
            os._exit(0)
    return ends
os.pipe = pipe
start = time.monotonic()
found = identify()
taken = time.monotonic() - start
for pid in forked:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
say([found["probe"], taken < 20, len(forked)])
"""
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_PROBE_TIMEOUT_S="30")
    assert run_child(code, env) == ["crashed", True, 1]


# ---- the kept results


def test_results_are_kept_per_state_of_the_file(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", acl_stubs.BOTH)
    kept = tmp_path / "kept"
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_CACHE=str(kept))
    code = IDENTIFY + "say(identify())"
    assert run_child(code, env)["cached"] is False
    (entry,) = kept.iterdir()
    assert run_child(code, env)["cached"] is True
    # Another file under the same name is another library.
    time.sleep(0.01)
    acl_stubs.compile_library(vendor / "op_api/lib/libcust_opapi.so",
                              FAKE_LAUNCH + STRANGERS["zero"])  # fmt: skip
    found = run_child(code, env)
    assert found["cached"] is False and found["probe"] == "foreign"
    assert len(list(kept.iterdir())) == 2 and entry.exists()


@pytest.mark.parametrize("damage", ["json", "variant", "identity", "writable", "folder"])
def test_a_kept_result_that_cannot_be_trusted_is_ignored(
    damage: str, root: Path, tmp_path: Path
) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", acl_stubs.BOTH)
    kept = tmp_path / "kept"
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_CACHE=str(kept))
    code = IDENTIFY + "say(identify())"
    run_child(code, env)
    (entry,) = kept.iterdir()
    content = json.loads(entry.read_text())
    if damage == "json":
        entry.write_text(entry.read_text()[:-9])
    elif damage == "variant":
        entry.write_text(json.dumps({**content, "variant": "K"}))
    elif damage == "identity":
        entry.write_text(json.dumps({**content, "identity": {**content["identity"], "size": 1}}))
    elif damage == "writable":
        entry.chmod(0o666)
    else:
        kept.chmod(0o777)
    found = run_child(code, env)
    assert found["variant"] == "B" and found["cached"] is False
    kept.chmod(0o700)


def test_a_folder_that_cannot_be_written_does_no_harm(root: Path, tmp_path: Path) -> None:
    vendor = acl_stubs.make_vendor(tmp_path / "v", acl_stubs.BOTH)
    (tmp_path / "file").write_text("")
    env = environment(
        root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_CACHE=str(tmp_path / "file" / "x")
    )
    assert run_child(IDENTIFY + "say(identify())", env)["variant"] == "B"


def test_k_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    stated = acl_stubs.make_vendor(tmp_path / "v", acl_stubs.BOTH, UNTOLD_VERSION)
    (stated / "version.info").write_text("Version=9.9.0\nmega_moe_abi=K\n")
    code = (
        IDENTIFY
        + """
from xmoe.kernels import capability
problems = capability.probe(abi_variant="K").problems
try:
    runtime.require_mega_moe("K")
except XmoeError as error:
    say([problems, str(error), identify()["source"]])
"""
    )
    problems, text, source = run_child(code, environment(root, ASCEND_CUSTOM_OPP_PATH=str(stated)))
    assert "'K'" in text and "combine_comm_mode" in text
    assert problems[0][0] == "variant_unknown" and "'K'" in problems[0][1]
    assert source.startswith("return-code probe"), "the library itself is B whatever it states"
    for make in (
        lambda: XmoeConfig.from_mapping({"abi_variant": "K"}),
        lambda: XmoeConfig.resolve(environ={"XMOE_ABI_VARIANT": "K"}),
    ):
        with pytest.raises(ConfigError, match="'K' is not acceptable"):
            make()
