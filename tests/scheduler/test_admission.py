"""Who joins a step, within the budgets of input, chunk and memory."""

from __future__ import annotations

import pytest

from slipstream.engine.errors import Overloaded
from slipstream.engine.request import RequestState
from slipstream.engine.scheduler.new_token_ratio import INITIAL, LOWEST, STEPS_TO_LOWEST, NewTokenRatio
from slipstream.engine.scheduler.prefill_adder import CLIPPED_OUTPUT_TOKENS
from slipstream.engine.scheduler.schedule_batch import NoBatch
from slipstream.engine.scheduler.step_planner import MAX_REFUSED


def test_whole_prompts_share_a_step_up_to_the_input_budget(hand) -> None:
    h = hand(prefill=40)
    for number in range(6):
        h.add([number] * 10)
    batch = h.step()
    assert batch.num_new == (10,) * 4
    assert h.step().num_new == (1,) * 4 + (10,) * 2, "decode rows first, then the prompts that were left"


@pytest.mark.parametrize(("prefill", "prompt_tokens"), [(12, 30), (12, 12), (100, 30)])
def test_decode_rows_count_in_the_input_budget_and_where_a_prompt_is_cut(
    hand, prefill: int, prompt_tokens: int
) -> None:
    h = hand(chunk=12, prefill=prefill)
    for number in range(4):
        h.add([number], 20)
    h.step()
    h.add([9] * prompt_tokens)
    batch = h.step()
    assert batch.num_decode == 4
    assert batch.num_new[4:] == (8,), "12 less four decode rows"
    assert batch.num_tokens == 12


def test_prompts_that_fill_a_chunk_are_not_cut_for_the_rows_that_decode(hand) -> None:
    """A burst of twelve in steps of four, whatever decodes beside them: no step for what was cut off each."""
    h = hand(chunk=16, prefill=100, num_rows=12)
    for number in range(12):
        h.add([number] * 4, 20)
    assert [h.step().num_new for _ in range(4)] == [(4,) * 4, (1,) * 4 + (4,) * 4, (1,) * 8 + (4,) * 4, (1,) * 12]


