"""How much of its allowed output a running request is expected to use, as a fraction that learns.

Few requests run to their max_tokens, so reserving all of it would leave the pool half empty; reserving none would
retract all the time. The ratio falls while decoding goes well and rises when a retraction shows that it was too low.
"""

from __future__ import annotations

INITIAL = 0.7
LOWEST = 0.14
STEPS_TO_LOWEST = 600
RETRACTION_HEADROOM_TOKENS = 20  # outputs each remaining request is given before the next retraction


class NewTokenRatio:
    """The current fraction, between 0 and 1."""

    __slots__ = ("_fall", "value")

    def __init__(self) -> None:
        self._fall = (INITIAL - LOWEST) / STEPS_TO_LOWEST
        self.value = INITIAL

    def record_decode_step(self) -> None:
        """A decode step went through without a retraction."""
        self.value = max(self.value - self._fall, LOWEST)

    def record_retraction(self, *, num_outputs: int, num_allowed: int, num_requests: int) -> None:
        """Requests were retracted; the sums are over those that stay."""
        estimate = (num_outputs + RETRACTION_HEADROOM_TOKENS * num_requests) / (num_allowed + 1)
        self.value = min(max(self.value, estimate), 1.0)

    def reset(self) -> None:
        """The engine is idle: nothing learned holds for what comes next."""
        self.value = INITIAL
