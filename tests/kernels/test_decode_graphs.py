"""Decode steps by the CPU's twins of graphs, their kernels interpreted: logits and hidden states against an eager step."""

import gc
import weakref

import pytest
import torch

from slipstream.engine.attention.backend import AttentionSpec
from slipstream.engine.attention.torch_native_backend import TorchNativeBackend
from slipstream.engine.forward.eager_runner import EagerRunner
from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward.row_state import RowState
from slipstream.engine.forward.staged_step import StagedStep, pack
from slipstream.engine.scheduler.schedule_batch import ScheduleBatch, ShownRow
from slipstream.streams.graph import GraphPool

CPU = torch.device("cpu")
PAGE_SIZE, PAGES_PER_ROW, NUM_ROWS, VOCAB, WIDTH = 16, 2, 3, 64, 32


class Bench:
    """A tiny model with rows 1…3, whose pages are fixed, by decode graphs at a setting, and by the eager runner."""

    def __init__(self, monkeypatch, model, hidden_states):
        from slipstream.engine.attention import triton_backend
        from slipstream.engine.forward.decode_graph_runner import DecodeGraphRunner
        from slipstream.engine.forward.plain_decoder import PlainDecoder
        from slipstream.engine.sampling.cuda_sampler import CudaSampler

        make = triton_backend.make_decode_workspace
        monkeypatch.setattr(
            triton_backend, "make_decode_workspace", lambda **options: make(**options, num_multiprocessors=1)
        )
        monkeypatch.setattr(triton_backend.TritonBackend, "_compile_blocking", lambda self: None)
        self.model = model
        shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
        self.pool = KVPool(shape, num_pages=NUM_ROWS * PAGES_PER_ROW, page_size=PAGE_SIZE, device=CPU)
        self.rows = RowState(num_rows=NUM_ROWS, max_pages=PAGES_PER_ROW, device=CPU)
        spec = AttentionSpec(
            kv_pool=self.pool, num_heads=2, num_kv_heads=1, head_dim=16, num_rows=NUM_ROWS, max_model_len=32,
            row_invariant=False, device=CPU, dtype=torch.float32,
        )  # fmt: skip
        sampler = CudaSampler(
            max_rows=NUM_ROWS, num_ids=VOCAB, table=self.rows.sampling, next_ids=self.rows.relay.table, device=CPU
        )
        decoder = PlainDecoder(self.model, self.pool, self.rows, triton_backend.TritonBackend(spec))
        self.graphs = DecodeGraphRunner(decoder, self.rows, sampler, max_rows=NUM_ROWS, hidden_states=hidden_states)
        torch_attention = TorchNativeBackend(spec)
        self.eager = EagerRunner(
            self.model, self.pool, decode_attention=torch_attention, extend_attention=torch_attention
        )
        with torch.inference_mode():
            self.graphs.capture_blocking(GraphPool(CPU))
        pages = torch.arange(NUM_ROWS * PAGES_PER_ROW, dtype=torch.int32) + 1
        self.rows.page_table[1:].copy_(pages.view(NUM_ROWS, PAGES_PER_ROW))

    @torch.inference_mode()
    def both(self, batch, lengths):
        """The drawable of the graph, and the output of the eager runner, from one state of the rows."""
        columns, widths = pack(batch)
        staged = StagedStep.of(torch.frombuffer(columns, dtype=torch.int32), widths)
        forward_batch = ForwardBatch.init_new(batch, staged, self.rows, page_size=PAGE_SIZE)
        # Plans of the torch backend clear pages that begin: none does here, and both read what is put there now.
        eager = self.eager.execute(forward_batch)
        for row, length in lengths.items():
            self.rows.lengths[row] = length
        packed = self.graphs.block_of(batch)
        block = None if packed is None else torch.frombuffer(bytearray(packed), dtype=torch.int32)
        return self.graphs.execute(batch, block), eager


def decode(rows, priors, shown=()):
    return ScheduleBatch(
        step=0, num_decode=len(rows), rows=rows, num_prior=priors, num_new=(1,) * len(rows), samples=(True,) * len(rows),
        extend_ids=b"", table_rows=b"", table_columns=b"", table_pages=b"", starts=(), shown=shown,
    )  # fmt: skip


@pytest.mark.parametrize("setting", ["none", "last", "full"])
def test_graphs_give_hidden_states_where_they_are_captured_for_them(monkeypatch, tiny_qwen3, setting):
    bench = Bench(monkeypatch, tiny_qwen3(), setting)
    torch.manual_seed(1)
    for layer in (*bench.pool.keys, *bench.pool.values):
        layer.normal_()
    bench.rows.relay.table.copy_(torch.tensor([0, 5, 41, 17]))
    for rows, priors in (((2, 3), (4, 19)), ((1,), (7,)), ((3, 1, 2), (20, 8, 5))):
        batch = decode(rows, priors, (ShownRow(0, 0),) if setting != "none" else ())
        assert bench.graphs.can_run(batch)
        drawable, eager = bench.both(batch, dict(zip(rows, priors, strict=True)))
        count = len(rows)
        torch.testing.assert_close(drawable.logits[:count], eager.logits, rtol=1e-4, atol=1e-5)
        if setting == "none":
            assert drawable.states is None
        else:
            hidden = bench.model.hidden(drawable.states, slice(None))
            assert hidden.shape == (drawable.logits.shape[0], WIDTH)
            every = bench.model.hidden(eager.states, slice(None))
            torch.testing.assert_close(hidden[:count], every, rtol=1e-4, atol=1e-5)


def test_graphs_without_hidden_states_refuse_a_step_that_brings_some_and_count_it(monkeypatch, tiny_qwen3):
    bench = Bench(monkeypatch, tiny_qwen3(), "none")
    assert bench.graphs.can_run(decode((1, 2), (3, 4)))
    assert not bench.graphs.can_run(decode((1, 2), (3, 4), (ShownRow(1, 0),)))
    assert (bench.graphs.num_hits, bench.graphs.num_misses) == (1, 1)


def test_released_graphs_leave_nothing_to_the_cycle_collector(monkeypatch, tiny_qwen3):
    bench = Bench(monkeypatch, tiny_qwen3(), "none")
    gone = weakref.ref(bench.graphs), weakref.ref(bench.pool)
    gc.collect()
    gc.disable()
    try:
        bench.graphs.release()
        del bench
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
