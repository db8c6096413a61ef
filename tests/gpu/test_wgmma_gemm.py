"""The product on Hopper's own instructions, on the card, against torch in float64."""

import pytest
import torch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
UNTOUCHED = 7.0


@pytest.fixture(autouse=True)
def on_a_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")
    torch.manual_seed(0)


def randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def product(x, weight, *, gated, residual):
    y = x.double() @ weight.double().T
    if gated:
        gate, up = y.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def assert_equals_float64(features, width, rows, config, *, gated, adds, dtype=torch.bfloat16):
    """Also that it writes nothing behind its rows, takes rows with gaps between them, and gives the same every time."""
    from slipstream.engine.kernels.wgmma_gemm import wgmma_gemm

    x = randn(rows, width + 64, dtype=dtype)[:, :width]
    weight = randn(features * (2 if gated else 1), width, dtype=dtype, scale=width**-0.5)
    residual = randn(rows, features, dtype=dtype) if adds else None
    outs = []
    for _ in range(2):
        memory = torch.full((rows + 8, features + 64), UNTOUCHED, device=CUDA, dtype=dtype)
        out = memory[:rows, :features]
        if residual is not None:
            out.copy_(residual)
        assert wgmma_gemm(x, weight, config, out=out, silu_mul=gated, add=adds) is out
        outs.append(out)
        assert (memory[rows:] == UNTOUCHED).all()
        assert (memory[:, features:] == UNTOUCHED).all()
    expected = product(x, weight, gated=gated, residual=residual)
    error = ((outs[0].double() - expected).norm() / expected.norm()).item()
    assert error < (6e-3 if dtype == torch.bfloat16 else 8e-4), f"relative error {error:.2e}"
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("rows", [1, 33, 64, 65, 100, 128, 129, 192, 200, 256])
@pytest.mark.parametrize(
    ("features", "width", "gated", "adds"),
    [
        (4096, 1024, False, False),
        (1024, 2048, False, True),
        (3072, 1024, True, False),
        (1000, 1032, False, True),
        (2056, 576, True, False),
    ],
)
def test_the_chosen_tile_equals_float64(features, width, gated, adds, rows):
    from slipstream.engine.kernels.wgmma_tiles import choose_tile

    tile = choose_tile(features, width, rows, gated=gated)
    assert_equals_float64(features, width, rows, tile, gated=gated, adds=adds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [64, 150, 256])
