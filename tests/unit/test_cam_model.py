# SPDX-License-Identifier: Apache-2.0
"""The executor's rules for CAMP2P and CAMAsync, checked over every reachable state.

For each guard there is a test in which the model without it goes wrong: a model that cannot fail
proves nothing.
"""

from __future__ import annotations

import dataclasses

import pytest

from support.cam_model import AsyncRules, P2PRules, async_model, explore, p2p_model


@pytest.mark.parametrize(
    "rules",
    [
        AsyncRules(groups=1, layers=3, slots=1),
        AsyncRules(groups=1, layers=3, slots=2),
        AsyncRules(groups=2, layers=2, slots=2),
        AsyncRules(groups=2, layers=2, slots=3),
        AsyncRules(groups=3, layers=1, slots=2),
        AsyncRules(groups=3, layers=1, slots=3),
        # Sends that need all cores, too: slower, not stuck.
        AsyncRules(groups=2, layers=2, slots=2, send_cores=4, compute_cores=4),
    ],
)
def test_camasync_with_the_gate_never_stops_and_never_reuses_early(rules: AsyncRules) -> None:
    result = explore(async_model(rules))
    assert result.ok, result
    assert result.states > 50


@pytest.mark.parametrize(
    "rules",
    [
        P2PRules(groups=1, layers=3, slots=1),
        P2PRules(groups=1, layers=3, slots=2),
        P2PRules(groups=2, layers=2, slots=2),
        P2PRules(groups=2, layers=2, slots=3),
        P2PRules(groups=2, layers=2, slots=2, compute_cores=4),
        P2PRules(groups=2, layers=2, slots=1),
        P2PRules(groups=2, layers=3, slots=2),
        P2PRules(groups=3, layers=2, slots=3),
    ],
)
def test_camp2p_with_its_edges_never_stops_and_keeps_its_counters(rules: P2PRules) -> None:
    result = explore(p2p_model(rules))
    assert result.ok, result


def test_without_the_gate_the_all_core_receive_is_a_deadlock() -> None:
    result = explore(async_model(AsyncRules(gate=False)))
    assert result.problem == "deadlock"
    # The second receive holds all cores; Attention waits for the result nobody can compute.
    assert set(result.stuck) == {"recv1", "R0.0"}
    assert result.trace.index("start recv1") > result.trace.index("finish recv0")


@pytest.mark.parametrize(
    ("post_after", "safe"),
    [("any", False), ("compute issued", False), ("compute done", False), ("send done", True)],
)
def test_posting_later_is_no_substitute_for_the_gate(post_after: str, safe: bool) -> None:
    """Issued is not started, and the send needs cores as well: only full serialisation is safe."""
    result = explore(async_model(AsyncRules(gate=False, post_after=post_after)))
    assert result.ok == safe
    assert safe or result.problem == "deadlock"


def test_more_groups_hide_the_hazard_only_until_all_wait_for_compute() -> None:
    two = AsyncRules(groups=2, layers=2, gate=False)
    # Two slots: the third receive waits for a send, so it never holds the cores too early.
    assert explore(async_model(dataclasses.replace(two, slots=2))).ok is False
    assert explore(async_model(dataclasses.replace(two, slots=3))).problem == "deadlock"


def test_a_core_partition_replaces_the_gate() -> None:
    rules = AsyncRules(gate=False, recv_cores=1, compute_cores=2, send_cores=1)
    assert explore(async_model(rules)).ok
    too_many = dataclasses.replace(rules, recv_cores=2, compute_cores=3)
    assert explore(async_model(too_many)).problem == "deadlock"


def test_without_the_credit_rule_a_dispatch_overwrites_another() -> None:
    result = explore(async_model(AsyncRules(credit=False)))
    assert "has a dispatch outstanding" in result.problem
    assert result.trace[-1] == "finish S0.1"


def test_without_the_slot_wait_a_buffer_is_reused_before_its_send() -> None:
    result = explore(async_model(AsyncRules(groups=2, slots=1, slot_wait=False)))
    assert "writes a slot whose item 0 is not sent yet" in result.problem
    result = explore(p2p_model(P2PRules(slots=1, slot_wait=False)))
    assert "writes a slot whose item 0 is not sent yet" in result.problem


def test_without_the_data_waits_a_phase_reads_too_early() -> None:
    assert "reads before" in explore(async_model(AsyncRules(data_waits=False))).problem
    assert "reads before" in explore(p2p_model(P2PRules(data_waits=False))).problem


def test_a_wait_issued_before_its_record_is_no_wait() -> None:
    """torch_npu: waiting for a never recorded event does nothing. The host must record first."""
    assert "reads before" in explore(p2p_model(P2PRules(recorded=False))).problem
    assert not explore(async_model(AsyncRules(groups=2, recorded=False))).ok


def test_without_the_group_edge_the_counters_of_camp2p_go_wrong() -> None:
    """More slots than groups: the slot wait no longer implies the send -> receive edge."""
    result = explore(p2p_model(P2PRules(groups=1, slots=2, group_edge=False)))
    assert not result.ok
    assert "counters race" in result.problem or result.problem == "deadlock"
    # Slot reuse alone happens to give the edge when there are as many slots as groups.
    assert explore(p2p_model(P2PRules(groups=2, slots=2, group_edge=False))).ok


def test_a_prefetch_that_attention_has_not_sent_starves_a_compute_on_all_cores() -> None:
    """Attention must send (u, L+1) before it waits for (u+1, L)."""
    rules = P2PRules(early_send=False, compute_cores=4)
    result = explore(p2p_model(rules))
    assert result.problem == "deadlock"
    assert explore(p2p_model(dataclasses.replace(rules, compute_cores=3))).ok
    assert explore(p2p_model(dataclasses.replace(rules, early_send=True))).ok


def test_a_search_that_is_cut_off_is_not_a_proof() -> None:
    with pytest.raises(RuntimeError, match="no end"):
        explore(async_model(AsyncRules(groups=3, layers=2, slots=3)), limit=1000)
