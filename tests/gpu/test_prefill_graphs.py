"""Prefill and mixed steps by graphs on the card, against the eager runner on the same steps."""

import functools
import importlib.util
from array import array

import pytest
import torch

from slipstream.engine.attention.backend import AttentionSpec
from slipstream.engine.attention.registry import make_backend
from slipstream.engine.forward import prefill_graph_runner
from slipstream.engine.forward.eager_runner import EagerRunner
from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward.prefill_graph_runner import PrefillAttention, PrefillGraphRunner
from slipstream.engine.forward.row_state import RowState
from slipstream.engine.forward.staged_step import StagedStep, pack
from slipstream.engine.forward.token_inputs import TokenInputs
from slipstream.engine.loader.dummy_loader import fill_dummy_weights
from slipstream.engine.loader.model_config import ModelConfig
from slipstream.engine.models.registry import build_model
from slipstream.engine.scheduler.schedule_batch import ScheduleBatch
from slipstream.streams.graph import GraphPool

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
PAGE_SIZE, PAGES_PER_ROW, NUM_ROWS, MAX_TOKENS = 16, 24, 40, 320
VOCAB = 500

# (prior, new) of each row, decode rows first; how many of those; whether each samples
STEPS = {
    "a whole bucket": ([(0, 64)], 0),
    "a prompt and padding": ([(0, 70)], 0),
    "two prompts, a long one": ([(0, 9), (0, 230)], 0),
    "prompts that go on": ([(70, 100), (9, 3)], 0),
    "one token": ([(170, 1)], 0),
    "decode rows and a prompt": ([(171, 1), (12, 1), (0, 80)], 2),
    "many decode rows": ([(5 + i, 1) for i in range(30)] + [(0, 40), (0, 20)], 30),
    "more prompts than slots": ([(0, 3 + i % 5) for i in range(36)], 0),
}


class Bench:
    """A small model in bf16 and one runner over it."""

    def __init__(self, name, kind, *, has_short=False, is_fresh=False, **options):
        raw = {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16",
        }
        config = ModelConfig.from_dict(raw)
        self.model = build_model(config, max_position=512, dtype=torch.bfloat16, device=CUDA)
        fill_dummy_weights(self.model)
        self.model.finish()
        shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
        self.pool = KVPool(shape, num_pages=NUM_ROWS * PAGES_PER_ROW, page_size=PAGE_SIZE, device=CUDA)
        self.rows = RowState(num_rows=NUM_ROWS, max_pages=PAGES_PER_ROW, device=CUDA)
        pages = torch.arange(NUM_ROWS * PAGES_PER_ROW, dtype=torch.int32, device=CUDA) + 1
        self.rows.page_table[1:].copy_(pages.view(NUM_ROWS, PAGES_PER_ROW))
        self.rows.relay.table.copy_(torch.arange(NUM_ROWS + 1) + 11)
        self.tokens = TokenInputs.make(MAX_TOKENS, CUDA)
        spec = AttentionSpec(
            kv_pool=self.pool,
            num_heads=8,
            num_kv_heads=2,
            head_dim=128,
            num_rows=NUM_ROWS,
            max_model_len=PAGES_PER_ROW * PAGE_SIZE,
            row_invariant=False,
            device=CUDA,
            dtype=torch.bfloat16,
        )
        decode = make_backend("triton", spec, field="decode_attention")
        extend = decode if name == "triton" else make_backend(name, spec, field="prefill_attention")
        self.fresh = extend.fresh_prompt(MAX_TOKENS) if is_fresh else None
        short = decode if has_short else None
        attention = PrefillAttention(decode=decode, extend=extend, short=short, fresh=self.fresh)
        if kind == "eager":
            self.runner = EagerRunner(self.model, self.pool, decode_attention=decode, extend_attention=extend)
            return
        kinds = attention.kinds(kind)
        if not kinds:
            pytest.skip(f"{name} cannot be captured in {kind} graphs here")
        self.runner = PrefillGraphRunner(
            self.model,
            self.pool,
            attention,
            self.tokens,
            kinds=kinds,
            chunk_tokens=MAX_TOKENS,
            page_table=self.rows.page_table,
            **options,
        )
        self.graph_pool = GraphPool(CUDA)
        self.runner.capture_blocking(self.graph_pool)

    def batch(self, rows, num_decode):
        num_extend = sum(new for _, new in rows[num_decode:])
        ids = torch.randint(VOCAB, (num_extend,), generator=torch.Generator().manual_seed(num_extend))
        schedule = ScheduleBatch(
            step=0,
            num_decode=num_decode,
            rows=tuple(range(1, len(rows) + 1)),
            num_prior=tuple(row[0] for row in rows),
            num_new=tuple(row[1] for row in rows),
            samples=tuple(index % 3 != 1 for index in range(len(rows))),
            extend_ids=array("i", ids.tolist()).tobytes(),
            table_rows=b"",
            table_columns=b"",
            table_pages=b"",
            starts=(),
        )
        columns, widths = pack(schedule)
        pinned = torch.frombuffer(columns, dtype=torch.int32).pin_memory()
        staged = StagedStep.of(pinned.to(CUDA, non_blocking=True), widths)
        return ForwardBatch.init_new(schedule, staged, self.rows, page_size=PAGE_SIZE, tokens=self.tokens)

    @torch.inference_mode()
    def run(self, step):
        batch = self.batch(*step)
        return self.runner.execute(batch).logits if self.runner.can_run(batch) else None


