"""The kernels for matrices times a few rows against torch in float64."""

import itertools

import pytest
import torch

from slipstream.engine.kernels.gemv import gemv
from slipstream.engine.kernels.linear import linear
from slipstream.engine.kernels.matrix_choice import choose
from slipstream.engine.kernels.resident_gemm import ResidentConfig, resident_gemm
from slipstream.engine.kernels.small_gemm import GemmConfig, make_split_workspace, small_gemm

EPS = 1e-6


def reference(x, weight, norm=None, silu_mul=False, residual=None):
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.double()
    y = x @ weight.T
    if silu_mul:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


FUSIONS = list(itertools.product([False, True], repeat=3))
FUSIONS_WITHOUT_NORM = list(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize(("with_norm", "silu_mul", "add"), FUSIONS)
@pytest.mark.parametrize(("rows", "features", "width"), [(1, 40, 48), (3, 10, 64), (8, 7, 96)])
def test_gemv_equals_float64(rows, features, width, with_norm, silu_mul, add):
    x = torch.randn(rows, width + 5)[:, :width]
    weight = torch.randn(features * (2 if silu_mul else 1), width) / 8
    norm = torch.randn(width) if with_norm else None
    residual = torch.randn(rows, features)
    out = residual.clone() if add else torch.full((rows, features), float("nan"))
    gemv(x, weight, out=out, norm=norm, eps=EPS, silu_mul=silu_mul, add=add, rows_per_program=4)
    expected = reference(x, weight, norm, silu_mul, residual if add else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("silu_mul", "add"), FUSIONS_WITHOUT_NORM)
@pytest.mark.parametrize(("rows", "features", "width"), [(1, 40, 80), (5, 32, 64), (17, 20, 96)])
def test_small_gemm_equals_float64(rows, features, width, silu_mul, add):
    x = torch.randn(rows, width + 3)[:, :width]
    weight = torch.randn(features * (2 if silu_mul else 1), width) / 8
    residual = torch.randn(rows, features)
    out = residual.clone() if add else torch.full((rows, features), float("nan"))
    config = GemmConfig(block_n=16, block_k=32, block_m=16)
    small_gemm(x, weight, config, out=out, silu_mul=silu_mul, add=add)
    expected = reference(x, weight, None, silu_mul, residual if add else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("with_norm", "silu_mul", "add"), FUSIONS)
@pytest.mark.parametrize(("rows", "features", "width", "block_n"), [(1, 40, 80, 16), (5, 20, 64, 8), (17, 70, 200, 32)])
def test_resident_gemm_equals_float64(rows, features, width, block_n, with_norm, silu_mul, add):
    x = torch.randn(rows, width + 3)[:, :width]
    weight = torch.randn(features * (2 if silu_mul else 1), width) / 8
    norm = torch.randn(width) if with_norm else None
    residual = torch.randn(rows, features)
    out = residual.clone() if add else torch.full((rows, features), float("nan"))
    config = ResidentConfig(block_n=block_n, num_warps=2)
    resident_gemm(x, weight, config, out=out, norm=norm, eps=EPS, silu_mul=silu_mul, add=add)
    expected = reference(x, weight, norm, silu_mul, residual if add else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "width", "split_k"), [(1, 96, 3), (19, 64, 2), (4, 80, 4)])
def test_a_split_sum_equals_float64_and_leaves_its_counters_at_zero(rows, width, split_k, add):
    x, weight, residual = torch.randn(rows, width), torch.randn(36, width) / 8, torch.randn(rows, 36)
    workspace = make_split_workspace(max_features=36, device="cpu")
    config = GemmConfig(block_n=16, block_k=16, split_k=split_k, block_m=16)
    for _ in range(2):
        out = residual.clone() if add else torch.full((rows, 36), float("nan"))
        small_gemm(x, weight, config, workspace=workspace, out=out, add=add)
        expected = reference(x, weight, residual=residual if add else None)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert not workspace.arrivals.any()


def test_what_the_kernels_cannot_do_is_refused():
    x, weight = torch.randn(9, 16), torch.randn(4, 16)
    with pytest.raises(ValueError, match="1 to 8 rows, got 9"):
        gemv(x, weight)
    with pytest.raises(ValueError, match="add needs"):
        gemv(x[:1], weight, add=True)
    with pytest.raises(ValueError, match="split sum needs"):
        small_gemm(x, weight, GemmConfig(block_n=16, block_k=16, split_k=2))
    with pytest.raises(ValueError, match="1 to 32 rows of up to 4096, got 33 of 16"):
        resident_gemm(torch.randn(33, 16), weight, ResidentConfig(block_n=16))
    with pytest.raises(ValueError, match="1 to 256 rows, got 257"):
        small_gemm(torch.randn(257, 16), weight, GemmConfig(block_n=16, block_k=16))
    with pytest.raises(ValueError, match="too small for 9 rows of 4 features in 2 parts"):
        small_gemm(
            x, weight, GemmConfig(block_n=16, block_k=16, split_k=2),
            workspace=make_split_workspace(max_features=1, max_rows=1, device="cpu"),
        )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 13, 32, 64, 65])
@pytest.mark.parametrize(("features", "width"), [(48, 64), (40, 96)])
def test_linear_equals_float64_whatever_kernel_it_chooses(rows, features, width):
    x, norm, residual = torch.randn(rows, width), torch.randn(width), torch.randn(rows, features)
    weight, pair = torch.randn(features, width) / 8, torch.randn(2 * features, width) / 8
    workspace = make_split_workspace(max_features=features, max_rows=64, device="cpu")
    for y, expected in (
        (linear(x, weight, workspace, norm=norm, eps=EPS), reference(x, weight, norm)),
        (linear(x, pair, workspace, norm=norm, eps=EPS, gated=True), reference(x, pair, norm, True)),
        (linear(x, weight, workspace, add_to=residual.clone()), reference(x, weight, residual=residual)),
    ):
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def chosen(features, width, rows, *, gated, has_wgmma):
    choice = choose(features, width, rows, gated=gated, splittable=features <= 4096, has_wgmma=has_wgmma)
    return type(choice).__name__


MODEL_SHAPES = (
    (4096, 1024, False),
    (3072, 1024, True),
    (14336, 4096, True),
    (4096, 14336, False),
    (151936, 1024, False),
)


@pytest.mark.parametrize("has_wgmma", [False, True])
def test_the_choice_covers_every_shape_of_the_two_models(has_wgmma):
    kinds = {
        (features, width, rows): chosen(features, width, rows, gated=gated, has_wgmma=has_wgmma)
        for features, width, gated in MODEL_SHAPES
        for rows in (1, 8, 32, 64, 65, 256)
    }
    assert {kind for (*_, rows), kind in kinds.items() if rows == 1} == {"Gemv"}
    assert kinds[4096, 1024, 8] == kinds[3072, 1024, 8] == "Resident"
    assert kinds[14336, 4096, 8] == kinds[14336, 4096, 32] == kinds[151936, 1024, 64] == "Streamed"
    many = {kind for (*_, rows), kind in kinds.items() if rows == 65}
    assert many == ({"Wgmma", "Library"} if has_wgmma else {"Library"})
    assert kinds[4096, 1024, 32] == ("Wgmma" if has_wgmma else "Streamed")
    assert kinds[14336, 4096, 256] == ("Wgmma" if has_wgmma else "Library")
    assert kinds[4096, 14336, 256] == kinds[151936, 1024, 256] == "Library"
