"""Linear layers, norms and rotary embeddings on their own."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.layers.linear import Linear, packs
from slipstream.engine.layers.norm import RMSNorm
from slipstream.engine.layers.rotary import RotaryEmbedding
from slipstream.engine.loader.rope_config import RopeConfig

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}


def linear(in_features, out_features, dtype, *, bias=True, **how):
    made = Linear(in_features, out_features, bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    made.weight.normal_(generator=generator)
    if made.bias is not None:
        made.bias.normal_(generator=generator)
    expected = made.weight.double().clone(), None if made.bias is None else made.bias.double().clone()
    made.finish(**how)
    return made, lambda x: torch.nn.functional.linear(x.double(), *expected)


def rows(count, width, dtype):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5, 16, 33, 200])
def test_a_finished_linear_multiplies_as_before(count, dtype, bias):
    for how in ({}, {"row_bucket": 16}):
        made, expected = linear(48, 80, dtype, bias=bias, **how)
        x = rows(count, 48, dtype)
        got = made(x)
        assert got.shape == (count, 80)
        assert got.dtype == dtype
        assert torch.allclose(got.double(), expected(x), atol=TOLERANCE[dtype], rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 96), (576, 960), (1536, 576)])
def test_in_a_row_bucket_a_rows_product_is_the_same_wherever_it_stands(shape, dtype):
    made, _ = linear(*shape, dtype, row_bucket=16)
    x = rows(50, shape[0], dtype)
    together = made(x)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(made(x[order]), together[order])
    for row in (0, 15, 16, 49):
        assert torch.equal(made(x[row : row + 1]), together[row : row + 1])


def test_a_packed_weight_replaces_the_plain_one_unless_an_embedding_shares_it():
    if not packs(CPU, torch.float32):
        pytest.skip("this CPU's torch does not pack weights")
    made, _ = linear(48, 80, torch.float32, bias=False)
    assert made.weight.numel() == 0
    embedding = torch.nn.Parameter(torch.randn(80, 48), requires_grad=False)
    before = embedding.clone()
    tied = Linear.tied_to(embedding)
    tied.finish(keep_weight=True)
    x = rows(3, 48, torch.float32)
    assert torch.equal(embedding, before)
    assert torch.allclose(tied(x), x @ before.t(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_agrees_with_float64(dtype):
    norm = RMSNorm(72, 1e-5, dtype=dtype, device=CPU)
    norm.weight.uniform_(0.5, 1.5)
    x = rows(9, 72, dtype) * 3

    def expected(value):
        wide = value.double()
        return wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()

    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert torch.allclose(norm(x).double(), expected(x), atol=tolerance)
    assert torch.allclose(norm(x.view(3, 3, 72)).view(9, 72), norm(x))


def test_rotation_turns_pairs_by_position_and_keeps_their_length():
    rotary = RotaryEmbedding(RopeConfig(theta=100.0), head_dim=8, max_position=50, dtype=torch.float32, device=CPU)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(3))
    turned = rotary.at(torch.tensor([0, 7, 49], dtype=torch.int32)).apply(x)
    assert torch.equal(turned[0], x[0])
    for token, position in ((1, 7), (2, 49)):
        for pair in range(4):
            angle = position * 100.0 ** (-pair / 4)
            before = torch.complex(x[token, :, pair], x[token, :, pair + 4])
            after = before * torch.exp(torch.tensor(1j * angle))
            assert torch.allclose(turned[token, :, pair], after.real, atol=1e-5)
            assert torch.allclose(turned[token, :, pair + 4], after.imag, atol=1e-5)


@pytest.mark.parametrize("row_bucket", [None, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_added_to_the_residual_in_place(bias, row_bucket):
    linear = Linear(24, 40, bias=bias, dtype=torch.float32, device=CPU)
    for parameter in linear.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    x, residual = rows(9, 24, torch.float32), rows(9, 40, torch.float32)
    expected = residual.double() + torch.nn.functional.linear(
        x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
    )
    memory = residual.data_ptr()
    linear.finish(row_bucket=row_bucket)
    linear.add_product(x, residual)
    assert residual.data_ptr() == memory
    torch.testing.assert_close(residual.double(), expected, rtol=1e-5, atol=1e-5)
