"""The row state of a step in one kernel, against torch's operators."""

import pytest
import torch

from slipstream.engine.kernels.row_writes import RowWrites, row_writes
from slipstream.engine.sampling.sampling_table import SamplingTable

NUM_ROWS, MAX_PAGES = 301, 12


def some_rows(count):
    return (torch.randperm(NUM_ROWS - 1)[:count] + 1).int()


def step_of(num_rows, num_writes, num_starts):
    entries = torch.randperm(NUM_ROWS * MAX_PAGES)[:num_writes]
    return RowWrites(
        rows=some_rows(num_rows),
        seq_lens=torch.randint(1, 999, (num_rows,)).int(),
        table_rows=(entries // MAX_PAGES).int(),
        table_columns=(entries % MAX_PAGES).int(),
        table_pages=torch.randint(1, 9999, (num_writes,)).int(),
        start_rows=some_rows(num_starts),
        temperature=torch.rand(num_starts),
        top_k=torch.randint(0, 99, (num_starts,)).int(),
        top_p=torch.rand(num_starts),
        min_p=torch.rand(num_starts),
        seed=torch.randint(-(2**62), 2**62, (num_starts,)),
    )


@pytest.mark.parametrize(("num_rows", "num_writes", "num_starts"), [(1, 0, 0), (3, 700, 2), (300, 5, 300), (7, 130, 0)])
def test_one_kernel_writes_what_torch_would_and_nothing_else(num_rows, num_writes, num_starts):
    step = step_of(num_rows, num_writes, num_starts)
    lengths, page_table = torch.randint(99, (NUM_ROWS,)).int(), torch.randint(99, (NUM_ROWS, MAX_PAGES)).int()
    sampling, expected = (SamplingTable(NUM_ROWS, torch.device("cpu")) for _ in range(2))
    expected_lengths, expected_table = lengths.clone(), page_table.clone()
    expected_lengths[step.rows.long()] = step.seq_lens
    expected_table[step.table_rows.long(), step.table_columns.long()] = step.table_pages
    expected.write(
        step.start_rows.long(),
        temperature=step.temperature,
        top_k=step.top_k,
        top_p=step.top_p,
        min_p=step.min_p,
        seed=step.seed,
    )
    row_writes(step, lengths=lengths, page_table=page_table, sampling=sampling)
    assert torch.equal(lengths, expected_lengths)
    assert torch.equal(page_table, expected_table)
    for column in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert torch.equal(getattr(sampling, column), getattr(expected, column)), column
