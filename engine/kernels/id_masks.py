# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Ruling out every id whose bit is not set: what a grammar allows, in one pass that writes only what it forbids."""

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_WORDS = 128


@triton.jit(do_not_specialize=["num_words", "logits_stride"], do_not_specialize_on_alignment=["rows_ptr", "masks_ptr"])
def _id_masks_kernel(
    logits_ptr, rows_ptr, masks_ptr, num_words, logits_stride, V: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    mask = tl.program_id(1)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    bits = tl.load(masks_ptr + mask.to(tl.int64) * num_words + word, mask=word < num_words, other=0)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
    nothing = tl.full([WORDS, 32], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token, nothing, mask=forbidden & (token < V))


def apply_id_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set to minus infinity what the masks do not allow.

    Shapes: logits [S, V] (rows may be strided), rows [r] int32 among 0..S-1, each once; masks [r, words] int32, bit i of word w
    stands for id 32 w + i, at least V bits.
    """
    if len(rows):
        _id_masks_kernel[(triton.cdiv(triton.cdiv(logits.shape[1], 32), _WORDS), len(rows))](
            logits, rows, masks, masks.shape[1], logits.stride(0), V=logits.shape[1], WORDS=_WORDS, PDL=DEPENDENT,
            num_warps=4, launch_pdl=DEPENDENT,
        )  # fmt: skip
