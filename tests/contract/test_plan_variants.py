# SPDX-License-Identifier: Apache-2.0
"""The compiled launch plan against recording libraries: every variant, caching, errors, guards."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.plan_stubs import child
from support.vendor import VARIANTS

ARGUMENTS = """
with make() as plan:
    scratch = Scratch()
    step(plan, mask=True, scratch=scratch)
    seen = [[s.number - base, s.number, s.count, s.second - base, s.type, s.rows, s.columns,
             s.real, s.text.decode()] for s in slots]
    got = {"slots": seen, "launched": [launched[0] - base, *launched[1:3]],
           "small": [a - base for a in launched[3:8]], "asked": scratch.asked,
           "step": [a - base for a in addresses()]}
say({**got, "left": counts()})
"""
SMALL = {  # name: (place among the step's addresses, aclDataType, rows, columns)
    "x": (0, 27, 2, 64),
    "topkIds": (1, 3, 2, 2),
    "topkWeights": (2, 0, 2, 2),
    "xActiveMask": (3, 2, 2, 0),
    "yOut": (4, 27, 2, 64),
    "expertTokenNumsOut": (5, 3, 4, 0),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_each_argument_arrives_in_its_place(variant: str, tmp_path: Path) -> None:
    got = child(tmp_path, ARGUMENTS, variant)
    for index, entry in enumerate(VARIANTS[variant]):
        name, kind = entry.split(":")
        offset, number, count, second, dtype, rows, columns, real, text = got["slots"][index]
        if name in SMALL:
            place, want_type, want_rows, want_columns = SMALL[name]
            assert offset == got["step"][place], name
            assert (dtype, rows, columns) == (want_type, want_rows, want_columns), name
        elif kind == "T":
            assert (offset, dtype, rows) == (0x1000 + 0x400 * index, 3, 8), name
        elif kind == "L":
            assert (offset, count) == (0x1000 + 0x400 * index, 2), name
            assert (second - offset, dtype, rows, columns) == (0x100, 27, 4, 8), name
        elif kind == "i":
            assert number == 2**40 + index, name
        elif kind == "S":
            assert text == f"text {name}", name
        else:
            assert real == 7.25, name
    assert got["launched"] == [0xC0000, 4096, 0x5150] and got["asked"] == [4096]
    left = got["left"]
    assert left["tensors"] == left["dead_tensors"] and left["lists"] == left["dead_lists"]
    assert left["arrays"] == 0


STEADY = """
with make(reuse=REUSE) as plan:
    scratch = Scratch()
    for number in range(4):
        step(plan, number % 4, tokens=T - number % 2, scratch=scratch)
    before, prepared = counts(), number_of("prepared").value
    wrong = 0
    for number in range(100):
        step(plan, number % 4, tokens=T - number % 2, scratch=scratch)
        want = addresses(number % 4)
        wrong += list(launched[3:8]) != want[:3] + want[4:]
    after = counts()
    told = plan.counters()
    prepared = number_of("prepared").value - prepared
say({"before": before, "after": after, "wrong": wrong, "prepared": prepared, "told": told,
     "asked": scratch.asked, "launches": number_of("launches").value, "end": counts()})
"""


@pytest.mark.parametrize("flags", [(), ("-DNO_ADDRESSES",)])
def test_a_step_makes_no_constant_descriptor_again(flags: tuple[str, ...], tmp_path: Path) -> None:
    got = child(tmp_path, "REUSE = False" + STEADY, "B", *flags)
    assert got["wrong"] == 0 and got["launches"] == 104 and got["prepared"] == 100
    made = got["after"]["tensors"] - got["before"]["tensors"]
    assert made == (500 if flags else 0)  # nothing but the five small ones, and those only then
    assert got["after"]["lists"] == got["before"]["lists"] == 6
    assert got["asked"] == [4096]  # the block is kept
    end = got["end"]
    assert end["tensors"] == end["dead_tensors"] and end["lists"] == end["dead_lists"]


def test_a_kept_executor_is_moved_and_phase_one_asked_once_a_shape(tmp_path: Path) -> None:
    got = child(tmp_path, "REUSE = True" + STEADY)
    assert got["wrong"] == 0 and got["prepared"] == 0 and got["launches"] == 104
    assert got["told"]["phase_one"] == 2 and got["told"]["reused"] == 102
    assert got["end"]["repeatable"] == got["end"]["dead_executors"] == 2


@pytest.mark.parametrize("flag", ["-DNO_REPEAT", "-DNO_ADDRESSES"])
def test_without_repeatable_executors_every_launch_asks_phase_one(
    flag: str, tmp_path: Path
) -> None:
    code = STEADY.replace(
        "told = plan.counters()",
        """told = plan.counters()
    told |= {"reuses": plan.reuses_executor, "refused": plan.reuse_refused}""",
    )
    got = child(tmp_path, "REUSE = True" + code, "B", flag)
    assert got["wrong"] == 0 and got["prepared"] == 100
    assert got["told"]["reuses"] is False
    assert got["told"]["refused"] == (561000 if flag == "-DNO_REPEAT" else 0)


def test_masks_never_reuse_an_executor(tmp_path: Path) -> None:
    got = child(
        tmp_path,
        """
