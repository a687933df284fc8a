# SPDX-License-Identifier: Apache-2.0
"""Misuse and faults of aclnnMegaMoe on the stream: caught in strict mode, harmful without it.

The operator checks none of this. Strict mode turns what would be silent corruption or an endless
wait into a device error with a text; with XSD_STRICT=0 the software device does the harm, within
bounds.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forked import Ended, fork_ranks
from support.vendor import BF16, Batch, Call, Group, Layer, Soft, aligned, from_bf16, place
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors

pytestmark = pytest.mark.ep

HIDDEN, INTER, EXPERTS, TOPK = 1024, 512, 4, 2
TIMEOUT, EXCEPTION, REMOTE = 507034, 507035, 507057
ENV = {"HCCL_BUFFSIZE": "16", "XSD_WAIT_TIMEOUT_MS": "10000"}
LOOSE = {**ENV, "XSD_STRICT": "0", "XSD_WAIT_TIMEOUT_MS": "1500"}
LAYER = Layer.random(EXPERTS, HIDDEN, INTER)


def batch(rank: int, tokens: int = 3, seed: int = 0) -> Batch:
    return Batch.random(tokens, TOPK, EXPERTS, HIDDEN, 31 * seed + rank)


def right(data: Batch, y: np.ndarray) -> bool:
    want = moe_reference(from_bf16(data.x), data.ids, data.weights, *LAYER.values)
    return bool(row_errors(from_bf16(y), want).max() <= BF16_ROW_TOLERANCE)


def one_launch(
    rank: int, folder: Path, inputs: list[Batch], changes: list[dict[str, Any]]
) -> tuple[int, str, np.ndarray, float]:
    soft = Soft(rank)
    group = Group(soft, rank, len(inputs), folder)
    call = Call.make(soft, group, LAYER, inputs[rank], **changes[rank])
    stream = soft.stream()
    start = time.monotonic()
    soft.launch(call.args, stream)
    code, text = soft.synchronize(stream)
    group.close()
    return code, text, call.y, time.monotonic() - start


def outcomes(
    inputs: list[Batch],
    *,
    env: dict[str, str] = ENV,
    changes: dict[int, dict[str, Any]] | None = None,
) -> list[tuple[int, str, np.ndarray, float]]:
    per_rank = [(changes or {}).get(rank, {}) for rank in range(len(inputs))]
    ended = fork_ranks(one_launch, len(inputs), inputs, per_rank, env=env)
    return [end.value for end in ended]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([2, 2], "names expert 2 twice"),
        ([1, -1], "topk_ids[1, 1]=-1 is outside 0..3"),
        ([EXPERTS, 0], "topk_ids[1, 0]=4 is outside 0..3"),
        ([0, 2**31 - 1], "=2147483647 is outside 0..3"),
    ],
)
def test_bad_expert_ids(ids: list[int], text: str) -> None:
    inputs = [batch(rank) for rank in range(2)]
    inputs[1].ids[1] = ids
    (code0, text0, _, seconds0), (code1, text1, _, _) = outcomes(inputs)
    assert code1 == EXCEPTION and text in text1
    # The other rank hears why at once instead of waiting for counts that never come.
    assert code0 == REMOTE and text in text0 and seconds0 < 5


def test_bad_expert_ids_do_harm_without_strict_mode() -> None:
    inputs = [batch(rank) for rank in range(2)]
    inputs[1].ids[1] = [2**31 - 1, -7]
    (code0, _, y0, _), (code1, _, y1, _) = outcomes(inputs, env=LOOSE)
    assert (code0, code1) == (0, 0)  # nobody says a word
    assert right(inputs[0], y0)
    # The row is what the window held; a fresh one held zeros.
    assert not y1[1].any() and y1[0].any() and y1[2].any()


def _unequal(kind: str) -> tuple[list[Batch], str]:
    inputs = [batch(rank) for rank in range(4)]
    if kind == "bs":
        inputs[2] = batch(2, tokens=5)
    else:
        inputs[2] = Batch.random(3, TOPK + 1, EXPERTS, HIDDEN, 2)
    return inputs, kind + "="


@pytest.mark.parametrize("kind", ["bs", "K"])
def test_ranks_that_disagree_on_sizes(kind: str) -> None:
    inputs, text = _unequal(kind)
    results = outcomes(inputs)
    assert {code for code, *_ in results} <= {EXCEPTION, REMOTE}
    assert EXCEPTION in {code for code, *_ in results}
    assert all(text in said and seconds < 5 for _, said, _, seconds in results)


def test_ranks_that_disagree_on_max_recv() -> None:
    results = outcomes([batch(0), batch(1)], changes={1: {"maxRecvTokenNum": 7}})
    assert all(code in (EXCEPTION, REMOTE) and "max_recv" in text for code, text, *_ in results)


def test_ranks_that_disagree_on_sizes_corrupt_without_strict_mode() -> None:
    inputs = _unequal("bs")[0]
    results = outcomes(inputs, env=LOOSE)
    assert not all(
        code == 0 and right(data, y) for data, (code, _, y, _) in zip(inputs, results, strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"moeExpertNum": 8}, "moe_expert_num=8"),
        ({"cclBufferSize": 1 << 40}, "cclBufferSize=1099511627776"),
        ({"epWorldSize": 4}, "ep_world_size=4"),
    ],
)
def test_arguments_that_do_not_fit_the_group(changes: dict[str, Any], text: str) -> None:
    both = {0: changes, 1: changes}
    for code, said, _, _ in outcomes([batch(0), batch(1)], changes=both):
        assert code in (EXCEPTION, REMOTE) and text in said


def test_window_smaller_than_claimed() -> None:
    both = {rank: {"cclBufferSize": 1 << 40} for rank in range(2)}
    for strict in ("1", "0"):
        env = {**ENV, "HCCL_BUFFSIZE": "1", "XSD_STRICT": strict}
        for code, text, _, _ in outcomes([batch(0), batch(1)], changes=both, env=env):
            assert code == EXCEPTION and "the window has 1048576 bytes" in text


def _odd_descriptors(rank: int, folder: Path, what: str) -> tuple[int, str]:
    soft = Soft(rank)
    group = Group(soft, rank, 2, folder)
    call = Call.make(soft, group, LAYER, batch(rank))
    if what == "bf16 weights":
        call.args["topkWeights"] = soft.tensor(aligned((3, TOPK), np.uint16), BF16)
    elif what == "no context":
        group.context[:] = 0
    elif what == "wild context":
        group.context[:4].view(np.uint64)[1] = 0x1234500
    else:
        call.args["context"] = soft.tensor(group.context[:2])
    stream = soft.stream()
    soft.launch(call.args, stream)
    result = soft.synchronize(stream)
    group.close()
    return result


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("bf16 weights", "reads them as FLOAT"),
        ("no context", "context"),
        ("wild context", "context"),
        ("short context", "at least 4"),
    ],
)
def test_tensors_the_kernel_misreads(what: str, text: str) -> None:
    for end in fork_ranks(_odd_descriptors, 2, what, env=ENV):
        code, said = end.value
        assert code in (EXCEPTION, REMOTE) and text in said


def _two_streams(rank: int, folder: Path, rounds: int) -> list[tuple[int, str, bool]]:
    soft = Soft(rank)
    group = Group(soft, rank, 2, folder)
    streams = [soft.stream(), soft.stream()]
    work = []
    for step in range(rounds):
        for lane, stream in enumerate(streams):
            data = batch(rank, seed=2 * step + lane)
            call = Call.make(soft, group, LAYER, data)
            soft.launch(call.args, stream)
            work.append((data, call, lane))
    ends = [soft.synchronize(stream) for stream in streams]
    group.close()
    return [(*ends[lane], right(data, call.y)) for data, call, lane in work]


def test_two_streams_on_one_window_are_caught() -> None:
    env = {**ENV, "XSD_DELAY_SEED": "3", "XSD_DELAY_MAX_US": "2000"}
    start = time.monotonic()
    results = [r for end in fork_ranks(_two_streams, 2, 6, env=env) for r in end.value]
    assert time.monotonic() - start < 15
    assert EXCEPTION in {code for code, _, _ in results}
    assert any("window" in text for code, text, _ in results if code == EXCEPTION)


def test_two_streams_on_one_window_do_harm_without_strict_mode() -> None:
    env = {**LOOSE, "XSD_DELAY_SEED": "3", "XSD_DELAY_MAX_US": "2000"}
    results = [r for end in fork_ranks(_two_streams, 2, 10, env=env) for r in end.value]
    assert not all(code == 0 and fine for code, _, fine in results)


def _dying(rank: int, folder: Path, when: str) -> tuple[int, str, float] | None:
    soft = Soft(rank)
    group = Group(soft, rank, 4, folder)
    call = Call.make(soft, group, LAYER, batch(rank))
    stream = soft.stream()
    if when == "while all wait for another":  # ranks 1 and 3 do: one finds out, and tells the other
        time.sleep({0: 1.0, 2: 0.4}.get(rank, 0.0))
    if rank == 2:
        if when == "after some launches":
            soft.launch(call.args, stream)
            assert soft.synchronize(stream)[0] == 0
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        start = time.monotonic()
        soft.launch(call.args, stream)
        code, text = soft.synchronize(stream)
        if code != 0:
            return code, text, time.monotonic() - start
    return None


@pytest.mark.parametrize(
    "when", ["before the launch", "after some launches", "while all wait for another"]
)
def test_dead_peer_ends_the_wait(when: str) -> None:
    ended: list[Ended] = fork_ranks(_dying, 4, when, env=ENV, check=False)
    assert ended[2].signal == signal.SIGKILL
    for end in ended:
        if end.rank != 2:
            assert not end.error and end.value is not None
            code, text, seconds = end.value
            assert code == REMOTE and "rank 2" in text and seconds < 5


def _absent(rank: int, folder: Path) -> list[tuple[int, str]]:
    """Rank 1 does not take part in the first launch; afterwards both try once more."""
    soft = Soft(rank)
    group = Group(soft, rank, 2, folder)
    results = []
    for step in range(2):
        stream = soft.stream()
        if rank == 0 or step == 1:
            call = Call.make(soft, group, LAYER, batch(rank))
            soft.launch(call.args, stream)
            results.append(soft.synchronize(stream))
        else:
            time.sleep(1.5)
    group.close()
    return results


def test_absent_peer_times_out_and_poisons_the_window() -> None:
    env = {**ENV, "XSD_WAIT_TIMEOUT_MS": "700"}
    first, second = (end.value for end in fork_ranks(_absent, 2, env=env))
    assert first[0][0] == TIMEOUT and "XSD_WAIT_TIMEOUT_MS" in first[0][1]
    for code, _ in (first[1], second[0]):
        assert code in (EXCEPTION, REMOTE)


def _after_abort(rank: int, folder: Path) -> list[tuple[int, str]]:
    soft = Soft(rank)
    group = Group(soft, rank, 2, folder)
    bad = batch(rank)
    if rank == 1:
        bad.ids[0] = [3, 3]
    results = []
    for data in (bad, batch(rank), batch(rank)):
        if len(results) == 2:  # what the operator's users must do as well: zero it, on every rank
            _meet(folder, rank, "stopped")
            assert (
                soft.acl.aclrtMemset(group.buffer, group.buffer_bytes, 0, group.buffer_bytes) == 0
            )
            _meet(folder, rank, "zeroed")
        call = Call.make(soft, group, LAYER, data)
        stream = soft.stream()
        soft.launch(call.args, stream)
        results.append(soft.synchronize(stream))
    group.close()
    return results


def _meet(folder: Path, rank: int, name: str) -> None:
    (folder / f"{name}{rank}").touch()
    deadline = time.monotonic() + 20
    while not (folder / f"{name}{1 - rank}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_aborted_launch_poisons_the_window_until_it_is_zeroed() -> None:
    for end in fork_ranks(_after_abort, 2, env=ENV):
        aborted, later, healed = end.value
        assert aborted[0] in (EXCEPTION, REMOTE) and "expert 3 twice" in aborted[1]
        assert later[0] == aborted[0] and "dirty" in later[1] and "expert 3 twice" in later[1]
        assert healed == (0, "")


def test_repeated_ids_are_computed_without_strict_mode() -> None:
    """The operator's arithmetic does not mind; the bound of rows received does, silently."""
    inputs = [batch(rank) for rank in range(2)]
    inputs[1].ids[:] = place(np.full((3, TOPK), 3, np.int32))
    for data, (code, _, y, _) in zip(inputs, outcomes(inputs, env=LOOSE), strict=True):
        assert code == 0 and right(data, y)
