"""Where a consumer picks up its request's tokens: delivery never waits for it, and what it is late for is joined."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .errors import MisuseError, RequestCancelled
from .outputs import Cancelled, Delta, End, Failed, Finished, TokenLogprobs


class Outbox:
    """A Sink with one consumer on the same event loop.

    Its size is bounded by the request's own limits: a slow consumer gets one larger delta, not a longer queue.
    """

    __slots__ = ("_end", "_logprobs", "_pieces", "_prompt_logprobs", "_token_ids", "_waiter", "_whole")

    def __init__(self, *, whole: bool = False) -> None:
        """`whole`: the consumer wants everything at once, and is not woken before the end."""
        self._whole = whole
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._end: End | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        if prompt_logprobs:
            self._prompt_logprobs = tuple(prompt_logprobs)
        if text:
            self._pieces.append(text)
        if not self._whole:
            self._wake()

    def end(self, end: End) -> None:
        self._end = end
        self._wake()

    @property
    def has_ended(self) -> bool:
        """The terminal event is here; there may still be tokens before it to pick up."""
        return self._end is not None

    async def take(self) -> Delta:
        """Wait for what is new and return all of it; tokens come before an error.

        Raises: the request's error if it failed; RequestCancelled if it was aborted; MisuseError if somebody else waits
        here already. Cancelling the wait loses nothing.
        """
        if self._waiter is not None:
            raise MisuseError("two tasks wait for the tokens of one request")
        token_ids, end = self._token_ids, self._end
        while end is None and (self._whole or not token_ids):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            end = self._end
        if not token_ids:
            if isinstance(end, Failed):
                raise end.error
            if isinstance(end, Cancelled):
                raise RequestCancelled("the request was aborted")
        finished = end if isinstance(end, Finished) else None
        return Delta(tuple(token_ids), self._taken_text(), finished, *self._taken_scores())

    def _taken_text(self) -> str:
        """What has gathered beside the ids, which are let go with it."""
        self._token_ids.clear()
        pieces = self._pieces
        if not pieces:
            return ""
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        pieces.clear()
        return text

    def _taken_scores(self) -> tuple[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...]]:
        if not self._logprobs and not self._prompt_logprobs:
            return (), ()
        scores = tuple(self._logprobs), self._prompt_logprobs
        self._logprobs.clear()
        self._prompt_logprobs = ()
        return scores

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
