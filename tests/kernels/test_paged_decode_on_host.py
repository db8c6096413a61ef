"""Paged decode attention in CUDA C++ as it is, compiled for the host, against attention in float64."""

import ctypes

import pytest
import torch

ENTRY = """
extern "C" const char* launch(const Arguments* given, long num_slots, int programs, unsigned seed) {
    const TensorMap k_map{given->k_cache, num_slots, HK * D, HK * D, BT, false, HALVES};
    const TensorMap v_map{given->v_cache, num_slots, HK * D, HK * D, BT, false, HALVES};
    return host::launch(programs, 1, 32, seed, [&] { paged_decode(k_map, v_map, *given); });
}
"""
EPS = 1e-6
FILES = ["head_vector.cuh", "attend_block.cuh", "paged_decode.cu"]


class Case:
    """Rows of these lengths in pages that lie anywhere; what stands behind a row's end is no number."""

    def __init__(self, lengths, *, group, num_kv_heads, head_dim, page_size, rope, norm):
        torch.manual_seed(len(lengths))
        self.lengths, self.group, self.num_kv_heads, self.head_dim = lengths, group, num_kv_heads, head_dim
        self.page_size, self.rope, self.norm = page_size, rope, norm
        self.num_heads = group * num_kv_heads
        rows, pages = len(lengths), max(1, -(-max(lengths) // page_size))
        self.rows = torch.randperm(rows + 2)[:rows].int()
        self.table = torch.zeros(rows + 2, pages, dtype=torch.int32)
        self.table[self.rows.long()] = (torch.randperm(rows * pages + 2)[: rows * pages] + 1).view(rows, pages).int()
        shape = (rows * pages + 3, page_size, num_kv_heads, head_dim)
        self.keys, self.values = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
        self.keys *= torch.randint(1, 8, (*shape[:2], 1, 1))  # some scores are far above others
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            for position in range(max(0, length - rope), pages * page_size):
                slot = int(self.table[row, position // page_size]), position % page_size
                self.keys[slot] = self.values[slot] = float("nan")
        width = (self.num_heads + 2 * num_kv_heads * rope) * head_dim
        self.q = torch.randn(rows, width + 8).bfloat16()[:, :width]
        self.q_norm, self.k_norm = (1 + 0.2 * torch.randn(2, head_dim)).bfloat16()
        angles = torch.arange(max(lengths) + 1)[:, None] * 10000.0 ** -torch.linspace(0, 1, head_dim // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float()
        self.out = torch.full((rows, self.num_heads * head_dim), 7.0).bfloat16()

    def rotated(self, x, norm, position):
        x = x.double()
        if self.norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.double()
        cos, sin = self.cos_sin[position].double().chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def expected(self):
        """Output [rows, Hq, D] and the new tokens' keys and values by row, in float64."""
        out = torch.full((len(self.lengths), self.num_heads, self.head_dim), 7.0, dtype=torch.float64)
        new = {}
        for index, (row, length) in enumerate(zip(self.rows.tolist(), self.lengths, strict=True)):
            if length == 0:
                continue
            at = [(int(self.table[row, t // self.page_size]), t % self.page_size) for t in range(length)]
            heads = self.q[index].view(-1, self.head_dim)
            q, k_new, v_new = heads.split([self.num_heads, *[self.num_kv_heads * self.rope] * 2])
            pages, inside = torch.tensor(at[: length - self.rope], dtype=torch.int64).view(-1, 2).unbind(-1)
            keys, values = self.keys[pages, inside].double(), self.values[pages, inside].double()
            q = q.double()
            if self.rope:
                q = self.rotated(q, self.q_norm, length - 1)
                new[at[-1]] = self.rotated(k_new, self.k_norm, length - 1), v_new.double()
                keys, values = torch.cat([keys, new[at[-1]][0][None]]), torch.cat([values, new[at[-1]][1][None]])
            q = q.view(self.num_kv_heads, self.group, self.head_dim)
            scores = torch.einsum("hgd,thd->hgt", q, keys) * self.head_dim**-0.5
            out[index] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten(0, 1)
        return out, new


def run(library, case, programs, seed, whole="never"):
    from slipstream.engine.kernels.decode_plan import DecodeTiling, make_decode_workspace, plan_decode
    from slipstream.engine.kernels.paged_decode import Arguments

    workspace = make_decode_workspace(
        max_rows=len(case.lengths), num_q_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim,
        device="cpu", num_multiprocessors=programs,
        tiling=DecodeTiling(block_tokens=16, programs_per_multiprocessor=1, whole=whole),
    )  # fmt: skip
    for partial in (workspace.partial_out, workspace.partial_stats):
        partial.fill_(float("nan"))
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    plan_decode(lengths, workspace)
    tensors = (
        case.q, case.keys, case.values, case.out, case.table, case.rows, lengths, workspace.plan, workspace.share,
        workspace.partial_out, workspace.partial_stats, workspace.arrivals, case.q_norm, case.k_norm, case.cos_sin,
    )  # fmt: skip
    scale = case.head_dim**-0.5 * 1.4426950408889634
    strides = case.q.stride(0), case.out.stride(0), case.table.stride(0)
    given = Arguments(*[tensor.data_ptr() for tensor in tensors], scale, EPS, *strides, len(case.lengths))
    library.launch.restype = ctypes.c_char_p
    num_slots = case.keys.shape[0] * case.page_size
    error = library.launch(ctypes.byref(given), ctypes.c_long(num_slots), programs, seed)
    assert error is None, error.decode()
    assert not workspace.arrivals.any()


CASES = [  # lengths, group, KV heads, head_dim, page size, with rope, with norm, stages, programs
    ([40, 17, 1], 2, 2, 128, 16, True, True, 3, 3),
    ([120, 0, 33, 16], 4, 2, 128, 16, True, False, 6, 5),
    ([130, 64, 65], 3, 3, 64, 64, False, False, 8, 4),
    ([600, 5], 4, 1, 128, 16, True, False, 4, 3),
    ([90, 31], 1, 4, 64, 16, True, True, 5, 16),
    ([300], 8, 1, 128, 32, True, True, 5, 9),
    ([64, 128, 1, 15, 16, 17], 7, 1, 128, 64, True, False, 5, 1),
]


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_on_the_host_equals_float64(case, on_host):
    lengths, group, num_kv_heads, head_dim, page_size, rope, norm, stages, programs = case
    defines = {
        "G": group, "HK": num_kv_heads, "D": head_dim, "PAGE": page_size, "STAGES": stages, "ROPE": int(rope),
        "NORM": int(norm), "AHEAD": 1, "BFLOAT16": 1,
    }  # fmt: skip
    library = on_host(FILES, defines, ENTRY)
    made = Case(
        lengths, group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, rope=rope, norm=norm
    )
    expected, new = made.expected()
    run(library, made, programs, seed=1)
    torch.testing.assert_close(made.out.view(expected.shape).double(), expected, rtol=0.02, atol=0.02)
    for slot, (key, value) in new.items():
        torch.testing.assert_close(made.keys[slot].double(), key, rtol=0.01, atol=0.02)
        assert torch.equal(made.values[slot].double(), value)


def test_programs_of_a_whole_sequence_each_give_the_same(on_host):
    defines = {"G": 2, "HK": 2, "D": 64, "PAGE": 16, "STAGES": 3, "ROPE": 1, "NORM": 0, "AHEAD": 1, "BFLOAT16": 1}
    made = Case([33, 0, 40, 48], group=2, num_kv_heads=2, head_dim=64, page_size=16, rope=True, norm=False)
    expected, _ = made.expected()
    run(on_host(FILES, defines, ENTRY), made, 9, seed=1, whole="always")
    torch.testing.assert_close(made.out.view(expected.shape).double(), expected, rtol=0.02, atol=0.02)


FAULTS = {
    "a block is read before it has come": ("wait_barrier(barriers + 8 * stage, parity);", ""),
    "a stage is filled while it is read": (
        "            if ((at + 1) * BT <= limit) {",
        "            sender.send(ring + stage * STAGE_BYTES, barriers + 8 * stage);\n            if ((at + 1) * BT <= limit) {",
    ),
    "what stands behind the end is multiplied": ("    if (IS_LAST) {  //", "    if (false) {  //"),
    "what stands behind the end counts": ("if (IS_LAST && lane", "if (false && lane"),
    "weights are relative to two origins": ("x.acc[t][i] *= shrink[i % 2]", "x.acc[t][i] *= 1.0f"),
    "pages are those of the row before": ("walk.go_on();\n        turn_to(0);", "walk.go_on();"),
    "inputs are those of the sequence before": ("            in.take_vectors(arg, walk.row, walk.head);", ""),
    "angles are those of the row before": (
        "            in.take_place(arg, walk.head, walk.seq_len, walk.request);",
        "",
    ),
    "a part is forgotten": ("program + n > last_program", "program + n >= last_program"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_noticed(fault, on_host):
    defines = {"G": 2, "HK": 2, "D": 64, "PAGE": 16, "STAGES": 2, "ROPE": 1, "NORM": 0, "AHEAD": 1, "BFLOAT16": 1}

    def is_right(library, seed):
        made = Case([70, 100], group=2, num_kv_heads=2, head_dim=64, page_size=16, rope=True, norm=False)
        expected, _ = made.expected()
        try:
            run(library, made, 3, seed)
            torch.testing.assert_close(made.out.view(expected.shape).double(), expected, rtol=0.02, atol=0.02)
        except AssertionError:
            return False
        return True

    assert is_right(on_host(FILES, defines, ENTRY), 0)
    faulty = on_host(FILES, defines, ENTRY, FAULTS[fault])
    assert not all(is_right(faulty, seed) for seed in range(10))
