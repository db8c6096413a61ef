"""The attention backends for CUDA against torch's own, in bf16 on the card."""

import dataclasses
import functools

import pytest
import torch

from slipstream.engine.attention.backend import AttentionSpec, GraphBucket, prepare_step
from slipstream.engine.attention.registry import make_backends, resolve_name
from slipstream.engine.errors import ConfigError, MisuseError
from slipstream.engine.forward.forward_batch import ForwardBatch
from slipstream.engine.forward.kv_loc_plan import KVLocPlan
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward_mode import ForwardMode

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
MAX_LEN = 8320
MAX_ROWS = 256
POOL_TOKENS = 1 << 17
BOUND = 1e-2  # norm of the error over the norm of what is expected; bf16 rounds by about 2e-3

HEADS = [
    (1, 1, 64),
    (8, 4, 64),
    (9, 3, 64),
    (16, 8, 128),
    (32, 8, 128),
    (5, 1, 128),
    (12, 2, 64),
    (7, 1, 128),
    (16, 2, 128),
]
NAMES = ["triton", "flashinfer"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def need(name):
    if name == "flashinfer":
        pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")


@functools.cache
def pool_of(kv_heads, head_dim, page_size):
    """One random pool for a page size is enough: rows differ in their pages."""
    shape = KVShape(num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    pool = KVPool(shape, num_pages=POOL_TOKENS // page_size, page_size=page_size, device=CUDA)
    for layer in (*pool.keys, *pool.values):
        layer.copy_(torch.randn(layer.shape, device=CUDA))
    return pool


@functools.cache
def backends_of(name, heads, kv_heads, head_dim, page_size, row_invariant=False):
    pool = pool_of(kv_heads, head_dim, page_size)
    spec = AttentionSpec(
        kv_pool=pool,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_rows=MAX_ROWS,
        max_model_len=MAX_LEN,
        row_invariant=row_invariant,
        device=CUDA,
        dtype=torch.bfloat16,
    )
    return spec, make_backends(spec, decode=name, prefill=name)


def step(pool, rows, num_decode):
    """A step of (prior, new) rows whose pages lie anywhere in the pool; rows may share pages, which only readers do."""
    page_size = pool.page_size
    pages_each = -(-max(prior + new for prior, new in rows) // page_size)
    table = torch.randint(1, pool.num_pages + 1, (len(rows) + 1, pages_each), device=CUDA).int()
    row_ids = torch.randperm(len(rows), device=CUDA).int() + 1
    prior = torch.tensor([row[0] for row in rows], dtype=torch.int32, device=CUDA)
    new = torch.tensor([row[1] for row in rows], dtype=torch.int32, device=CUDA)
    start = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    token_rows = row_ids.repeat_interleave(new.long())
    positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32, device=CUDA) for p, n in rows])
    return ForwardBatch(
        mode=ForwardMode.of(num_decode=num_decode, num_extend=len(rows) - num_decode),
        num_decode=num_decode,
        rows=row_ids,
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=CUDA),
        positions=positions,
        seq_lens=prior + new,
        prefix_lens=prior,
        query_start_loc=start,
        logits_indices=start[1:] - 1,
        sample_rows=row_ids,
        sample_lens=prior + new,
        kv_loc=KVLocPlan.make(table, page_size, token_rows=token_rows, positions=positions),
        prefix_lens_cpu=tuple(row[0] for row in rows),
        num_new_cpu=tuple(row[1] for row in rows),
    )


def assert_near(actual, expected, bound=BOUND):
    actual, expected = actual.double(), expected.double()
    assert torch.isfinite(actual).all()
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < bound, f"relative error {error:.2e}"


def write_new_tokens(pool, batch):
    """As the layers do, between the plan and the attention: planning may clear the pages that begin here."""
    for slots in (pool.key_slots[0], pool.value_slots[0]):
        slots[batch.kv_loc.slots] = torch.randn(batch.num_tokens, *slots.shape[1:], device=CUDA).bfloat16()


def compare(spec, chosen, reference, batch):
    """Both backends on one step; the output goes where it is asked to."""
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, device=CUDA).bfloat16()
    plans = [prepare_step(*backends, batch) for backends in (reference, chosen)]
    write_new_tokens(spec.kv_pool, batch)
    out = torch.full_like(q, float("nan"))
    expected, got = plans[0].forward(q, 0), plans[1].forward(q, 0, out)
    assert got.data_ptr() == out.data_ptr()
    assert_near(got, expected)
    torch.cuda.synchronize()


