# SPDX-License-Identifier: Apache-2.0
"""What phase one of MegaMoe refuses, with which code and in which order, and what it accepts.

Source: ops-transformer 9.1.0, mc2/mega_moe op_api and arch22 tiling (`xmoe.policy` has the limits a
second time, for the product).
"""

from __future__ import annotations

from typing import Any

from xmoe.conformance.case import Case, NotHere, add, case, require
from xmoe.conformance.phase_one import Answer, Sizes, T, ask, variant_of
from xmoe.conformance.session import Session
from xmoe.layout import WindowSpec, required_ccl_buffer_bytes

NULL, INVALID, TILING = 161001, 161002, 561002
_BASE = Sizes()
_RELIES = "errors of phase one"

_ORDER = ("context", "x", "topkIds", "topkWeights", "weight1", "weight2", "yOut",
          "expertTokenNumsOut")  # fmt: skip

# name, what is wrong, sizes, arguments, code. Later faults are added where the order matters.
_Fault = tuple[str, str, Sizes, dict[str, Any], int]
_NULLS: list[_Fault] = [
    (f"null_{key}", f"a null {key} gives 161001, before anything that is looked at later", _BASE,
     {**dict.fromkeys(_ORDER[i:]), "moeExpertNum": 0}, NULL)
    for i, key in enumerate(_ORDER)
]  # fmt: skip
_INTEGERS: list[_Fault] = [
    ("experts_zero", "moeExpertNum 0", _BASE, {"moeExpertNum": 0, "epWorldSize": 0}, INVALID),
    ("ep_negative", "epWorldSize below 1", _BASE, {"epWorldSize": -1}, INVALID),
    ("max_recv_negative", "maxRecvTokenNum below 0, before commAlg", _BASE,
     {"maxRecvTokenNum": -1, "commAlg": "fullmesh"}, INVALID),
]  # fmt: skip
_TILING: list[_Fault] = [
    ("comm_alg", "a commAlg other than the empty text, before the shapes", Sizes(bs=4097),
     {"commAlg": "fullmesh"}, TILING),
    ("rows_high", "more than 4096 rows, before the attributes", Sizes(bs=4097), {"epWorldSize": 3},
     TILING),
    ("rows_zero", "no rows", _BASE, {"x": T((0, 1024)), "yOut": T((0, 1024))}, TILING),
    ("hidden_low", "H below 1024", Sizes(hidden=512), {}, TILING),
    ("hidden_step", "H that is no multiple of 512", Sizes(hidden=1280), {}, TILING),
    ("hidden_high", "H above 8192", Sizes(hidden=8704), {}, TILING),
    ("inter_low", "I below 512", Sizes(inter=256), {}, TILING),
    ("inter_step", "I that is no multiple of 512", Sizes(inter=1280), {}, TILING),
    ("inter_high", "I above 3072", Sizes(inter=3584), {}, TILING),
    ("topk_high", "K above 16", Sizes(topk=17), {}, TILING),
    ("local_experts_high", "more than 128 experts per rank", Sizes(experts=129), {}, TILING),
    ("x_rank", "x of three dimensions", _BASE, {"x": T((1, 1, 1024))}, TILING),
    ("x_dtype", "x of float32", _BASE, {"x": T((1, 1024), "float32")}, TILING),
    ("ids_dtype", "ids of int64", _BASE, {"topkIds": T((1, 2), "int64")}, TILING),
    ("ids_rows", "ids with other rows than x", _BASE, {"topkIds": T((2, 2), "int32")}, TILING),
    ("topk_weights_dtype", "weights of int32", _BASE, {"topkWeights": T((1, 2), "int32")}, TILING),
    ("topk_weights_shape", "weights with other columns than ids", _BASE,
     {"topkWeights": T((1, 3), "float32")}, TILING),
    ("context_dtype", "a context of float32", _BASE, {"context": T((4100,), "float32")}, TILING),
    ("weight_packed", "all experts in one tensor of three dimensions", _BASE,
     {"weight1": [T((2, 1024, 2048))] * 2}, TILING),
    ("weight_lengths", "lists of different length", _BASE, {"weight2": [T((1024, 1024))]}, TILING),
    ("weight_columns", "weight1 with columns that are not 2I", _BASE,
     {"weight1": [T((1024, 4096))] * 2}, TILING),
    ("weight_rows", "weight1 with rows that are not H", _BASE,
     {"weight1": [T((1536, 2048))] * 2}, TILING),
    ("weight_dtype", "weights of float32", _BASE,
     {"weight1": [T((1024, 2048), "float32")] * 2}, TILING),
    ("mask_rank", "a mask of two dimensions", _BASE,
     {"xActiveMaskOptional": T((1, 1), "int8")}, TILING),
    ("mask_dtype", "a mask of int32", _BASE, {"xActiveMaskOptional": T((1,), "int32")}, TILING),
    ("mask_length", "a mask of another length", _BASE,
     {"xActiveMaskOptional": T((2,), "int8")}, TILING),
    ("experts_high", "more than 1024 experts", _BASE, {"moeExpertNum": 1025}, TILING),
    ("ep_not_listed", "an EP size that is no power of two", _BASE, {"epWorldSize": 6}, TILING),
    ("ep_one", "EP size 1", _BASE, {"epWorldSize": 1}, TILING),
    ("quant_mode", "quantised dispatch of bf16 weights", _BASE, {"dispatchQuantMode": 2}, TILING),
    ("quant_out", "an int8 output type without quantisation", _BASE,
     {"dispatchQuantOutDtype": 2}, TILING),
    ("combine_quant", "quantised combine", _BASE, {"combineQuantMode": 3}, TILING),
    ("activation", "an activation other than swiglu", _BASE, {"activation": "gelu"}, TILING),
    ("clamp_negative", "a clamp below 0", _BASE, {"activationClamp": -1.0}, TILING),
    ("clamp_nan", "a clamp that is no number", _BASE, {"activationClamp": float("nan")}, TILING),
    ("y_dtype", "y of float32, before the buffer", _BASE,
     {"yOut": T((1, 1024), "float32"), "cclBufferSize": 0}, TILING),
    ("y_shape", "y of another width", _BASE, {"yOut": T((1, 512))}, TILING),
    ("counts_dtype", "counts of float32", _BASE,
     {"expertTokenNumsOut": T((2,), "float32")}, TILING),
    ("counts_length", "counts of another length than the lists", _BASE,
     {"expertTokenNumsOut": T((4,), "int32")}, TILING),
    ("buffer_zero", "no communication buffer", _BASE, {"cclBufferSize": 0}, TILING),
]  # fmt: skip


