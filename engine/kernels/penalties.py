# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Penalties for what a row's history holds: counting it, and changing the logits of what was counted.

A word an id and request row: twice how often the id is in the output, plus one if it is in the prompt.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_HISTORY_BLOCK = 1024
_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyColumns:
    """What the kernels know of each request row. Shapes: words [R, vocab] int32; num_counted [R] int32, tokens of the
    history that `count_history` was given; repetition [R] fp32; frequency, presence [R] fp64.
    """

    words: torch.Tensor
    num_counted: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "bounds_ptr", "num_prompt_ptr", "rows_ptr"])
def _count_kernel(
    ids_ptr, bounds_ptr, num_prompt_ptr, rows_ptr, words_ptr, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    begin = tl.load(bounds_ptr + start)
    inside = at < tl.load(bounds_ptr + start + 1) - begin
    in_prompt = at < tl.load(num_prompt_ptr + start)
    row = tl.load(rows_ptr + start).to(tl.int64)
    words = words_ptr + row * V + tl.load(ids_ptr + begin + at, mask=inside, other=0)
    tl.atomic_or(words, 1, mask=inside & in_prompt)
    tl.atomic_add(words, 2, mask=inside & (in_prompt == 0))


@triton.jit(
    do_not_specialize=["logits_stride"],
    do_not_specialize_on_alignment=["places_ptr", "rows_ptr", "lengths_ptr"],
)
def _penalise_kernel(
    logits_ptr, places_ptr, rows_ptr, lengths_ptr, next_ids_ptr, words_ptr, num_counted_ptr, repetition_ptr,
    frequency_ptr, presence_ptr, logits_stride, V: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    place = tl.load(places_ptr + tl.program_id(1)).to(tl.int64)
    row = tl.load(rows_ptr + place).to(tl.int64)
    # The row's last draw stands in the relay until the next one, unless this is the first draw since the row was counted.
    has_drawn = tl.load(lengths_ptr + place) > tl.load(num_counted_ptr + row)
    inside = token < V
    is_last = inside & has_drawn & (token == tl.load(next_ids_ptr + row))
    word = tl.load(words_ptr + row * V + token, mask=inside, other=0) + tl.where(is_last, 2, 0)
    tl.store(words_ptr + row * V + token, word, mask=is_last)
    is_known = word != 0
    x_ptrs = logits_ptr + place * logits_stride + token
    x = tl.load(x_ptrs, mask=is_known, other=0.0).to(tl.float32)
    repetition = tl.load(repetition_ptr + row)
    x = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition))
    count = word >> 1
    take = count.to(tl.float64) * tl.load(frequency_ptr + row) + tl.load(presence_ptr + row)
    x = tl.where(count > 0, x - take.to(tl.float32), x)
    tl.store(x_ptrs, x.to(logits_ptr.dtype.element_ty), mask=is_known)


def count_history(
    rows: torch.Tensor,
    bounds: torch.Tensor,
    num_prompt: torch.Tensor,
    ids: torch.Tensor,
    words: torch.Tensor,
    *,
    longest: int,
) -> None:
    """Add histories to the words of their rows, which were zero.

    Shapes, int32: rows, num_prompt [n]; bounds [n + 1]: history i is ids[bounds[i] : bounds[i + 1]], of which the first
    num_prompt[i] are the prompt; words [R, vocab]. `longest`: of them, in ids.
    """
    if longest:
        _count_kernel[(triton.cdiv(longest, _HISTORY_BLOCK), rows.shape[0])](
            ids, bounds, num_prompt, rows, words, V=words.shape[1], BLOCK=_HISTORY_BLOCK, PDL=DEPENDENT,
            num_warps=4, launch_pdl=DEPENDENT,
        )  # fmt: skip


def penalise(
    logits: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    next_ids: torch.Tensor,
    columns: PenaltyColumns,
) -> None:
    """Count each row's last draw, and change the logits of every id in its history, in place.

    x is divided by the repetition penalty, or multiplied if negative; from ids of the output, frequency x count + presence
    is then subtracted. Roundings are those of `LogitChanges`, whatever computes it.

    Shapes: logits [B, vocab] bf16 or fp32, rows may be strided; places [n] int32: which of the B, each once; rows, lengths
    [B] int: request rows, and the tokens each has so far; next_ids [R] int: the relay.
    """
    vocab = columns.words.shape[1]
    if logits.shape[1] != vocab:
        raise ValueError(f"counts of {vocab} ids do not fit logits of {logits.shape[1]}")
    _penalise_kernel[(triton.cdiv(vocab, _CHUNK), places.shape[0])](
        logits, places, rows, lengths, next_ids, columns.words, columns.num_counted, columns.repetition,
        columns.frequency, columns.presence, logits.stride(0), V=vocab, CHUNK=_CHUNK, PDL=DEPENDENT,
        # Fused, a product and a difference would round once where the host's way rounds twice.
        enable_fp_fusion=False, num_warps=8, launch_pdl=DEPENDENT,
    )  # fmt: skip
