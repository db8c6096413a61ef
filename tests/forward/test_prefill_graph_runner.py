"""Prefill by graphs against the eager runner, by the CPU's twins of graphs."""

import gc
import weakref
from array import array

import pytest
import torch

from slipstream.engine.attention.backend import AttentionSpec
from slipstream.engine.attention.torch_native_backend import TorchNativeBackend
from slipstream.engine.forward.eager_runner import EagerRunner
from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward.prefill_graph_runner import PrefillAttention, PrefillGraphRunner, prefill_buckets
from slipstream.engine.forward.row_state import RowState
from slipstream.engine.forward.staged_step import StagedStep, pack
from slipstream.engine.forward.token_inputs import TokenInputs
from slipstream.engine.loader.dummy_loader import fill_dummy_weights
from slipstream.engine.loader.model_config import ModelConfig
from slipstream.engine.models.registry import build_model
from slipstream.engine.scheduler.schedule_batch import ScheduleBatch
from slipstream.streams.graph import GraphPool

CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES_PER_ROW = 24
NUM_ROWS = 4
VOCAB = 97


class Bench:
    """A tiny model with rows 1…4, whose pages are fixed, and one runner over it."""

    def __init__(self, kind: str, *, max_tokens: int = 40, **options: object) -> None:
        raw = {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "torch_dtype": "float32",
        }
        config = ModelConfig.from_dict(raw)
        self.model = model = build_model(config, max_position=128, dtype=torch.float32, device=CPU)
        fill_dummy_weights(model)
        model.finish()
        shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        self.pool = KVPool(shape, num_pages=NUM_ROWS * PAGES_PER_ROW, page_size=PAGE_SIZE, device=CPU)
        self.rows = RowState(num_rows=NUM_ROWS, max_pages=PAGES_PER_ROW, device=CPU)
        pages = torch.arange(NUM_ROWS * PAGES_PER_ROW, dtype=torch.int32) + 1
        self.rows.page_table[1:].copy_(pages.view(NUM_ROWS, PAGES_PER_ROW))
        self.rows.relay.table.copy_(torch.arange(NUM_ROWS + 1) + 11)
        spec = AttentionSpec(
            kv_pool=self.pool,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            num_rows=NUM_ROWS,
            max_model_len=96,
            row_invariant=False,
            device=CPU,
            dtype=torch.float32,
        )
        attention = TorchNativeBackend(spec)
        self.runner: EagerRunner | PrefillGraphRunner
        if kind == "eager":
            self.runner = EagerRunner(model, self.pool, decode_attention=attention, extend_attention=attention)
        else:
            self.tokens = TokenInputs.make(max_tokens, CPU)
            self.runner = PrefillGraphRunner(
                model,
                self.pool,
                PrefillAttention(decode=attention, extend=attention),
                self.tokens,
                kinds=["breakable"],
                chunk_tokens=max_tokens,
                page_table=self.rows.page_table,
                **options,
            )
            self.runner.capture_blocking(GraphPool(CPU))

    def batch(
        self, prior: list[int], new: list[int], num_decode: int = 0, samples: list[bool] | None = None
    ) -> ForwardBatch:
        num_extend = sum(new[num_decode:])
        ids = torch.randint(VOCAB, (num_extend,), generator=torch.Generator().manual_seed(num_extend))
        schedule = ScheduleBatch(
            step=0,
            num_decode=num_decode,
            rows=tuple(range(1, len(new) + 1)),
            num_prior=tuple(prior),
            num_new=tuple(new),
            samples=tuple(samples or [True] * len(new)),
            extend_ids=array("i", ids.tolist()).tobytes(),
            table_rows=b"",
            table_columns=b"",
            table_pages=b"",
            starts=(),
        )
        columns, widths = pack(schedule)
        staged = StagedStep.of(torch.frombuffer(columns, dtype=torch.int32), widths)
        return ForwardBatch.init_new(schedule, staged, self.rows, page_size=PAGE_SIZE)

    @torch.inference_mode()
    def run(self, *args: object, **kwargs: object) -> torch.Tensor:
        batch = self.batch(*args, **kwargs)
        assert self.runner.can_run(batch)
        return self.runner.execute(batch).logits


STEPS = [
    pytest.param(([0], [8]), {}, id="a whole bucket"),
    pytest.param(([0, 0], [9, 4]), {}, id="two prompts and padding"),
    pytest.param(([0], [20]), {"samples": [False]}, id="a chunk that samples nothing"),
    pytest.param(([20, 9], [17, 1]), {}, id="prompts that go on"),
    pytest.param(([37, 10, 0], [1, 1, 12]), {"num_decode": 2}, id="decode rows with a prompt"),
    pytest.param(([38, 11, 12], [1, 1, 5]), {"num_decode": 2, "samples": [True, False, True]}, id="some rows sample"),
]


