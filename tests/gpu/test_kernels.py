"""The compiled kernels in bf16 on the card, against torch in float64. tests/kernels has the finer cases, interpreted."""

import pytest
import torch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
EPS = 1e-6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=CUDA)


def assert_near(actual, expected, bound=6e-3):
    """Norm of the error over the norm of what is expected; bf16 rounding of the result alone is about 1.7e-3."""
    actual, expected = actual.double(), expected.double()
    assert torch.isfinite(actual).all()
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < bound, f"relative error {error:.2e}"


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def cos_sin_table(length, head_dim):
    angles = torch.arange(length, device=CUDA)[:, None] * (10000.0 ** -torch.linspace(0, 1, head_dim // 2, device=CUDA))
    return torch.cat([angles.cos(), angles.sin()], -1).float()


@pytest.mark.parametrize(("tokens", "width"), [(1, 1024), (7, 4096), (300, 576)])
def test_norms_and_activation_equal_float64(tokens, width):
    from slipstream.engine.kernels.rmsnorm import rmsnorm
    from slipstream.engine.kernels.silu_mul import silu_mul

    x, weight = randn(tokens, width), randn(width)
    assert_near(rmsnorm(x, weight, EPS), normed(x.double(), weight))
    pair = randn(tokens, 2 * width)
    gate, up = pair.double().chunk(2, -1)
    assert_near(silu_mul(pair), torch.nn.functional.silu(gate) * up)


LINEARS = [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 14336), (1030, 576)]


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 33, 200])
@pytest.mark.parametrize(("features", "width"), LINEARS)
def test_matrix_products_of_few_rows_equal_float64(features, width, rows):
    from slipstream.engine.kernels.gemv import gemv
    from slipstream.engine.kernels.resident_gemm import ResidentConfig, resident_gemm
    from slipstream.engine.kernels.small_gemm import GemmConfig, make_split_workspace, small_gemm

    x, weight, norm, residual = (
        randn(rows, width),
        randn(features, width, scale=0.05),
        randn(width),
        randn(rows, features),
    )
    workspace = make_split_workspace(max_features=features, device=CUDA)
    plain = x.double() @ weight.double().T
    after_norm = normed(x.double(), norm) @ weight.double().T
    split = GemmConfig(block_n=64, block_k=64, split_k=4)
    assert_near(small_gemm(x, weight, GemmConfig(block_n=32, block_k=128)), plain)
    out = residual.clone()
    assert_near(small_gemm(x, weight, split, workspace=workspace, out=out, add=True), plain + residual.double())
    again = small_gemm(x, weight, split, workspace=workspace, out=residual.clone(), add=True)
    assert torch.equal(out, again)
    assert not workspace.arrivals.any()
    if rows <= 8:
        assert_near(gemv(x, weight, norm=norm, eps=EPS), after_norm)
        assert_near(gemv(x, weight, out=residual.clone(), add=True), plain + residual.double())
    if rows <= 16 and width <= 2048:
        config = ResidentConfig(block_n=16, num_warps=8)
        assert_near(resident_gemm(x, weight, config, norm=norm, eps=EPS), after_norm)
        assert_near(resident_gemm(x, weight, config, out=residual.clone(), add=True), plain + residual.double())


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 14336)])
def test_the_linear_chosen_for_a_model_equals_float64(hidden, inner, rows):
    from slipstream.engine.kernels.linear import linear
    from slipstream.engine.kernels.small_gemm import make_split_workspace

    x, norm, residual = randn(rows, hidden), randn(hidden), randn(rows, hidden)
    gate_up, down, qkv = (randn(*shape, scale=0.02) for shape in ((2 * inner, hidden), (hidden, inner), (4096, hidden)))
    workspace = make_split_workspace(max_features=hidden, device=CUDA)
    gate, up = (normed(x.double(), norm) @ gate_up.double().T).chunk(2, -1)
    middle = linear(x, gate_up, workspace, norm=norm, eps=EPS, gated=True)
    assert_near(middle, torch.nn.functional.silu(gate) * up)
    assert_near(linear(x, qkv, workspace, norm=norm, eps=EPS), normed(x.double(), norm) @ qkv.double().T)
    expected = middle.double() @ down.double().T + residual.double()
    assert linear(middle, down, workspace, add_to=residual) is residual
    assert_near(residual, expected)


