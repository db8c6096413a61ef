"""Who runs: the requests that decode, and the one whose prompt is in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from ..request import Request


class RunningSet:
    """Every request that has a row. At most one prompt at a time is in pieces."""

    def __init__(self) -> None:
        self.decoding: dict[Request, None] = {}  # in the order in which their prompts were through; a set otherwise
        self.prefilling: Request | None = None
        self.showing: set[Request] = set()  # of those that decode, who has hidden states brought home

    def __iter__(self) -> Iterator[Request]:
        yield from self.decoding
        if self.prefilling is not None:
            yield self.prefilling

    def __len__(self) -> int:
        return len(self.decoding) + (self.prefilling is not None)

    def advance(self, request: Request, *, ends_prefill: bool) -> None:
        """A step that computes part of the prompt of `request` was planned; `ends_prefill`: its last part."""
        if not ends_prefill:
            self.prefilling = request
            return
        if request is self.prefilling:
            self.prefilling = None
        self.decoding[request] = None
        if request.next_hidden is not None:
            self.showing.add(request)

    def remove(self, request: Request) -> None:
        """Take out a request that ends or is sent back."""
        if request is self.prefilling:
            self.prefilling = None
        else:
            del self.decoding[request]
            self.showing.discard(request)

    def clear(self) -> None:
        self.decoding.clear()
        self.showing.clear()
        self.prefilling = None
