"""The Triton attention backend and full prefill graphs, interpreted; the page lists that attention libraries take."""

import dataclasses

import pytest
import torch

from slipstream.engine.attention.backend import AttentionSpec, GraphBucket, prepare_step
from slipstream.engine.attention.torch_native_backend import TorchNativeBackend
from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_loc_plan import KVLocPlan
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward_mode import ForwardMode
from slipstream.engine.kernels.graph_rows import GraphRows, graph_rows
from slipstream.engine.kernels.page_lists import page_lists
from slipstream.engine.kernels.step_tokens import StepRows, step_tokens

CPU = torch.device("cpu")


@pytest.fixture
def backend_of(monkeypatch):
    from slipstream.engine.attention import triton_backend

    make = triton_backend.make_decode_workspace
    monkeypatch.setattr(
        triton_backend, "make_decode_workspace", lambda **options: make(**options, num_multiprocessors=1)
    )
    # Warming up is about compilation, of which the interpreter has none.
    monkeypatch.setattr(triton_backend.TritonBackend, "_compile_blocking", lambda self: None)
    return triton_backend.TritonBackend


def make_spec(num_rows=4):
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    pool = KVPool(shape, num_pages=40, page_size=16, device=CPU)
    fill(pool)
    return AttentionSpec(
        kv_pool=pool,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_rows=num_rows,
        max_model_len=160,
        row_invariant=False,
        device=CPU,
        dtype=torch.float32,
    )


def fill(pool):
    """Random keys and values; to be done again after a plan of the torch backend, which clears pages that begin."""
    for layer in (*pool.keys, *pool.values):
        layer.normal_()


def make_step(table, rows, num_decode):
    row_ids = torch.arange(len(rows), 0, -1, dtype=torch.int32)
    prior, new = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in (0, 1))
    start = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32) for p, n in rows])
    token_rows = row_ids.repeat_interleave(new.long())
    return ForwardBatch(
        mode=ForwardMode.of(num_decode=num_decode, num_extend=len(rows) - num_decode),
        num_decode=num_decode,
        rows=row_ids,
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        seq_lens=prior + new,
        prefix_lens=prior,
        query_start_loc=start,
        logits_indices=start[1:] - 1,
        sample_rows=row_ids,
        sample_lens=prior + new,
        kv_loc=KVLocPlan.make(table, 16, token_rows=token_rows, positions=positions),
        prefix_lens_cpu=tuple(row[0] for row in rows),
        num_new_cpu=tuple(row[1] for row in rows),
    )


@pytest.mark.parametrize(
    ("rows", "num_decode"),
    [([(0, 20), (33, 5)], 0), ([(40, 1), (0, 1), (70, 1)], 3), ([(40, 1), (9, 1), (0, 7), (64, 3)], 2)],
)
def test_eager_steps_give_what_torch_gives(backend_of, rows, num_decode):
    spec = make_spec()
    table = torch.randint(1, 41, (5, 10)).int()
    batch = make_step(table, rows, num_decode)
    q = torch.randn(batch.num_tokens, 2, 16)
    triton, reference = backend_of(spec), TorchNativeBackend(spec)
    pairs = ((reference, reference), (triton, triton), (reference, triton))
    plans = [prepare_step(*pair, batch) for pair in pairs]
    fill(spec.kv_pool)
    expected, *others = (plan.forward(q, 0) for plan in plans)
    for other in others:
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-5)