@functools.cache
def eager_of(name):
    """Logits and pool of the eager runner after all steps."""
    bench = Bench(name, "eager")
    return [bench.run(step) for step in STEPS.values()], bench.pool


def assert_near(actual, expected, bound):
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < bound, f"relative error {error:.2e}"


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("breakable", {}), ("full", {}), ("full", {"has_short": True}), ("breakable", {"debug": True})],
)
def test_every_step_gives_the_eager_logits_and_kv(name, kind, options):
    if name == "flashinfer":
        pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    expected, pool = eager_of(name)
    bench = Bench(name, kind, **options)
    missed = []
    for (label, step), logits in zip(STEPS.items(), expected, strict=True):
        got = bench.run(step)
        if got is None:
            missed.append(label)
            continue
        assert got.shape == logits.shape, label
        assert_near(got, logits, 2e-2)
    assert missed == (["more prompts than slots"] if kind == "full" else [])
    assert bench.runner.num_misses == len(missed)
    if not missed:
        for layer in range(3):
            assert_near(bench.pool.keys[layer][1:], pool.keys[layer][1:], 2e-2)
            assert_near(bench.pool.values[layer][1:], pool.values[layer][1:], 2e-2)
    assert all(torch.isfinite(layer).all() for layer in (*bench.pool.keys, *bench.pool.values))


def test_one_prompt_without_a_prefix_attends_to_what_the_step_has_made(monkeypatch):
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    monkeypatch.setattr(prefill_graph_runner, "SHORT_TOKENS", 32)
    bench, eager = Bench("flashinfer", "full", is_fresh=True), Bench("flashinfer", "eager")
    if bench.fresh is None:
        pytest.skip("FlashAttention-3 is not there")
    planned = []
    plan = bench.fresh.plan
    monkeypatch.setattr(bench.fresh, "plan", lambda num_tokens: (planned.append(num_tokens), plan(num_tokens)))
    for length in (33, 40, 61, MAX_TOKENS - 3, MAX_TOKENS, 47):
        for part in bench.fresh.kv:
            part.fill_(float("nan"))  # of an earlier step, whose numbers went wrong
        step = [(0, length)], 0
        assert_near(bench.run(step), eager.run(step), 2e-2)
    assert planned == [33, 40, 61, MAX_TOKENS - 3, MAX_TOKENS, 47]
    for step in (([(47, 40)], 0), ([(0, 40), (0, 9)], 0)):
        assert_near(bench.run(step), eager.run(step), 2e-2)
    assert len(planned) == 6, "a prefix, or a second prompt, is in the pool"
    for layer in range(3):
        assert_near(bench.pool.keys[layer][1:], eager.pool.keys[layer][1:], 2e-2)
        assert_near(bench.pool.values[layer][1:], eager.pool.values[layer][1:], 2e-2)


@pytest.mark.parametrize("kind", ["breakable", "full"])
def test_steps_in_flight_do_not_disturb_each_other_and_ask_nothing_of_the_device(kind):
    bench = Bench("flashinfer" if importlib.util.find_spec("flashinfer") else "triton", kind)
    steps = [STEPS[name] for name in ("a prompt and padding", "decode rows and a prompt")]
    alone = []
    for step in steps:
        alone.append(bench.run(step).clone())
        torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    busy = torch.cuda.Event()
    busy.record()
    with torch.inference_mode():
        batches = [bench.batch(*steps[0])]
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert bench.runner.can_run(batches[0])
            first = bench.runner.execute(batches[0]).logits
            torch.cuda.set_sync_debug_mode("default")
            batches.append(bench.batch(*steps[1]))
            torch.cuda.set_sync_debug_mode("error")
            second = bench.runner.execute(batches[1]).logits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the host waited for the device"
    torch.cuda.synchronize()
    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])
