"""What a submitted request is held by."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .request import Request


class RequestHandle(NamedTuple):
    """A submitted request, and its engine's way to abort it."""

    request: Request
    abort_request: Callable[[Request], None]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def abort(self) -> None:
        """End the request now: its sink gets Cancelled before this returns. Does nothing if it has ended."""
        self.abort_request(self.request)
