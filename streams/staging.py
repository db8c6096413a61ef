"""Host memory that copies to and from the device read or fill, in slots of one step each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .errors import MisuseError

_ALIGN_BYTES = 64
_POISON_BYTE = 0xA5


class Slot:
    """The host memory of one step. Lifetime: its views are valid until `StagingRing.release(step)`."""

    __slots__ = ("_buffer", "_live", "_used_bytes", "step")

    def __init__(self, step: int, buffer: torch.Tensor) -> None:
        self.step = step
        self._buffer = buffer
        self._used_bytes = 0
        self._live = True

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous CPU tensor, 64-byte aligned, that nobody else has until the step is released.

        Raises MisuseError if the slot is released already or has not that much left.
        """
        if not self._live:
            raise MisuseError(f"the staging slot of step {self.step} was used after its release")
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        end = start + num_bytes
        if end > self._buffer.numel():
            raise MisuseError(
                f"the staging slot of step {self.step} holds {self._buffer.numel()} bytes, {start} are taken: "
                f"no room for {num_bytes} bytes ({tuple(shape)} {dtype})"
            )
        self._used_bytes = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._buffer[start:end].view(dtype).view(tuple(shape))

    def retire(self, *, poison: bool) -> None:
        """The step is over: hand out no more, and overwrite what was handed out if `poison`."""
        self._live = False
        if poison:
            self._buffer[: self._used_bytes].fill_(_POISON_BYTE)


class StagingRing:
    """`slots` pieces of `nbytes` host memory, pinned if copies are to be asynchronous. One a step, given back by its commit.

    There is no waiting: a step that finds no slot free was launched before enough others were committed, which is a
    bug of the caller.
    `poison` overwrites released slots, so that a copy or a view that outlives its step shows.
    """

    def __init__(self, nbytes: int, *, slots: int = 3, pinned: bool, poison: bool = False) -> None:
        self._free = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(slots)]
        self._taken: dict[int, tuple[Slot, torch.Tensor]] = {}
        self._poison = poison

    def acquire(self, step: int) -> Slot:
        """The slot of `step`. Raises MisuseError if the step has one already, or none is free."""
        if step in self._taken:
            raise MisuseError(f"step {step} has a staging slot already")
        if not self._free:
            raise MisuseError(f"no staging slot free for step {step}: steps {sorted(self._taken)} are not released")
        buffer = self._free.pop(0)  # the one released longest ago
        slot = Slot(step, buffer)
        self._taken[step] = (slot, buffer)
        return slot

    def release(self, step: int) -> None:
        """The slot of `step` comes back: no copy reads or fills it any more. Raises MisuseError if the step has none."""
        try:
            slot, buffer = self._taken.pop(step)
        except KeyError:
            raise MisuseError(f"step {step} has no staging slot to release") from None
        slot.retire(poison=self._poison)
        self._free.append(buffer)
