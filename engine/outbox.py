"""Where a consumer picks up its request's tokens: delivery never waits for it, and what it is late for is joined."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence

from .errors import MisuseError, RequestCancelled
from .outputs import Cancelled, Delta, End, Failed, Finished, HiddenStates, TokenLogprobs


class Outbox:
    """A Sink with one consumer on the same event loop.

    Its size is bounded by the request's own limits: a slow consumer gets one larger delta, not a longer queue.
    """

    __slots__ = (
        "_end",
        "_has_more",
        "_hidden_states",
        "_logprobs",
        "_loop",
        "_pieces",
        "_prompt_logprobs",
        "_token_ids",
        "_waiter",
        "_whole",
    )

    def __init__(self, *, whole: bool = False) -> None:
        """`whole`: the consumer wants everything at once, and is not woken before the end."""
        self._whole = whole
        self._token_ids: list[int] = []
        self._has_more = False  # something beside the ids below
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._hidden_states: list[HiddenStates] = []
        self._end: End | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the consumer's

    def push(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self._token_ids += token_ids
        if text or logprobs or prompt_logprobs or hidden_states is not None:
            self._has_more = True
            if text:
                self._pieces.append(text)
            self._logprobs += logprobs
            if prompt_logprobs:
                self._prompt_logprobs = tuple(prompt_logprobs)
            if hidden_states is not None:
                self._hidden_states.append(hidden_states)
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
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            waiter = self._waiter = self._loop.create_future()
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
        if end is None and not self._has_more:
            # What a NamedTuple's own constructor does, at half its cost: this is made for every token of every stream.
            return tuple.__new__(Delta, (ids, "", None, (), (), None))
        finished = end if isinstance(end, Finished) else None
        states = HiddenStates.joined(self._hidden_states)
        delta = Delta(ids, "".join(self._pieces), finished, tuple(self._logprobs), self._prompt_logprobs, states)
        self._has_more = False
        self._pieces.clear()
        self._logprobs.clear()
        self._prompt_logprobs = ()
        self._hidden_states.clear()
        return delta

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: its consumer was cancelled, and has not run since
            waiter.set_result(None)