@pytest.mark.parametrize(
    ("blocks", "split", "resident"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 4, 1), (2, 2, 1), (1, 3, 1), (1, 8, 1)]
)
def test_every_kind_of_cluster_equals_float64(blocks, split, resident, rows, dtype):
    from slipstream.engine.kernels.wgmma_tiles import WgmmaConfig

    groups = -(-rows // (64 * blocks))
    config = WgmmaConfig(
        row_groups=groups, block_n=32, blocks=blocks, split=split, resident=resident if groups == 1 else 1
    )
    assert_equals_float64(1000, 2056, rows, config, gated=False, adds=True, dtype=dtype)
    if split == 1:
        assert_equals_float64(1000, 520, rows, config, gated=True, adds=False, dtype=dtype)


@pytest.mark.parametrize("rows", [128, 256])
def test_many_tiles_of_one_program_equal_float64(rows):
    from slipstream.engine.kernels.wgmma_tiles import choose_tile

    tile = choose_tile(14336, 4096, rows, gated=True)
    assert_equals_float64(14336, 4096, rows, tile, gated=True, adds=False)
    tile = choose_tile(4096, 14336, rows, gated=False)
    assert_equals_float64(4096, 14336, rows, tile, gated=False, adds=True)


@pytest.mark.parametrize(("blocks", "split", "gated"), [(2, 1, True), (1, 1, False), (1, 2, False)])
def test_more_rows_than_a_tile_equal_float64(blocks, split, gated):
    from slipstream.engine.kernels.wgmma_tiles import WgmmaConfig

    config = WgmmaConfig(row_groups=2, block_n=96, blocks=blocks, split=split)
    assert_equals_float64(2000, 1032, 1100, config, gated=gated, adds=not gated)


@pytest.mark.parametrize("tokens", [0, 1, 100, 300, 1024, 1200, 4096])
def test_a_gated_product_of_any_number_of_tokens_equals_float64(tokens):
    from slipstream.engine.kernels.linear import gated_product

    x, weight = randn(tokens, 2048), randn(2 * 4608, 2048, scale=2048**-0.5)
    expected = product(x, weight, gated=True, residual=None)
    error = (gated_product(x, weight).double() - expected).norm()
    assert error <= 6e-3 * expected.norm()


def test_a_chain_of_products_in_a_graph_waits_for_what_it_reads():
    """Each starts ahead of the end of the one before: in a graph, hundreds of times, the result is that of one at a time."""
    from slipstream.engine.kernels.wgmma_gemm import wgmma_gemm
    from slipstream.engine.kernels.wgmma_tiles import choose_tile

    rows, width, inner = 128, 1024, 3072
    up = [randn(2 * inner, width, scale=width**-0.5) for _ in range(6)]
    down = [randn(width, inner, scale=inner**-0.5) for _ in range(6)]
    start, x = randn(rows, width), torch.empty(rows, width, device=CUDA, dtype=torch.bfloat16)

    def chain(pause):
        x.copy_(start)
        for one, two in zip(up, down, strict=True):
            middle = wgmma_gemm(x, one, choose_tile(inner, width, rows, gated=True), silu_mul=True)
            pause()
            wgmma_gemm(middle, two, choose_tile(width, inner, rows, gated=False), out=x, add=True)
            pause()

    chain(torch.cuda.synchronize)
    expected = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for _ in range(200):
        graph.replay()
    assert torch.equal(x, expected)


def test_what_it_cannot_do_is_refused():
    from slipstream.engine.kernels.wgmma_gemm import wgmma_gemm
    from slipstream.engine.kernels.wgmma_tiles import WgmmaConfig

    weight, x = randn(64, 128), randn(8, 128)
    with pytest.raises(ValueError, match="excludes silu_mul"):
        wgmma_gemm(x, weight, WgmmaConfig(row_groups=1, block_n=32, split=2), silu_mul=True)
    with pytest.raises(ValueError, match="one or two blocks, not 4"):
        wgmma_gemm(x, weight, WgmmaConfig(row_groups=1, block_n=32, blocks=4), silu_mul=True)
    with pytest.raises(ValueError, match="block_n 24 is not cut"):
        wgmma_gemm(x, weight, WgmmaConfig(row_groups=1, block_n=24), silu_mul=True)
    with pytest.raises(ValueError, match="add needs"):
        wgmma_gemm(x, weight, WgmmaConfig(row_groups=1, block_n=32), add=True)
    with pytest.raises(ValueError, match="does not fit the shared memory"):
        wgmma_gemm(x, weight, WgmmaConfig(row_groups=4, block_n=256, split=2))
    assert wgmma_gemm(x[:0], weight, WgmmaConfig(row_groups=1, block_n=32)).shape == (0, 64)


def test_a_second_process_finds_the_compiled_kernel(tmp_path, monkeypatch):
    from slipstream.engine.kernels import nvrtc_kernel

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    source = 'extern "C" __global__ void nothing() {}'
    first = nvrtc_kernel.cubin(source, "nothing", {})
    monkeypatch.setattr(nvrtc_kernel, "_compile", None)
    assert nvrtc_kernel.cubin(source, "nothing", {}) == first
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".cubin"]


def test_what_does_not_compile_says_why():
    from slipstream.engine.kernels.nvrtc_kernel import NvrtcError, cubin

    with pytest.raises(NvrtcError, match=r"(?s)did not compile.*missing"):
        cubin('extern "C" __global__ void broken() { missing(); }', "broken", {})
