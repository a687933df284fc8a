# SPDX-License-Identifier: Apache-2.0
"""The fused operator through op, resource and executor on forked ranks with the software device."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from support.mega_moe import HIDDEN, Rank, batch, check, experts, padding_counts
from support.ranks import run_ranks, values
from xmoe.errors import AclError, CommError, ConfigError, WindowTooSmall, XmoeError
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.kernels.ops.routing import check_ids
from xmoe.reference import tokens_per_expert
from xmoe.types import ExpertWeights, FenceMode, TokenBatch

pytestmark = [pytest.mark.ep, pytest.mark.timeout(300)]


def _values(rank, group, tokens, num_experts, topk, padding):
    with Rank(rank, group, num_experts, topk, 8, padding=padding) as me:
        ticket = me.submit(batch(tokens[rank], num_experts, topk, seed=rank))
        y = me.result(ticket)
        return y, ticket.result()["counts"]


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_values_and_counts(size, padding):
    num_experts, topk = 16, 4
    tokens = [(3 * rank) % 8 for rank in range(size)]  # rank 0 is empty
    outs = values(run_ranks(_values, size, tokens, num_experts, topk, padding))
    batches = [batch(n, num_experts, topk, seed=r) for r, n in enumerate(tokens)]
    for (y, _), n in zip(outs, tokens, strict=True):
        assert y.shape == (n, HIDDEN) and y.dtype == torch.bfloat16
    check([y for y, _ in outs], batches, num_experts)
    counts = torch.cat([c for _, c in outs]).long()
    counts -= padding_counts(tokens, max(tokens), topk, padding, num_experts)
    ids = torch.cat([b.topk_ids for b in batches]).numpy()
    assert counts.tolist() == tokens_per_expert(ids, num_experts).tolist()


# ---- two streams on one resource


def _two_streams(rank, group, mode, launches):
    """Alternate two streams. Returns the number of wrong outputs, or the error met."""
    wrong = 0
    with Rank(rank, group, 4, 2, 4, fence=mode) as me:
        mine = batch(2, 4, 2, seed=rank)
        other = batch(2, 4, 2, seed=rank + 100)
        with me.device.bind():
            streams = [me.device.create_stream(), me.device.create_stream()]
        want = [me.run(mine), me.run(other)]
        pending = []
        try:
            for number in range(launches):
                stream, tokens = streams[number % 2], (mine, other)[number % 2]
                launch = me.resource.launch(
                    stream, lambda queue, tokens=tokens: me.op.launch(tokens, queue)
                )
                pending.append((number, launch))
                if len(pending) == 8 or number == launches - 1:
                    with me.device.bind():
                        for one in streams:
                            one.synchronize(20)
                    wrong += sum(
                        not torch.equal(done.hidden_states, want[n % 2]) for n, done in pending
                    )
                    pending.clear()
        except (AclError, CommError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            with me.device.bind():
                for one in streams:
                    one.close()
    return wrong


def test_fence_off_is_caught_by_the_strict_device():
    outs = run_ranks(
        _two_streams,
        2,
        FenceMode.OFF,
        64,
        env={"XSD_STRICT": "1", "XSD_DELAY_SEED": "7", "XSD_DELAY_MAX_US": "500"},
        check=False,
    )
    said = [f"{out.value} {out.message}" for out in outs]
    assert any("two launches at a time on one window" in text for text in said), said


def test_fence_off_corrupts_on_the_lenient_device():
    outs = run_ranks(
        _two_streams,
        2,
        FenceMode.OFF,
        200,
        env={
            "XSD_STRICT": "0",
            "XSD_DELAY_SEED": "7",
            "XSD_DELAY_MAX_US": "500",
            "XSD_WAIT_TIMEOUT_MS": "3000",
        },
        check=False,
    )
    # Wrong numbers, or counters so confused that a wait never ends: either is the race.
    assert any(
        out.error in ("AclError", "PeerLost") or isinstance(out.value, str) or out.value > 0
        for out in outs
    ), outs


@pytest.mark.parametrize("mode,strict", [("stream", "1"), ("stream", "0"), ("host", "1")])
def test_ordered_fences_never_race(mode, strict):
    launches = 1000 if mode == "stream" and strict == "1" else 200
    outs = run_ranks(
        _two_streams,
        2,
        FenceMode(mode),
        launches,
        deadline_s=240,
        env={"XSD_STRICT": strict, "XSD_DELAY_SEED": "7", "XSD_DELAY_MAX_US": "500"},
    )
    assert values(outs) == [0, 0]


# ---- V4.1: outputs of many steps, delays everywhere, any depth


def _back_to_back(rank, group, depth, steps):
    rng = random.Random(rank)
    with Rank(rank, group, 8, 2, 4, max_inflight=depth) as me:
        tickets = []
        for step in range(steps):
            time.sleep(rng.random() * 0.002)
            tickets.append(me.submit(batch(1 + step % 4, 8, 2, seed=step * 10 + rank)))
        return [me.result(ticket) for ticket in tickets]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_back_to_back_steps_keep_their_outputs(depth):
    steps = 200 if depth == 2 else 40
    outs = values(
        run_ranks(
            _back_to_back,
            4,
            depth,
            steps,
            deadline_s=240,
            env={"XSD_DELAY_SEED": str(depth), "XSD_DELAY_MAX_US": "1000"},
        )
    )
    batches = [
        batch(1 + step % 4, 8, 2, seed=step * 10 + rank)
        for rank in range(4)
        for step in range(steps)
    ]
    check([y for out in outs for y in out], batches, 8)


# ---- V3.1, V4.3, V13.2


def _beyond_capacity(rank, group):
    """Too many rows are refused on all ranks before a launch; the next step works."""
    with Rank(rank, group, 8, 2, 32) as me:
        outs = []
        for step, rows in enumerate((1, 32, 33, 477, 32)):
            tokens = batch(rows if rank == 1 else 1, 8, 2, seed=step * 10 + rank)
            if rows <= 32:
                outs.append((tokens, me.run(tokens)))
                continue
            with pytest.raises(WindowTooSmall, match=f"{rows} (rows|tokens) per rank"):
                me.run(tokens)
        assert me.resource.fence.launches == 3
        return outs


def test_rows_beyond_the_capacity():
    outs = values(run_ranks(_beyond_capacity, 4))
    pairs = [pair for out in outs for pair in out]
    check([y for _, y in pairs], [b for b, _ in pairs], 8)


def _two_resources(rank, group):
    """Two resources on two streams, queued in opposite order on odd ranks."""
    with Rank(rank, group, 8, 2, 8) as one, Rank(rank, group, 8, 2, 8, role="draft") as two:
        tickets = {}
        for step in range(20):
            order = (one, two) if (rank + step) % 2 else (two, one)
            counts_first = [batch(2, 8, 2, seed=step * 100 + rank * 10 + n) for n in range(2)]
            for me in order:
                number = 0 if me is one else 1
                padded = counts_first[number]
                launch = me.resource.launch(
                    me.executor.stream, lambda s, me=me, t=padded: me.op.launch(t, s)
                )
                tickets[step, number] = (padded, launch)
        for me in (one, two):
            me.resource.drain()
        return [(tokens, launch.hidden_states) for tokens, launch in tickets.values()]


def test_two_resources_in_opposite_order():
    outs = values(run_ranks(_two_resources, 4))
    pairs = [pair for out in outs for pair in out]
    check([y for _, y in pairs], [b for b, _ in pairs], 8)


def _repeats(rank, group):
    with Rank(rank, group, 16, 4, 4) as me:
        tokens = batch(rank % 3, 16, 4, seed=rank)
        first = me.run(tokens)
        return all(torch.equal(first, me.run(tokens)) for _ in range(20))


def test_same_call_same_bits():
    env = {"XSD_DELAY_SEED": "11", "XSD_DELAY_MAX_US": "1000"}
    assert all(values(run_ranks(_repeats, 8, env=env, deadline_s=120)))


# ---- V5.1, V5.2, V5.3: empty ranks


def _patterns(rank, group, patterns, padding):
    with Rank(rank, group, 8, 2, 8, padding=padding) as me:
        outs = []
        for number, pattern in enumerate(patterns):
            n = pattern[rank]
            tokens = batch(n, 8, 2, seed=number * 10 + rank)
            if n == 0 and number % 2:
                tokens = None
            outs.append(me.run(tokens))
        return outs


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
def test_empty_ranks(padding):
    patterns = [[0, 2, 0, 5], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]] * 20
    random.Random(0).shuffle(patterns)
    outs = values(run_ranks(_patterns, 4, patterns, padding, deadline_s=120))
    for rank, out in enumerate(outs):
        for pattern, y in zip(patterns, out, strict=True):
            assert y.shape == (pattern[rank], HIDDEN) and y.dtype == torch.bfloat16
    batches = [
        batch(pattern[rank], 8, 2, seed=number * 10 + rank)
        for rank in range(4)
        for number, pattern in enumerate(patterns)
    ]
    check([y for out in outs for y in out], batches, 8)


def _one_of_sixteen(rank, group, alone):
    with Rank(rank, group, 16, 8, 2) as me:
        whole = batch(4, 16, 8, seed=5)
        if rank == alone:
            return me.run(TokenBatch(*(t[:1] for t in vars(whole).values())))
        # An empty, non-contiguous slice of a larger tensor.
        return me.run(TokenBatch(*(t[2:2, ::1] for t in vars(whole).values())))


@pytest.mark.parametrize("alone", [0, 15])
def test_one_active_rank_of_sixteen(alone):
    outs = values(run_ranks(_one_of_sixteen, 16, alone, deadline_s=120))
    whole = batch(4, 16, 8, seed=5)
    check([outs[alone]], [TokenBatch(*(t[:1] for t in vars(whole).values()))], 16)
    assert all(y.shape == (0, HIDDEN) for rank, y in enumerate(outs) if rank != alone)


def _skips(rank, group):
    with Rank(rank, group, 8, 2, 4) as me:
        for step in range(6):
            me.sequence = step
            if rank == 2 and step == 3:
                continue
            me.run(batch(1, 8, 2, seed=step))


def test_a_rank_that_skipped_a_step_is_named():
    """V5.3."""
    outs = run_ranks(_skips, 4, check=False)
    assert {out.error for out in outs} == {"RankDisagreement"}
    assert all("step 4: ranks 0,1,3; step 5: ranks 2" in out.message for out in outs)
    assert max(out.seconds for out in outs) < 20


# ---- V6: routing values


def _routing(rank, group):
    """Poisoned outputs, unused slots, experts without tokens, one NaN row."""
    with Rank(rank, group, 8, 2, 8) as me:
        tokens = batch(6, 8, 2, seed=rank)
        ids = tokens.topk_ids % 3  # experts 3..7 get nothing
        ids[:, 1] = (ids[:, 0] + 1) % 3
        ids[1, 1], ids[2] = -1, -1
        mine = TokenBatch(tokens.hidden_states, ids, tokens.topk_weights)
        clean = me.run(mine)
        x = tokens.hidden_states.clone()
        if rank == 1:
            x[4] = float("nan")
        dirty = me.run(TokenBatch(x, ids, tokens.topk_weights))
        bad = dirty.isnan().any(dim=1)
        assert torch.equal(dirty[~bad], clean[~bad])
        assert bad.tolist() == [rank == 1 and row == 4 for row in range(6)]
        assert (clean[2] == 0).all()
        return mine, clean


@pytest.mark.parametrize("size", [2, 4])
def test_routing_values(size):
    outs = values(run_ranks(_routing, size))
    check([y for _, y in outs], [b for b, _ in outs], 8)


def _refused_ids(rank, group, bad):
    with Rank(rank, group, 8, 2, 8) as me:
        tokens = batch(3, 8, 2, seed=rank)
        ids = tokens.topk_ids.long()
        if rank == 2:
            ids[1, 0] = bad
        found = check_ids(ids, 8)
        error = ConfigError(found.sentence(8)) if found else None
        try:
            me.submit(TokenBatch(tokens.hidden_states, ids, tokens.topk_weights), error=error)
            said = "nothing"
        except ConfigError as caught:
            said = str(caught)
        return said, me.run(tokens)


@pytest.mark.parametrize("bad", [-7, 8, 10**6, 2**32 + 1])
def test_bad_ids_are_refused_before_the_launch(bad):
    """V6.2: one text on all ranks; the next step works."""
    outs = values(run_ranks(_refused_ids, 4, bad))
    assert len({said for said, _ in outs}) == 1
    assert str(bad) in outs[0][0] and "rank 2" in outs[0][0] and "row 1, slot 0" in outs[0][0]
    check([y for _, y in outs], [batch(3, 8, 2, seed=rank) for rank in range(4)], 8)


def _bad_tensors(rank, group):
    """Every tensor rule of the contract, broken on all ranks alike; then a good step."""
    with Rank(rank, group, 8, 2, 8) as me:
        good = batch(4, 8, 2, seed=rank)
        x, ids, w = good.hidden_states, good.topk_ids, good.topk_weights
        shifted = torch.empty(4 * HIDDEN + 8, dtype=torch.bfloat16)[8:].view(4, HIDDEN)
        assert shifted.data_ptr() % 32
        wide = torch.zeros(4, 17, dtype=torch.int32)
        ones = torch.ones(4, dtype=torch.int8)
        cases = {
            "torch.bfloat16": (x.float(), ids, w, None),
            r"\[4, 1024\]": (x[:, :512].contiguous(), ids, w, None),
            "torch.int32": (x, ids.long(), w, None),
            "torch.float32": (x, ids, w.bfloat16(), None),
            r"topk_weights: \[3, 2\]": (x, ids, w[:3], None),
            r"hidden_states.*strides": (x.t().contiguous().t(), ids, w, None),
            "topk_ids.*strides": (x, ids.t().contiguous().t(), w, None),
            "multiples of 32": (shifted, ids, w, None),
            "topk=17": (x, wide, wide.float(), None),
            "0 rows": (x[:0], ids[:0], w[:0], None),
            "mask.*torch.int8": (x, ids, w, ones.bool()),
            r"mask: \[3\]": (x, ids, w, ones[:3]),
        }
        for words, (hidden, slots, weights, mask) in cases.items():
            with pytest.raises(ConfigError, match=words):
                tokens = TokenBatch(hidden, slots, weights)
                queue = me.executor.stream
                me.resource.launch(queue, lambda s, t=tokens, m=mask: me.op.launch(t, s, m))
        with pytest.raises(WindowTooSmall, match="9 rows"):
            me.resource.require_rows(9)
        assert me.resource.failed is None
        return me.run(good)


def test_bad_tensors_are_refused():
    outs = values(run_ranks(_bad_tensors, 2))
    check(outs, [batch(4, 8, 2, seed=rank) for rank in range(2)], 8)


def _bad_weights(rank, group):
    with Rank(rank, group, 8, 2, 8) as me:
        good = experts(0, 4)
        flat = ExpertWeights(good.gate_up.view(4 * HIDDEN, -1), good.down)
        cases = {
            "three dimensions": (flat, {}),
            "torch.bfloat16": (ExpertWeights(good.gate_up.float(), good.down), {}),
            "do not belong together": (ExpertWeights(good.gate_up, good.gate_up), {}),
            "strides": (ExpertWeights(good.gate_up[:, :, ::2], good.down), {}),
            "3 local experts": (ExpertWeights(good.gate_up[:3], good.down[:3]), {}),
            "activation='geglu'": (good, {"activation": "geglu"}),
            "activation='relu2'": (good, {"activation": "relu2"}),
            "activation_clamp=-1": (good, {"activation_clamp": -1}),
            "activation_clamp=nan": (good, {"activation_clamp": float("nan")}),
        }
        runtime, resource = me.device.runtime, me.resource
        for words, (weights, changes) in cases.items():
            with me.device.bind(), pytest.raises(ConfigError, match=words):
                MegaMoe(runtime, resource.handle, weights, 8, resource.workspace, **changes)


def test_bad_weights_are_refused():
    run_ranks(_bad_weights, 2)


def _overwrites(rank, group):
    """V4.2: the caller's tensors may be overwritten as soon as the call returns."""
    with Rank(rank, group, 8, 2, 4, max_inflight=2) as me:
        outs = []
        for step in range(20):
            tokens = batch(3, 8, 2, seed=step * 10 + rank)
            ticket = me.submit(tokens)
            tokens.hidden_states.fill_(float("nan"))
            tokens.topk_ids.fill_(10**9)
            tokens.topk_weights.fill_(float("nan"))
            outs.append(me.result(ticket))
            assert int(ticket.result()["counts"].sum()) >= 0
        return outs


