# SPDX-License-Identifier: Apache-2.0
"""Agreement over a group: one error for all, differences named, dead peers noticed."""

from __future__ import annotations

import time

import pytest

from support.ranks import run_ranks, values
from xmoe.comm.agree import (
    agree_success,
    broadcast_bytes,
    compare_digest,
    exchange_step,
    gather_facts,
    introduce,
    lost_ranks,
    require_equal,
)
from xmoe.errors import AclError, ConfigError, RankDisagreement, WindowTooSmall, XmoeError

pytestmark = pytest.mark.ep


def _errors(rank, group):
    introduce(group)
    said = []
    mine = {
        1: [WindowTooSmall("too small"), AclError("aclX", 107002, "NONE", "text"), KeyError("k")],
        2: [ConfigError("bad"), None, None],
    }.get(rank, [None, None, None])
    for error in mine:
        try:
            agree_success(group, "probe", error)
        except XmoeError as caught:
            said.append((type(caught).__name__, str(caught), getattr(caught, "code", 0)))
    agree_success(group, "probe", None)
    return said


def test_one_error_for_all():
    outs = values(run_ranks(_errors, 4))
    assert outs[0] == outs[1] == outs[2] == outs[3]
    names, texts, codes = zip(*outs[0], strict=True)
    assert names == ("WindowTooSmall", "AclError", "XmoeError")
    assert codes == (0, 107002, 0)
    assert "probe failed on rank 1,2: too small" in texts[0] and "KeyError" in texts[2]


def _values(rank, group):
    assert gather_facts(group, {"rank": rank}) == [{"rank": r} for r in range(4)]
    assert broadcast_bytes(group, b"root" if rank == 0 else None, "x") == b"root"
    require_equal(group, "spec", {"a": 1, "b": "x"})
    compare_digest(group, "same")
    said = []
    for call in (
        lambda: compare_digest(group, "odd" if rank == 3 else "even"),
        lambda: require_equal(group, "spec", {"a": 1, "b": rank // 2}),
    ):
        with pytest.raises(RankDisagreement) as caught:
            call()
        said.append(str(caught.value))
    assert exchange_step(group, 10 + rank, 1) == (10, 11, 12, 13)
    with pytest.raises(ConfigError) as refused:
        exchange_step(group, 1, 2, ConfigError("no good") if rank == 2 else None)
    said.append(str(refused.value))
    return said


def test_differences_are_named():
    outs = values(run_ranks(_values, 4))
    assert outs[0] == outs[1] == outs[2] == outs[3]
    assert "ranks 0,1,2: 'even'; ranks 3: 'odd'" in outs[0][0]
    assert "values of b (ranks 0,1: 0; ranks 2,3: 1)" in outs[0][1]
    assert "step 2 failed on rank 2: no good" in outs[0][2]


def _silent(rank, group, alive):
    introduce(group)
    if rank == 1:
        time.sleep(20 if alive else 60)
        return
    started = time.monotonic()
    try:
        exchange_step(group, 1, 1, timeout_s=2.0 if alive else 30.0)
    finally:
        if alive:
            assert lost_ranks(group) == () and time.monotonic() - started < 8


def test_a_silent_peer_ends_the_wait_at_the_deadline():
    outs = run_ranks(_silent, 2, True, check=False, kill=[(1, 4.0)])
    assert outs[0].error == "PeerLost" and "no answer within 2 s" in outs[0].message


def test_a_dead_peer_ends_the_wait_at_once():
    outs = run_ranks(_silent, 3, False, check=False, kill=[(1, 1.0)])
    for rank in (0, 2):
        assert outs[rank].error == "PeerLost" and "peer 1 lost" in outs[rank].message
        assert outs[rank].seconds < 10


def test_one_rank_needs_no_group():
    assert gather_facts(None, 3) == [3] and exchange_step(None, 5, 1) == (5,)
    agree_success(None, "x", None)
    compare_digest(None, "d")
    with pytest.raises(ConfigError):
        agree_success(None, "x", ConfigError("e"))
    with pytest.raises(ConfigError):
        exchange_step(None, 5, 1, ConfigError("e"))
