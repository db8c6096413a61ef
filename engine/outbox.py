"""Where a consumer picks up its request's tokens: delivery never waits for it, and what it is late for is joined."""

from __future__ import annotations

import asyncio
import copy
from asyncio import get_running_loop
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
        if logprobs:
            self._logprobs.extend(logprobs)
        if prompt_logprobs:
            self._prompt_logprobs = tuple(prompt_logprobs)
        if text:
            self._pieces.append(text)
        waiter = self._waiter
        if waiter is not None and not self._whole:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

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
            waiter = self._waiter = get_running_loop().create_future()
            try:
                await waiter
            except BaseException:
                self._waiter = None
                raise
            end = self._end
        if not token_ids and end is not None:
            if isinstance(end, Failed):
                # A copy: one error may have ended many requests, and each raise of one object would grow its traceback.
                raise copy.copy(end.error) from end.error.__cause__
            if isinstance(end, Cancelled):
                raise RequestCancelled("the request was aborted")
        ids = tuple(token_ids)
        token_ids.clear()
        text = ""
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces.clear()
        finished = end if isinstance(end, Finished) else None
        if not self._logprobs and not self._prompt_logprobs:
            # What a NamedTuple's own constructor does, at half its cost: this is made for every token of every stream.
            return tuple.__new__(Delta, (ids, text, finished, (), ()))
        delta = Delta(ids, text, finished, tuple(self._logprobs), self._prompt_logprobs)
        self._logprobs.clear()
        self._prompt_logprobs = ()
        return delta

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: its consumer was cancelled, and has not run since
            waiter.set_result(None)
