"""What the deferred sample brings from the host: dead rows, and which rows draw at random."""

from __future__ import annotations

import dataclasses
from array import array

import torch

from slipstream.engine.forward.row_samplings import RowSamplings
from slipstream.engine.forward.staged_sample import SampleBlock, StagedSample
from slipstream.engine.scheduler.schedule_batch import RowSampling, RowStart, ScheduleBatch
from slipstream.engine.worker import SampleInputs

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
RANDOM = RowSampling(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=1)

# Rows 4, 6 and 9 sample; row 5 is in the middle of its prompt.
BATCH = ScheduleBatch(
    step=1,
    num_decode=1,
    rows=(4, 5, 6, 9),
    num_prior=(3, 0, 0, 0),
    num_new=(1, 2, 2, 2),
    samples=(True, False, True, True),
    extend_ids=array("i", [0] * 6).tobytes(),
    table_rows=b"",
    table_columns=b"",
    table_pages=b"",
    starts=(),
)


def stage(inputs, *, kinds, batch=BATCH):
    samplings = RowSamplings()
    samplings.apply(RowStart(row=row, sampling=sampling) for row, sampling in kinds.items())
    block = SampleBlock.make(batch, inputs, samplings)
    packed = torch.frombuffer(bytearray(b"".join(block.columns)) or bytearray(4), dtype=torch.int32)
    return StagedSample.of(packed[: sum(block.widths)], block), block.needs


def test_a_greedy_batch_with_nothing_to_add_ships_nothing():
    staged, needs = stage(SampleInputs(), kinds={4: GREEDY, 6: GREEDY, 9: GREEDY})
    assert not needs.any_random
    assert staged.relay_rows is None


def test_random_rows_are_named_by_their_place_among_the_sampling_rows():
    staged, needs = stage(SampleInputs(), kinds={4: GREEDY, 6: RANDOM, 9: RANDOM})
    assert staged.random is not None
    assert staged.random.tolist() == [1, 2]
    assert needs.any_random
    assert needs.any_top_p
    assert needs.max_top_k == 0


def test_if_all_rows_are_random_none_needs_to_be_named():
    staged, _ = stage(SampleInputs(), kinds={4: RANDOM, 6: RANDOM, 9: RANDOM})
    assert staged.random is None


def test_dead_rows_draw_nothing_and_write_to_the_padding_row():
    inputs = SampleInputs(dead=frozenset({1, 2}))
    staged, needs = stage(inputs, kinds={4: GREEDY, 6: RANDOM, 9: GREEDY})
    assert staged.relay_rows is not None
    assert staged.relay_rows.tolist() == [4, 0, 9]
    assert not needs.any_random


def test_a_row_that_starts_again_is_sampled_as_it_now_wants():
    samplings = RowSamplings()
    samplings.apply([RowStart(row=4, sampling=RANDOM)])
    assert samplings.random_among([4])[0] == (0,)
    samplings.apply([RowStart(row=4, sampling=dataclasses.replace(RANDOM, top_k=1))])
    assert samplings.random_among([4]) == ((), samplings.random_among([])[1])
    assert samplings.random_among([0])[0] == ()