with make(reuse=True) as plan:
    for number in range(3):
        step(plan, number, mask=True)
    say(plan.counters())
""",
    )
    assert got["phase_one"] == 3 and got["reused"] == 0


def test_shapes_are_bounded(tmp_path: Path) -> None:
    got = child(
        tmp_path,
        """
with make(reuse=True) as plan:
    for tokens in range(1, 33):
        step(plan, tokens=tokens, topk=1)
    told = plan.counters()
    alive = counts()
    step(plan, tokens=32, topk=1)
    again = plan.counters()
say({"told": told, "alive": alive, "again": again, "end": counts()})
""",
    )
    assert got["told"]["shapes"] == 16 and got["told"]["evicted"] == 16
    constant = 1 + 6 * 2
    assert got["alive"]["tensors"] - got["alive"]["dead_tensors"] == constant + 16 * 5
    assert got["alive"]["dead_executors"] == 16
    assert got["again"]["reused"] == 1  # the latest shape is still there
    assert got["end"]["tensors"] == got["end"]["dead_tensors"]
    assert got["end"]["dead_executors"] == 32


def test_vendor_failures_name_the_call_and_leave_the_plan_usable(tmp_path: Path) -> None:
    got = child(
        tmp_path,
        """
seen = []
for reuse in (False, True):
    with make(reuse=reuse) as plan:
        for name in ("phase_one_status", "phase_two_status"):
            status_of(name).value = 561002
            seen.append(refused(lambda: step(plan)))
            status_of(name).value = 0
            step(plan)
            seen.append(launched[3] - base)
    status_of("phase_two_status").value = 361001
    with make(reuse=True) as plan:
        status_of("phase_two_status").value = 0
        step(plan)
        status_of("phase_two_status").value = 361001
        seen.append(refused(lambda: step(plan)))  # a kept executor that failed is not kept
        status_of("phase_two_status").value = 0
        step(plan)
        seen.append(plan.counters()["phase_one"])
end = counts()
say({"seen": seen, "left": end["tensors"] - end["dead_tensors"]})
""",
    )
    for at in (0, 6):
        one, fine, two, again, kept, asked = got["seen"][at : at + 6]
        assert "aclnnMegaMoeGetWorkspaceSize" in one and "561002" in one
        assert "AclError: aclnnMegaMoe " in two.replace("failed", " ") or "aclnnMegaMoe" in two
        assert "GetWorkspaceSize" not in two
        assert fine == again == 0x40000
        assert "361001" in kept and asked == 2
    assert got["left"] == 0


def test_a_workspace_that_cannot_be_had_leaves_no_executor(tmp_path: Path) -> None:
    got = child(
        tmp_path,
        """
class Empty(Scratch):
    def take(self, nbytes):
        raise MemoryError(nbytes)
class Small(Scratch):
    def take(self, nbytes):
        self.address, self.nbytes = base + 0xC0000, nbytes - 1
with make() as plan:
    try:
        step(plan, scratch=Empty())
        seen = "launched"
    except MemoryError as error:
        seen = str(error)
    small = refused(lambda: step(plan, scratch=Small()))
    held = number_of("launches").value
    step(plan)
say({"seen": seen, "small": small, "held": held, "launches": number_of("launches").value,
     "dead": counts()["dead_executors"]})
