# SPDX-License-Identifier: Apache-2.0
"""The four asynchronous operators on the software device: payloads against numpy, chunks, order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.cam_ranks import CamRank, cam_rank
from support.ranks import run_ranks, values
from xmoe.errors import ConfigError
from xmoe.kernels.ops.cam.host import HostCamAsyncOps
from xmoe.kernels.ops.cam.protocols import DispatchItem
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, receive_capacity

HIDDEN, TOPK, EXPERTS = 32, 3, 4  # EXPERTS per FFN rank
SMALL = {"BATCH_SIZE_FACTOR": "0.0005", "XSD_WAIT_TIMEOUT_MS": "5000"}  # 131 rows


def case(rank: int, layer: int, tokens: int, experts: int, routing: str) -> dict[str, np.ndarray]:
    """One Attention rank's batch. Rows and weights are such that sums in float32 are exact."""
    rng = np.random.default_rng(100 * rank + layer)
    ids = np.stack([rng.permutation(experts)[:TOPK] for _ in range(tokens)])
    if routing == "one":  # all tokens to the last expert
        ids[:] = experts - 1
    if routing == "low":  # nothing for the FFN ranks above the first
        ids = np.stack([rng.permutation(EXPERTS)[:TOPK] for _ in range(tokens)])
    return {
        "x": rng.integers(-16, 16, (tokens, HIDDEN)).astype(np.float32),
        "ids": ids.astype(np.int32),
        "w": rng.choice([0.25, 0.5, 1.0], (tokens, TOPK)).astype(np.float32),
    }


def combined(data: dict[str, np.ndarray], factor: np.ndarray, shared: float = 0.0) -> np.ndarray:
    """sum_k w * factor[expert] * x (+ the shared expert's share), in float64."""
    weight = (data["w"] * factor[data["ids"]]).sum(1, keepdims=True)
    return (weight + shared) * data["x"].astype(np.float64)


def topology(rank: int, attn: int, ffn: int, **kw: Any) -> CamAsyncTopology:
    return CamAsyncTopology(attn, ffn, rank, HIDDEN, TOPK, EXPERTS, max_seq_len=64, **kw)


def experts(item: DispatchItem, first_expert: int, quant: bool) -> torch.Tensor:
    """FFN compute of the tests: row of global expert e times (e + 1). At least one row."""
    counts = item.tokens_per_expert.numpy()
    factor = np.repeat(np.arange(len(counts)) + first_expert + 1, counts).astype(np.float32)
    rows = item.hidden_states[: len(factor)].float().numpy()
    if quant:
        rows = rows * item.scales[: len(factor), None].numpy()
    out = np.zeros((max(1, len(factor)), HIDDEN), np.float32)
    out[: len(factor)] = rows * factor[:, None]
    return torch.from_numpy(out).to(torch.bfloat16)


def ffn_side(one: CamRank, t: CamAsyncTopology, group: str, dispatches: int) -> list[list[int]]:
    """Serve until `dispatches` were finished; returns rank, layer, first and last expert, rows."""
    ops = HostCamAsyncOps(one.library, t)
    recv, send = one.stream(), one.stream()
    seen, finished = [], 0
    first_expert = (t.rank - t.attn_size) * EXPERTS
    while finished < dispatches:
        # Ungated, the receive would take all cores before the send of the last item has any.
        while one.soft.ready(t, group) == 0:
            time.sleep(0.0005)
        item = ops.dispatch_recv(group, stream=recv)
        one.sync(recv)
        out = experts(item, first_expert, t.dynamic_quant)
        one.keep((item, out))
        ops.combine_send(group, out, item.batch_info, stream=send)  # beside the next receive
        info = item.batch_info.tolist()
        finished += info[4] == EXPERTS - 1
        seen.append([info[1], info[2], info[3], info[4], int(item.tokens_per_expert.sum())])
    one.sync(send)
    return seen


def attention_side(
    one: CamRank, t: CamAsyncTopology, group: str, layers: int, tokens: int, routing: str
) -> list[np.ndarray]:
    ops, stream = HostCamAsyncOps(one.library, t), one.stream()
    got = []
    for layer in range(layers):
        data = case(t.rank, layer, tokens, t.ffn_size * EXPERTS, routing)
        x = torch.from_numpy(data["x"]).to(torch.bfloat16)
        ids, w = torch.from_numpy(data["ids"]).clone(), torch.from_numpy(data["w"]).clone()
        ops.dispatch_send(group, x, ids, layer, stream=stream)
        result = ops.combine_recv(group, ids, w, stream=stream)
        one.sync(stream)
        got.append(result.float().numpy())
    return got


def serve(
    rank: int,
    _: Any,
    folder: str,
    attn: int,
    ffn: int,
    layers: int,
    tokens: int,
    kw: dict[str, Any],
) -> Any:
    routing = kw.pop("routing", "mixed")
    with cam_rank(rank, attn + ffn, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, attn, ffn, **kw)
        if t.is_ffn:
            return ffn_side(one, t, group, layers * t.groups)
        return attention_side(one, t, group, layers, tokens, routing)


