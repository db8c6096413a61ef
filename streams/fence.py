"""A position in a lane that other lanes, and the host, can wait for."""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """Everything submitted to one lane before the fence was made.

    Lifetime: may outlive its lane; once passed it stays passed.
    """

    def done(self) -> bool:
        """Whether the position has been passed. Never blocks; may be asked from any thread."""
        ...

    def wait_blocking(self) -> None:
        """Stop the calling thread until the position has been passed."""
        ...
