"""Masks over ids, applied in the interpreter; tests/gpu has them compiled."""

import pytest
import torch

from slipstream.engine.kernels.id_masks import apply_id_masks
from slipstream.engine.sampling.logit_changes import unpacked


@pytest.mark.parametrize("vocab", [1, 31, 32, 300, 9001])
def test_what_has_no_bit_is_ruled_out_and_all_else_is_as_it_was(vocab):
    words = -(-vocab // 32) + 1
    masks = torch.randint(-(1 << 31), 1 << 31, (3, words), dtype=torch.int64).to(torch.int32)
    masks[1] = -1
    masks[2] = 0
    logits = torch.randn(5, vocab + 7)[:, :vocab]
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    expected = logits.clone()
    expected[rows.long()] = expected[rows.long()].masked_fill(~unpacked(masks, vocab), float("-inf"))
    apply_id_masks(logits, rows, masks)
    assert torch.equal(logits, expected)


def test_no_rows_are_no_kernel():
    logits = torch.randn(2, 40)
    apply_id_masks(logits, torch.empty(0, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int32))
    assert torch.isfinite(logits).all()
