"""Who of the waiting goes first, and who waits for another's prefix."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.engine.cache.page_allocator import PageAllocator
from slipstream.engine.cache.radix_cache import RadixCache
from slipstream.engine.request import Request, RequestState
from slipstream.engine.request_builder import RequestBuilder
from slipstream.engine.scheduler.waiting_queue import MAX_PASSED, WINDOW, WaitingQueue
from slipstream.engine.worker import WorkerLimits

POLICIES = ("fcfs", "lpm", "shortest-prefill", "priority")
BUILDER = RequestBuilder(
    WorkerLimits(num_pages=4096, page_size=1, num_rows=4, max_model_len=4096, vocab_size=1000), None
)


def waiting(arrival: int, prompt: list[int], priority: int = 0) -> Request:
    request = BUILDER.build(
        prompt,
        SamplingParams(max_tokens=1),
        None,  # type: ignore[arg-type]
        request_id=None,
        salt=None,
        priority=priority,
    )
    request.arrival = arrival
    return request


class Setting:
    """A queue over a small tree."""

    def __init__(self, policy) -> None:
        self.pages = PageAllocator(4096, 1)
        self.tree = RadixCache(self.pages, 1)
        self.queue = WaitingQueue(policy, self.tree)
        self.num_matches = 0
        real = self.tree.match_length

        def counted(ids, salt=None):
            self.num_matches += 1
            return real(ids, salt)

        self.tree.match_length = counted  # type: ignore[method-assign]

    def cache(self, ids: list[int]) -> None:
        from slipstream.engine.cache.token_bytes import encode_token_ids

        matched = self.tree.match(encode_token_ids(ids)).num_tokens
        own = self.pages.allocate(len(ids))
        self.pages.free(own[:matched])
        self.tree.insert(encode_token_ids(ids), [*self.tree.match(encode_token_ids(ids)).pages, *own[matched:]])

    def arrivals(self, count: int = 100) -> list[int]:
        return [request.arrival for request in self.queue.first(count)]


def test_first_come_first_served_is_by_arrival_whoever_comes_back() -> None:
    s = Setting("fcfs")
    requests = [waiting(number, [number]) for number in range(5)]
    for request in requests:
        s.queue.add(request)
    s.queue.admit(requests[0])
    s.queue.admit(requests[1])
    s.queue.add(requests[1])  # retracted
    assert s.arrivals() == [1, 2, 3, 4]
    assert s.arrivals(2) == [1, 2]
    assert [request.arrival for request in s.queue] == [1, 2, 3, 4]


def test_a_higher_priority_goes_first_and_equals_go_by_arrival() -> None:
    s = Setting("priority")
    for arrival, priority in enumerate([0, 5, -2, 5, 0]):
        s.queue.add(waiting(arrival, [1], priority))
    assert s.arrivals() == [1, 3, 0, 4, 2]
    fcfs = Setting("fcfs")
    for arrival, priority in enumerate([0, 5, -2]):
        fcfs.queue.add(waiting(arrival, [1], priority))
    assert fcfs.arrivals() == [0, 1, 2], "priorities count under their own policy only"


def test_the_longest_cached_prefix_goes_first() -> None:
    s = Setting("lpm")
    s.cache([1, 2, 3, 4])
    for arrival, prompt in enumerate([[9, 9], [1, 2, 9], [1, 2, 3, 9], [1, 9, 9, 9], [1, 2, 8]]):
        s.queue.add(waiting(arrival, prompt))
    assert s.arrivals() == [2, 1, 4, 3, 0]


def test_the_shortest_prefill_goes_first_cached_tokens_taken_off() -> None:
    s = Setting("shortest-prefill")
    s.cache([1, 2, 3, 4, 5, 6])
    for arrival, prompt in enumerate([[9] * 4, [1, 2, 3, 4, 5, 6, 7], [9], [8] * 3]):
        s.queue.add(waiting(arrival, prompt))
    assert s.arrivals() == [1, 2, 3, 0]


@pytest.mark.parametrize("policy", ["lpm", "shortest-prefill"])
def test_prompts_are_matched_again_only_when_the_tree_has_changed(policy) -> None:
    s = Setting(policy)
    requests = [waiting(number, [number + 1, 5]) for number in range(10)]
    for request in requests:
        s.queue.add(request)
    s.arrivals()
    s.arrivals()
    assert s.num_matches == 10
    s.queue.admit(requests[3])
    s.queue.add(waiting(10, [7]))
    s.arrivals()
    assert s.num_matches == 11, "the new one only"
    s.cache([1, 2])
    assert s.arrivals()[0] == 0
    assert s.num_matches == 21


def test_only_the_oldest_are_ranked_and_the_others_follow_by_arrival() -> None:
    s = Setting("lpm")
    s.cache([1, 2, 3])
    for arrival in range(WINDOW + 20):
        s.queue.add(waiting(arrival, [1, 2, 3, 4] if arrival in (100, WINDOW + 5) else [9]))
    order = s.arrivals(1000)
    assert s.num_matches == WINDOW
    assert order[0] == 100
    assert order[1:WINDOW] == [arrival for arrival in range(WINDOW) if arrival != 100]
    assert order[WINDOW:] == list(range(WINDOW, WINDOW + 20))


def test_how_many_are_ranked_is_a_setting() -> None:
    s = Setting("lpm")
    s.cache([1, 2, 3])
    queue = WaitingQueue("lpm", s.tree, window=2)
    for arrival in range(5):
        queue.add(waiting(arrival, [1, 2, 3, 4] if arrival % 2 else [9]))
    assert [request.arrival for request in queue.first(9)] == [1, 0, 2, 3, 4]


def test_the_oldest_has_its_turn_after_enough_have_passed_it() -> None:
    s = Setting("shortest-prefill")
    s.queue.add(waiting(0, [9] * 50))
    for arrival in range(1, MAX_PASSED + 1):
        s.queue.add(waiting(arrival, [8]))
        (first,) = s.queue.first(1)
        assert first.arrival == arrival
        s.queue.admit(first)
    s.queue.add(waiting(MAX_PASSED + 1, [8]))
    assert s.arrivals() == [0, MAX_PASSED + 1]
    s.queue.admit(s.queue.first(1)[0])
    assert s.arrivals() == [MAX_PASSED + 1]


@settings(max_examples=60)
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.sampled_from("aadmr"), st.integers(0, 3), st.integers(-2, 2)), max_size=60),
)
def test_the_queue_agrees_with_a_plain_list(policy, moves) -> None:
    s = Setting(policy)
    s.cache([1, 1, 1])
    model: list[Request] = []
    gone: list[Request] = []
    for number, (move, which, priority) in enumerate(moves):
        if move == "a":
            request = waiting(number, [which] * (which + 1), priority)
            s.queue.add(request)
            model.append(request)
        elif move == "r" and gone:
            s.queue.add(gone[-1])
            model.append(gone.pop())
        elif model:
            request = model.pop(which % len(model))
            (s.queue.admit if move == "d" else s.queue.remove)(request)
            gone.append(request)
        assert len(s.queue) == len(model)
        assert s.queue.num_tokens == sum(len(request.ids) for request in model)
        assert {*s.arrivals()} == {request.arrival for request in model}
        assert s.arrivals() == [request.arrival for request in sorted(model, key=lambda r: rank(policy, r))]


def rank(policy: str, request: Request) -> tuple[int, int]:
    matched = min(len(request.ids) - 1, 3) if request.ids[0] == 1 else 0
    ranks = {"fcfs": 0, "priority": -request.priority, "lpm": -matched}
    return ranks.get(policy, len(request.ids) - matched), request.arrival


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everybody(hand, policy) -> None:
    h = hand(num_pages=40, num_rows=3, schedule_policy=policy)
    requests = [h.add([number % 3] * (1 + number % 7), 1 + number % 5) for number in range(20)]
    h.run()
    assert all(request.num_outputs == request.params.max_tokens for request in requests)
    assert h.num_home_pages == 40


def test_the_lowest_priority_is_sent_back_first(hand) -> None:
    h = hand(num_pages=6, prefix_cache=False)
    h.scheduler._planner.ratio.value = 0.0
    low, high = h.add([1] * 3, 18), h.add([2] * 3, 18)
    low.priority, high.priority = -1, 1
    while not h.scheduler.stats.num_retractions:
        h.step()
    assert (low.state, high.state) == (RequestState.WAITING, RequestState.RUNNING)


class TestSharedPrefix:
    """Of requests that share an uncached prefix the first goes ahead, and the others find it in the cache."""

    def test_it_is_computed_once(self, hand) -> None:
        h = hand(num_pages=200, num_rows=16)
        shared = list(range(100))
        requests = [h.add([*shared, 500 + number], 3) for number in range(8)]
        stranger = h.add([900] * 40, 3)
        first = h.step()
        assert first.num_new == (101, 40), "one of the eight, and who shares nothing"
        assert stranger.state is RequestState.RUNNING
        assert h.step().num_new[2:] == (1,) * 7
        assert [request.num_cached_tokens for request in requests] == [0] + [100] * 7
        h.run()

    def test_a_prefix_in_pieces_is_waited_for_to_its_end(self, hand) -> None:
        h = hand(num_pages=200, chunk=48)
        first, second = h.add([*range(160), 500], 1), h.add([*range(160), 501], 1)
        computed = 0
        while h.scheduler.has_work():
            computed += h.step().num_tokens
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 160)
        assert computed == 161 + 1, "of the second only its own last token"

    def test_with_a_step_in_flight_it_is_waited_for_as_well(self, hand) -> None:
        h = hand(num_pages=200)
        h.add([*range(100), 500], 5)
        first = h.batch()
        twin = h.add([*range(100), 501], 5)
        second = h.batch(first)
        assert twin.state is RequestState.WAITING
        h.commit(first)
        h.batch(second)
        assert twin.num_cached_tokens == 100

    def test_a_short_one_is_not_worth_a_wait(self, hand) -> None:
        h = hand()
        for last in range(4):
            h.add([*range(20), 500 + last], 1)
        assert h.step().num_rows == 4

    def test_but_the_whole_pages_of_the_very_same_prompt_are(self, hand) -> None:
        h = hand()
        twins = [h.add(range(20), 1) for _ in range(4)]
        computed = 0
        while h.scheduler.has_work():
            computed += h.step().num_tokens
        shared = 19 // h.scheduler.memory.page_size * h.scheduler.memory.page_size
        assert [twin.num_cached_tokens for twin in twins] == [0, shared, shared, shared]
        assert computed == 20 + 3 * (20 - shared)

    def test_another_salt_or_no_cache_means_no_wait(self, hand) -> None:
        h = hand(num_pages=200)
        for salt in ("a", "b"):
            h.add(range(100), 1, salt=salt)
        assert h.step().num_rows == 2
        h = hand(num_pages=200, prefix_cache=False)
        for _ in range(2):
            h.add(range(100), 1)
        assert h.step().num_rows == 2

    @pytest.mark.parametrize("end", ["abort", "fail"])
    def test_whoever_waits_goes_on_when_the_first_ends_badly(self, hand, end: str) -> None:
        from slipstream.engine.errors import StepFailed

        h = hand(num_pages=200)
        first, second = h.add(range(100), 1), h.add(range(100), 1)
        batch = h.batch()
        assert batch.num_rows == 1
        if end == "abort":
            h.scheduler.abort(first)
            h.commit(batch)
        else:
            h.scheduler.fail(batch, StepFailed("x", step=0))
        h.step()
        assert second.num_outputs == 1


class TestDeadlines:
    """Times are those of whatever clock the caller has."""

    def add(self, h, deadline: float | None, **params) -> Request:
        request = h._builder.build(
            [1] * 5,
            SamplingParams(max_tokens=20, **params),
            None,
            request_id=None,
            salt=None,
            deadline=deadline,
        )
        h.scheduler.add(request)
        return request

    def test_one_that_waits_fails_before_any_compute(self, hand) -> None:
        h = hand()
        request = self.add(h, 10.0)
        assert h.scheduler.has_deadlines
        assert h.scheduler.expire(9.9) == []
        (update,) = h.scheduler.expire(10.0)
        assert update.request is request
        assert (update.end.error.param, update.end.error.code) == ("deadline_s", "timeout")
        assert not h.scheduler.has_work()
        assert not h.scheduler.has_deadlines

    def test_one_that_runs_is_finished_with_what_it_has(self, hand) -> None:
        h = hand()
        request = self.add(h, 10.0)
        h.step()
        batch = h.batch()
        (update,) = h.scheduler.expire(11.0)
        assert (update.end.reason, update.end.usage.output_tokens) == ("deadline", 1)
        assert h.memory.rows.num_held == 1
        assert h.commit(batch) == [], "its row was in flight"
        assert request.state is RequestState.FINISHED
        assert h.num_home_pages == 64

    def test_one_that_was_sent_back_is_finished_with_what_it_has(self, hand) -> None:
        h = hand(num_pages=8, prefix_cache=False)
        h.scheduler._planner.ratio.value = 0.0
        requests = [self.add(h, 10.0), self.add(h, 10.0)]
        while not h.scheduler.stats.num_retractions:
            h.step()
        victim = next(request for request in requests if request.num_retractions)
        ends = {update.request: update.end for update in h.scheduler.expire(10.0)}
        assert ends[victim].reason == "deadline"
        assert ends[victim].usage.output_tokens == victim.num_outputs > 0
        assert set(ends) == set(requests)
        assert not h.scheduler.has_work()
        assert h.num_home_pages == 8

    def test_those_that_ended_before_are_forgotten(self, hand) -> None:
        h = hand(max_queued_requests=10_000)
        for _ in range(5000):
            h.scheduler.abort(self.add(h, 1e6))
        assert len(h.scheduler._deadlines._heap) <= 1024
        assert h.scheduler.expire(2e6) == []