def run(
    tmp_path: Path, attn: int, ffn: int, layers: int, tokens: int, env: dict[str, str], **kw: Any
) -> list[Any]:
    args = (str(tmp_path), attn, ffn, layers, tokens, kw)
    return values(run_ranks(serve, attn + ffn, *args, group=False, env=env))


def check(results: list[Any], attn: int, ffn: int, tokens: int, routing: str, tol: float) -> None:
    factor = np.arange(ffn * EXPERTS, dtype=np.float64) + 1
    for rank in range(attn):
        for layer, got in enumerate(results[rank]):
            want = combined(case(rank, layer, tokens, ffn * EXPERTS, routing), factor)
            # One rounding of each expert's row to bfloat16, one of the sum.
            scale = np.abs(want).max() + 1
            assert np.abs(got - want).max() <= tol * scale, (rank, layer)


@pytest.mark.parametrize("routing", ["mixed", "one", "low"])
def test_results_match_numpy(tmp_path: Path, routing: str) -> None:
    results = run(tmp_path, 2, 2, 3, 20, SMALL, routing=routing)
    check(results, 2, 2, 20, routing, 0.02)
    served = results[2] + results[3]
    if routing == "mixed":
        assert sum(item[4] for item in served) == 2 * 3 * 20 * TOPK
    else:
        # FFN ranks without a routed row still get an item per dispatch and must answer it.
        assert sum(item[4] == 0 for item in served) == 6
        assert sum(item[4] for item in served) == 2 * 3 * 20 * TOPK


def test_many_groups_and_layers_with_random_delays(tmp_path: Path) -> None:
    env = {**SMALL, "XSD_DELAY_SEED": "11", "XSD_DELAY_MAX_US": "300"}
    results = run(tmp_path, 3, 2, 25, 7, env)
    check(results, 3, 2, 7, "mixed", 0.02)
    for served in results[3:]:
        for group in range(3):  # each group's layers arrive in order
            assert [item[1] for item in served if item[0] == group] == list(range(25))


def test_dynamic_quantisation_and_tensor_parallel_groups(tmp_path: Path) -> None:
    results = run(tmp_path, 4, 1, 2, 9, SMALL, dynamic_quant=True, tp_size=2)
    check(results, 4, 1, 9, "mixed", 0.03)
    assert {item[0] for item in results[4]} == {0, 2}  # items name the group's first rank
    assert [item[4] for item in results[4]] == [2 * 9 * TOPK] * 4


def test_receives_are_chunked_by_whole_experts(tmp_path: Path) -> None:
    # 26 rows capacity; 20 tokens x 3 experts = 60 rows over 4 experts.
    env = {"BATCH_SIZE_FACTOR": "0.0001"}
    results = run(tmp_path, 2, 1, 2, 20, env)
    check(results, 2, 1, 20, "mixed", 0.02)
    items = results[2]
    assert len(items) > 4
    assert all(item[4] <= 26 for item in items)
    for before, after in zip(items, items[1:], strict=False):
        if before[3] != EXPERTS - 1:  # the rest of the same dispatch comes next
            assert after[:2] == before[:2] and after[2] == before[3] + 1
        else:
            assert after[2] == 0


def test_groups_take_turns(tmp_path: Path) -> None:
    """With all groups waiting, the cursor goes round and no group is served twice in between."""
    order = values(run_ranks(turns, 4, str(tmp_path), group=False, env=SMALL))[3]
    assert order == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]


def turns(rank: int, _: Any, folder: str) -> list[list[int]]:
    with cam_rank(rank, 4, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, 3, 1)
        ops, stream = HostCamAsyncOps(one.library, t), one.stream()
        order = []
        for layer in range(2):
            if not t.is_ffn:
                data = case(rank, layer, 4, EXPERTS, "mixed")
                x = torch.from_numpy(data["x"]).to(torch.bfloat16)
                ids, w = torch.from_numpy(data["ids"]).clone(), torch.from_numpy(data["w"]).clone()
                ops.dispatch_send(group, x, ids, layer, stream=stream)
                one.keep(ops.combine_recv(group, ids, w, stream=stream))
                one.sync(stream)
                continue
            while one.soft.ready(t, group) < 3:
                pass
            for _i in range(3):
                item = ops.dispatch_recv(group, stream=stream)
                one.sync(stream)
                order.append(item.batch_info[1:3].tolist())
                one.mark(f"l{layer}")
                out = experts(item, 0, False)
                ops.combine_send(group, out, item.batch_info, stream=stream)
                one.sync(stream)
        return order


def quantised(rank: int, _: Any, folder: str) -> Any:
    """What travels with dynamic quantisation: int8 rows and a float32 scale per token."""
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, 1, 1, dynamic_quant=True)
        ops, stream = HostCamAsyncOps(one.library, t), one.stream()
        if not t.is_ffn:
            x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(3))
            x[5] = 0
            x = x.to(torch.bfloat16)
            ids = torch.arange(8 * TOPK, dtype=torch.int32).reshape(8, TOPK) % EXPERTS
            ops.dispatch_send(group, x, ids, 0, stream=stream)
            one.sync(stream)
            return x.float().numpy(), ids.numpy()
        item = ops.dispatch_recv(group, stream=stream)
        one.sync(stream)
        n = int(item.tokens_per_expert.sum())
        return (
            item.hidden_states[:n].numpy(),
            item.scales[:n].numpy(),
            item.tokens_per_expert.numpy(),
        )