def test_the_end_of_a_prompt_joins_beside_the_rows_that_decode(hand) -> None:
    h = hand(chunk=12, prefill=100)
    for number in range(4):
        h.add([number], 20)
    h.step()
    h.add([8] * 19, 20)
    h.add([9] * 4, 20)
    assert h.step().num_new == (1, 1, 1, 1, 8)
    assert h.step().num_new == (1, 1, 1, 1, 11), "one more would be a piece of the next, whose pages are of four"
    assert h.step().num_new == (1, 1, 1, 1, 1, 4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pieces_of_a_prompt_end_on_page_boundaries(hand, page_size: int) -> None:
    h = hand(page_size=page_size, num_pages=512 // page_size, chunk=16)
    h.add([1] * 3, 40)
    h.step()
    long = h.add([2] * 70)
    pieces = []
    while not long.prefill_committed:
        batch = h.step()
        pieces.append(batch.num_new[1])
        assert batch.num_tokens <= 16 or page_size == 16
        assert long.num_planned % page_size == 0 or long.num_planned >= 70
    assert sum(pieces) == 70
    assert all(piece == pieces[0] for piece in pieces[:-1])


def test_a_step_full_of_decode_rows_still_moves_a_prompt_by_a_page(hand) -> None:
    h = hand(chunk=8, prefill=8)
    long = h.add([1] * 40)
    h.step()
    assert long.num_planned == 8
    for number in range(2, 10):
        h.add([number], 100)
    while not long.prefill_committed:
        before = long.num_planned
        h.step()
        assert long.num_planned - before >= 4


def test_a_step_full_of_decode_rows_still_lets_a_prompt_in(hand) -> None:
    h = hand(chunk=4, prefill=4)
    for number in range(6):
        h.add([number], 30)
    while h.scheduler.stats.num_waiting:
        h.step()
    late = h.add([9] * 10, 1)
    assert h.step().num_new[-1] == 4
    for _ in range(2):
        h.step()
    assert late.num_outputs == 1


def test_one_prompt_at_a_time_is_in_pieces(hand) -> None:
    h = hand(chunk=8)
    first, second = h.add([1] * 20), h.add([2] * 20)
    h.step()
    h.step()
    assert (first.num_planned, second.state) == (16, RequestState.WAITING)
    batch = h.step()
    assert batch.num_new == (4, 4), "the rest of the first, and a first piece of the second"
    assert second.num_planned == 4


def test_rows_bound_how_many_run(hand) -> None:
    h = hand(num_rows=3)
    for number in range(5):
        h.add([number], 4)
    assert h.step().num_rows == 3
    assert h.scheduler.stats.num_waiting == 2
    h.run()
    assert h.scheduler.stats.num_output_tokens == 20


def test_only_rows_that_end_their_prompt_sample(hand) -> None:
    h = hand(chunk=8)
    h.add([1] * 12)
    assert h.step().samples == (False,)
    assert h.step().samples == (True,)
    h.add([2] * 5, 0)
    batch = h.step()
    assert batch.samples == (True, False), "a scoring row never samples"
    assert batch.sample_indices == (0,)


def test_what_running_requests_are_expected_to_need_is_kept_for_them(hand) -> None:
    """16 pages; the first may use 12 and is expected to use 70% of its outputs, so a second one of 8 has to wait."""
    h = hand(num_pages=16)
    h.add([1] * 8, 40)
    h.step()
    second = h.add([2] * 8, 30)
    h.step()
    assert second.state is RequestState.WAITING
    h.run()
    assert h.scheduler.stats.num_retractions == 0


def test_small_requests_pass_a_head_without_memory_until_it_is_too_old(hand) -> None:
    """22 outputs are expected of the only one that runs: after twice as many steps nobody passes any more."""
    h = hand(num_pages=16)
    running = h.add([1] * 8, 40, ignore_eos=False)
    h.step()
    head = h.add([2] * 8, 30)
    arrived = h.scheduler.next_step
    passed = []
    while head.state is RequestState.WAITING:
        small = h.add([3, len(passed)], 2)
        h.step()
        passed.append(small.state is not RequestState.WAITING)
        if running.has_ended:
            running = h.add([1] * 8, 40)  # never left alone
    assert passed[0]
    assert not passed[-1], "at last nobody passes it"
    assert passed == sorted(passed, reverse=True)
    assert passed.index(False) <= 2 * 40 + 1
    assert head.arrival_step == arrived
    h.run()


def test_where_nobody_would_fit_nobody_is_tried(hand) -> None:
    h = hand(num_pages=16, page_size=4)
    h.add([1] * 8, 56, ignore_eos=True)
    h.step()
    for number in range(5):
        h.add([number] * 8, 8)
    tries = []
    real = h.memory.attach_prefix
    h.memory.attach_prefix = lambda request: (tries.append(request), real(request))
    h.step()
    assert len(tries) == 1


def test_so_many_are_tried_behind_a_head_without_memory_and_no_more(hand) -> None:
    h = hand(num_pages=64, num_rows=64)
    h.add([1] * 8, 100, ignore_eos=True)
    h.step()
    waiting = [h.add([number] * 8, 160) for number in range(2, 40)]
    tries = []
    real = h.memory.attach_prefix
    h.memory.attach_prefix = lambda request: (tries.append(request), real(request))
    h.step()
    refused = [request for request in tries if request.state is RequestState.WAITING]
    assert len(refused) == MAX_REFUSED + 1
    assert waiting[-1] not in tries


def test_the_expectations_of_the_first_to_be_admitted_count_for_those_behind_it(hand) -> None:
    """An idle engine admits anybody who fits at all; his outputs are expected nevertheless."""
    h = hand(num_pages=16)
    first, second = h.add([1] * 8, 50), h.add([2] * 8, 50)
    assert h.step().num_rows == 1
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.WAITING)


def test_a_request_that_ignores_end_ids_is_expected_to_use_all_its_outputs(hand) -> None:
    for ignore_eos, num_rows in ((False, 2), (True, 1)):
        h = hand(num_pages=20)
        for number in range(2):
            h.add([number] * 4, 44, ignore_eos=ignore_eos)
        assert h.step().num_rows == num_rows


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_a_request_as_large_as_the_pool_is_admitted_and_runs_to_its_end(hand, page_size: int) -> None:
    h = hand(page_size=page_size, num_pages=512 // page_size)
    request = h.add([1] * 10, 502)
    h.run()
    assert request.num_outputs == 502
    assert h.scheduler.stats.num_retractions == 0
    assert h.num_home_pages == 512 // page_size


def test_output_is_reserved_only_up_to_the_clip(hand) -> None:
    h = hand(page_size=16, num_pages=1000)
    for number in range(3):
        h.add([number], CLIPPED_OUTPUT_TOKENS * 3, ignore_eos=True)
    assert h.step().num_rows == 3, "3 × 4096 of 16000 tokens, not 3 × 12288"


def test_a_seated_request_survives_the_end_of_another_prefill_in_the_same_step(hand) -> None:
    """At depth 1 cached pages of a step in flight count as evictable but cannot be evicted yet.

    A finished request leaves its pages in the tree while its surplus row is still in flight. Of the two that are
    admitted then, the second finds no page free: it has its seat and waits for that commit, and must not be lost.
    """
    h = hand(num_pages=8, num_rows=4)
    done = h.add([1] * 15, 8, stop_token_ids=(7,))
    first = h.batch()
    second = h.batch(first)  # holds a surplus row once the stop id is known
    h.commit(first)
    assert done.state is RequestState.FINISHED
    assert h.memory.pages.num_free == 4
    a, b = h.add([2] * 15, 1), h.add([3] * 11, 1)
    third = h.batch(second)
    assert third.num_new == (15,)
    assert [request.state for request in (a, b)] == [RequestState.RUNNING] * 2
    h.commit(second)
    fourth = h.batch(third)
    assert fourth.num_new == (11,)
    h.commit(third)
    h.commit(fourth)
    assert a.num_outputs == b.num_outputs == 1
    assert not h.scheduler.has_work()


def test_nothing_is_planned_where_nothing_waits(hand) -> None:
    h = hand()
    assert h.plan() is NoBatch.NOTHING
    h.add([1], 1)
    batch = h.batch()
    assert h.plan(batch) is NoBatch.NOTHING, "its one token is in flight"
    h.commit(batch)
    assert h.plan() is NoBatch.NOTHING


def test_more_waiting_requests_than_the_limit_are_refused(hand) -> None:
    h = hand(max_queued_requests=2)
    h.add([1])
    h.add([2])
    with pytest.raises(Overloaded, match="2 requests"):
        h.add([3])
    h.step()
    h.add([3])


def test_more_waiting_tokens_than_the_limit_are_refused(hand) -> None:
    h = hand(max_queued_tokens=20, num_rows=1)
    h.add([1] * 50)  # alone in the queue, so that it is served at all
    with pytest.raises(Overloaded, match="50 tokens"):
        h.add([2])
    h.step()
    h.add([2] * 15)
    h.add([3] * 5)
    with pytest.raises(Overloaded, match="20 tokens"):
        h.add([4])
    refused = h.scheduler.stats.num_waiting
    assert refused == 2, "a refused request leaves nothing behind"
    h.run()
    assert h.scheduler._waiting.num_tokens == 0


def test_waiting_tokens_are_counted_over_aborts_and_retractions(hand) -> None:
    h = hand(num_pages=8, max_queued_tokens=1000)
    h.scheduler._planner.ratio.value = 0.0
    requests = [h.add([number] * 7, 20) for number in range(3)]
    while not h.scheduler.stats.num_retractions:
        h.step()
        assert h.scheduler._waiting.num_tokens == sum(len(r.ids) for r in requests if r.state is RequestState.WAITING)
    waiting = next(request for request in requests if request.state is RequestState.WAITING)
    h.scheduler.abort(waiting)
    assert h.scheduler._waiting.num_tokens == sum(len(r.ids) for r in requests if r.state is RequestState.WAITING)
    h.run()
    assert h.scheduler._waiting.num_tokens == 0


class TestNewTokenRatio:
    """How much of its allowed output a request is expected to use."""

    def test_it_falls_while_decoding_goes_well_and_not_below_its_floor(self) -> None:
        ratio = NewTokenRatio()
        assert ratio.value == INITIAL
        ratio.record_decode_step()
        assert LOWEST < ratio.value < INITIAL
        for _ in range(2 * STEPS_TO_LOWEST):
            ratio.record_decode_step()
        assert ratio.value == LOWEST

    def test_a_retraction_raises_it_but_never_above_one_nor_down(self) -> None:
        ratio = NewTokenRatio()
        ratio.record_retraction(num_outputs=900, num_allowed=1000, num_requests=4)
        assert ratio.value == pytest.approx(980 / 1001)
        ratio.record_retraction(num_outputs=5000, num_allowed=1000, num_requests=4)
        assert ratio.value == 1.0
        ratio.record_retraction(num_outputs=0, num_allowed=1000, num_requests=1)
        assert ratio.value == 1.0

    def test_idleness_forgets_what_was_learned(self, hand) -> None:
        h = hand()
        h.add([1], 5)
        h.step()
        h.step()
        assert h.scheduler._planner.ratio.value < INITIAL
        h.run()
        assert h.scheduler._planner.ratio.value == INITIAL
