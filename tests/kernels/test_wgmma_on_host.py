"""The kernel in CUDA C++ as it is, compiled for the host: its indices, its ring, its clusters and its split sums, against
torch in float64. What only a GPU can show (registers, orders of memory, speed) is in tests/gpu.
"""

import ctypes

import pytest
import torch

LAUNCH = """
extern "C" const char* launch(
    const u16* x, long x_stride, const u16* w, u16* out, int rows, int out_stride, int grid, unsigned seed) {
    const TensorMap x_map{x, rows, K, x_stride, BM, true};
    const TensorMap w_map{w, SILU ? 2 * N : N, K, K, PIECE_ROWS, false};
    return host::launch(grid, CLUSTER, 128 * (ROW_GROUPS + 1), seed, [&] { wgmma_gemm(x_map, w_map, out, rows, out_stride); });
}
"""


@pytest.fixture
def compiled(on_host):
    """A kernel of this tile for the host: `compiled(features, width, tile, silu_mul=…, add=…)`."""

    def compile_for_host(features, width, tile, *, silu_mul=False, add=False, fault=("", "")):
        few_stages = {"STAGES": min(tile.stages, 3), "BFLOAT16": 1}
        defines = {**tile.defines(features, width, silu_mul=silu_mul, add=add), **few_stages}
        launch = on_host(["wgmma_gemm.cu"], defines, LAUNCH, fault).launch
        launch.restype = ctypes.c_char_p
        return launch

    return compile_for_host


def run(launch, x, weight, out, grid, seed=0):
    """Says what went wrong, or None."""
    error = launch(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.stride(0)), ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(out.data_ptr()), len(x), out.stride(0), grid, seed,
    )  # fmt: skip
    return None if error is None else error.decode()


def tile_of(**fields):
    from slipstream.engine.kernels.wgmma_tiles import WgmmaConfig

    return WgmmaConfig(**fields)


CASES = [  # features, width, rows, tile, gated, adds, clusters at once
    (48, 64, 5, {"row_groups": 1, "block_n": 32}, False, False, 9),
    (40, 200, 70, {"row_groups": 2, "block_n": 16}, False, True, 2),
    (24, 136, 64, {"row_groups": 1, "block_n": 32}, True, False, 1),
    (32, 520, 100, {"row_groups": 1, "block_n": 32, "blocks": 2}, False, True, 9),
    (40, 328, 128, {"row_groups": 1, "block_n": 32, "blocks": 2}, True, False, 1),
    (32, 400, 60, {"row_groups": 1, "block_n": 32, "split": 2}, False, True, 9),
    (24, 260 * 2, 33, {"row_groups": 1, "block_n": 24, "split": 3}, False, False, 9),
    (32, 712, 110, {"row_groups": 1, "block_n": 32, "blocks": 2, "split": 2}, False, True, 9),
    (24, 200, 300, {"row_groups": 1, "block_n": 16, "blocks": 2}, False, False, 2),
]


@pytest.mark.parametrize(("features", "width", "rows", "tile", "gated", "adds", "clusters"), CASES)
def test_the_kernel_on_the_host_equals_float64(features, width, rows, tile, gated, adds, clusters, compiled):
    tile = tile_of(**tile)
    launch = compiled(features, width, tile, silu_mul=gated, add=adds)
    torch.manual_seed(0)
    x = torch.randn(rows, width + 8).bfloat16()[:, :width]
    weight = (torch.randn(features * (2 if gated else 1), width) * width**-0.5).bfloat16()
    residual = torch.randn(rows, features).bfloat16()
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    if adds:
        expected = expected + residual.double()
    tiles = -(-features // (tile.block_n // 2 if gated else tile.block_n)) * -(-rows // tile.rows)
    grid = tile.cluster * (tiles if tile.split > 1 else min(tiles, clusters))
    for seed in range(2):
        memory = torch.full((rows + 3, features + 16), 7.0, dtype=torch.bfloat16)
        out = memory[:rows, :features]
        if adds:
            out.copy_(residual)
        assert run(launch, x, weight, out, grid, seed) is None
        assert ((out.double() - expected).norm() / expected.norm()).item() < 6e-3
        assert (memory[rows:] == 7).all()
        assert (memory[:, features:] == 7).all()


FAULTS = {
    "a stage is filled while it is read": (
        "wait_barrier(ring.empty(step % STAGES), (step / STAGES - 1) & 1);\n        producer.send_w", "producer.send_w",
    ),
    "a stage is given back before it is read": ("wait_for_products<1>();", ""),
    "a stage is read before it is full": ("wait_barrier(ring.full(stage), (step / STAGES) & 1);", ""),
    "a stage is never given back": ("if (inner > 0) {", "if (false) {"),
    "a CTA ends while others arrive at it": (
        "for (int step = num_steps - ahead; step < num_steps; ++step) {", "for (int step = 0; step < 0; ++step) {",
    ),
    "the input is loaded ahead of the wait": ("    wait_for_inputs();\n    for (int step", "    for (int step"),
    "sums are added before all are there": (", me);\n            cluster_sync();", ", me);"),
    "one row too many is stored": ("if (row >= rows)", "if (row > rows)"),
}  # fmt: skip


def seems_right(launch, tile, seed):
    torch.manual_seed(0)
    x, weight = torch.randn(126, 1040).bfloat16(), torch.randn(16, 1040).bfloat16()
    out = torch.full((127, 16), 7.0, dtype=torch.bfloat16)
    error = run(launch, x, weight, out[:126], tile.cluster, seed)
    near = torch.allclose(out[:126].double(), x.double() @ weight.double().T, rtol=0.02, atol=0.5)
    return error is None and near and bool((out[126] == 7).all())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_noticed(fault, compiled):
    """The imitation is worth as much as it finds."""
    tile = tile_of(row_groups=1, block_n=16, blocks=2, split=2 if "sums" in fault else 1)
    assert seems_right(compiled(16, 1040, tile), tile, 0)
    launch = compiled(16, 1040, tile, fault=FAULTS[fault])
    assert not all(seems_right(launch, tile, seed) for seed in range(20))
