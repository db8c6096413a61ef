# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""From logits to the next token of every row: one kernel, and a second one only where a row filters its candidates.

The draw is the largest `exp(logit / temperature) / e` with the exponential variates e of `sampling.counter_random`, which
the torch sampler draws by too. Restricted to the allowed set
it is the same draw, so filtered rows need no sort: the winner is taken, checked against the filters by counting what
lies above it, and if it fails, everything from it down is out and the next winner is taken from the rest.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..sampling.sampling_table import SamplingTable
from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

GREEDY_TEMPERATURE = 1e-5
"""From here down a row takes its largest logit, the lowest id among equals."""

_CHUNK = 4096
_LONG_CHUNK = 16384
_FEW_ROWS = 16
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerWorkspace:
    """Scratch for up to `max_rows` rows of one vocabulary, shared by all buckets.

    scores [3, max_rows, chunks] fp32 (best score, largest logit, mass); winners [max_rows, chunks] int32 (-1: not a
    number); row_stats [2, max_rows] fp32; arrivals [max_rows] int32, zero between kernels.
    """

    scores: torch.Tensor
    winners: torch.Tensor
    row_stats: torch.Tensor
    arrivals: torch.Tensor


def make_sampler_workspace(*, max_rows: int, vocab_size: int, device: torch.device | str) -> SamplerWorkspace:
    """Allocates the scratch."""
    chunks = triton.cdiv(vocab_size, _CHUNK)
    return SamplerWorkspace(
        scores=torch.zeros((3, max_rows, chunks), dtype=torch.float32, device=device),
        winners=torch.zeros((max_rows, chunks), dtype=torch.int32, device=device),
        row_stats=torch.zeros((2, max_rows), dtype=torch.float32, device=device),
        arrivals=torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


@triton.jit
def _mix(word):
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _keys(seed, length):
    """The two words of a row, as in `counter_random.row_keys`."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    steps = length.to(tl.uint32) * 0x9E3779B1
    first = _mix(_mix(_mix(low ^ 0xCC9E2D51) + high) + steps)
    second = _mix(_mix(_mix(high ^ 0x1B873593) + low) ^ steps)
    return first, second


@triton.jit
def _log2(x, COMPILED: tl.constexpr):
    """To 2^-22, in one instruction where there is a card; the library's exact one costs the sampler half its time."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _exponential(ids, first, second, COMPILED: tl.constexpr):
    """`counter_random.exponential`: the same words, the same 31 bits."""
    word = ids.to(tl.uint32) * 0x9E3779B1 + first
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13) ^ second) * 0xC2B2AE35
    word = (word ^ (word >> 16)) & 0x7FFFFFFF
    u = (word.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    # -log(1 - u) by its series where u is small: 1 - u loses the low bits of the variates that decide who wins.
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    return tl.where(
        u < 0.03125, series, _log2(tl.maximum(1.0 - u, 9.357622968840175e-14), COMPILED) * -0.6931471805599453
    )


# Rows, lengths, counts and results are slices: a variant for every alignment of theirs would be compiled in the middle of
# serving.
_SLICES = ["rows_ptr", "num_rows_ptr", "lengths_ptr", "ids_ptr", "bad_ptr"]


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _sample_kernel(
    logits_ptr, rows_ptr, num_rows_ptr, lengths_ptr, dead_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, scores_ptr, winners_ptr, stats_ptr, arrivals_ptr, ids_ptr, bad_ptr, next_ids_ptr,
    logits_stride, plane, max_rows,
    V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    # Ahead of the branch, so that the logits do not wait for the number of rows; padded rows have logits too.
    x = tl.load(logits_ptr + b.to(tl.int64) * logits_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    if b < tl.load(num_rows_ptr):
        row = tl.load(rows_ptr + b).to(tl.int64)
        is_bad = tl.max((x != x).to(tl.int32), axis=0)
        x = tl.where(x != x, float("-inf"), x)
        score = x
        top = tl.max(x, axis=0)
        base = tl.minimum(tl.maximum(top, -1e30), 1e30)
        scale = tl.full([], 1.0, tl.float32)
        races = b < 0
        mass = tl.full([], 0.0, tl.float32)
        filtered = b < 0
        if not GREEDY:
            temperature = tl.load(temperature_ptr + row)
            if temperature > _GREEDY:
                scale = 1.4426950408889634 / temperature
                first, second = _keys(tl.load(seed_ptr + row), tl.load(lengths_ptr + b))
                p = tl.exp2((x - base) * scale)
                score = p / _exponential(token, first, second, PDL)
                races = b >= 0
                filters = (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0)
                filtered = filters | (tl.load(min_p_ptr + row) > 0.0)
                if filtered:
                    mass = tl.sum(p, axis=0)
        best, index = tl.max(score, axis=0, return_indices=True)
        if races:
            # Relative to this chunk's largest logit: made comparable between chunks.
            best = tl.where(best > 0.0, tl.log2(tl.maximum(best, 1e-37)) + base * scale, float("-inf"))
        at = b * CHUNKS + chunk
        tl.store(scores_ptr + at, best)
        tl.store(scores_ptr + plane + at, top)
        tl.store(scores_ptr + 2 * plane + at, mass)
        tl.store(winners_ptr + at, tl.where(is_bad > 0, -1, chunk * CHUNK + index))
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + b, 1) == CHUNKS - 1:
            tl.store(arrivals_ptr + b, 0)
            c = tl.arange(0, CHUNKS_BLOCK)
            there = c < CHUNKS
            slots = b * CHUNKS + c
            bests = tl.load(scores_ptr + slots, mask=there, other=float("-inf"), cache_modifier=".cg")
            tops = tl.load(scores_ptr + plane + slots, mask=there, other=float("-inf"), cache_modifier=".cg")
            winners = tl.load(winners_ptr + slots, mask=there, other=0, cache_modifier=".cg")
            first = tl.argmax(bests, axis=0)
            winner = tl.sum(tl.where(c == first, winners, 0), axis=0)
            row_top = tl.max(tops, axis=0)
            # Not a number anywhere, an infinite logit, or nothing allowed at all.
            bad = (tl.min(winners, axis=0) < 0) | (row_top == float("inf")) | (row_top == float("-inf"))
            winner = tl.where(bad, 0, winner)
            tl.store(bad_ptr + b, bad.to(tl.int32))
            tl.store(ids_ptr + b, winner)
            if filtered & (bad == 0):
                masses = tl.load(scores_ptr + 2 * plane + slots, mask=there, other=0.0, cache_modifier=".cg")
                factor = tl.where(masses > 0.0, tl.exp2((tops - row_top) * scale), 0.0)
                tl.store(stats_ptr + b, row_top)
                tl.store(stats_ptr + max_rows + b, tl.sum(masses * factor, axis=0))
            elif tl.load(dead_ptr + b) == 0:
                tl.store(next_ids_ptr + row, winner)


@triton.jit
def _above(x_ptr, bound, top, scale, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits exceed `bound`, and their mass relative to that of the largest logit."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        counts += (x > bound).to(tl.int32)
        masses += tl.where(x > bound, tl.exp2((x - top) * scale), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _ordered(x):
    """The bit patterns of floats as integers in the same order."""
    pattern = x.to(tl.int32, bitcast=True)
    return tl.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern)


@triton.jit
def _mass_of_top_k(x_ptr, k, top, scale, V: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Mass of the k largest logits and of the equals of the last, found by bisecting their bit patterns."""
    low = tl.full([], -(2**31), tl.int64)
    high = tl.full([], 2**31, tl.int64)
    count = tl.full([], 0, tl.int32)
    # Invariant: k logits or more have patterns from `low` on, fewer than k from `high` on.
    while (high - low > 2 ** (32 - BITS)) & (count != k):
        middle = (low + high) >> 1
        counts = tl.zeros([BLOCK], tl.int32)
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
            counts += (_ordered(x) >= middle.to(tl.int32)).to(tl.int32)
        found = tl.sum(counts, axis=0)
        count = tl.where(found >= k, found, count)
        low = tl.where(found >= k, middle, low)
        high = tl.where(found >= k, high, middle)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        masses += tl.where(_ordered(x) >= low.to(tl.int32), tl.exp2((x - top) * scale), 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _winner_above(
    x_ptr, bound, top, scale, seed, length, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The draw among the logits that exceed `bound`: the lowest id of the best score."""
    first, second = _keys(seed, length)
    best = tl.full([], -1.0, tl.float32)
    winner = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        score = tl.where(x > bound, tl.exp2((x - top) * scale) / _exponential(token, first, second, PDL), -1.0)
        block_best, index = tl.max(score, axis=0, return_indices=True)
        winner = tl.where(block_best > best, start + index, winner)
        best = tl.maximum(best, block_best)
    return winner


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _filter_kernel(
    logits_ptr, rows_ptr, num_rows_ptr, lengths_ptr, dead_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, stats_ptr, ids_ptr, bad_ptr, next_ids_ptr, logits_stride, max_rows,
    V: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    if b < tl.load(num_rows_ptr):
        row = tl.load(rows_ptr + b).to(tl.int64)
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where(top_k >= V, 0, top_k)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        wants = (tl.load(top_k_ptr + row) > 0) | (top_p < 1.0) | (min_p > 0.0)
        if wants & (temperature > _GREEDY) & (tl.load(bad_ptr + b) == 0):
            x_ptr = logits_ptr + b.to(tl.int64) * logits_stride
            scale = 1.4426950408889634 / temperature
            seed = tl.load(seed_ptr + row)
            length = tl.load(lengths_ptr + b)
            top = tl.load(stats_ptr + b)
            mass = tl.load(stats_ptr + max_rows + b)
            if (top_k > 0) & (top_p < 1.0):
                mass = _mass_of_top_k(x_ptr, top_k, top, scale, V, BLOCK, BITS)
            floor = tl.where(min_p > 0.0, top + temperature * tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
            winner = tl.load(ids_ptr + b).to(tl.int32)
            chosen = winner * 0 - 1
            while chosen < 0:
                bound = tl.load(x_ptr + winner).to(tl.float32)
                count, above = _above(x_ptr, bound, top, scale, V, BLOCK)
                keeps = ((top_k == 0) | (count < top_k)) & ((top_p >= 1.0) | (above < top_p * mass)) & (bound >= floor)
                # Nothing lies above the largest logit: it is in whatever the filters say, so the loop ends.
                if keeps | (count == 0):
                    chosen = winner
                else:
                    winner = _winner_above(x_ptr, bound, top, scale, seed, length, V, BLOCK, PDL)
            tl.store(ids_ptr + b, chosen)
            if tl.load(dead_ptr + b) == 0:
                tl.store(next_ids_ptr + row, chosen)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    lengths: torch.Tensor,
    dead: torch.Tensor,
    table: SamplingTable,
    next_ids: torch.Tensor,
    workspace: SamplerWorkspace,
    *,
    ids: torch.Tensor,
    bad: torch.Tensor,
    greedy: bool = False,
    filters: bool = True,
) -> None:
    """Chooses the next token of each live row, into `ids` and, unless the row is dead, into the relay `next_ids`.

    Shapes: logits [B, V] bf16 or fp32 (rows may be strided), not written; rows [B] int; num_rows [1] int32, how many rows
    are live (padded ones are left alone); lengths [B] int, the tokens that the row has
    so far; dead [B] uint8 or bool; next_ids [R] int; ids [B] int; bad [B] int32, set to 1 (and the id
    to 0) where a row holds NaN or +inf, or allows nothing, else to 0.
    The allowed set: the top_k largest, of those the smallest head whose renormalised probability reaches top_p, of those
    all with at least min_p of the largest probability; equals of the last one in each count as in.
    `greedy`: no row draws, temperature is ignored. `filters`: some row may have top_k, top_p or min_p; False saves the
    second kernel.
    """
    num_slots, vocab = logits.shape
    if triton.cdiv(vocab, _CHUNK) != workspace.winners.shape[1]:
        raise ValueError(f"the workspace is for another vocabulary than {vocab}")
    # With few rows short chunks fill the card; with many they need not, and fewer programs cost less, but not where each
    # draws: that wants the registers.
    chunk = _LONG_CHUNK if greedy and num_slots > _FEW_ROWS else _CHUNK
    chunks = triton.cdiv(vocab, chunk)
    max_rows = workspace.arrivals.shape[0]
    per_row = (rows, num_rows, lengths, dead, table.temperature, table.top_k, table.top_p, table.min_p, table.seed)
    _sample_kernel[(chunks, num_slots)](
        logits, *per_row, workspace.scores, workspace.winners, workspace.row_stats, workspace.arrivals,
        ids, bad, next_ids, logits.stride(0), workspace.scores.stride(0), max_rows,
        V=vocab, CHUNK=chunk, CHUNKS=chunks, CHUNKS_BLOCK=triton.next_power_of_2(chunks),
        GREEDY=greedy, PDL=DEPENDENT, num_warps=8 if chunk == _CHUNK else 16, launch_pdl=DEPENDENT,
    )  # fmt: skip
    if filters and not greedy:
        _filter_kernel[(num_slots,)](
            logits, *per_row, workspace.row_stats, ids, bad, next_ids, logits.stride(0), max_rows,
            V=vocab, BLOCK=min(16384, triton.next_power_of_2(vocab)), BITS=16 if logits.element_size() == 2 else 32,
            PDL=DEPENDENT, num_warps=32 if vocab > 4096 else 4, launch_pdl=DEPENDENT,
        )  # fmt: skip
