# SPDX-License-Identifier: Apache-2.0
"""What a launch plan refuses by name: sizes, addresses and constants that C would take on trust, a
workspace that gives something else, use of the plan while it waits for one."""

from __future__ import annotations

from pathlib import Path

from support.plan_stubs import child

STEPS = """
plan = make()
step(plan)
before = number_of("launches").value
x, ids, weights, mask, y, out = addresses()
scratch = Scratch()
def go(*a, tokens=T, topk=K, stream=1, workspace=scratch):
    return refused(lambda: plan.step(tokens, topk, *a, stream, workspace))
right = (x, ids, weights, 0, y, out)
seen = {
    "tokens": [go(*right, tokens=n) for n in (-1, -2, 1 << 56, 1 << 62)],
    "topk": [go(*right, topk=n) for n in (-1, 1 << 61)],
    "end": [go((1 << 64) - 64, *right[1:]), go(*right[:4], (1 << 64) - 32, out)],
    "numbers": [go(*right, tokens=n) for n in (1 << 63, -(1 << 64), 1.0, None, "2", [2])],
    "addresses": [go(n, *right[1:]) for n in (1 << 64, -1, -32, None, b"", 1.5)],
    "stream": [go(*right, stream=n) for n in (1 << 64, -1, None)],
    "workspace": [go(*right, workspace=None), go(*right, workspace=5)],
}
counts_before = plan.counters()
fine = go(*right)
say({"seen": seen, "launches": number_of("launches").value - before, "fine": fine,
     "shapes": counts_before["shapes"], "closed": plan.close()})
"""


def test_steps_with_odd_numbers(tmp_path: Path) -> None:
    got = child(tmp_path, STEPS)
    seen = got["seen"]
    for name in ("tokens", "topk", "end"):
        for text in seen[name]:
            assert text.startswith("ConfigError") and "would leave the address space" in text, name
    for name in ("numbers", "addresses", "stream", "workspace"):
        for text in seen[name]:
            assert text.startswith("ConfigError") and "something else than numbers" in text, name
            assert "allowed: " in text
    assert got["fine"] == "" and got["launches"] == 1
    assert got["shapes"] == 1, "a shape that is refused takes no place"


INTERRUPTED = """
def elsewhere(plan):
    "Whether another thread can still use the plan."
    thread = threading.Thread(target=lambda: refused(plan.rebuild), daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()
def interrupted(plan, before):
    "The interrupt comes before the native part was entered, or before its status is known."
    real = plan._step
    def once(*arguments):
        plan._step = real
        if not before:
            real(*arguments)
        raise KeyboardInterrupt
    plan._step = once
    try:
        step(plan)
    except KeyboardInterrupt:
        return "interrupted"
seen = {}
with make() as plan:
    seen["known"] = [interrupted(plan, False), elsewhere(plan), refused(lambda: step(plan))]
    dead = counts()["dead_executors"]
    seen["entered"] = [interrupted(plan, True), elsewhere(plan), refused(lambda: step(plan))]
class Waits(Scratch):
    "Another thread's step, which keeps the plan while this one is interrupted."
    def take(self, nbytes):
        super().take(nbytes)
        thread = threading.Thread(target=lambda: said.append(interrupted(plan, True)))
        thread.start()
        thread.join(10)
        said.append(thread.is_alive())
with make() as plan:
    said, before = [], number_of("launches").value
    said.append(refused(lambda: step(plan, scratch=Waits())))
    seen["other"] = [*said, number_of("launches").value - before, elsewhere(plan)]
class Swallows(Scratch):
    "Its own use of the plan is interrupted, which it tells nobody: the step it was for is over."
    def take(self, nbytes):
        super().take(nbytes)
        interrupted(plan, True)
with make() as plan:
    said = refused(lambda: step(plan, scratch=Swallows()))
    seen["swallowed"] = [said, elsewhere(plan), refused(lambda: step(plan))]
say({"seen": seen, "dead": dead})
"""


def test_an_interrupt_leaves_the_plan_to_others(tmp_path: Path) -> None:
    got = child(tmp_path, INTERRUPTED)
    assert got["seen"]["known"] == ["interrupted", True, ""]
    assert got["seen"]["entered"] == ["interrupted", True, ""]
    assert got["seen"]["other"] == ["interrupted", False, "", 1, True]
    text, free, again = got["seen"]["swallowed"]
    assert "was used for something else" in text and free and again == ""
    assert got["dead"] == 1, "the op_executor of the interrupted step is destroyed"


