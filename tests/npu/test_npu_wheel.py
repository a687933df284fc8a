# SPDX-License-Identifier: Apache-2.0
"""The wheel itself: import, tensors, allocator, and operators against the CPU's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.npu import child


def test_import_leaves_the_parent_uninitialised() -> None:
    """Else no rank could be forked from it."""
    import torch_npu

    assert not torch_npu.npu.is_initialized()
    assert torch.npu.is_available() and torch.npu.device_count() == 16
    assert not torch_npu.npu.is_initialized()


def test_identity() -> None:
    def body(device: torch.device) -> tuple[str, int]:
        properties = torch.npu.get_device_properties(device)
        return torch.npu.get_device_name(device), properties.total_memory

    assert child(body) == ("Ascend910_9391", 64 << 30)


def test_tensors_travel() -> None:
    def body(device: torch.device) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool):
            source = torch.arange(1001).to(dtype)
            assert torch.equal(source.to(device).cpu(), source)
        pinned = torch.randn(4096).pin_memory()
        assert torch.equal(pinned.to(device, non_blocking=True).cpu(), pinned)
        cube = torch.arange(24).reshape(2, 3, 4)
        view = cube.to(device).permute(2, 0, 1)[1:, :, 1]
        assert torch.equal(view.cpu(), cube.permute(2, 0, 1)[1:, :, 1])

    child(body)


def test_allocator_reuses_and_runs_out() -> None:
    def body(device: torch.device) -> None:
        block = torch.empty(8 << 20, dtype=torch.uint8, device=device)
        address = block.data_ptr()
        del block
        again = torch.empty(8 << 20, dtype=torch.uint8, device=device)
        assert again.data_ptr() == address
        assert torch.npu.memory_allocated() >= 8 << 20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(65 << 30, dtype=torch.uint8, device=device)

    child(body)


EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y, i: x + y * 2 - 1,
    "divide": lambda x, y, i: x / (y.abs() + 1),
    "power": lambda x, y, i: x.abs().pow(1.5) + 2.0**y + y**2,
    "reductions": lambda x, y, i: torch.stack([x.sum(), x.mean(), x.amax(), x.amin(), x.std()]),
    "reductions by dimension": lambda x, y, i: x.sum(1) + x.mean(1) + x.max(1).values,
    "softmax": lambda x, y, i: torch.softmax(x, -1) + torch.log_softmax(y, -1),
    "activations": lambda x, y, i: torch.sigmoid(x) * torch.nn.functional.silu(y)
    + torch.nn.functional.softplus(x) + torch.nn.functional.gelu(y),
    "matmul": lambda x, y, i: x @ y.t(),
    "batched": lambda x, y, i: torch.matmul(x.view(2, 4, 32), y.view(2, 4, 32).transpose(1, 2)),
    "where": lambda x, y, i: torch.where(x > y, x, y) * (x != 0),
    "masked fill": lambda x, y, i: x.masked_fill(y > 0, -1.0),
    "clamp": lambda x, y, i: x.clamp(-0.5, 0.5) + y.clamp(min=0),
    "index": lambda x, y, i: x[i % 8] + x.index_select(0, i % 8),
    "mask index": lambda x, y, i: x[y > 0],
    "nonzero": lambda x, y, i: (x > 0).nonzero(),
    "gather": lambda x, y, i: x.gather(1, i.unsqueeze(1).expand(5, 3)),
    "scatter": lambda x, y, i: torch.zeros_like(x).scatter_(1, i.unsqueeze(0).expand(8, 5), y),
    "cat": lambda x, y, i: torch.cat([x, y], 1).repeat(2, 1),
    "sort": lambda x, y, i: torch.sort(x, dim=1, stable=True, descending=True).values,
    "argsort": lambda x, y, i: torch.argsort(i, stable=True),
    "topk": lambda x, y, i: torch.topk(x, 4).indices,
    "cumsum": lambda x, y, i: x.cumsum(-1) + i.cumsum(0).sum(),
    "triangles": lambda x, y, i: x.tril(-1) + y.triu(2),
    "bincount": lambda x, y, i: torch.bincount(i, minlength=12),
    "interleave": lambda x, y, i: x.repeat_interleave(3, dim=1),
    "arange": lambda x, y, i: torch.arange(3, 17, 2, device=x.device) % 5,
    "pad": lambda x, y, i: torch.nn.functional.pad(x, (1, 2), value=3.0),
    "conv1d": lambda x, y, i: torch.nn.functional.conv1d(
        x.unsqueeze(0), y[:, :4].unsqueeze(1), groups=8
    ),
    "embedding": lambda x, y, i: torch.nn.functional.embedding(i % 8, x),
    "casts": lambda x, y, i: (x.bfloat16() + y.bfloat16()).float() + i.sum().float(),
    "isfinite": lambda x, y, i: torch.isfinite(x / 0.0) | torch.isfinite(y),
    "triangular solve": lambda x, y, i: torch.linalg.solve_triangular(
        torch.eye(8, device=x.device) + x[:, :8].tril(-1), y, upper=False, unitriangular=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_operators_equal_the_cpu(name: str) -> None:
    """The same routines run underneath, so the bytes are equal, not merely close."""

    def body(device: torch.device) -> None:
        make = torch.Generator().manual_seed(5)
        x, y = (torch.randn(8, 32, generator=make) for _ in range(2))
        i = torch.randint(0, 10, (5,), generator=make)
        want = EXPRESSIONS[name](x, y, i)
        got = EXPRESSIONS[name](x.to(device), y.to(device), i.to(device)).cpu()
        assert got.dtype == want.dtype and got.shape == want.shape
        assert torch.equal(got, want), (got - want).abs().max()

    child(body)


def test_missing_operator_is_named() -> None:
    def body(device: torch.device) -> None:
        rows = torch.randn(4, 32, device=device)
        counts = torch.ones(2, 2, dtype=torch.int64, device=device)
        with pytest.raises(RuntimeError, match="aclnnMoeReRouting"):
            torch.ops.npu.npu_moe_re_routing(rows, counts)

    child(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_cpu(dtype: torch.dtype) -> None:
    """scaled_dot_product_attention, which torch_npu gives to its flash attention."""

    def body(device: torch.device) -> None:
        attend = torch.nn.functional.scaled_dot_product_attention
        make = torch.Generator().manual_seed(8)
        query = torch.randn(2, 4, 7, 32, generator=make).to(dtype)
        key, value = (torch.randn(2, 2, 9, 32, generator=make).to(dtype) for _ in range(2))
        mask = torch.ones(7, 9, dtype=torch.bool).tril(2)
        for how in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
            want = attend(query, key, value, enable_gqa=True, **how)
            moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in how.items()}
            args = (one.to(device) for one in (query, key, value))
            got = attend(*args, enable_gqa=True, **moved).cpu()
            assert torch.equal(got, want), how

    child(body)


def test_moe_operators_of_torch_npu() -> None:
    def body(device: torch.device) -> None:
        make = torch.Generator().manual_seed(3)
        tokens, experts, k = 6, 4, 2
        x = torch.randn(tokens, 64, generator=make).bfloat16()
        logits = torch.randn(tokens, experts, generator=make)
        ops = torch.ops.npu
        weights, ids, _ = ops.npu_moe_gating_top_k_softmax(logits.to(device), None, k)
        best = torch.softmax(logits, -1).topk(k)
        assert torch.equal(ids.cpu().long(), best.indices)
        assert torch.equal(weights.cpu(), best.values)
        rows, places, counts, _ = ops.npu_moe_init_routing_v2(
            x.to(device), ids, active_num=tokens * k, expert_num=experts, expert_capacity=0,
            drop_pad_mode=0, expert_tokens_num_type=1, expert_tokens_num_flag=True,
            active_expert_range=[0, experts], quant_mode=-1,
        )  # fmt: skip
        assert torch.equal(counts.cpu(), torch.bincount(best.indices.flatten(), minlength=experts))
        order = best.indices.flatten().argsort(stable=True)
        assert torch.equal(rows.cpu(), x[order // k])

    child(body)


def test_grouped_product_and_swiglu() -> None:
    def body(device: torch.device) -> None:
        make = torch.Generator().manual_seed(4)
        rows = torch.randn(9, 64, generator=make).bfloat16()
        weight = torch.randn(3, 64, 32, generator=make).bfloat16()
        sizes = [4, 0, 5]
        (got,) = torch.ops.npu.npu_grouped_matmul(
            [rows.to(device)], [weight.to(device)],
            group_list=torch.tensor(sizes, device=device), split_item=3, group_type=0,
            group_list_type=1,
        )  # fmt: skip
        want = torch.cat([
            (part.float() @ weight[i].float()).bfloat16()
            for i, part in enumerate(rows.split(sizes))
        ])  # fmt: skip
        assert torch.equal(got.cpu(), want)
        gate, up = want.float().chunk(2, -1)
        gated = torch.ops.npu.npu_swiglu(got, -1).cpu()
        assert torch.equal(gated, (torch.nn.functional.silu(gate) * up).bfloat16())

    child(body)
