"""A higher priority starts at the cost of lower ones, if the policy says so."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams
from slipstream.engine.request import Request, RequestState
from slipstream.engine.scheduler.preemption import victims_for
from slipstream.engine.scheduler.request_memory import FreedPages
from slipstream.engine.scheduler.schedule_batch import NoBatch


def preempting(hand, **settings):
    return hand(schedule_policy="priority", priority_preemption=True, **settings)


def add(h, prompt, max_tokens: int = 8, *, priority: int, **params) -> Request:
    wanted = SamplingParams(max_tokens=max_tokens, **params)
    request = h._builder.build(list(prompt), wanted, None, request_id=None, salt=None, priority=priority)
    h.scheduler.add(request)
    return request


def test_a_higher_priority_takes_the_row_of_the_lowest_with_the_fewest_outputs(hand) -> None:
    h = preempting(hand, num_rows=3)
    old_low = add(h, [1], 20, priority=-1)
    h.step()
    young_low, middle = add(h, [2], 20, priority=-1), add(h, [3], 20, priority=0)
    h.step()
    urgent = add(h, [4], 20, priority=5)
    batch = h.step()
    assert batch.num_rows == 3
    states = [request.state for request in (old_low, young_low, middle, urgent)]
    assert states == [RequestState.RUNNING, RequestState.WAITING, RequestState.RUNNING, RequestState.RUNNING]
    h.run()
    assert all(request.num_outputs == 20 for request in (old_low, young_low, middle, urgent))
    assert h.scheduler.stats.num_retractions == 1


def test_equals_and_lower_ones_take_nothing(hand) -> None:
    h = preempting(hand, num_rows=1)
    running = add(h, [1], 20, priority=0)
    h.step()
    for priority in (0, -3):
        add(h, [2], 2, priority=priority)
        h.step()
    assert running.state is RequestState.RUNNING
    assert h.scheduler.stats.num_retractions == 0


def test_without_the_setting_priorities_only_order_the_queue(hand) -> None:
    h = hand(schedule_policy="priority", num_rows=1)
    running = add(h, [1], 20, priority=0)
    h.step()
    add(h, [2], 2, priority=9)
    h.step()
    assert running.state is RequestState.RUNNING


def test_a_step_in_flight_is_committed_first(hand) -> None:
    h = preempting(hand, num_rows=1)
    low = add(h, [1], 20, priority=0)
    batch = h.batch()
    urgent = add(h, [2], 3, priority=1)
    assert h.plan(batch) is NoBatch.DRAIN
    assert low.state is RequestState.RUNNING
    h.commit(batch)
    h.step()
    assert (low.state, urgent.state) == (RequestState.WAITING, RequestState.RUNNING)
    assert low.num_outputs == 1, "the token in flight is not lost"
    assert h.scheduler.stats.num_drains == 1
    h.run()
    assert (low.num_outputs, urgent.num_outputs) == (20, 3)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_no_more_are_sent_back_than_its_pages_need(hand, prefix_cache: bool) -> None:
    h = preempting(hand, num_pages=24, prefix_cache=prefix_cache)
    lows = [add(h, [number] * 8, 12, priority=0, ignore_eos=True) for number in range(4)]
    h.step()
    assert all(request.state is RequestState.RUNNING for request in lows), "five pages each, 20 of 24"
    urgent = add(h, [9] * 20, 12, priority=1, ignore_eos=True)  # eight pages
    h.step()
    assert urgent.state is RequestState.RUNNING
    assert sum(request.state is RequestState.WAITING for request in lows) == 1
    h.run()
    assert all(request.num_outputs == 12 for request in (*lows, urgent))


def test_nobody_is_sent_back_for_one_that_would_not_start_even_then(hand) -> None:
    h = preempting(hand, num_pages=24)
    top = add(h, [1] * 40, 30, priority=3, ignore_eos=True)  # 18 pages
    h.step()
    low = add(h, [2] * 4, 8, priority=0)
    h.step()
    middle = add(h, [3] * 30, 8, priority=1)  # ten pages: the low one has three
    h.step()
    assert low.state is RequestState.RUNNING
    assert middle.state is RequestState.WAITING
    assert h.scheduler.stats.num_retractions == h.scheduler.stats.num_drains == 0
    h.run()
    assert (top.num_outputs, low.num_outputs, middle.num_outputs) == (30, 8, 8)


def test_a_long_prompt_in_pieces_makes_way_and_a_more_important_one_does_not(hand) -> None:
    h = preempting(hand, num_pages=64, chunk=8, prefill=8)
    long = add(h, [1] * 80, 2, priority=0)
    h.step()
    urgent = add(h, [2] * 4, 2, priority=1)
    assert h.step().num_new == (4, 4), "the prompt, and what is left for the other one"
    assert urgent.num_outputs == 1
    assert long.num_retractions == 1
    top = add(h, [3] * 80, 2, priority=2)
    h.step()
    assert top is h.scheduler._running.prefilling
    assert victims_for(add(h, [4], 2, priority=1), h.scheduler._running, h.memory, ratio=0.5) == []
    h.run()
    assert long.num_outputs == top.num_outputs == 2


def test_pages_count_as_freed_once_nobody_else_has_locked_them(hand) -> None:
    h = hand(num_pages=64)
    first = h.add([*range(40), 90], 20)
    h.step()
    second = h.add([*range(40), 91], 20)
    h.step()
    shared = 10
    assert second.num_cached_tokens == 40
    freed = FreedPages()
    freed.add(first)
    assert freed.num_pages == len(first.pages) - shared
    freed.add(second)
    available = h.memory.num_available_pages
    assert freed.num_pages == len(first.pages) + len(second.pages) - shared
    for request in (first, second):
        h.scheduler.abort(request)
    assert h.memory.num_available_pages - available == freed.num_pages