WAITING = """
class Other(Scratch):
    def __init__(self, act):
        super().__init__()
        self.act = act
    def take(self, nbytes):
        super().take(nbytes)
        self.act(self)
def to(address, nbytes):
    def act(scratch):
        scratch.address, scratch.nbytes = address, nbytes
    return act
def elsewhere(plan):
    "Whether another thread can still use the plan."
    thread = threading.Thread(target=lambda: refused(plan.rebuild), daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()
def raises(scratch):
    raise MemoryError("no more")
seen = {}
for name, act in {
    "text": to("a", 4096), "too large": to(1 << 64, 4096), "negative": to(base, -1),
    "none": to(None, None), "small": to(base + 0xC0000, 1), "null": to(0, 4096),
    "steps": lambda s: step(plan), "rebinds": lambda s: plan.rebind("weight1", base),
    "rebuilds": lambda s: plan.rebuild(), "closes": lambda s: plan.close(),
}.items():
    plan = make()
    said = refused(lambda: step(plan, scratch=Other(act)))
    seen[name] = [said, elsewhere(plan), refused(lambda: step(plan))]
    plan.close()
plan = make()
try:
    step(plan, scratch=Other(raises))
except MemoryError as error:
    seen["raises"] = [str(error), elsewhere(plan), refused(lambda: step(plan))]
plan.close()
end = counts()
left = [end["tensors"] - end["dead_tensors"], end["lists"] - end["dead_lists"]]
say({"seen": seen, "left": left})
"""


def test_a_workspace_that_gives_something_else(tmp_path: Path) -> None:
    got = child(tmp_path, WAITING)
    seen = got["seen"]
    words = {
        **dict.fromkeys(("text", "too large", "negative", "none"), "the address or size"),
        **dict.fromkeys(("small", "null"), "got no workspace"),
        **dict.fromkeys(("steps", "rebinds", "rebuilds"), "was used for something else"),
        "closes": "launch plan is closed",
    }
    for name, word in words.items():
        text, free, again = seen[name]
        assert text.startswith("ConfigError") and word in text, (name, text)
        assert free, f"{name}: the plan stays locked"
        assert again == "" or (name == "closes" and "closed" in again), (name, again)
    assert seen["raises"] == ["no more", True, ""]
    assert got["left"] == [0, 0]


MADE = """
def bad(**kw):
    return refused(lambda: make(**kw))
def layer(hidden, local):
    return refused(lambda: LaunchPlan(runtime, symbols, constants(), hidden=hidden,
                                      local_experts=local))
pack = lambda **kw: bad(weight1=Packed(**{"address": LISTS, "shape": (4, 8), "dtype": "bfloat16",
                                          "count": 2, **kw}))
seen = {
    "sizes": [layer(n, L) for n in (-1, -2, -3, 1 << 31, 1.0, None, "tokens ", True)]
             + [layer(H, n) for n in (-1, 1 << 64, "second")],
    "shape": [pack(shape=s) for s in ((1,) * 9, (-1, 4), (1 << 31, 1 << 31), 7, None, ("4", 8))],
    "storage": [pack(storage=s) for s in ((1,) * 9, (-4,), 7.5)],
    "numbers": [pack(count=n) for n in (0, 4097, 1 << 64, None, 1.5)]
               + [pack(address=n) for n in (0, -32, 1 << 64, "x", None)]
               + [pack(step_bytes=n) for n in (-64, 1 << 64, 1.5)],
    "end": [pack(address=(1 << 64) - 64, step_bytes=1 << 62)],
    "type": [pack(dtype=n) for n in ("bfloat17", 99, None, [1])],
    "format": [pack(format=n) for n in ("NZ", 77, None, [1])],
}
plan = make()
seen["rebind"] = [refused(lambda: plan.rebind("weight1", n)) for n in (0, -32, 16, 1 << 64, None)]
seen["key"] = [refused(lambda: plan.rebind(k, base)) for k in ("x", "moeExpertNum", 3, None, [])]
fine = refused(lambda: step(plan))
plan.close()
end = counts()
say({"seen": seen, "fine": fine, "left": end["tensors"] - end["dead_tensors"]})
"""


def test_constants_that_c_would_take_on_trust(tmp_path: Path) -> None:
    got = child(tmp_path, MADE)
    for name, texts in got["seen"].items():
        for text in texts:
            assert text.startswith("ConfigError") and "allowed: " in text, (name, text)
    assert all("rebind of" in text for text in got["seen"]["key"])
    assert got["fine"] == "" and got["left"] == 0
