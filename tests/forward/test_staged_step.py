"""Packing a step for one copy, and what the device derives from it."""

from __future__ import annotations

from array import array

import pytest
import torch

from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_loc_plan import KVLocPlan
from slipstream.engine.forward.row_state import RowState
from slipstream.engine.forward.staged_step import StagedStep, pack
from slipstream.engine.scheduler.schedule_batch import RowSampling, RowStart, ScheduleBatch

CPU = torch.device("cpu")


def ints(*values):
    return array("i", values).tobytes()


def mixed_batch():
    """Two decode rows, a chunk in the middle of a prompt, and a whole prompt; pages of 4."""
    return ScheduleBatch(
        step=9,
        num_decode=2,
        rows=(3, 1, 5, 2),
        num_prior=(7, 2, 4, 0),
        num_new=(1, 1, 3, 5),
        samples=(True, True, False, True),
        extend_ids=ints(11, 12, 13, 21, 22, 23, 24, 25),
        table_rows=ints(5, 2, 2),
        table_columns=ints(1, 0, 1),
        table_pages=ints(6, 9, 4),
        starts=(
            RowStart(row=2, sampling=RowSampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=-(2**63))),
            RowStart(row=5, sampling=RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=2**63 - 1)),
        ),
    )


def stage(batch):
    packed, widths = pack(batch)
    return StagedStep.of(torch.frombuffer(packed, dtype=torch.int32).clone(), widths)


def state():
    made = RowState(num_rows=6, max_pages=3, device=CPU)
    made.page_table[3] = torch.tensor([8, 2, 0])
    made.page_table[1] = torch.tensor([5, 0, 0])
    made.page_table[5] = torch.tensor([7, 0, 0])
    made.relay.scatter(torch.tensor([1, 3]), torch.tensor([101, 103]))
    return made


def test_every_column_survives_packing():
    staged = stage(mixed_batch())
    assert staged.rows.tolist() == [3, 1, 5, 2]
    assert staged.num_prior.tolist() == [7, 2, 4, 0]
    assert staged.num_new.tolist() == [1, 1, 3, 5]
    assert staged.seq_lens.tolist() == [8, 3, 7, 5]
    assert staged.query_start_loc.tolist() == [0, 1, 2, 5, 10]
    assert staged.sample_rows.tolist() == [3, 1, 2]
    assert staged.sample_lens.tolist() == [8, 3, 5]
    assert staged.logits_indices.tolist() == [0, 1, 9]
    assert staged.extend_ids.tolist() == [11, 12, 13, 21, 22, 23, 24, 25]
    assert staged.start_rows.tolist() == [2, 5]
    assert staged.start_seed.tolist() == [-(2**63), 2**63 - 1]
    assert staged.start_temperature.tolist() == pytest.approx([0.7, 0.0])


def test_the_row_state_takes_exactly_what_the_step_says():
    made = state()
    before = made.page_table.clone()
    made.apply(stage(mixed_batch()))
    assert made.page_table[5].tolist() == [7, 6, 0]
    assert made.page_table[2].tolist() == [9, 4, 0]
    assert torch.equal(made.page_table[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])
    sampling = made.sampling
    assert sampling.temperature.tolist() == pytest.approx([0, 0, 0.7, 0, 0, 0, 0])
    assert sampling.top_k.tolist() == [0, 0, 5, 0, 0, 0, 0]
    assert sampling.top_p.tolist() == pytest.approx([1, 1, 0.9, 1, 1, 1, 1])
    assert sampling.min_p.tolist() == pytest.approx([0, 0, 0.1, 0, 0, 0, 0])
    assert sampling.seed.tolist() == [0, 0, -(2**63), 0, 0, 2**63 - 1, 0]


def test_a_mixed_batch_takes_ids_from_relay_and_host_and_translates_every_position():
    made, batch = state(), mixed_batch()
    staged = stage(batch)
    made.apply(staged)
    derived = ForwardBatch.init_new(batch, staged, made, page_size=4)
    assert derived.mode.has_decode
    assert derived.mode.has_extend
    assert derived.input_ids.tolist() == [103, 101, 11, 12, 13, 21, 22, 23, 24, 25]
    assert derived.positions.tolist() == [7, 2, 4, 5, 6, 0, 1, 2, 3, 4]
    assert derived.kv_loc.slots.tolist() == [2 * 4 + 3, 5 * 4 + 2, 24, 25, 26, 36, 37, 38, 39, 16]
    assert (derived.num_rows, derived.num_tokens, derived.num_samples) == (4, 10, 3)


def test_a_decode_batch_ships_no_tokens():
    made = state()
    batch = ScheduleBatch(
        step=1,
        num_decode=2,
        rows=(1, 3),
        num_prior=(2, 7),
        num_new=(1, 1),
        samples=(True, True),
        extend_ids=b"",
        table_rows=b"",
        table_columns=b"",
        table_pages=b"",
        starts=(),
    )
    staged = stage(batch)
    made.apply(staged)
    derived = ForwardBatch.init_new(batch, staged, made, page_size=4)
    assert derived.input_ids.tolist() == [101, 103]
    assert derived.positions.tolist() == [2, 7]
    assert derived.kv_loc.slots.tolist() == [22, 11]


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_page_translation_agrees_with_division(page_size):
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(1, 50, (5, 40), generator=generator, dtype=torch.int32)
    rows = torch.randint(0, 5, (200,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 40 * page_size, (200,), generator=generator, dtype=torch.int32)
    plan = KVLocPlan.make(table, page_size, token_rows=rows, positions=positions)
    for slot, row, position in zip(plan.slots.tolist(), rows.tolist(), positions.tolist(), strict=True):
        assert slot == int(table[row, position // page_size]) * page_size + position % page_size


def test_the_pages_of_a_row_cover_its_tokens_and_no_more():
    table = torch.arange(15, dtype=torch.int32).view(3, 5)
    plan = KVLocPlan(slots=torch.empty(0, dtype=torch.int64), page_table=table, page_size=4)
    assert plan.pages_of(torch.tensor([2, 0]), 8).tolist() == [[10, 11], [0, 1]]
    assert plan.pages_of(torch.tensor([1]), 9).tolist() == [[5, 6, 7]]