def paged(seq_lens, num_kv_heads, head_dim, page_size):
    num_rows, max_pages = len(seq_lens), -(-max(seq_lens) // page_size)
    table = (torch.randperm(num_rows * max_pages, device=CUDA).int() + 1).view(num_rows, max_pages)
    rows = torch.randperm(num_rows, device=CUDA).int()
    shape = (num_rows * max_pages + 1, page_size, num_kv_heads, head_dim)
    return randn(*shape), randn(*shape), table, rows


def attention_reference(q, k_cache, v_cache, table, row, seq_len):
    """q [n, Hq, D], the last n positions of the row's sequence."""
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    t = torch.arange(seq_len, device=CUDA)
    slots = table[row].long()[t // page_size] * page_size + t % page_size
    k, v = (c.view(-1, num_kv_heads, head_dim)[slots].float() for c in (k_cache, v_cache))
    k, v = (x.repeat_interleave(q.shape[1] // num_kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,nhd->hqn", q.float(), k).double() * head_dim**-0.5
    visible = t[None, :] <= (seq_len - q.shape[0] + torch.arange(q.shape[0], device=CUDA))[:, None]
    p = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqn,nhd->qhd", p, v.double())


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 8, 64), (8, 1, 128)]
)
@pytest.mark.parametrize("seq_lens", [[1], [1000], [8192, 1, 130, 0, 64], [200] * 48, list(range(1, 257))])
def test_decode_attention_equals_float64_and_itself(num_q_heads, num_kv_heads, head_dim, page_size, seq_lens):
    from slipstream.engine.kernels.decode_attention import decode_attention
    from slipstream.engine.kernels.decode_plan import make_decode_workspace, plan_decode
    from slipstream.engine.kernels.paged_decode import has_paged_decode

    k_cache, v_cache, table, rows = paged(seq_lens, num_kv_heads, head_dim, page_size)
    q, lengths = randn(len(seq_lens), num_q_heads, head_dim), ints(seq_lens)
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    has_paged = has_paged_decode(k_cache, num_q_heads // num_kv_heads)
    workspace = make_decode_workspace(max_rows=len(seq_lens), device=CUDA, has_paged=has_paged, **shape)
    plan_decode(lengths, workspace)
    out = decode_attention(q, k_cache, v_cache, table, rows, lengths, workspace)
    for _ in range(3):
        assert torch.equal(out, decode_attention(q, k_cache, v_cache, table, rows, lengths, workspace))
    assert not workspace.arrivals.any()
    workspace = make_decode_workspace(max_rows=len(seq_lens), device=CUDA, row_invariant=True, **shape)
    plan_decode(lengths, workspace)
    whole = decode_attention(q, k_cache, v_cache, table, rows, lengths, workspace)
    for b in range(0, len(seq_lens), 17 if len(seq_lens) > 20 else 1):
        if seq_lens[b] == 0:
            assert not out[b].any()
            continue
        expected = attention_reference(q[b : b + 1], k_cache, v_cache, table, rows[b], seq_lens[b])[0]
        assert_near(out[b], expected, 1e-2)
        assert_near(whole[b], expected, 1e-2)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "with_norm"), [(16, 8, True), (32, 8, False)])
