"""Nothing that a launched step names is given away before that step is committed; everything comes home with it."""

from __future__ import annotations

import pytest

from slipstream.engine.errors import MisuseError, StepFailed
from slipstream.engine.outputs import Cancelled, Failed, Finished
from slipstream.engine.request import RequestState
from slipstream.engine.worker import StepOutcome


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_abort_between_launch_and_commit_holds_row_and_pages_until_that_commit(hand, prefix_cache: bool) -> None:
    h = hand(num_rows=1, num_pages=8, prefix_cache=prefix_cache)
    request = h.add([1] * 10)
    batch = h.batch()
    end = h.scheduler.abort(request)
    assert isinstance(end, Cancelled)
    assert h.memory.rows.num_held == 1
    assert h.memory.pages.num_held == 3
    assert h.memory.pages.num_free == 5
    other = h.add([2] * 3)
    assert not isinstance(h.plan(batch), type(batch)), "no row is free"
    assert h.commit(batch) == [], "the token of a row that has ended is dropped"
    assert h.memory.rows.num_free == 1
    assert h.memory.pages.num_free == 8
    h.step()
    assert other.num_outputs == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_surplus_row_is_dead_and_home_with_its_last_step_failed_or_not(hand, fails: bool) -> None:
    h = hand(page_size=1, num_pages=64)
    request, witness = h.add([1] * 4, 20, stop_token_ids=(7,)), h.add([2] * 4, 20)
    first = h.batch()
    second = h.batch(first)
    updates = h.commit(first)
    assert isinstance(updates[0].end, Finished)
    assert h.scheduler.sample_inputs(second).dead == {0}
    held = h.memory.pages.num_held
    assert held == 1, "the position that the surplus row writes"
    assert h.memory.rows.num_held == 1
    if fails:
        updates = h.scheduler.fail(second, StepFailed("x", step=1))
        assert [(update.request, type(update.end)) for update in updates] == [(witness, Failed)]
    else:
        updates = h.commit(second)
        assert [update.request for update in updates] == [witness]
    assert request.num_outputs == 1
    assert h.memory.pages.num_held == h.memory.rows.num_held == 0


def test_a_page_that_is_held_is_given_to_nobody(hand) -> None:
    h = hand(num_pages=4, num_rows=4, prefix_cache=False)
    victim = h.add([1] * 11, 4)
    batch = h.batch()
    pages = set(victim.pages)
    h.scheduler.abort(victim)
    other = h.add([2] * 7, 1)
    h.plan(batch)
    assert other.pages == [], "the one page that is free is too little"
    assert set(h.memory.pages.held_pages()[batch.step]) == pages
    h.commit(batch)
    h.batch()
    assert set(other.pages) & pages


def test_a_failed_step_ends_its_rows_and_keeps_only_what_was_cached_before(hand) -> None:
    h = hand(page_size=1, num_pages=32)
    first = h.add([1] * 6, 9)
    for _ in range(4):
        h.step()
    batch = h.batch()
    updates = h.scheduler.fail(batch, StepFailed("broken", step=4))
    assert isinstance(updates[0].end, Failed)
    assert first.state is RequestState.FAILED
    assert h.memory.tree.num_evictable_pages == 6, "the prompt, shared when its step was committed; not the outputs"
    assert h.memory.pages.num_free == 26


def test_a_step_that_never_started_brings_its_rows_home_too(hand) -> None:
    h = hand(num_rows=2)
    request = h.add([1] * 6, 4)
    batch = h.batch()
    (update,) = h.scheduler.fail(batch, StepFailed("launch", step=0))
    assert (update.request, update.end.usage.output_tokens) == (request, 0)
    assert h.num_home_pages == 64
    assert h.memory.rows.num_free == 2
    h.add([1] * 6, 1)
    assert h.run() == 1


def test_steps_are_committed_once_and_in_order(hand) -> None:
    h = hand()
    h.add([1], 5)
    first = h.batch()
    second = h.batch(first)
    h.commit(first)
    h.commit(second)
    with pytest.raises(MisuseError, match="committed after"):
        h.scheduler.commit(first, StepOutcome(token_ids=(1,)))


def test_after_death_every_request_has_failed_and_nothing_waits(hand) -> None:
    h = hand(num_rows=2)
    requests = [h.add([number], 5) for number in range(4)]
    h.batch()
    error = RuntimeError("dead")
    updates = h.scheduler.abort_all(error)
    assert {update.request for update in updates} == set(requests)
    assert all(update.end.error is error for update in updates)
    assert all(request.state is RequestState.FAILED for request in requests)
    assert not h.scheduler.has_work()
    assert h.scheduler.abort(requests[0]) is None


def test_a_page_of_nobody_is_found_by_the_check(hand) -> None:
    h = hand()
    h.add([1], 5)
    h.step()
    h.memory.pages.take(1)
    with pytest.raises(MisuseError, match="page"):
        h.scheduler.check()


def test_a_row_that_is_not_home_at_idle_is_found_by_the_check(hand) -> None:
    h = hand()
    h.memory.rows.allocate()
    with pytest.raises(MisuseError, match="row"):
        h.scheduler.check()


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_amid_a_chunked_prompt_frees_its_pages_and_keeps_finished_pieces(
    hand, num_pieces: int, in_flight: bool
) -> None:
    h = hand(num_pages=64, chunk=16)
    request = h.add(range(100))
    for _ in range(num_pieces):
        h.step()
    batch = h.batch() if in_flight else None
    assert h.scheduler.abort(request) is not None
    if batch is not None:
        assert h.memory.pages.num_held == 4
        h.commit(batch)
    assert h.memory.pages.num_free == 64 - 4 * num_pieces
    assert h.memory.tree.num_evictable_pages == 4 * num_pieces
    assert not h.scheduler.has_work()
    again = h.add(range(100), 1)
    h.run()
    assert again.num_cached_tokens == 16 * num_pieces
