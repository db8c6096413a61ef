"""What a caller's own code may do to one request's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class LogitsProcessor(Protocol):
    """Changes one request's logits before its next token is drawn.

    `token_ids` is the exact history, prompt and output: with overlap on too, the newest token is in it. `logits`
    [vocab] fp32 is a copy of the request's own row, on the device, to change in place or to replace by what is returned.
    Runs on the compute lane: there it must not wait for the device. What it raises fails its own request only.
    """

    def __call__(self, token_ids: Sequence[int], logits: Any, /) -> Any:
        """Return the logits to draw from."""
        ...