STEPS = {
    "one short prompt": ([(0, 5)], 0),
    "one long prompt": ([(0, 1500)], 0),
    "prompts with and without prefix": ([(0, 1), (63, 65), (128, 64), (1, 130), (2000, 30)], 0),
    "a chunk behind 8k": ([(8000, 200)], 0),
    "decode rows": ([(0, 1), (15, 1), (16, 1), (700, 1), (8191, 1)], 5),
    "decode rows and prompts": ([(99, 1), (4000, 1), (0, 70), (300, 17)], 2),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [*((*heads, 16) for heads in HEADS), *((*heads, page) for heads in HEADS[2:5] for page in (1, 64))],
)
def test_every_backend_gives_what_torch_gives(heads, kv_heads, head_dim, page_size, name):
    need(name)
    shape = (heads, kv_heads, head_dim, page_size)
    spec, chosen = backends_of(name, *shape)
    _, reference = backends_of("torch", *shape)
    for rows, num_decode in STEPS.values():
        batch = step(spec.kv_pool, rows, num_decode)
        compare(spec, chosen, reference, batch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [2, 33, 256])
def test_batches_of_many_rows_give_what_torch_gives(num_rows, name):
    need(name)
    shape = (16, 8, 128, 16)
    spec, chosen = backends_of(name, *shape)
    _, reference = backends_of("torch", *shape)
    decode = [(17 * i % 900, 1) for i in range(num_rows)]
    extend = [(13 * i % 70, 1 + 29 * i % 40) for i in range(num_rows)]
    for rows, num_decode in ((decode, num_rows), (extend, 0), (decode[1::2] + extend[::2], num_rows // 2)):
        batch = step(spec.kv_pool, rows, num_decode)
        compare(spec, chosen, reference, batch)


@pytest.mark.parametrize("name", NAMES)
def test_planning_and_running_ask_nothing_of_the_device(name):
    need(name)
    spec, chosen = backends_of(name, 16, 8, 128, 16)
    batch = step(spec.kv_pool, [(30, 1), (5, 1), (0, 300), (40, 3)], 2)
    q = torch.randn(batch.num_tokens, 16, 128, device=CUDA).bfloat16()
    prepare_step(*chosen, batch).forward(q, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # 0.1 s: whoever waits for the device is seen to wait
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepare_step(*chosen, batch).forward(q, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the host waited for the device"
    torch.cuda.synchronize()


def test_flashinfer_refuses_to_overwrite_a_plan_that_has_not_reached_the_device():
    need("flashinfer")
    spec, (_, extend) = backends_of("flashinfer", 16, 8, 128, 16)
    batch = step(spec.kv_pool, [(0, 20)], 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    for _ in range(3):
        extend.prepare(batch, decode=False, extend=True)
    with pytest.raises(MisuseError, match="3 steps"):
        extend.prepare(batch, decode=False, extend=True)
    torch.cuda.synchronize()
    extend.prepare(batch, decode=False, extend=True)


def test_open_plans_of_flashinfer_do_not_disturb_each_other():
    need("flashinfer")
    shape = (16, 8, 128, 16)
    spec, chosen = backends_of("flashinfer", *shape)
    _, reference = backends_of("torch", *shape)
    batches = [step(spec.kv_pool, rows, 0) for rows in ([(0, 400)], [(7, 3), (90, 80)], [(500, 9)])]
    queries = [torch.randn(batch.num_tokens, 16, 128, device=CUDA).bfloat16() for batch in batches]
    references = [prepare_step(*reference, batch) for batch in batches]
    for batch in batches:
        write_new_tokens(spec.kv_pool, batch)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    got = [prepare_step(*chosen, batch).forward(q, 0) for batch, q in zip(batches, queries, strict=True)]
    torch.cuda.synchronize()
    for plan, q, out in zip(references, queries, got, strict=True):
        assert_near(out, plan.forward(q, 0))


@pytest.mark.parametrize("name", NAMES)
def test_inside_a_graph_a_backend_gives_what_it_gives_outside(name):
    need(name)
    spec, (_, backend) = backends_of(name, 16, 8, 128, 16)
    if "full" not in backend.capabilities.graph_modes:
        pytest.skip("no FlashAttention-3 here")
    has_decode = name == "triton"
    page_table = torch.zeros(MAX_ROWS + 1, 128, dtype=torch.int32, device=CUDA)
    bucket = GraphBucket(num_decode=3 if has_decode else 0, num_extend=4, num_tokens=128)
    backend.graph_state(bucket, page_table)
    q, out = (torch.randn(128, 16, 128, device=CUDA).bfloat16() for _ in range(2))
    plan = backend.prepare_capture(bucket)

    def run():
        if has_decode:
            plan.decode(q, 0, out)
        plan.extend(q, 0, out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    steps = [([(0, 50), (20, 70)], 0), ([(900, 128)], 0), ([(0, 1), (5, 1), (9, 1), (100, 33)], 0), ([(7, 100)], 0)]
    if has_decode:
        steps += [([(30, 1), (800, 1), (0, 33), (100, 66)], 2), ([(3, 1), (900, 90)], 1)]
    for rows, num_decode in steps:
        batch = step(spec.kv_pool, rows, num_decode)
        page_table.zero_()
        page_table[: len(rows) + 1, : batch.kv_loc.page_table.shape[1]].copy_(batch.kv_loc.page_table)
        q.normal_()
        backend.prepare_replay(bucket, batch, decode=has_decode, extend=True)
        out.fill_(7.0)
        graph.replay()
        tokens = batch.num_tokens
        expected = prepare_step(backend, backend, batch).forward(q[:tokens], 0)
        assert_near(out[:tokens], expected, 4e-3)
        # A padded decode slot leaves zeros, an extend slot nothing.
        assert ((out[tokens:] == 7.0) | (out[tokens:] == 0.0)).all(), "padding was written"
        torch.cuda.synchronize()


def test_triton_in_row_invariant_mode_gives_a_token_the_same_numbers_in_every_step():
    spec, (_, triton) = backends_of("triton", 16, 8, 128, 16, row_invariant=True)
    whole = step(spec.kv_pool, [(0, 1600)], 0)
    q = torch.randn(1600, 16, 128, device=CUDA).bfloat16()
    expected = prepare_step(triton, triton, whole).forward(q, 0)
    for first, last in ((0, 1), (0, 700), (700, 1600), (1000, 1003), (1599, 1600)):
        chunk = dataclasses.replace(
            whole,
            prefix_lens=torch.tensor([first], device=CUDA).int(),
            seq_lens=torch.tensor([last], device=CUDA).int(),
            query_start_loc=torch.tensor([0, last - first], device=CUDA).int(),
            prefix_lens_cpu=(first,),
            num_new_cpu=(last - first,),
        )
        assert torch.equal(prepare_step(triton, triton, chunk).forward(q[first:last], 0), expected[first:last])
    decode = dataclasses.replace(
        whole,
        mode=ForwardMode.DECODE,
        num_decode=1,
        seq_lens=torch.tensor([900], device=CUDA).int(),
        prefix_lens_cpu=(899,),
        num_new_cpu=(1,),
    )
    alone = prepare_step(triton, triton, decode).forward(q[:1], 0)
    many = dataclasses.replace(
        decode,
        num_decode=200,
        rows=whole.rows.repeat(200),
        seq_lens=torch.tensor([900] * 100 + [1500] * 100, device=CUDA).int(),
        prefix_lens_cpu=(899,) * 100 + (1499,) * 100,
        num_new_cpu=(1,) * 200,
    )
    assert torch.equal(prepare_step(triton, triton, many).forward(q[:1].repeat(200, 1, 1), 0)[:1], alone)


def test_auto_means_what_is_there_and_serves_the_pool():
    spec, _ = backends_of("triton", 16, 8, 128, 16)
    assert resolve_name("auto", spec, phase="decode") == "triton"
    try:
        from slipstream.engine.attention.flashinfer_backend import serves_prebuilt

        expected = "flashinfer" if serves_prebuilt(spec) else "triton"
    except ImportError:
        expected = "triton"
    assert resolve_name("auto", spec, phase="prefill") == expected
    assert resolve_name("auto", dataclasses.replace(spec, head_dim=96), phase="prefill") == "torch"
    assert resolve_name("auto", dataclasses.replace(spec, row_invariant=True), phase="prefill") == "triton"
    assert resolve_name("auto", dataclasses.replace(spec, dtype=torch.float32), phase="decode") == "torch"
    with pytest.raises(ConfigError, match="row-invariant"):
        make_backends(dataclasses.replace(spec, row_invariant=True), decode="triton", prefill="flashinfer")
    with pytest.raises(ConfigError, match="head dims"):
        make_backends(dataclasses.replace(spec, head_dim=96), decode="triton", prefill="triton")
