"""When the pool is too small for all that run: drain, send the cheapest back, resume exactly."""

from __future__ import annotations

import pickle

import pytest

from slipstream.engine.forward_mode import ForwardMode
from slipstream.engine.request import RequestState
from slipstream.engine.scheduler.schedule_batch import NoBatch


class ExpectsNothing:
    """A ratio that never learns, so that requests run into each other; it keeps what it was told."""

    value = 0.0

    def record_decode_step(self) -> None:
        pass

    def record_retraction(self, **sums: int) -> None:
        self.sums = sums

    def reset(self) -> None:
        pass


def no_ratio(h) -> None:
    h.scheduler._planner.ratio = ExpectsNothing()


def test_a_step_in_flight_is_drained_before_anybody_is_sent_back(hand) -> None:
    h = hand(num_pages=4, prefix_cache=False)
    no_ratio(h)
    first, second = h.add([1] * 7, 8), h.add([2] * 7, 8)
    batch = h.batch()
    following = h.batch(batch)  # position 8 of each: their second pages are full
    h.commit(batch)
    assert h.plan(following) is NoBatch.DRAIN
    assert h.scheduler.stats.num_drains == 1
    assert h.scheduler.stats.num_retractions == 0
    assert first.state is second.state is RequestState.RUNNING
    h.commit(following)
    after = h.batch()
    assert after.num_rows == 1
    assert h.scheduler.stats.num_retractions == 1


def test_fewest_outputs_go_first_and_one_always_stays(hand) -> None:
    h = hand(num_pages=6, prefix_cache=False)
    no_ratio(h)
    old = h.add([1] * 3, 18)
    h.step()
    h.step()
    young = h.add([2] * 3, 18)
    h.step()
    while not h.scheduler.stats.num_retractions:
        h.step()
    assert (old.state, young.state) == (RequestState.RUNNING, RequestState.WAITING)
    assert young.num_retractions == 1
    h.run()
    assert old.num_outputs == young.num_outputs == 18


def test_of_equals_the_longer_prompt_goes_first(hand) -> None:
    h = hand(num_pages=7, prefix_cache=False)
    no_ratio(h)
    short, long = h.add([1] * 3, 16), h.add([2] * 11, 16)
    while not h.scheduler.stats.num_retractions:
        h.step()
    assert (short.state, long.state) == (RequestState.RUNNING, RequestState.WAITING)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_resumed_row_computes_its_prompt_and_outputs_again_and_goes_on(hand, prefix_cache: bool) -> None:
    h = hand(num_pages=8, prefix_cache=prefix_cache)
    no_ratio(h)
    requests = [h.add([number] * 7, 20, seed=number) for number in (1, 2, 3)]
    while not h.scheduler.stats.num_retractions:
        h.step()
    victim = next(request for request in requests if request.num_retractions)
    outputs, arrival = victim.num_outputs, victim.arrival
    assert victim.row == 0
    assert victim.pages == []
    while victim.state is RequestState.WAITING:
        batch = h.step()
    index = batch.rows.index(victim.row)
    assert index >= batch.num_decode
    assert batch.num_prior[index] + batch.num_new[index] == 7 + outputs, "all it has, the newest output included"
    assert batch.starts[-1].row == victim.row
    assert batch.starts[-1].sampling.seed == victim.params.seed
    assert victim.num_outputs == outputs + 1
    assert victim.arrival == arrival
    assert victim.num_cached_tokens == 0, "counted for its prompt, at its first admission only"
    h.run()
    assert all(request.num_outputs == 20 for request in requests)


def test_a_retracted_request_is_the_next_to_run(hand) -> None:
    h = hand(num_pages=8, num_rows=2)
    no_ratio(h)
    first, second = h.add([1] * 7, 20), h.add([2] * 7, 20)
    third = h.add([3], 2)
    while not h.scheduler.stats.num_retractions:
        h.step()
    victim = first if first.num_retractions else second
    assert list(h.scheduler._waiting) == [victim, third]


@pytest.mark.parametrize(("num_pages", "num_retractions"), [(25, 0), (24, 1)])
def test_six_rows_that_fill_the_pool_send_back_exactly_one(hand, num_pages: int, num_retractions: int) -> None:
    h = hand(num_pages=num_pages, prefix_cache=False)
    no_ratio(h)
    requests = [h.add([0] * 12, 8), *(h.add([number] * 10, 7) for number in range(1, 6))]
    assert h.step().num_rows == 6
    h.run()
    assert h.scheduler.stats.num_retractions == num_retractions
    assert [request.num_outputs for request in requests] == [8, 7, 7, 7, 7, 7]


def test_a_retraction_teaches_how_much_output_to_expect(hand) -> None:
    h = hand(num_pages=8, prefix_cache=False)
    no_ratio(h)
    for number in range(3):
        h.add([number] * 7, 20)
    while not h.scheduler.stats.num_retractions:
        h.step()
    staying = list(h.scheduler._running)
    sums = h.scheduler._planner.ratio.sums
    assert sums["num_requests"] == len(staying)
    assert sums["num_allowed"] == 20 * len(staying)
    assert 0 < sums["num_outputs"] <= sum(request.num_outputs for request in staying)


def test_a_prompt_in_pieces_may_be_sent_back_and_is_resumed(hand) -> None:
    h = hand(num_pages=12, chunk=8, prefill=8)
    no_ratio(h)
    old = h.add([1] * 4, 40)
    for _ in range(3):
        h.step()
    long = h.add(range(100, 130), 4)
    h.run()
    assert (old.num_outputs, long.num_outputs) == (40, 4)


def test_a_batch_is_frozen_plain_and_picklable(hand) -> None:
    h = hand(chunk=8)
    h.add([1] * 3, 9)
    extend = h.step()
    decode = h.step()
    h.add([2] * 20)
    mixed = h.step()
    modes = [batch.mode for batch in (extend, decode, mixed)]
    assert modes == [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED]
    assert [batch.num_tokens for batch in (extend, decode, mixed)] == [3, 1, 5]
    assert pickle.loads(pickle.dumps(mixed)) == mixed
    with pytest.raises(AttributeError):
        mixed.step = 9  # type: ignore[misc]
