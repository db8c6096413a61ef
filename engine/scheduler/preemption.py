"""Who is sent back so that a waiting request of a higher priority can start."""

from __future__ import annotations

from ..request import Request
from .prefill_adder import expected_outputs, pages_wanted
from .request_memory import FreedPages, RequestMemory
from .running_set import RunningSet


def victims_for(head: Request, running: RunningSet, memory: RequestMemory, *, ratio: float) -> list[Request]:
    """The fewest requests of lower priority than the waiting `head` without which it has a row and memory to start.

    None if it can start as things are, if all of them would not be enough, or if a prompt that is not of lower priority
    is in pieces: that one goes first. The prompt in pieces is the first to go, then who has the lowest priority and the
    fewest outputs. Pages of a step in flight count as taken: with one, this is a guess.
    """
    prefilling = running.prefilling
    candidates = [request for request in running if request.priority < head.priority]
    if not candidates or (prefilling is not None and prefilling.priority >= head.priority):
        return []
    candidates.sort(
        key=lambda request: (
            request is not prefilling, request.priority, request.num_outputs, -request.num_prompt_tokens
        )
    )  # fmt: skip
    memory.attach_prefix(head)  # locked while it is judged: what it shares with a victim is not freed by that one
    try:
        return _fewest(head, candidates, running, memory, ratio)
    finally:
        memory.detach_prefix(head)


def _fewest(
    head: Request, candidates: list[Request], running: RunningSet, memory: RequestMemory, ratio: float
) -> list[Request]:
    num_least = pages_wanted(memory, head, 0)
    num_wanted = pages_wanted(memory, head, expected_outputs(head, ratio))
    expected = {request: _pages_to_come(memory, request, ratio) for request in running}
    num_reserved, num_staying = sum(expected.values()), len(expected)
    freed = FreedPages()
    for num_victims, victim in enumerate((None, *candidates)):
        if victim is not None:
            freed.add(victim)
            num_reserved -= expected[victim]
            num_staying -= 1
        has_row = memory.rows.num_free or num_victims
        has_turn = running.prefilling is None or num_victims
        needed = num_wanted + num_reserved if num_staying else num_least
        if has_row and has_turn and needed <= memory.num_available_pages + freed.num_pages:
            return candidates[:num_victims]
    return []


def _pages_to_come(memory: RequestMemory, request: Request, ratio: float) -> int:
    num_positions = len(request.ids) + expected_outputs(request, ratio)
    return max(memory.pages_for(num_positions) - len(request.pages), 0)
