"""Paged split-KV decode attention against torch in float64."""

import pytest
import torch

from slipstream.engine.kernels.decode_attention import RopeInputs, decode_attention
from slipstream.engine.kernels.decode_plan import DecodeTiling, make_decode_workspace, plan_decode
from slipstream.engine.kernels.rope_kv_write import rope_kv_write

SEQ_LENS = [0, 1, 40, 16, 0, 33, 0, 0]


def paged_case(seq_lens, num_kv_heads, head_dim, page_size):
    """A pool, a page table with one request row a sequence in shuffled order, and those rows."""
    num_rows, max_pages = len(seq_lens), -(-max(seq_lens) // page_size)
    pages = torch.randperm(num_rows * max_pages)[: num_rows * max_pages].int() + 1
    table = torch.zeros(num_rows + 2, max_pages, dtype=torch.int32)
    rows = torch.randperm(num_rows).int() + 1
    table[rows.long()] = pages.view(num_rows, max_pages)
    shape = (num_rows * max_pages + 1, page_size, num_kv_heads, head_dim)
    return torch.randn(shape), torch.randn(shape), table, rows


def reference(q, k_cache, v_cache, table, rows, seq_lens):
    num_rows, num_q_heads, head_dim = q.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(num_rows):
        n = seq_lens[b]
        if n == 0:
            continue
        t = torch.arange(n)
        slots = table[rows[b]].long()[t // page_size] * page_size + t % page_size
        k, v = (c.double().view(-1, num_kv_heads, head_dim)[slots] for c in (k_cache, v_cache))
        k, v = (x.repeat_interleave(num_q_heads // num_kv_heads, 1) for x in (k, v))
        p = torch.einsum("hd,nhd->hn", q[b].double(), k).mul(head_dim**-0.5).softmax(-1)
        out[b] = torch.einsum("hn,nhd->hd", p, v)
    return out


def workspace_for(
    num_rows, num_q_heads, num_kv_heads, head_dim, num_programs, row_invariant=False, block_tokens=16, whole="never"
):
    return make_decode_workspace(
        max_rows=num_rows, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device="cpu",
        row_invariant=row_invariant, num_multiprocessors=num_programs,
        tiling=DecodeTiling(block_tokens=block_tokens, programs_per_multiprocessor=1, whole=whole),
    )  # fmt: skip


@pytest.mark.parametrize("num_programs", [1, 3, 7, 40])
def test_the_plan_hands_out_every_block_once_and_in_equal_shares(num_programs):
    workspace = workspace_for(len(SEQ_LENS), 4, 2, 16, num_programs)
    plan_decode(torch.tensor(SEQ_LENS, dtype=torch.int32), workspace)
    blocks = [-(-n // 16) for n in SEQ_LENS]
    flat = [(row, head, block) for row, n in enumerate(blocks) for head in range(2) for block in range(n)]
    share = max(1, -(-len(flat) // num_programs))
    assert workspace.share.item() == share
    for p, (row, head, block, count) in enumerate(workspace.plan.tolist()):
        assert count == len(flat[p * share : (p + 1) * share])
        if count:
            assert (row, head, block) == flat[p * share]


@pytest.mark.parametrize("num_programs", [1, 3, 40])
def test_a_row_invariant_plan_splits_no_sequence(num_programs):
    workspace = workspace_for(len(SEQ_LENS), 4, 2, 16, num_programs, row_invariant=True)
    plan_decode(torch.tensor(SEQ_LENS, dtype=torch.int32), workspace)
    entries = [entry for entry in workspace.plan.tolist() if entry[3]]
    assert all(block == 0 for _, _, block, _ in entries)
    assert sum(count for *_, count in entries) == sum(2 * -(-n // 16) for n in SEQ_LENS)


@pytest.mark.parametrize(
    ("seq_lens", "num_programs", "is_whole"),
    [
        ([200, 195, 208, 0], 40, True),
        ([200, 195, 208, 0], 5, False),  # more sequences than programs
        ([200, 195, 120, 0], 40, False),  # two programs would wait for the others
        ([600, 600, 600], 40, False),  # long enough to be worth splitting
        ([512, 512], 4, True),
    ],
)
def test_short_sequences_that_are_alike_stay_whole(seq_lens, num_programs, is_whole):
    workspace = workspace_for(len(seq_lens), 4, 2, 16, num_programs, whole="if_alike")
    plan_decode(torch.tensor(seq_lens, dtype=torch.int32), workspace)
    blocks = [-(-n // 16) for n in seq_lens]
    whole = [[row, head, 0, n] for row, n in enumerate(blocks) if n for head in range(2)]
    entries = [entry for entry in workspace.plan.tolist() if entry[3]]
    assert (entries == whole) == is_whole
    assert sum(count for *_, count in entries) == 2 * sum(blocks)


@pytest.mark.parametrize("row_invariant", [False, True])
@pytest.mark.parametrize("num_programs", [1, 7, 40])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "page_size"), [(4, 2, 16, 1), (3, 1, 32, 16)])
def test_decode_attention_equals_float64(num_q_heads, num_kv_heads, head_dim, page_size, num_programs, row_invariant):
    k_cache, v_cache, table, rows = paged_case(SEQ_LENS, num_kv_heads, head_dim, page_size)
    q = torch.randn(len(SEQ_LENS), num_q_heads, head_dim)
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    workspace = workspace_for(len(SEQ_LENS), num_q_heads, num_kv_heads, head_dim, num_programs, row_invariant)
    plan_decode(seq_lens, workspace)
    for _ in range(2):  # the second run finds the arrivals as the first one left them
        out = torch.full_like(q, float("nan"))
        out[seq_lens == 0] = 0.0  # nobody computes what has no tokens
        decode_attention(q, k_cache, v_cache, table, rows, seq_lens, workspace, out=out)
        expected = reference(q, k_cache, v_cache, table, rows, SEQ_LENS)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("num_programs", [2, 40])
@pytest.mark.parametrize(("page_size", "block_tokens"), [(16, 32), (8, 16), (64, 16), (32, 32), (4, 16), (1, 32)])
def test_blocks_of_any_part_or_number_of_pages_give_the_same(page_size, block_tokens, num_programs):
    seq_lens = [1, 130, 16, 33, 97, 0]
    k_cache, v_cache, table, rows = paged_case(seq_lens, 2, 16, page_size)
    k_cache[0] = v_cache[0] = float("nan")  # page 0 is nobody's, and stands for what is not there
    for row, length in zip(rows.tolist(), seq_lens, strict=True):
        page, inside = divmod(length, page_size)
        if inside:  # nor is what lies behind a sequence's end in its own page anybody's
            k_cache[table[row, page], inside:] = v_cache[table[row, page], inside:] = float("nan")
        table[row, -(-length // page_size) :] = 0
    q = torch.randn(len(seq_lens), 4, 16)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    workspace = workspace_for(len(seq_lens), 4, 2, 16, num_programs, block_tokens=block_tokens)
    plan_decode(lengths, workspace)
    out = decode_attention(q, k_cache, v_cache, table, rows, lengths, workspace)
    torch.testing.assert_close(
        out.double(), reference(q, k_cache, v_cache, table, rows, seq_lens), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("num_programs", [3, 40])
def test_taking_the_packed_projection_equals_rope_kv_write_then_attention(num_programs, with_norm):
    num_q_heads, num_kv_heads, head_dim, page_size = 6, 2, 32, 4
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    k_cache, v_cache, table, rows = paged_case(SEQ_LENS, num_kv_heads, head_dim, page_size)
    qkv = torch.randn(len(SEQ_LENS), (num_q_heads + 2 * num_kv_heads) * head_dim)
    angles = torch.arange(64.0)[:, None] * torch.rand(head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    norms = {"q_norm": torch.randn(head_dim), "k_norm": torch.randn(head_dim)} if with_norm else {}
    positions = (seq_lens - 1).clamp(min=0)
    slots = table[rows.long(), (positions // page_size).long()] * page_size + positions % page_size
    slots[seq_lens == 0] = 0
    k_two, v_two = k_cache.clone(), v_cache.clone()
    q = rope_kv_write(qkv, positions, slots, cos_sin, k_two, v_two, num_q_heads=num_q_heads, **norms)
    expected = reference(q, k_two, v_two, table, rows, SEQ_LENS)
    workspace = workspace_for(len(SEQ_LENS), num_q_heads, num_kv_heads, head_dim, num_programs)
    plan_decode(seq_lens, workspace)
    rope = RopeInputs(cos_sin=cos_sin, **norms)
    out = decode_attention(qkv, k_cache, v_cache, table, rows, seq_lens, workspace, rope=rope)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k_cache[1:], k_two[1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(v_cache[1:], v_two[1:])


def test_a_head_dim_that_is_no_power_of_two_is_refused():
    k_cache, v_cache, table, rows = paged_case([3], 1, 24, 1)
    with pytest.raises(ValueError, match="head_dim 24"):
        decode_attention(
            torch.randn(1, 1, 24), k_cache, v_cache, table, rows, torch.tensor([3]), workspace_for(1, 1, 1, 24, 1)
        )


def test_the_paged_kernel_takes_only_what_it_reads_as_it_lies():
    options = {"max_rows": 64, "num_q_heads": 4, "num_kv_heads": 4, "head_dim": 64, "device": "cpu", "has_paged": True}
    workspace = make_decode_workspace(**options, num_multiprocessors=4)
    assert workspace.is_paged(32)
    assert not make_decode_workspace(**options, num_multiprocessors=4, tiling=DecodeTiling()).is_paged(32)
    assert not make_decode_workspace(**options, num_multiprocessors=4, row_invariant=True).is_paged(32)
    cache, lengths = torch.zeros(9, 16, 4, 64, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.int32)
    q, table = torch.zeros(32, 4, 64, dtype=torch.bfloat16), torch.zeros(33, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seq_lens is torch\.int64, not int32"):
        decode_attention(q, cache, cache, table, lengths, lengths.long(), workspace)
    with pytest.raises(ValueError, match=r"q is torch\.float32, the cache torch\.bfloat16"):
        decode_attention(q.float(), cache, cache, table, lengths, lengths, workspace)


def test_a_row_invariant_workspace_cuts_every_number_of_rows_alike():
    def workspace(row_invariant):
        return make_decode_workspace(
            max_rows=256, num_q_heads=16, num_kv_heads=8, head_dim=16, device="cpu", row_invariant=row_invariant,
            num_multiprocessors=4,
        )  # fmt: skip

    assert len({workspace(True).tiling(num_rows) for num_rows in (1, 8, 32, 256)}) == 1
    assert len({workspace(False).tiling(num_rows) for num_rows in (1, 8, 32, 256)}) > 1