def test_a_captured_plan_follows_the_step_and_writes_no_padding(backend_of):
    spec = make_spec()
    triton, reference = backend_of(spec), TorchNativeBackend(spec)
    table = torch.randint(1, 41, (5, 10)).int()
    bucket = GraphBucket(num_decode=3, num_extend=4, num_tokens=32)
    state = triton.graph_state(bucket, table)
    plan = triton.prepare_capture(bucket)
    steps = (([(0, 9), (3, 3), (0, 1), (100, 5)], 0), ([(40, 1), (9, 1), (0, 7), (64, 3)], 2), ([(3, 1), (16, 12)], 1))
    for rows, num_decode in steps:
        batch = make_step(table, rows, num_decode)
        triton.prepare_replay(bucket, batch, decode=True, extend=True)
        q, out = torch.randn(32, 2, 16), torch.full((32, 2, 16), 7.0)
        tokens = batch.num_tokens
        reference_plan = prepare_step(reference, reference, batch)
        fill(spec.kv_pool)
        plan.decode(q, 0, out)
        padded = out[num_decode:]
        assert ((padded == 7.0) | (padded == 0.0)).all(), "a padded slot attends to nothing"
        padded.fill_(7.0)
        plan.extend(q, 0, out)
        expected = reference_plan.forward(q[:tokens], 0)
        torch.testing.assert_close(out[:tokens], expected, rtol=1e-4, atol=1e-5)
        assert (out[tokens:] == 7.0).all()
    assert (state.decode_lens.tolist(), state.extend_lens.tolist()) == ([4, 0, 0], [28, 0, 0, 0])
    assert state.query_start.tolist() == [1, 13, 13, 13, 13]


def test_what_triton_cannot_serve_is_said(backend_of):
    spec = dataclasses.replace(make_spec(), head_dim=24)
    assert "not 24" in backend_of.capabilities.refusal(spec)
    assert backend_of.capabilities.refusal(make_spec()) is None


def test_page_lists_hold_each_rows_pages_one_row_after_the_other():
    table = torch.arange(50, dtype=torch.int32).view(5, 10)
    rows, seq_lens = torch.tensor([3, 1, 4], dtype=torch.int32), torch.tensor([33, 16, 1], dtype=torch.int32)
    out = torch.full((7,), -1, dtype=torch.int32)
    page_lists(table, rows, seq_lens, 16, out, max_pages=3, max_rows=5)
    assert out.tolist() == [30, 31, 32, 10, 40, -1, -1]


@pytest.mark.parametrize("num_decode", [0, 2])
def test_step_tokens_equal_what_torch_derives(num_decode):
    prior, new = [70, 20, 5, 0, 3], [1, 1, 7, 0, 40]
    table = torch.randint(1, 99, (9, 12)).int()
    rows, num_prior = torch.tensor([5, 2, 8, 1, 3]).int(), torch.tensor(prior).int()
    start = torch.nn.functional.pad(torch.tensor(new).cumsum(0), (1, 0)).int()
    ids, next_ids = torch.randint(1000, (49,)).int(), torch.randint(1000, (9,))
    step = StepRows(
        rows=rows,
        num_prior=num_prior,
        query_start=start,
        extend_ids=ids[num_decode:],
        next_ids=next_ids,
        page_table=table,
        num_decode=num_decode,
    )
    got = [torch.full((60,), 7, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int64)]
    step_tokens(step, 16, 49, max_rows=9, ids=got[0], positions=got[1], slots=got[2])
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prior, new, strict=True)]).int()
    token_rows = rows.repeat_interleave(torch.tensor(new))
    assert got[0][:49].tolist() == [*next_ids[rows.long()][:num_decode].tolist(), *ids[num_decode:].tolist()]
    assert torch.equal(got[1][:49], positions)
    expected = KVLocPlan.make(table, 16, token_rows=token_rows, positions=positions).slots
    assert torch.equal(got[2][:49], expected)
    assert not any(column[49:].any() for column in got)


def test_graph_rows_refuse_more_rows_than_slots():
    slots = GraphRows.make(num_decode=1, num_extend=2, device=CPU)
    some = torch.zeros(4, dtype=torch.int32)
    for num_rows, first_extend in ((3, 2), (4, 1)):
        with pytest.raises(ValueError, match="slots"):
            graph_rows(some[:num_rows], some, some, first_extend, 4, out=slots)
