"""What the steps of every device have in common: how they stage, how a part fails, and how a row does."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ..errors import EngineDead, StepFailed

if TYPE_CHECKING:
    from ...streams.staging import Slot
    from ..scheduler.schedule_batch import ScheduleBatch

    # Puts packed bytes into the step's slot, as int32; on CUDA pinned memory that lives as long as the step.
    Stage = Callable[[Slot, bytes | bytearray], torch.Tensor]

_NOT_FINITE = "no token could be drawn: the logits were not finite, or every token was ruled out"


class StepFault:
    """The error of one step. A part that fails leaves it here, later parts do nothing, and reading the step raises it:
    the lane itself never sees an exception, so the next step starts clean.
    """

    __slots__ = ("_error", "_step")

    def __init__(self, step: int) -> None:
        self._step = step
        self._error: Exception | None = None

    def attempt(self, run: Callable[[], None]) -> None:
        """Run a part, unless one before it has failed."""
        if self._error is not None:
            return
        try:
            # Jobs run on the lane's thread, which does not inherit the submitter's mode.
            with torch.inference_mode():
                run()
        except Exception as error:
            # The frames' locals are the step's tensors: they must not live as long as the error does.
            traceback.clear_frames(error.__traceback__)
            self._error = error

    def raise_if_any(self) -> None:
        """Raises: StepFailed, or EngineDead after an error of the device: it stays with the context, and nothing that
        follows can be trusted.
        """
        error = self._error
        if error is None:
            return
        if isinstance(error, EngineDead):
            raise error
        if isinstance(error, torch.AcceleratorError):
            raise EngineDead(f"the device failed in step {self._step}: {error}") from error
        raise StepFailed(f"step {self._step} failed: {error}", step=self._step) from error


def rows_not_finite(batch: ScheduleBatch, failed: Iterable[int], dead: frozenset[int]) -> dict[int, str]:
    """Why rows failed, by their position in the batch. `failed`: a flag for each row that samples, in their order."""
    flagged = zip(batch.sample_indices, failed, strict=True)
    return {index: _NOT_FINITE for index, bad in flagged if bad and index not in dead}
