"""Paged causal prefill attention against torch in float64."""

import pytest
import torch

from slipstream.engine.kernels.prefill_attention import prefill_attention


def reference(q, k_cache, v_cache, table, rows, query_start, seq_lens):
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    out = torch.full(q.shape, float("nan"), dtype=torch.float64)
    for b, row in enumerate(rows.tolist()):
        first, last, n = int(query_start[b]), int(query_start[b + 1]), int(seq_lens[b])
        if first == last:
            continue
        t = torch.arange(n)
        slots = table[row].long()[t // page_size] * page_size + t % page_size
        k, v = (c.double().view(-1, num_kv_heads, head_dim)[slots] for c in (k_cache, v_cache))
        k, v = (x.repeat_interleave(q.shape[1] // num_kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q[first:last].double(), k) * head_dim**-0.5
        visible = t[None, :] <= (n - (last - first) + torch.arange(last - first))[:, None]
        p = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqn,nhd->qhd", p, v)
    return out


@pytest.mark.parametrize(
    ("new_tokens", "prefixes"),
    [([1], [0]), ([70], [0]), ([5, 0, 66, 1], [0, 0, 0, 0]), ([3, 65, 1], [64, 7, 130]), ([64, 128], [63, 1])],
)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "page_size"), [(2, 1, 16, 1), (3, 1, 32, 16)])
def test_prefill_attention_equals_float64(num_q_heads, num_kv_heads, head_dim, page_size, new_tokens, prefixes):
    num_rows = len(new_tokens)
    seq_lens = torch.tensor([a + b for a, b in zip(new_tokens, prefixes, strict=True)], dtype=torch.int32)
    query_start = torch.tensor([0, *torch.tensor(new_tokens).cumsum(0).tolist()], dtype=torch.int32)
    max_pages = -(-int(seq_lens.max()) // page_size)
    table = (torch.randperm(num_rows * max_pages).int() + 1).view(num_rows, max_pages)
    rows = torch.randperm(num_rows).int()
    shape = (num_rows * max_pages + 1, page_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.randn(shape), torch.randn(shape)
    padding = 9
    q = torch.randn(sum(new_tokens) + padding, num_q_heads, head_dim)
    out = torch.full_like(q, float("nan"))
    prefill_attention(q, k_cache, v_cache, table, rows, query_start, seq_lens, out=out)
    expected = reference(q, k_cache, v_cache, table, rows, query_start, seq_lens)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert out[-padding:].isnan().all()


def test_a_head_dim_that_is_no_power_of_two_is_refused():
    cache, one = torch.zeros(1, 1, 1, 24), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="head_dim 24"):
        prefill_attention(torch.zeros(1, 1, 24), cache, cache, one[None], one, torch.tensor([0, 1]), one)


def test_row_invariant_tokens_do_not_depend_on_how_a_prompt_is_cut():
    cache = torch.randn(12, 16, 1, 16)
    table, row = (torch.randperm(11).int() + 1)[None], torch.zeros(1, dtype=torch.int32)
    q = torch.randn(170, 2, 16)

    def attend(first, last):
        start, length = torch.tensor([0, last - first]).int(), torch.tensor([last]).int()
        return prefill_attention(q[first:last], cache, cache, table, row, start, length, row_invariant=True)

    whole = attend(0, 170)
    for first, last in ((0, 50), (50, 170), (101, 102)):
        assert torch.equal(attend(first, last), whole[first:last])