""",
    )
    assert got["seen"] == "4096" and got["held"] == 0 and got["launches"] == 1
    assert "4096" in got["small"] and got["dead"] == 2


GUARDS = """
plan = make()
step(plan)
before = number_of("launches").value
x, ids, weights, mask, y, out = addresses()
scratch = Scratch()
go = lambda *a: refused(lambda: plan.step(T, K, *a, 1, scratch))
seen = {
    "misaligned": go(x + 16, ids, weights, 0, y, out),
    "misaligned mask": go(x, ids, weights, mask + 8, y, out),
    "same": go(x, ids, weights, 0, x, out),
    "overlap": go(x, ids, weights, 0, y, y + 64),
    "ids over x": go(x, x + 32, weights, 0, y, out),
}
touching = go(x, x + T * H * 2, weights, 0, y, out)
seen["bad key"] = refused(lambda: plan.rebind("x", base))
plan.close()
plan.close()
seen["closed"] = refused(lambda: step(plan))
seen["closed rebind"] = refused(lambda: plan.rebind("weight1", base))
launches = number_of("launches").value - before
say({"seen": seen, "touching": touching, "launches": launches, "counters": plan.counters()})
"""


def test_guards_on_addresses_and_on_a_closed_plan(tmp_path: Path) -> None:
    got = child(tmp_path, GUARDS)
    seen = got["seen"]
    assert "x does not start at a multiple of 32" in seen["misaligned"]
    assert "xActiveMaskOptional" in seen["misaligned mask"]
    assert "x and yOut share memory" in seen["same"]
    assert "yOut and expertTokenNumsOut share memory" in seen["overlap"]
    assert "x and topkIds share memory" in seen["ids over x"]
    assert "closed" in seen["closed"] and "closed" in seen["closed rebind"]
    assert seen["bad key"]
    assert got["touching"] == "" and got["launches"] == 1  # neighbours are not overlapping
    assert got["counters"] == {}


def test_moved_constants_are_described_anew(tmp_path: Path) -> None:
    got = child(
        tmp_path,
        """
where = [p.key for p in symbols.variant.params].index("weight1")
with make(reuse=True) as plan:
    step(plan)
    step(plan)
    before = slots[where].number - base
    plan.rebind("weight1", base + 0x20000)
    step(plan)
    after, asked = slots[where].number - base, plan.counters()["phase_one"]
    plan.rebuild()
    step(plan)
    again = slots[where].number - base
end = counts()
say({"before": before, "after": after, "again": again, "asked": asked,
     "left": [end["tensors"] - end["dead_tensors"], end["lists"] - end["dead_lists"],
              end["repeatable"] - end["dead_executors"]]})
""",
    )
    assert got["before"] == 0x1000 + 0x400 * 4 and got["after"] == got["again"] == 0x20000
    assert got["asked"] == 2  # what was prepared with the old address is forgotten
    assert got["left"] == [0, 0, 0]


def test_refusals_when_a_plan_is_made(tmp_path: Path) -> None:
    got = child(
        tmp_path,
        """
from xmoe.kernels.acl import variants
b = variants.VARIANTS["B"]
swapped = list(b.params)
swapped[11], swapped[12] = swapped[12], swapped[11]
other = dataclasses.replace(b, params=tuple(swapped))
identified = dataclasses.replace(symbols.identified, variant=other)
edited = dataclasses.replace(symbols, identified=identified)
values = constants()
missing = dict(values)
del missing["weight1"]
bad = lambda **kw: refused(lambda: make(**kw))
seen = {
    "stale": refused(lambda: LaunchPlan(runtime, edited, values, hidden=H, local_experts=L)),
    "missing": refused(lambda: LaunchPlan(runtime, symbols, missing, hidden=H, local_experts=L)),
    "unknown": bad(wieght1=1),
    "tensor for list": bad(weight1=Packed(LISTS, (4, 8), "bfloat16", is_list=False)),
    "list for tensor": bad(context=Packed(LISTS, (8,), "int32", 2)),
    "misaligned": bad(weight1=Packed(LISTS + 16, (4, 8), "bfloat16", 2)),
    "misaligned step": bad(weight1=Packed(LISTS, (4, 8), "bfloat16", 2, step_bytes=72)),
    "null": bad(weight1=Packed(0, (4, 8), "bfloat16", 2)),
    "text": bad(moeExpertNum="8"),
}
end = counts()
say({"seen": seen, "left": end["tensors"] - end["dead_tensors"], "prepared":
     number_of("prepared").value})
""",
    )
    seen = got["seen"]
    assert "LibraryError" in seen["stale"] and "build.py" in seen["stale"]
    assert "weight1" in seen["missing"] and "did you mean 'weight1'" in seen["unknown"]
    for name in ("tensor for list", "list for tensor", "misaligned", "misaligned step", "null"):
        assert seen[name].startswith("ConfigError"), name
    assert "moeExpertNum" in seen["text"]
    assert got["left"] == 0 and got["prepared"] == 0


def test_threads_take_turns_on_one_plan(tmp_path: Path) -> None:
    got = child(
        tmp_path,
        """
wrong = []
def work(number):
    scratch = Scratch()
    for turn in range(400):
        step(plan, number, tokens=1 + (number + turn) % 3, scratch=scratch)
        if turn % 50 == number:
            plan.rebind("weight1", LISTS + 0x400 * (turn % 7))
with make(reuse=True) as plan:
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    told = plan.counters()
end = counts()
say({"launches": number_of("launches").value, "told": told,
     "left": [end["tensors"] - end["dead_tensors"], end["lists"] - end["dead_lists"],
              end["repeatable"] - end["dead_executors"]]})
""",
    )
    assert got["told"]["launches"] == 1600 and got["left"] == [0, 0, 0]