def test_quantised_rows_and_scales_match_numpy(tmp_path: Path) -> None:
    (x, ids), (rows, scales, counts) = values(
        run_ranks(quantised, 2, str(tmp_path), group=False, env=SMALL)
    )
    assert counts.tolist() == [int((ids == e).sum()) for e in range(EXPERTS)]
    token = np.concatenate([np.nonzero((ids == e).any(1))[0] for e in range(EXPERTS)])
    scale = (np.abs(x).max(1) / np.float32(127)).astype(np.float32)
    safe = np.where(scale == 0, np.float32(1), scale)
    want = np.rint(x / safe[:, None]).astype(np.int8)
    assert np.array_equal(scales, scale[token])
    assert np.array_equal(rows, want[token])


def shared(rank: int, _: Any, folder: str) -> Any:
    """The older operator set: slot 0 of every FFN rank is the shared expert (factor 3)."""
    with cam_rank(rank, 3, folder) as one:
        group = one.communicator("afd")
        t = topology(rank, 1, 2)
        stream = one.stream()
        ops = HostCamAsyncOps(one.library, t, shared_expert=True)
        if not t.is_ffn:
            data = case(0, 0, 10, 2 * EXPERTS, "mixed")
            ids, w = torch.from_numpy(data["ids"]).clone(), torch.from_numpy(data["w"]).clone()
            x = torch.from_numpy(data["x"]).to(torch.bfloat16)
            ops.dispatch_send(group, x, ids, 5, stream=stream)
            result = ops.combine_recv(group, ids, w, stream=stream)
            one.sync(stream)
            return result.float().numpy()
        item = ops.dispatch_recv(group, stream=stream)
        one.sync(stream)
        assert item.shared_count is not None and item.shared_hidden_states is not None
        n = int(item.shared_count)
        out = experts(item, (rank - 1) * EXPERTS, False)
        shared_out = item.shared_hidden_states[: max(1, n)] * 3
        ops.combine_send(
            group, out, item.batch_info, stream=stream, shared_out=shared_out.contiguous()
        )
        one.sync(stream)
        return n, int(item.batch_info[2])


def test_the_older_set_carries_a_shared_expert(tmp_path: Path) -> None:
    got, first, second = values(run_ranks(shared, 3, str(tmp_path), group=False, env=SMALL))
    assert first == (5, 5) and second == (5, 5)
    factor = np.arange(2 * EXPERTS, dtype=np.float64) + 1
    want = combined(case(0, 0, 10, 2 * EXPERTS, "mixed"), factor, shared=3.0)
    assert np.abs(got - want).max() <= 0.02 * (np.abs(want).max() + 1)


def test_capacity_and_topology_are_checked() -> None:
    assert receive_capacity({}) == 262144
    assert receive_capacity({"BATCH_SIZE_FACTOR": "0.0005"}) == 131
    for text in ("0", "1.5", "-1", "much"):
        with pytest.raises(ConfigError, match="BATCH_SIZE_FACTOR"):
            receive_capacity({"BATCH_SIZE_FACTOR": text})
    good = {"attn_size": 2, "ffn_size": 1, "rank": 0, "hidden": 8, "topk": 2}
    good |= {"experts_per_rank": 4, "max_seq_len": 64}
    assert CamAsyncTopology(**good).info_length(shared=False) == 10
    for change in (
        {"topk": 5},
        {"tp_size": 3},
        {"max_seq_len": 262145},
        {"max_seq_len": 131072},
        {"rank": 3},
        {"dynamic_quant": 1},
    ):
        with pytest.raises(ConfigError, match="allowed"):
            CamAsyncTopology(**{**good, **change})


def test_a_combine_of_any_batch_is_launched_from_one_operator_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A set owns device memory and plans, so making one is no matter for a step."""
    from xmoe.kernels.ops.cam import torch_ops

    made: list[tuple[object, ...]] = []

    class Nothing:
        def combine_recv(self, group: str, ids: torch.Tensor, *_: object, **__: object) -> None:
            made.append(("rows", ids.shape[0]))

    def remember(*place: object) -> Nothing:
        made.append(place)
        return Nothing()

    monkeypatch.setattr(torch_ops, "_async", remember)
    monkeypatch.setattr(torch_ops, "_stream", lambda tensor: 0)
    for rows in (3, 5):
        x, ids = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(rows, 2, dtype=torch.int32)
        place = (rows, 64, 2, 1, 1, 4, 0, 2)
        torch_ops._combine_recv(False, x, ids, ids.float(), x, 0, *place, "group")
    first, _, second, last = made
    assert first == second and last == ("rows", 5)