def test_the_packed_projection_gives_what_rope_kv_write_and_attention_give(num_q_heads, num_kv_heads, with_norm, few):
    from slipstream.engine.kernels.decode_attention import RopeInputs, decode_attention
    from slipstream.engine.kernels.decode_plan import make_decode_workspace, plan_decode
    from slipstream.engine.kernels.paged_decode import has_paged_decode
    from slipstream.engine.kernels.rope_kv_write import rope_kv_write

    seq_lens = [1, 17, 1024, 65, 300] * (1 if few else 30)
    k_cache, v_cache, table, rows = paged(seq_lens, num_kv_heads, 128, 16)
    qkv, lengths = randn(len(seq_lens), (num_q_heads + 2 * num_kv_heads) * 128), ints(seq_lens)
    norms = {"q_norm": randn(128), "k_norm": randn(128)} if with_norm else {}
    cos_sin = cos_sin_table(2048, 128)
    positions = lengths - 1
    slots = table[rows.long(), (positions // 16).long()] * 16 + positions % 16
    k_two, v_two = k_cache.clone(), v_cache.clone()
    q = rope_kv_write(qkv, positions, slots, cos_sin, k_two, v_two, num_q_heads=num_q_heads, eps=EPS, **norms)
    part = qkv.double().view(len(seq_lens), -1, 128)[:, :num_q_heads]
    part = normed(part, norms["q_norm"]) if with_norm else part
    cos, sin = (c[:, None].double() for c in cos_sin[positions.long()].chunk(2, -1))
    a, b = part.chunk(2, -1)
    assert_near(q, torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    workspace = make_decode_workspace(
        max_rows=256, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=128, device=CUDA,
        has_paged=has_paged_decode(k_cache, num_q_heads // num_kv_heads),
    )  # fmt: skip
    plan_decode(lengths, workspace)
    expected = decode_attention(q, k_two, v_two, table, rows, lengths, workspace)
    rope = RopeInputs(cos_sin=cos_sin, eps=EPS, **norms)
    fused = decode_attention(qkv, k_cache, v_cache, table, rows, lengths, workspace, rope=rope)
    assert_near(fused, expected, 5e-3)
    assert_near(k_cache, k_two, 1e-3)
    assert torch.equal(v_cache, v_two)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize(
    ("new_tokens", "prefixes"),
    [([1], [0]), ([128], [0]), ([5, 0, 700, 1], [0, 0, 0, 90]), ([2000, 3, 65], [100, 7, 64])],
)
def test_prefill_attention_equals_float64(num_q_heads, num_kv_heads, head_dim, page_size, new_tokens, prefixes):
    from slipstream.engine.kernels.prefill_attention import prefill_attention

    seq_lens = [a + b for a, b in zip(new_tokens, prefixes, strict=True)]
    k_cache, v_cache, table, rows = paged(seq_lens, num_kv_heads, head_dim, page_size)
    starts = [sum(new_tokens[:i]) for i in range(len(new_tokens) + 1)]
    q = randn(starts[-1] + 5, num_q_heads, head_dim)
    out = torch.full_like(q, float("nan"))
    prefill_attention(q, k_cache, v_cache, table, rows, ints(starts), ints(seq_lens), out=out)
    assert out[starts[-1] :].isnan().all()
    for b, n in enumerate(new_tokens):
        if n:
            mine = slice(starts[b], starts[b] + n)
            assert_near(out[mine], attention_reference(q[mine], k_cache, v_cache, table, rows[b], seq_lens[b]), 1e-2)


def test_the_step_prologue_derives_the_inputs_of_a_step():
    from slipstream.engine.kernels.step_prologue import empty_step_inputs, step_prologue

    lengths, next_ids = ints([0, 33, 15, 16]), ints([7, 70, 71, 72], torch.int64)
    table, inputs = torch.arange(4 * 64, dtype=torch.int32, device=CUDA).view(4, 64) + 1, empty_step_inputs(4, CUDA)
    embedding, hidden = randn(80, 4096), randn(4, 4096)
    step_prologue(
        ints([3, 1, 2, 2]), ints([2]), next_ids, lengths, table, 16, inputs, embedding=embedding, hidden=hidden
    )
    assert inputs.ids.tolist() == [72, 70, 0, 0]
    assert inputs.positions.tolist() == [16, 33, 0, 0]
    assert inputs.seq_lens.tolist() == [17, 34, 0, 0]
    assert inputs.slots.tolist() == [int(table[3, 1]) * 16, int(table[1, 2]) * 16 + 1, 0, 0]
    assert lengths.tolist() == [0, 34, 15, 17]
    assert torch.equal(hidden, embedding[[72, 70, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{"greedy": True}, {"filters": False}, {"filters": True}])
def test_the_sampler_chooses_what_its_definition_chooses(dtype, options):
    from slipstream.engine.kernels.sampling import make_sampler_workspace, sample
    from slipstream.engine.sampling.counter_random import exponential
    from slipstream.engine.sampling.sampling_table import SamplingTable

    num_rows, vocab = 12, 151936
    logits = randn(num_rows, vocab, dtype=dtype, scale=3.0)
    filters = options.get("filters", False)
    table = SamplingTable(num_rows, CUDA)
    table.temperature.fill_(0.8)
    table.seed.copy_(torch.arange(1, num_rows + 1) * 987654321987)
    if filters:
        table.top_k.copy_(torch.tensor([0, 50, 0, 20] * 3))
        table.top_p.copy_(torch.tensor([0.9, 1.0, 1.0, 0.7] * 3))
        table.min_p.copy_(torch.tensor([0.0, 0.0, 0.05, 0.0] * 3))
    rows, lengths = torch.arange(num_rows, device=CUDA).int(), torch.arange(num_rows, device=CUDA).int() * 7
    workspace = make_sampler_workspace(max_rows=16, vocab_size=vocab, device=CUDA)
    ids, bad, relay = ints([-1] * num_rows, torch.int64), ints([-1] * num_rows), ints([-1] * num_rows, torch.int64)
    dead = torch.zeros(num_rows, dtype=torch.uint8, device=CUDA)
    for _ in range(2):
        sample(logits, rows, ints([num_rows]), lengths, dead, table, relay, workspace, ids=ids, bad=bad, **options)
        assert bad.tolist() == [0] * num_rows
        assert torch.equal(ids, relay)
        score = logits.double() / 0.8
        if not options.get("greedy"):
            for b in range(num_rows if filters else 0):
                k, p, m = table.top_k[b].item(), table.top_p[b].item(), table.min_p[b].item()
                x = score[b].clone()
                if k:
                    x[x < x.topk(k).values[-1]] = float("-inf")
                values, order = x.sort(descending=True)
                above = values.softmax(-1).cumsum(-1) - values.softmax(-1)
                x[order[above >= p]] = float("-inf")
                if m:
                    x[x < x.max() + torch.tensor(m).log()] = float("-inf")
                score[b] = x
            score -= (
                exponential(table.seed, lengths, torch.arange(vocab, dtype=torch.int32, device=CUDA)).double().log()
            )
        chosen, best = score.gather(1, ids[:, None])[:, 0], score.max(1).values
        assert (best - chosen).max().item() < 1e-4
    assert not workspace.arrivals.any()


def test_a_captured_layer_of_dependent_launches_repeats_the_eager_result_exactly():
    from slipstream.engine.kernels.gemv import gemv
    from slipstream.engine.kernels.rmsnorm import rmsnorm

    layers = [(randn(3072 * 2, 1024, scale=0.03), randn(1024, 3072, scale=0.03), randn(1024)) for _ in range(12)]
    start = randn(2, 1024)
    hidden, middle, final = start.clone(), randn(2, 3072), randn(2, 1024)

    def forward():
        hidden.copy_(start)
        for gate_up, down, norm in layers:
            gemv(hidden, gate_up, out=middle, norm=norm, silu_mul=True)
            gemv(middle, down, out=hidden, add=True)
        rmsnorm(hidden, layers[0][2], EPS, out=final)

    forward()
    expected = final.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for _ in range(50):
        final.fill_(float("nan"))
        graph.replay()
        assert torch.equal(final, expected)
    x = start.double()
    for gate_up, down, norm in layers:
        gate, up = (normed(x, norm) @ gate_up.double().T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ down.double().T
    assert_near(final, normed(x, layers[0][2]), 5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [300, 151_936])
def test_masks_rule_out_every_id_whose_bit_is_not_set(vocab, dtype):
    from slipstream.engine.kernels.id_masks import apply_id_masks
    from slipstream.engine.sampling.logit_changes import unpacked

    block = torch.randint(-(1 << 31), 1 << 31, (3 + 3 * (-(-vocab // 32)),), device=CUDA).to(torch.int32)
    rows, masks = ints([5, 0, 2]), block[3:].view(3, -1)  # a slice that is aligned to nothing
    logits = randn(7, vocab + 5, dtype=dtype)[:, :vocab]
    expected = logits.clone()
    expected[rows.long()] = expected[rows.long()].masked_fill(~unpacked(masks, vocab), float("-inf"))
    apply_id_masks(logits, rows, masks)
    assert torch.equal(logits, expected)
