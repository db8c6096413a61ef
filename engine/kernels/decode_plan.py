# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Who computes what in split-KV decode attention, decided on the device once a step for all layers."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_PLAN_ELEMENTS = 8192
_WHOLE_BLOCKS = tl.constexpr(32)
PAGED_BLOCK_TOKENS: Final = 16
"""Tokens of a block of `paged_decode`: the tall side of what a tensor core multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiling:
    """How a step's work is cut: KV blocks of `block_tokens`, `blocks_in_flight` of them being loaded while one is computed,
    at least `least_share` of them a program. `whole`: whether each sequence is one program's; "if_alike" means in steps whose
    sequences are short and about as long as each other, so that nobody waits for the longest.
    """

    block_tokens: int = 64
    blocks_in_flight: int = 2
    programs_per_multiprocessor: int = 3
    num_warps: int = 4
    least_share: int = 1
    whole: Literal["never", "if_alike", "always"] = "never"


# Measured on an H200, by the number of sequences (rows times KV heads) up to which each is the fastest. Few sequences:
# every further part costs its combination. Many: several programs on a multiprocessor, one loads while another computes.
_TILINGS = (
    (32, DecodeTiling(programs_per_multiprocessor=2)),
    (128, DecodeTiling(block_tokens=128, programs_per_multiprocessor=1)),
    (256, DecodeTiling(blocks_in_flight=3, programs_per_multiprocessor=2)),
)
_MANY = DecodeTiling(block_tokens=32, blocks_in_flight=3, programs_per_multiprocessor=4, num_warps=1)
# For `paged_decode`, whose ring does not drain between sequences.
_PAGED = DecodeTiling(
    block_tokens=PAGED_BLOCK_TOKENS, blocks_in_flight=3, programs_per_multiprocessor=8, num_warps=1, whole="if_alike"
)
_PAGED_FROM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkspace:
    """Scratch of `decode_attention`, shared by every layer and bucket: one step runs at a time on the compute lane.

    The work of a step is one flat list of KV blocks, ordered by (row, KV head, block). Program p of a fixed grid of P
    takes an equal, contiguous share of it, so a share may end inside a sequence: those parts meet in `partial_*`. Or each takes
    whole sequences, and some take none.

    plan [P, 4] int32: first row, first head, first block, number of blocks; share [1] int32: blocks a program, or all of them
    where no sequence is split.
    partial_out [2 P, G, D] fp32 and partial_stats [2, 2 P, G] fp32: a program has at most two unfinished parts.
    arrivals [max_rows * Hk] int32: zero between kernels; the last program of a sequence combines its parts.
    `row_invariant`: one tiling for all numbers of rows and no sequence is split, so that a row's result does not depend
    on its batch-mates. `has_paged`: `paged_decode` serves, where there are enough sequences.
    """

    plan: torch.Tensor
    share: torch.Tensor
    partial_out: torch.Tensor
    partial_stats: torch.Tensor
    arrivals: torch.Tensor
    num_multiprocessors: int
    num_kv_heads: int
    group: int
    row_invariant: bool
    has_paged: bool
    only: DecodeTiling | None

    def is_paged(self, num_rows: int) -> bool:
        """Whether `paged_decode` computes a bucket of `num_rows`."""
        return self.has_paged and num_rows * self.num_kv_heads >= _PAGED_FROM

    def tiling(self, num_rows: int) -> DecodeTiling:
        """The tiling for a bucket of `num_rows`."""
        if self.only is not None:
            return self.only
        if self.is_paged(num_rows):
            return _PAGED
        if not self.row_invariant:
            for most_sequences, tiling in _TILINGS:
                if num_rows * self.num_kv_heads <= most_sequences:
                    return tiling
        return _MANY

    def num_programs(self, num_rows: int) -> int:
        """The grid for a bucket of `num_rows`."""
        return self.num_multiprocessors * self.tiling(num_rows).programs_per_multiprocessor


def make_decode_workspace(
    *,
    max_rows: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    row_invariant: bool = False,
    has_paged: bool = False,
    tiling: DecodeTiling | None = None,
    num_multiprocessors: int | None = None,
) -> DecodeWorkspace:
    """Allocates the scratch. `tiling` replaces the measured ones, and `paged_decode` serves one of its blocks alone;
    `num_multiprocessors` is the device's unless given.
    """
    if num_multiprocessors is None:
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    tilings = (_MANY, _PAGED, *(each for _, each in _TILINGS)) if tiling is None else (tiling,)
    num_programs = num_multiprocessors * max(each.programs_per_multiprocessor for each in tilings)
    group = num_q_heads // num_kv_heads
    return DecodeWorkspace(
        plan=torch.zeros((num_programs, 4), dtype=torch.int32, device=device),
        share=torch.ones(1, dtype=torch.int32, device=device),
        partial_out=torch.zeros((2 * num_programs, group, head_dim), dtype=torch.float32, device=device),
        partial_stats=torch.zeros((2, 2 * num_programs, group), dtype=torch.float32, device=device),
        arrivals=torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
        num_multiprocessors=num_multiprocessors,
        num_kv_heads=num_kv_heads,
        group=group,
        row_invariant=row_invariant,
        has_paged=has_paged and not row_invariant and (tiling is None or tiling.block_tokens == PAGED_BLOCK_TOKENS),
        only=tiling,
    )


# Rows and lengths are often slices: a variant for every alignment of theirs would be compiled in the middle of serving.
@triton.jit(
    do_not_specialize=["num_rows", "num_programs", "least_share"], do_not_specialize_on_alignment=["seq_lens_ptr"]
)
def _plan_kernel(
    seq_lens_ptr, plan_ptr, share_ptr, num_rows, num_programs, least_share,
    HK: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    # A padded row has no block: to start a sequence costs as much as some blocks, and padding comes in one heap.
    blocks = (seq_len + BT - 1) // BT
    starts = (tl.cumsum(blocks, axis=0) - blocks) * HK
    total = tl.sum(blocks, axis=0) * HK
    program = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    share = tl.maximum((total + num_programs - 1) // num_programs, least_share)
    begin = tl.minimum(program * share, total)
    end = tl.minimum(begin + share, total)
    if WHOLE != "never":
        pairs = tl.max(tl.where(blocks > 0, row + 1, 0), axis=0) * HK
        pairs_each = (pairs + num_programs - 1) // num_programs
        pair = tl.minimum(program * pairs_each, pairs)
        pair_end = tl.minimum(pair + pairs_each, pairs)
        whole_begin = _flat_of_pair(pair, row, starts, blocks, total, pairs, HK)
        whole_end = _flat_of_pair(pair_end, row, starts, blocks, total, pairs, HK)
        if WHOLE == "always":
            begin, end, share = whole_begin, whole_end, total
        else:
            longest = tl.max(blocks, axis=0)
            is_whole = (pairs_each == 1) & (longest <= _WHOLE_BLOCKS) & (longest * pairs * 8 <= total * 9)
            begin, end = tl.where(is_whole, whole_begin, begin), tl.where(is_whole, whole_end, end)
            share = tl.where(is_whole, total, share)
    # The last row that starts at or before a flat index owns it: a row without blocks starts where the next one does.
    found = (starts[None, :] <= begin[:, None]) & (row < num_rows)[None, :]
    owner = tl.sum(found.to(tl.int32), axis=1) - 1
    chosen = row[None, :] == owner[:, None]
    owner_start = tl.sum(tl.where(chosen, starts[None, :], 0), axis=1)
    owner_blocks = tl.maximum(tl.sum(tl.where(chosen, blocks[None, :], 0), axis=1), 1)
    inside = begin - owner_start
    entry = plan_ptr + program * 4
    mine = program < num_programs
    tl.store(entry, owner, mask=mine)
    tl.store(entry + 1, inside // owner_blocks, mask=mine)
    tl.store(entry + 2, inside % owner_blocks, mask=mine)
    tl.store(entry + 3, end - begin, mask=mine)
    if tl.program_id(0) == 0:
        tl.store(share_ptr, share)


@triton.jit
def _flat_of_pair(pair, row, starts, blocks, total, pairs, HK: tl.constexpr):
    chosen = row[None, :] == (pair // HK)[:, None]
    start = tl.sum(tl.where(chosen, starts[None, :], 0), axis=1)
    each = tl.sum(tl.where(chosen, blocks[None, :], 0), axis=1)
    return tl.where(pair < pairs, start + (pair % HK) * each, total)


def plan_decode(seq_lens: torch.Tensor, workspace: DecodeWorkspace) -> None:
    """Writes the step's plan for `decode_attention`; once a step, before the first layer.

    Shapes: seq_lens [B] int, the new token included; 0 for a padded row, which nobody computes.
    """
    num_rows = seq_lens.shape[0]
    rows = triton.next_power_of_2(num_rows)
    entries = max(1, min(64, _PLAN_ELEMENTS // rows))
    tiling, num_programs = workspace.tiling(num_rows), workspace.num_programs(num_rows)
    _plan_kernel[(triton.cdiv(num_programs, entries),)](
        seq_lens, workspace.plan, workspace.share, num_rows, num_programs, tiling.least_share,
        HK=workspace.num_kv_heads, BT=tiling.block_tokens, ROWS=rows, ENTRIES=entries,
        WHOLE="always" if workspace.row_invariant else tiling.whole,
        PDL=DEPENDENT, num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
