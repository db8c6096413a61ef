"""Tiles of the product on Hopper's own instructions: those that the model chooses can all be made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.kernels.wgmma_tiles import FEW_ROWS, WgmmaConfig, choose_tile, clocks

SHARED_BYTES = 228 << 10
REGISTERS = 1 << 16
MODEL_SHAPES = [  # of a 0.6B and an 8B model: features, width, gated
    (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),
    (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False),
]  # fmt: skip


@given(
    features=st.integers(1, 8192).map(lambda n: 8 * n),
    width=st.integers(1, 4096).map(lambda n: 8 * n),
    rows=st.integers(0, 5000),
    gated=st.booleans(),
)
def test_a_chosen_tile_can_be_compiled_and_launched(features, width, rows, gated):
    tile = choose_tile(features, width, rows, gated=gated)
    if tile is None:
        return
    assert tile.block_n % (16 if gated or tile.blocks == 2 else 8) == 0
    assert 8 <= tile.block_n <= 256
    assert tile.stages >= 2
    assert tile.shared_bytes <= SHARED_BYTES - 1024
    assert tile.resident * (tile.shared_bytes + 1024) <= SHARED_BYTES
    # A sum's registers and some forty beside it, for every thread that multiplies.
    assert tile.resident * 128 * tile.row_groups * (tile.block_n // 2 + 40) <= REGISTERS
    assert tile.cluster in (1, 2, 4, 8)
    assert not (gated and tile.split > 1)
    assert tile.rows >= rows
    assert width >= 64 * tile.split, "every part of a split sum has something to add"


@pytest.mark.parametrize(("features", "width", "gated"), MODEL_SHAPES)
def test_every_number_of_rows_of_the_two_models_has_a_tile(features, width, gated):
    tiles = {rows: choose_tile(features, width, rows, gated=gated) for rows in range(1, FEW_ROWS + 1)}
    assert None not in tiles.values()
    # One compiled kernel serves 64 rows more or less: a start compiles few.
    assert len(set(tiles.values())) <= 4


@pytest.mark.parametrize(("features", "width", "gated"), MODEL_SHAPES)
def test_many_rows_are_for_the_library(features, width, gated):
    assert choose_tile(features, width, FEW_ROWS + 1, gated=gated) is None
    assert choose_tile(features, width, 4096, gated=gated) is None


@pytest.mark.parametrize(("features", "width"), [(1001, 1024), (1024, 1001), (64, 8)])
def test_shapes_that_the_copy_engine_cannot_load_have_no_tile(features, width):
    assert choose_tile(features, width, 64, gated=False) is None


def test_more_work_is_never_modelled_as_less_time():
    tile = WgmmaConfig(row_groups=2, block_n=64)
    assert clocks(4096, 1024, tile) < clocks(8192, 1024, tile) < clocks(8192, 2048, tile)
    taller = WgmmaConfig(row_groups=4, block_n=64)
    assert clocks(4096, 1024, tile) < clocks(4096, 1024, taller)


def test_a_tile_whose_sums_do_not_fit_the_ring_is_refused():
    with pytest.raises(ValueError, match="does not fit the shared memory"):
        _ = WgmmaConfig(row_groups=4, block_n=256, split=2).shared_bytes