def test_inputs_may_be_overwritten_after_the_call():
    env = {"XSD_DELAY_SEED": "1", "XSD_DELAY_MAX_US": "20000"}
    outs = values(run_ranks(_overwrites, 2, env=env))
    batches = [batch(3, 8, 2, seed=step * 10 + rank) for rank in range(2) for step in range(20)]
    check([y for out in outs for y in out], batches, 8)


# ---- V9.1: closing, and peers that die


def _closes_twice(rank, group):
    me = Rank(rank, group)
    me.run(batch(2, 8, 2, seed=rank))
    for _ in range(2):
        me.close()
        me.resource.close()
    try:
        me.resource.handle  # noqa: B018
    except CommError:
        return True


def test_close_twice():
    assert values(run_ranks(_closes_twice, 2)) == [True, True]


def _until_killed(rank, group, where):
    me = Rank(rank, group)
    try:
        for step in range(10**9):
            me.run(batch(2, 8, 2, seed=step))
            if where == "idle":
                time.sleep(0.5)
            elif where == "close" and step == 3:
                if rank != 2:
                    me.close()
                    return "closed"
                time.sleep(60)
    finally:
        me.close()


@pytest.mark.parametrize("where", ["idle", "dispatch", "close"])
def test_a_killed_peer_is_named_and_nobody_hangs(where):
    outs = run_ranks(
        _until_killed,
        4,
        where,
        check=False,
        kill=[(2, 3.0)],
        deadline_s=60,
        env={"XSD_DELAY_SEED": "3", "XSD_DELAY_MAX_US": "2000"} if where == "dispatch" else None,
    )
    assert outs[2].signal == 9
    for out in outs[:2] + outs[3:]:
        assert out.seconds < 30, out
        if where == "close":
            assert out.value == "closed" or "peer 2 lost" in out.message, out
        else:
            assert out.error == "PeerLost" and "peer 2 lost" in out.message, out


# ---- V10.1: threads that never selected a device


def _threads(rank, group):
    made: dict[str, object] = {}

    def in_thread(fn):
        def run() -> None:
            try:
                fn()
            except XmoeError as error:
                made["error"] = error

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)
        if "error" in made:
            raise made["error"]

    in_thread(lambda: made.update(me=Rank(rank, group)))
    me = made["me"]
    in_thread(lambda: made.update(y=me.run(batch(2, 8, 2, seed=rank))))
    in_thread(me.close)
    return made["y"]


def test_three_threads_without_a_device():
    outs = values(run_ranks(_threads, 2))
    check(outs, [batch(2, 8, 2, seed=rank) for rank in range(2)], 8)
