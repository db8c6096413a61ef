"""What a step's requests change of their logits, applied on the device by operations of fixed kinds.

Nothing here is compiled once the worker is warm, and nothing waits for the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..logits_processor import LogitsProcessor
    from ..worker import SampleInputs

    ToDevice = Callable[[bytes], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRow:
    """One row with the caller's own code: `history` is prompt and output, packed int32."""

    at: int
    index: int
    processors: tuple[LogitsProcessor, ...]
    history: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitChanges:
    """Changes of the rows that sample, as int32 columns.

    Shapes: edit_rows, edit_ids, biases, factors, takes [n], the last three fp32 bits; each (row, id) once. out_rows,
    out_ids [m]: ruled out. mask_rows [r], masks [r, words]: the ids that may be drawn. Made on the host by `packed`, there
    one block.
    """

    block: bytes
    widths: tuple[int, ...]
    processed: tuple[ProcessedRow, ...]

    @classmethod
    def packed(cls, inputs: SampleInputs, sampling: Sequence[int], *, vocab_size: int) -> LogitChanges | None:
        """The changes of `inputs` among the rows that sample; None if there are none."""
        if not inputs.changes_logits:
            return None
        place = {index: k for k, index in enumerate(sampling) if index not in inputs.dead}
        rows = array("i")
        edits = [bytearray(), bytearray(), bytearray(), bytearray()]
        for edit in inputs.edits:
            if edit.place in place:
                rows.extend(array("i", [place[edit.place]]) * (len(edit.ids) // 4))
                for column, more in zip(edits, edit[1:], strict=True):
                    column += more
        out = [
            (place[index], token_id)
            for index, tokens in inputs.suppressed
            if index in place
            for token_id in tokens
            if token_id < vocab_size
        ]
        masks = [(place[index], mask) for index, mask in inputs.masks if index in place]
        columns = (
            rows.tobytes(),
            *map(bytes, edits),
            array("i", [at for at, _ in out]).tobytes(),
            array("i", [token_id for _, token_id in out]).tobytes(),
            array("i", [at for at, _ in masks]).tobytes(),
            b"".join(mask for _, mask in masks),
        )
        processed = tuple(
            ProcessedRow(at=place[index], index=index, processors=processors, history=history)
            for index, processors, history in inputs.processors
            if index in place
        )
        return cls(block=b"".join(columns), widths=tuple(len(column) // 4 for column in columns), processed=processed)

    def edit_(self, logits: torch.Tensor, block: torch.Tensor) -> None:
        """Change the edited ids of `logits` [S, vocab] in place. `block`: this one's, int32 on the logits' device."""
        if self.widths[0]:
            edit_rows, edit_ids, *floats = block.split_with_sizes(self.widths)[:5]
            at = (edit_rows.long(), edit_ids.long())
            biases, factors, takes = (column.view(torch.float32) for column in floats)
            x = logits[at].float() + biases
            x = torch.where(x < 0, x * factors, x / factors) - takes
            logits.index_put_(at, x.to(logits.dtype))

    def restrict_(self, logits: torch.Tensor, block: torch.Tensor) -> dict[int, str]:
        """Then rule out what must not be drawn, and let the callers' own code have its turn. As `edit_`.

        Returns why rows failed, by position in the batch's rows: a caller's own code may raise.
        """
        out_rows, out_ids, mask_rows, masks = block.split_with_sizes(self.widths)[5:]
        if self.widths[5]:
            forbidden = torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device)
            logits.index_put_((out_rows.long(), out_ids.long()), forbidden)
        if self.widths[7]:
            _apply_masks(logits, mask_rows, masks.view(len(mask_rows), -1))
        return self._processed(logits)

    def _processed(self, logits: torch.Tensor) -> dict[int, str]:
        failed: dict[int, str] = {}
        for row in self.processed:
            history = array("i", row.history)
            try:
                x = logits[row.at].to(torch.float32, copy=True)
                for processor in row.processors:
                    x = processor(history, x)
                if x.shape != logits.shape[1:]:
                    raise ValueError(f"it returned logits of shape {tuple(x.shape)}")
                logits[row.at] = x
            except Exception as error:
                failed[row.index] = f"a logits processor failed: {error}"
        return failed


def _apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Rule out what the masks do not allow. Shapes: logits [S, vocab]; rows [r] int32; masks [r, words] int32."""
    if logits.is_cuda:
        from ..kernels.id_masks import apply_id_masks

        apply_id_masks(logits, rows, masks)
        return
    at = rows.long()
    allowed = unpacked(masks, logits.shape[1])
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(~allowed, float("-inf")))


def unpacked(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Which ids have their bit set. Shapes: masks [r, words] int32 → [r, vocab] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> shifts).bitwise_and_(1)
    return bits.view(masks.shape[0], -1)[:, :vocab_size].bool()
