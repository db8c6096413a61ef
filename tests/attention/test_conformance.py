"""Every attention backend against attention written out in float64, over a scattered paged pool."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.engine.attention.backend import AttentionSpec, prepare_step
from slipstream.engine.attention.registry import make_backend, make_backends
from slipstream.engine.errors import ConfigError
from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_loc_plan import KVLocPlan
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward_mode import ForwardMode

MAX_LEN = 1024
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Case:
    """A step over a pool full of random numbers: `rows` are (prior, new) pairs, decode rows first."""

    def __init__(self, rows, *, num_decode, heads=4, kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32):
        generator = torch.Generator().manual_seed(7)
        pages_each = -(-MAX_LEN // page_size)
        num_pages = len(rows) * pages_each
        shape = KVShape(num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        self.pool = KVPool(shape, num_pages=num_pages, page_size=page_size, device=torch.device("cpu"))
        for layer in (*self.pool.keys, *self.pool.values):
            layer.copy_(torch.randn(layer.shape, generator=generator))
        order = torch.randperm(num_pages, generator=generator).int() + 1
        table = torch.zeros(len(rows) + 3, pages_each, dtype=torch.int32)
        self.row_ids = [len(rows) - index for index in range(len(rows))]  # not in the order of the batch
        for index, row in enumerate(self.row_ids):
            table[row] = order[index * pages_each : (index + 1) * pages_each]
        self.rows, self.num_decode, self.heads = rows, num_decode, heads
        self.fresh: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        prior = torch.tensor([row[0] for row in rows], dtype=torch.int32)
        new = torch.tensor([row[1] for row in rows], dtype=torch.int32)
        token_rows = torch.tensor(self.row_ids, dtype=torch.int32).repeat_interleave(new.long())
        positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32) for p, n in rows])
        ends = new.cumsum(0)
        self.batch = ForwardBatch(
            mode=ForwardMode.of(num_decode=num_decode, num_extend=len(rows) - num_decode),
            num_decode=num_decode,
            rows=torch.tensor(self.row_ids, dtype=torch.int32),
            input_ids=torch.zeros(len(token_rows), dtype=torch.int64),
            positions=positions,
            seq_lens=prior + new,
            prefix_lens=prior,
            query_start_loc=torch.cat((torch.zeros(1), ends)).int(),
            logits_indices=(ends - 1).int(),
            sample_rows=torch.tensor(self.row_ids, dtype=torch.int32),
            sample_lens=prior + new,
            kv_loc=KVLocPlan.make(table, page_size, token_rows=token_rows, positions=positions),
            prefix_lens_cpu=tuple(row[0] for row in rows),
            num_new_cpu=tuple(row[1] for row in rows),
        )
        self.q = torch.randn(len(token_rows), heads, head_dim, generator=generator).to(dtype)

    def spec(self, *, row_invariant=False):
        shape = self.pool.shape
        return AttentionSpec(
            kv_pool=self.pool,
            num_heads=self.heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_rows=len(self.rows),
            max_model_len=MAX_LEN,
            row_invariant=row_invariant,
            device=torch.device("cpu"),
            dtype=shape.dtype,
        )

    def run(self, *, layer=1, row_invariant=False):
        backend = make_backend("torch", self.spec(row_invariant=row_invariant), field="decode_attention")
        slots = self.batch.kv_loc.slots
        written = [(part[layer], part[layer][slots]) for part in (self.pool.key_slots, self.pool.value_slots)]
        with torch.inference_mode():
            attention = prepare_step(backend, backend, self.batch)
            for part, new in written:  # a model writes a layer's new keys and values after the plan was made
                part[slots] = new
            return attention.forward(self.q, layer)

    def expected(self, *, layer=1):
        """Token by token, head by head, in float64."""
        table, page_size = self.batch.kv_loc.page_table, self.pool.page_size
        out, token = torch.empty(self.q.shape, dtype=torch.float64), 0
        for row, (prior, new) in zip(self.row_ids, self.rows, strict=True):
            slots = [int(table[row, p // page_size]) * page_size + p % page_size for p in range(prior + new)]
            keys = self.pool.key_slots[layer][slots].double()
            values = self.pool.value_slots[layer][slots].double()
            for position in range(prior, prior + new):
                for head in range(self.heads):
                    kv_head = head * keys.shape[1] // self.heads
                    scores = keys[: position + 1, kv_head] @ self.q[token, head].double() / keys.shape[2] ** 0.5
                    out[token, head] = torch.softmax(scores, 0) @ values[: position + 1, kv_head]
                token += 1
        return out

    def assert_agrees(self, *, row_invariant=False):
        got = self.run(row_invariant=row_invariant)
        assert got.shape == self.q.shape
        assert got.is_contiguous()
        assert got.dtype == self.q.dtype
        assert (got.double() - self.expected()).abs().max().item() < TOLERANCE[self.q.dtype]


DECODE_ROWS = [(0, 1), (36, 1), (150, 1), (15, 1), (16, 1), (299, 1), (31, 1)]
EXTEND_ROWS = [(0, 9), (0, 9), (0, 70), (33, 5), (33, 5), (130, 66), (7, 1), (0, 1)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (9, 3), (8, 1)])
def test_decode_rows_of_many_lengths_agree_with_the_reference(heads, kv_heads, page_size):
    case = Case(DECODE_ROWS, num_decode=len(DECODE_ROWS), heads=heads, kv_heads=kv_heads, page_size=page_size)
    case.assert_agrees()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_extend_rows_with_and_without_prefix_agree_with_the_reference(heads, kv_heads, page_size):
    Case(EXTEND_ROWS, num_decode=0, heads=heads, kv_heads=kv_heads, page_size=page_size).assert_agrees()


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_batches_agree_with_the_reference(dtype, head_dim):
    rows = [*DECODE_ROWS, *EXTEND_ROWS]
    Case(rows, num_decode=len(DECODE_ROWS), head_dim=head_dim, dtype=dtype).assert_agrees()


@pytest.mark.parametrize("lengths", [[40] * 5, [41, 40, 40], [1], [900, 1, 449, 450, 451]])
def test_decode_rows_of_equal_and_very_unequal_lengths_agree_with_the_reference(lengths):
    Case([(length - 1, 1) for length in lengths], num_decode=len(lengths)).assert_agrees()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_row_invariant_path_agrees_with_the_reference(dtype):
    rows = [*DECODE_ROWS, *EXTEND_ROWS]
    Case(rows, num_decode=len(DECODE_ROWS), dtype=dtype).assert_agrees(row_invariant=True)


def test_the_row_invariant_path_computes_a_token_the_same_way_in_any_step():
    alone = Case([(36, 1)], num_decode=1)
    crowded = Case([(36, 1), (150, 1), (0, 9)], num_decode=2)
    # The same keys, values and query in both pools, though on other pages.
    for layer in range(2):
        for source, target in ((alone.pool.key_slots, crowded.pool.key_slots),
                               (alone.pool.value_slots, crowded.pool.value_slots)):  # fmt: skip
            tables = (alone.batch.kv_loc.page_table[1], crowded.batch.kv_loc.page_table[3])
            slots = [[int(table[p // 16]) * 16 + p % 16 for p in range(37)] for table in tables]
            target[layer][slots[1]] = source[layer][slots[0]]
    crowded.q[0] = alone.q[0]
    assert torch.equal(crowded.run(row_invariant=True)[0], alone.run(row_invariant=True)[0])


def test_what_lies_behind_a_rows_end_in_its_pages_does_not_matter():
    case = Case([(36, 1), (150, 1)], num_decode=2)
    before = case.run()
    table = case.batch.kv_loc.page_table
    row = case.row_ids[0]
    slots = [int(table[row, p // 16]) * 16 + p % 16 for p in range(37, 160)]
    for layer in (case.pool.key_slots[1], case.pool.value_slots[1]):
        layer[slots] = 1e4
    assert torch.equal(case.run(), before)


@pytest.mark.parametrize("page_size", [4, 16])
def test_nan_that_a_failed_row_left_in_its_pages_reaches_nobody(page_size):
    rows = [(36, 1), (150, 1), (48, 1), (0, 7), (16, 5)]
    case = Case(rows, num_decode=3, page_size=page_size)
    clean = case.run()
    table = case.batch.kv_loc.page_table
    for row, (prior, new) in zip(case.row_ids, rows, strict=True):
        # All of the row's pages but what it wrote before, or, in a page that it began before, was cleared then.
        first_column = -(-prior // page_size)
        for layer in (case.pool.keys[1], case.pool.values[1]):
            written = [layer.flatten(0, 1)[slots_of(table, row, position, page_size)].clone()
                       for position in range(prior, prior + new)]  # fmt: skip
            layer[table[row, first_column:].long()] = float("nan")
            for position in range(prior, prior + new):
                case.fresh.append((layer, slots_of(table, row, position, page_size), written[position - prior]))
    backend = make_backend("torch", case.spec(), field="decode_attention")
    with torch.inference_mode():
        attention = prepare_step(backend, backend, case.batch)
        for layer, slot, value in case.fresh:  # the layer's KV write, which comes after the plan
            layer.flatten(0, 1)[slot] = value
        assert torch.equal(attention.forward(case.q, 1), clean)


def slots_of(table, row, position, page_size):
    return int(table[row, position // page_size]) * page_size + position % page_size


def test_a_backend_that_is_not_there_is_refused_by_the_setting_that_names_it():
    case = Case([(3, 1)], num_decode=1)
    with pytest.raises(ConfigError, match="flashinfer") as caught:
        make_backend("flashinfer", case.spec(), field="prefill_attention")
    assert caught.value.field == "prefill_attention"


def test_the_torch_backend_does_not_offer_to_be_captured():
    case = Case([(3, 1)], num_decode=1)
    backend = make_backend("torch", case.spec(), field="decode_attention")
    assert "full" not in backend.capabilities.graph_modes


def test_auto_on_the_cpu_is_torch_for_both_halves():
    decode, prefill = make_backends(Case([(3, 1)], num_decode=1).spec(), decode="auto", prefill="torch")
    assert decode is prefill
    assert decode.capabilities.name == "torch"


def test_capabilities_name_what_they_refuse():
    spec = Case([(3, 1)], num_decode=1).spec()
    capabilities = make_backend("torch", spec, field="decode_attention").capabilities
    assert capabilities.refusal(spec) is None
    refused = dataclasses.replace(capabilities, page_sizes=frozenset({1, 64})).refusal(spec)
    assert "16" in str(refused)
    refused = dataclasses.replace(capabilities, head_dims=frozenset({64, 128})).refusal(spec)
    assert "32" in str(refused)