@pytest.mark.parametrize("debug", [False, True], ids=["segments", "one break"])
def test_every_step_gives_the_eager_logits_and_kv_whatever_ran_before(debug):
    eager, graphs = Bench("eager"), Bench("graphs", debug=debug)
    for param in STEPS:
        args, options = param.values
        expected, logits = eager.run(*args, **options), graphs.run(*args, **options)
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for layer in range(3):
        torch.testing.assert_close(graphs.pool.keys[layer][1:], eager.pool.keys[layer][1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(graphs.pool.values[layer][1:], eager.pool.values[layer][1:], rtol=1e-4, atol=1e-5)
        assert torch.isfinite(graphs.pool.keys[layer]).all()


@pytest.mark.parametrize("kind", ["eager", "graphs"])
def test_the_last_feed_forward_is_computed_for_no_more_tokens_than_are_asked_for(kind):
    bench = Bench(kind)
    seen = []
    for layer in (0, 2):
        mlp = bench.model.stack[layer].mlp
        mlp.register_forward_pre_hook(lambda _, args, layer=layer: seen.append((layer, args[0].shape[0])))
    bench.run([0, 0], [9, 7], samples=[False, True])
    assert seen == [(0, 16), (2, 1)]
    seen.clear()
    bench.run([9, 7], [16, 16], samples=[False, False])
    assert seen == [(0, 32)]


@torch.inference_mode()
def test_hidden_states_of_some_tokens_are_those_of_all_and_change_nothing():
    bench = Bench("graphs")
    states = bench.runner.execute(bench.batch([0, 0], [9, 4])).states
    every = bench.model.hidden(states, slice(None))
    torch.testing.assert_close(bench.model.hidden(states, torch.tensor([12, 3])), every[[12, 3]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bench.model.hidden(states, slice(4, 7)), every[4:7], rtol=1e-5, atol=1e-6)
    assert torch.equal(bench.model.hidden(states, slice(None)), every)


def test_padding_does_not_see_what_an_earlier_step_left():
    graphs = Bench("graphs")
    graphs.runner._buffers.attended.fill_(float("nan"))
    graphs.tokens.ids.fill_(5)
    graphs.tokens.slots.fill_(PAGE_SIZE * 30)
    before = graphs.pool.keys[0][30].clone()
    logits = graphs.run([0, 0], [9, 4])
    assert torch.isfinite(logits).all()
    assert torch.isfinite(graphs.pool.values[2]).all()
    assert torch.equal(graphs.pool.keys[0][30], before)


def test_logits_outlive_the_next_step():
    graphs = Bench("graphs")
    first = graphs.run([0], [8])
    kept = first.clone()
    graphs.run([0, 0], [9, 4])
    assert torch.equal(first, kept)


def test_what_no_bucket_holds_is_refused_and_counted():
    graphs = Bench("graphs", max_tokens=16)
    with torch.inference_mode():
        assert not graphs.runner.can_run(graphs.batch([0], [17]))
        assert not graphs.runner.can_run(graphs.batch([3], [1], num_decode=1))
        assert graphs.runner.can_run(graphs.batch([0], [16]))
        with pytest.raises(ValueError, match="can_run"):
            graphs.runner.execute(graphs.batch([0], [17]))
    assert (graphs.runner.num_hits, graphs.runner.num_misses) == (1, 1)


def test_a_gap_that_fails_leaves_the_runner_usable():
    graphs = Bench("graphs")
    expected = graphs.run([0], [8])
    backend = graphs.runner._attention.extend
    plan = backend.prepare

    def broken(*args: object, **kwargs: object) -> object:
        made = plan(*args, **kwargs)

        def fail(*_: object) -> None:
            raise RuntimeError("attention failed")

        made.extend = fail
        return made

    backend.prepare = broken
    with pytest.raises(RuntimeError, match="attention failed"):
        graphs.run([0], [8])
    backend.prepare = plan
    assert torch.equal(graphs.run([0], [8]), expected)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64, 256])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 64, 100, 1000, 2048, 2304, 5000])
def test_buckets_end_at_the_largest_step_and_pad_little(chunk_tokens, num_rows):
    sizes = prefill_buckets(chunk_tokens + num_rows, chunk_tokens)
    assert sizes[-1] == chunk_tokens + num_rows
    assert chunk_tokens in sizes, "a whole chunk alone has no padding"
    assert list(sizes) == sorted(set(sizes))
    few = [size for size in range(chunk_tokens + 1, sizes[-1] + 1) if size <= chunk_tokens + 128]
    assert all(min(size for size in sizes if size >= beside) - beside < 64 for beside in few)
    worst = [(above - below - 1) / (below + 1) for below, above in zip((0, *sizes), sizes, strict=False)]
    assert all(waste <= 0.75 for waste in worst)
    assert all(waste <= 0.125 for below, waste in zip((0, *sizes), worst, strict=False) if below >= 128)


def test_a_capture_that_fails_raises_its_cause_and_names_the_bucket_and_the_way_around(monkeypatch):
    real = PrefillGraphRunner._forward_of

    def forward_of(self, size, attention):
        if size == 16:
            raise torch.OutOfMemoryError("the card is full")
        return real(self, size, attention)

    monkeypatch.setattr(PrefillGraphRunner, "_forward_of", forward_of)
    with pytest.raises(torch.OutOfMemoryError, match="the card is full") as caught:
        Bench("graphs")
    (note,) = caught.value.__notes__
    assert "prefill graph (breakable) of 16 tokens" in note
    assert "prefill_graph=off" in note


def test_a_released_runner_leaves_nothing_to_the_cycle_collector():
    bench = Bench("graph")
    gone = weakref.ref(bench.runner), weakref.ref(bench.pool)
    gc.collect()
    gc.disable()
    try:
        bench.runner.release()
        del bench
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
