"""RMSNorm, SiLU·mul, rope with KV write and the step prologue against torch in float64."""

import pytest
import torch

from slipstream.engine.kernels.linear import gated_product
from slipstream.engine.kernels.rmsnorm import rmsnorm
from slipstream.engine.kernels.rope_kv_write import rope_kv_write
from slipstream.engine.kernels.silu_mul import silu_mul
from slipstream.engine.kernels.step_prologue import empty_step_inputs, step_prologue

EPS = 1e-6


def reference_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], angles [T, D/2]: the half rotation as transformers writes it."""
    cos = torch.cat([angles.cos(), angles.cos()], -1)[:, None]
    sin = torch.cat([angles.sin(), angles.sin()], -1)[:, None]
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@pytest.mark.parametrize("width", [64, 576, 1024])
def test_rmsnorm_equals_float64(width):
    x, weight = torch.randn(3, width), torch.randn(width)
    torch.testing.assert_close(rmsnorm(x, weight, EPS).double(), reference_norm(x, weight), rtol=1e-5, atol=1e-5)


def test_rmsnorm_reads_strided_rows_and_writes_into_out():
    x, weight, out = torch.randn(4, 200)[:, :96], torch.randn(96), torch.full((4, 96), float("nan"))
    assert rmsnorm(x, weight, EPS, out=out) is out
    torch.testing.assert_close(out.double(), reference_norm(x, weight), rtol=1e-5, atol=1e-5)


def test_no_rows_launch_nothing():
    assert rmsnorm(torch.randn(0, 8), torch.ones(8), EPS).shape == (0, 8)
    assert silu_mul(torch.randn(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("width", [24, 1500])
def test_silu_mul_equals_float64(width):
    x = torch.randn(3, 2 * width) * 4
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(silu_mul(x).double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (3, 1, 24)])
def test_rope_kv_write_equals_float64(num_q_heads, num_kv_heads, head_dim, with_norm):
    tokens, pages, page_size = 5, 4, 4
    qkv = torch.randn(tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.tensor([0, 7, 3, 30, 12], dtype=torch.int32)
    slots = torch.tensor([5, 15, 6, 9, 12], dtype=torch.int32)
    angles = torch.arange(32.0)[:, None] * torch.rand(head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    k_cache, v_cache = (torch.full((pages, page_size, num_kv_heads, head_dim), 9.0) for _ in range(2))
    q_norm, k_norm = (torch.randn(head_dim), torch.randn(head_dim)) if with_norm else (None, None)
    fresh = tuple(torch.full((tokens, num_kv_heads, head_dim), 9.0) for _ in range(2))
    plain = rope_kv_write(
        qkv, positions, slots, cos_sin, k_cache.clone(), v_cache.clone(),
        num_q_heads=num_q_heads, q_norm=q_norm, k_norm=k_norm, eps=EPS,
    )  # fmt: skip
    out = rope_kv_write(
        qkv, positions, slots, cos_sin, k_cache, v_cache,
        num_q_heads=num_q_heads, q_norm=q_norm, k_norm=k_norm, eps=EPS, fresh=fresh,
    )  # fmt: skip
    assert torch.equal(out, plain)
    q, k, v = qkv.double().split([num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], -1)
    q, k, v = (part.view(tokens, -1, head_dim) for part in (q, k, v))
    if with_norm:
        q, k = reference_norm(q, q_norm), reference_norm(k, k_norm)
    row_angles = angles[positions.long()].double()
    torch.testing.assert_close(out.double(), rotated(q, row_angles), rtol=1e-4, atol=1e-4)
    for made, expected in zip(fresh, (rotated(k, row_angles), v), strict=True):
        torch.testing.assert_close(made.double(), expected, rtol=1e-4, atol=1e-4)
    for cache, expected in ((k_cache, rotated(k, row_angles)), (v_cache, v)):
        flat = cache.view(-1, num_kv_heads, head_dim)
        torch.testing.assert_close(flat[slots.long()].double(), expected, rtol=1e-4, atol=1e-4)
        untouched = torch.ones(pages * page_size, dtype=torch.bool)
        untouched[slots.long()] = False
        assert (flat[untouched] == 9.0).all()


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_step_prologue_derives_every_input_and_pads_to_row_zero(page_size):
    lengths = torch.tensor([0, 33, 15, 16], dtype=torch.int32)
    next_ids = torch.tensor([7, 70, 71, 72])
    page_table = torch.arange(4 * 64, dtype=torch.int32).view(4, 64) + 1
    embedding, hidden = torch.randn(80, 1100), torch.empty(4, 1100)
    inputs = empty_step_inputs(4, "cpu")
    inputs.ids.fill_(-1), inputs.slots.fill_(-1), inputs.seq_lens.fill_(-1), inputs.positions.fill_(-1)
    step_prologue(
        torch.tensor([3, 1, 2, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), next_ids, lengths,
        page_table, page_size, inputs, embedding=embedding, hidden=hidden,
    )  # fmt: skip
    assert inputs.ids.tolist() == [72, 70, 0, 0]
    assert inputs.positions.tolist() == [16, 33, 0, 0]
    assert inputs.seq_lens.tolist() == [17, 34, 0, 0]
    slots = [int(page_table[row, p // page_size]) * page_size + p % page_size for row, p in ((3, 16), (1, 33))]
    assert inputs.slots.tolist() == [*slots, 0, 0]
    assert lengths.tolist() == [0, 34, 15, 17]
    assert torch.equal(hidden, embedding[[72, 70, 0, 0]])


def test_the_step_prologue_wants_embedding_and_hidden_together():
    with pytest.raises(ValueError, match="go together"):
        step_prologue(*[torch.zeros(1)] * 5, 1, empty_step_inputs(1, "cpu"), embedding=torch.zeros(1, 1))


def test_a_gated_product_is_the_gate_s_silu_times_the_up_half():
    x, weight = torch.randn(6, 32), torch.randn(2 * 24, 32) / 6
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(gated_product(x, weight).double(), expected, rtol=1e-4, atol=1e-5)
