"""Which prompt tokens join the step being planned, within the budgets of input, chunk, memory and, if set, latency.

Input bounds a step as a whole, chunk its prompt tokens. A piece of a prompt leaves room in the chunk for the decode rows of
the step; what ends its prompt need not, for it would have its first token a whole step later. Memory bounds the pages that
everything admitted is expected to need before it ends. One prompt at a time is in pieces; the pieces end on page
boundaries, so that a piece always fills whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from ..request import Request
from .lineup import Lineup
from .request_memory import RequestMemory
from .step_times import Allowance

CLIPPED_OUTPUT_TOKENS = 4096  # more output than this is not reserved ahead: it can be retracted for
SHARED_TOKENS = 32  # so much of an uncached prefix in common is worth a wait of a step or two


class Admission(Enum):
    """What became of a waiting request."""

    ADMITTED = "admitted"
    NO_MEMORY = "no memory"  # its pages would not last
    NO_BUDGET = "no budget"  # this step computes enough tokens already
    PREFIX_COMING = "prefix coming"  # another one computes the same prefix now: soon it is in the cache


def expected_outputs(request: Request, ratio: float) -> int:
    """Output tokens that `request` is still expected to produce."""
    left = min(request.max_total_tokens - len(request.ids), CLIPPED_OUTPUT_TOKENS)
    return left if request.params.ignore_eos else int(left * ratio)


def pages_wanted(memory: RequestMemory, request: Request, num_outputs: int) -> int:
    """Pages beyond its prefix that a waiting request takes for what it has, the next token and `num_outputs` more."""
    num_positions = min(len(request.ids) + 1 + num_outputs, request.max_total_tokens)
    return memory.pages_for(num_positions) - len(request.pages)


class PrefillAdder:
    """The budgets of one step, spent request by request."""

    def __init__(
        self,
        memory: RequestMemory,
        lineup: Lineup,
        *,
        running: Iterable[Request],
        ratio: float,
        chunk_tokens: int,
        input_tokens: int,
        latency: Allowance | None = None,
    ) -> None:
        self._memory = memory
        self._lineup = lineup
        self._ratio = ratio
        self._num_decode = len(lineup.decodes)
        self._chunk_tokens = chunk_tokens
        self._input_tokens = max(input_tokens - self._num_decode, memory.page_size)
        self._latency = latency
        self._running = running
        self._reserved_pages: int | None = None  # summed on first need: most steps admit nobody
        self._drain_steps = 0
        # What running requests compute next of their prompts, as _coming_part names it.
        self._coming: set[tuple[str | None, int, bytes]] = set()

    @property
    def has_budget(self) -> bool:
        if self._chunk_tokens <= 0 or self._input_tokens <= 0:
            return False
        # Whatever the latency: one page at least joins, or a prompt would wait for as long as others decode.
        return self._latency is None or not self._lineup.extends or self._latency.tokens(0) > 0

    @property
    def has_memory(self) -> bool:
        """Whether anybody at all could still be admitted beside those that run."""
        return self._reserved() < self._memory.num_available_pages

    @property
    def drain_steps(self) -> int:
        """Steps until the last of those that run is expected to be through."""
        self._reserved()
        return self._drain_steps

    def continue_chunk(self, request: Request) -> None:
        """Take the next piece of the prompt that is under way. It always moves while a page of room is left."""
        room = request.num_slots + self._memory.num_available_pages * self._memory.page_size - request.num_planned
        self._take(request, self._share(request, room))

    def admit(self, request: Request, *, may_exceed: bool) -> Admission:
        """Try to start a waiting request. `may_exceed`: nothing else runs, so its expectations are not held against it."""
        if not self.has_budget:
            return Admission.NO_BUDGET
        memory = self._memory
        memory.attach_prefix(request)  # locked while it is judged: the lock itself shrinks what is evictable
        reserved = self._reserved()
        coming = self._coming_part(request)
        if coming in self._coming:
            memory.detach_prefix(request)
            return Admission.PREFIX_COMING
        num_pages = pages_wanted(memory, request, expected_outputs(request, self._ratio))
        num_needed = pages_wanted(memory, request, 0) if may_exceed else num_pages + reserved
        if num_needed > memory.num_available_pages:
            memory.detach_prefix(request)
            return Admission.NO_MEMORY
        share = self._share(request)
        if share <= 0:
            memory.detach_prefix(request)
            return Admission.NO_BUDGET
        memory.seat(request)
        if request.num_retractions == 0:
            request.num_cached_tokens = request.num_planned
        self._reserved_pages = reserved + num_pages
        if coming is not None:
            self._coming.add(coming)
        self._take(request, share)
        return Admission.ADMITTED

    def _take(self, request: Request, num_new: int) -> None:
        if num_new <= 0:
            return
        num_positions = request.num_planned + num_new
        num_pages = self._memory.pages_for(num_positions) - len(request.pages)
        if not self._memory.secure(num_pages):
            return  # pages of a step in flight are on their way home
        self._memory.grow(request, num_positions)
        if self._reserved_pages is not None:
            self._reserved_pages -= num_pages  # no longer an expectation: these pages are taken
        if self._latency is not None:
            self._latency.spend(request.num_planned, num_new)
        self._lineup.extend(request, num_new)
        self._chunk_tokens -= num_new
        self._input_tokens -= num_new

    def _share(self, request: Request, room: int | None = None) -> int:
        """Tokens of `request` that may join: all that are left of its prompt, or else whole pages of it, within `room`."""
        page_size = self._memory.page_size
        # Neither latency nor a step full of decode rows may starve the prompts: one page at least.
        least = 0 if self._lineup.extends else page_size
        budget = min(self._chunk_tokens, self._input_tokens)
        if self._latency is not None:
            budget = min(budget, max(self._latency.tokens(request.num_planned), least))
        if room is not None:
            budget = min(budget, room)
        num_left = len(request.ids) - request.num_planned
        if num_left <= budget:
            return num_left
        budget = min(budget, max(self._chunk_tokens - self._num_decode, least))
        return (request.num_planned + budget) // page_size * page_size - request.num_planned

    def _reserved(self) -> int:
        """Pages that the running requests are expected to take beyond those they have."""
        if self._reserved_pages is None:
            page_size, ratio = self._memory.page_size, self._ratio
            self._reserved_pages = 0
            for request in self._running:
                # As expected_outputs, in place: this is each running request in each plan that a full pool holds up.
                num_ids = len(request.ids)
                left = request.max_total_tokens - num_ids
                if left > CLIPPED_OUTPUT_TOKENS:
                    left = CLIPPED_OUTPUT_TOKENS
                if not request.params.ignore_eos:
                    left = int(left * ratio)
                if left > self._drain_steps:
                    self._drain_steps = left
                num_pages = -(-(num_ids + left) // page_size) - len(request.pages)
                if num_pages > 0:
                    self._reserved_pages += num_pages
                if not request.prefill_committed:
                    coming = self._coming_part(request)
                    if coming is not None:
                        self._coming.add(coming)
        return self._reserved_pages

    def _coming_part(self, request: Request) -> tuple[str | None, int, bytes] | None:
        """The next whole pages of the prompt behind what is cached or committed: who has the same shares a prefix.

        At the end of a prompt that has begun it is all that is left, and of a shorter one it is the whole prompt, so that
        choices of one prompt compute none of its pages twice. None if no page is left, or if nothing is kept anyway.
        """
        page_size = self._memory.page_size
        start = request.num_prefilled
        end = start + -(-SHARED_TOKENS // page_size) * page_size
        last = request.longest_prefix // page_size * page_size
        if start >= last or not self._memory.tree.enabled:
            return None
        if end > last:
            # Strangers that share so little do not wait for each other: only who asks the very same.
            end = last if start else len(request.ids)
        return request.salt, start, request.ids[start:end].tobytes()
