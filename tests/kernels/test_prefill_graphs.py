"""Prefill and mixed steps by the CPU's twins of graphs with attention inside, their kernels interpreted: against eager ones."""

from array import array

import pytest
import torch

from slipstream.engine.attention.backend import AttentionSpec
from slipstream.engine.attention.torch_native_backend import TorchNativeBackend
from slipstream.engine.forward.eager_runner import EagerRunner
from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward.prefill_graph_runner import PrefillAttention, PrefillGraphRunner
from slipstream.engine.forward.row_state import RowState
from slipstream.engine.forward.staged_step import StagedStep, pack
from slipstream.engine.forward.token_inputs import TokenInputs
from slipstream.engine.scheduler.schedule_batch import ScheduleBatch
from slipstream.streams.graph import GraphPool

CPU = torch.device("cpu")
PAGE_SIZE, PAGES_PER_ROW, NUM_ROWS, VOCAB, MAX_TOKENS = 16, 2, 3, 64, 16


class FreshByTorch:
    """What `FreshPrompt` does, written out; counts its plans."""

    def __init__(self):
        from slipstream.engine.attention.fresh_prompt import FreshKV

        self.kv = FreshKV(torch.zeros(MAX_TOKENS, 1, 16), torch.zeros(MAX_TOKENS, 1, 16))
        self.num_bytes = 0
        self.planned = []
        self.num_tokens = 0

    def plan_padding(self, num_tokens):
        self.num_tokens = num_tokens

    def plan(self, num_tokens):
        self.planned.append(num_tokens)
        self.num_tokens = num_tokens

    def extend(self, q, layer, out):
        keys, values = (part[: self.num_tokens, 0] for part in self.kv)
        scores = torch.einsum("thd,sd->hts", q[: self.num_tokens], keys) / 4.0
        scores = scores.masked_fill(~torch.ones(scores.shape[1:]).tril().bool(), float("-inf"))
        out[: self.num_tokens] = torch.einsum("hts,sd->thd", scores.softmax(-1), values)
        return out


class Bench:
    """A tiny model with rows 1…3, whose pages are fixed, and one runner over it."""

    def __init__(self, monkeypatch, model, kind, *, debug=False, fresh=None):
        from slipstream.engine.attention import triton_backend

        make = triton_backend.make_decode_workspace
        monkeypatch.setattr(
            triton_backend, "make_decode_workspace", lambda **options: make(**{"num_multiprocessors": 1, **options})
        )
        monkeypatch.setattr(triton_backend.TritonBackend, "_compile_blocking", lambda self: None)
        shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
        self.pool = KVPool(shape, num_pages=NUM_ROWS * PAGES_PER_ROW, page_size=PAGE_SIZE, device=CPU)
        self.rows = RowState(num_rows=NUM_ROWS, max_pages=PAGES_PER_ROW, device=CPU)
        pages = torch.arange(NUM_ROWS * PAGES_PER_ROW, dtype=torch.int32) + 1
        self.rows.page_table[1:].copy_(pages.view(NUM_ROWS, PAGES_PER_ROW))
        self.rows.relay.table.copy_(torch.tensor([0, 5, 41, 17]))
        spec = AttentionSpec(
            kv_pool=self.pool, num_heads=2, num_kv_heads=1, head_dim=16, num_rows=NUM_ROWS, max_model_len=32,
            row_invariant=False, device=CPU, dtype=torch.float32,
        )  # fmt: skip
        if kind == "eager":
            plain = TorchNativeBackend(spec)
            self.runner = EagerRunner(model, self.pool, decode_attention=plain, extend_attention=plain)
            return
        triton = triton_backend.TritonBackend(spec)
        attention = PrefillAttention(decode=triton, extend=triton, fresh=fresh)
        assert attention.kinds("full") == (("extend", "mixed") if fresh is None else ("extend", "fresh", "mixed"))
        self.runner = PrefillGraphRunner(
            model, self.pool, attention, TokenInputs.make(MAX_TOKENS, CPU),
            kinds=attention.kinds("full"), chunk_tokens=MAX_TOKENS, page_table=self.rows.page_table, debug=debug,
        )  # fmt: skip
        with torch.inference_mode():
            self.runner.capture_blocking(GraphPool(CPU))

    @torch.inference_mode()
    def run(self, prior, new, num_decode=0, samples=None):
        ids = torch.randint(VOCAB, (sum(new[num_decode:]),), generator=torch.Generator().manual_seed(sum(new)))
        batch = ScheduleBatch(
            step=0, num_decode=num_decode, rows=tuple(range(1, len(new) + 1)), num_prior=prior, num_new=new,
            samples=samples or (True,) * len(new), extend_ids=array("i", ids.tolist()).tobytes(),
            table_rows=b"", table_columns=b"", table_pages=b"", starts=(),
        )  # fmt: skip
        columns, widths = pack(batch)
        staged = StagedStep.of(torch.frombuffer(columns, dtype=torch.int32), widths)
        forward_batch = ForwardBatch.init_new(batch, staged, self.rows, page_size=PAGE_SIZE)
        assert self.runner.can_run(forward_batch)
        return self.runner.execute(forward_batch).logits


@pytest.mark.parametrize("debug", [False, True], ids=["planned in the gap", "one break"])
def test_every_step_is_planned_anew_and_gives_the_eager_logits_and_kv(monkeypatch, tiny_qwen3, debug):
    eager, graphs = Bench(monkeypatch, tiny_qwen3(), "eager"), Bench(monkeypatch, tiny_qwen3(), "graphs", debug=debug)
    steps = [
        ((0, 0), (9, 4)),
        ((9,), (7,)),
        ((16, 4, 0), (1, 1, 7), 2),
        ((17, 5, 7), (1, 1, 6), 2, (True, False, True)),
        ((18, 6), (8, 2), 0, (False, False)),
    ]
    for step in steps:
        expected, logits = eager.run(*step), graphs.run(*step)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for layer in range(2):
        torch.testing.assert_close(graphs.pool.keys[layer][1:], eager.pool.keys[layer][1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(graphs.pool.values[layer][1:], eager.pool.values[layer][1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("debug", [False, True], ids=["planned in the gap", "one break"])
def test_one_long_prompt_without_a_prefix_attends_to_what_the_step_has_made(monkeypatch, tiny_qwen3, debug):
    from slipstream.engine.forward import prefill_graph_runner

    monkeypatch.setattr(prefill_graph_runner, "SHORT_TOKENS", 8)
    fresh = FreshByTorch()
    eager, graphs = (
        Bench(monkeypatch, tiny_qwen3(), "eager"),
        Bench(monkeypatch, tiny_qwen3(), "graphs", debug=debug, fresh=fresh),
    )
    for part in fresh.kv:
        part.fill_(float("nan"))  # of an earlier step, whose numbers went wrong
    steps = [
        ((0,), (9,)),  # padded to 12
        ((9,), (10,)),  # has a prefix
        ((0, 0), (5, 6)),  # two prompts
        ((0,), (4,)),  # short
        ((0,), (16,)),
        ((16, 0), (1, 9), 1),  # beside a decode row
    ]
    for step in steps:
        expected, logits = eager.run(*step), graphs.run(*step)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert fresh.planned == [9, 16]
