"""Pinned memory that a plan is copied to the device from: it belongs to a step until its copies are through."""

from __future__ import annotations

from typing import Final

import torch

from ..errors import MisuseError

# Places that plans rotate among: as many as steps can be open at once, as in the staging ring.
NUM_PLACES: Final = 3


class Copied:
    """Whether what a plan was copied from may be written again."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._is_recorded = False

    def check(self) -> None:
        """Raises MisuseError if the copies are not through: the host must not wait for them."""
        if self._is_recorded and not self._event.query():
            raise MisuseError(f"attention was planned for more than {NUM_PLACES} steps that have not run")

    def record(self) -> None:
        """On the current stream, behind the copies."""
        self._event.record()
        self._is_recorded = True