def _refusal(fault: _Fault) -> Case:
    name, wrong, sizes, changes, code = fault

    def run(session: Session) -> str:
        if code == INVALID and not variant_of(session).checks_integers:
            raise NotHere("this ABI variant has no integer checks")
        changed = {k: v for k, v in changes.items() if v is None or variant_of(session).has(k)}
        answer = ask(session, sizes, changed if len(changed) or not changes else changes)
        require(answer.code == code, f"wanted {code}, got {_words(answer)}")
        require(not answer.made, f"{code}, but an op_executor was made")
        require(answer.text != "", f"{code} without a text")
        return _words(answer)

    meaning = wrong if code == NULL else f"phase one refuses {wrong} with {code}"
    return Case(f"refuse.{name}", meaning, _RELIES, run)


def _words(answer: Answer) -> str:
    return f"{answer.code}: {answer.text[:110]!r}" if answer.code else "0, accepted"


for _one in (*_NULLS, *_INTEGERS, *_TILING):
    add(_refusal(_one))

_ACCEPTED: list[tuple[str, str, Sizes, dict[str, Any]]] = [
    ("smallest", "the smallest call", _BASE, {}),
    ("rows_4096", "4096 rows", Sizes(bs=4096), {}),
    ("hidden_8192", "H of 8192", Sizes(hidden=8192), {}),
    ("inter_3072", "I of 3072", Sizes(inter=3072), {}),
    ("inter_512", "I of 512, which profile seed relies on", Sizes(inter=512), {}),
    ("topk_16", "K of 16", Sizes(topk=16), {}),
    ("experts_128", "128 experts per rank", Sizes(experts=128), {}),
    ("ep_32", "EP 32 with 1024 experts", Sizes(experts=32, ep=32), {}),
    ("out_dtype_bf16", "the output type bf16 by name", _BASE, {"dispatchQuantOutDtype": 27}),
    ("clamp_zero", "clamp 0 for none", _BASE, {"activationClamp": 0.0}),
    ("mask", "a mask of int8", _BASE, {"xActiveMaskOptional": T((1,), "int8")}),
]


def _acceptance(name: str, what: str, sizes: Sizes, changes: dict[str, Any]) -> Case:
    def run(session: Session) -> str:
        answer = ask(session, sizes, changes)
        require(answer.code == 0 and answer.made, f"refused with {_words(answer)}")
        return f"accepted, workspace {answer.workspace_bytes} bytes"

    return Case(f"accept.{name}", f"phase one accepts {what}", "policy's limits", run)


for _entry in _ACCEPTED:
    add(_acceptance(*_entry))


@case(
    "window.smallest_buffer",
    "the buffer size that xmoe.layout computes is the smallest that is accepted",
    "policy, MegaMoeCommResource",
)
def smallest_buffer(s: Session) -> str:
    said = []
    for bs, topk, hidden, ep in ((1, 2, 1024, 2), (64, 8, 2048, 8), (512, 8, 4096, 16)):
        spec = WindowSpec(bs, hidden, topk, ep, 2)
        need = required_ccl_buffer_bytes("A3", spec)
        sizes = Sizes(bs=bs, topk=topk, hidden=hidden, ep=ep)
        exact = ask(s, sizes, {"cclBufferSize": need})
        below = ask(s, sizes, {"cclBufferSize": need - 1})
        require(
            (exact.code, below.code) == (0, TILING),
            f"{need} bytes for {sizes}: {_words(exact)}; one less: {_words(below)}",
        )
        said.append(str(need))
    return f"exact at {', '.join(said)} bytes"


@case("workspace.grows", "the workspace grows with the rows a rank may receive", "WorkspaceCache")
def workspace_grows(s: Session) -> str:
    few, more = (ask(s, _BASE, {"maxRecvTokenNum": n}).workspace_bytes for n in (100, 10_100))
    require(0 < few < more, f"{few} bytes for 100 rows, {more} for 10100")
    return f"{few} bytes for 100 rows, {more} for 10100"


@case("executor.fresh", "phase one makes an op_executor of its own each time", "op")
def executor_fresh(s: Session) -> str:
    answers = [ask(s, _BASE, {}) for _ in range(100)]
    require(all(a.code == 0 and a.made for a in answers), "one of 100 calls made none")
    return "100 calls, 100 op_executors, all destroyed"
