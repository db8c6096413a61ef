"""Prefixes out of the cache: whole pages of committed steps, at least one token left to compute, never a stale page."""

from __future__ import annotations

import pytest

from slipstream.engine.scheduler.schedule_batch import RowStart


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_a_prompt_that_is_cached_whole_has_its_last_page_computed_again(hand, page_size: int) -> None:
    h = hand(page_size=page_size, num_pages=2048 // page_size, chunk=1024)
    prompt = list(range(512))
    first, second = h.add(prompt, 1), None
    h.run()
    second = h.add(prompt, 1)
    batch = h.step()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 512 - page_size
    assert batch.num_new == (page_size,), "never a row without a token"
    assert batch.num_prior == (512 - page_size,)


def test_the_next_turn_finds_all_of_the_last_one_but_its_newest_token(hand) -> None:
    h = hand(page_size=1, num_pages=256)
    first = h.add(range(30), 12)
    h.run()
    answer = first.ids.tolist()
    second = h.add([*answer, 500, 501], 1)
    h.run()
    assert second.num_cached_tokens == 30 + 12 - 1
    assert h.scheduler.stats.num_cached_tokens == 41


@pytest.mark.parametrize("num_cached", [8, 16, 20, 32, 36])
@pytest.mark.parametrize("chunk", [16, 64])
def test_a_hit_may_end_inside_a_piece_at_its_edge_or_cover_the_prompt(hand, num_cached: int, chunk: int) -> None:
    h = hand(chunk=chunk)
    h.add(range(num_cached), 1)
    h.run()
    request = h.add(range(37), 1)
    computed = 0
    while not request.has_ended:
        computed += h.step().num_new[0]
    assert request.num_cached_tokens == num_cached
    assert computed == 37 - num_cached


def test_a_long_prompt_in_pieces_is_found_whole_afterwards(hand) -> None:
    h = hand(page_size=16, num_pages=256, chunk=64)
    h.add(range(1000), 1)
    h.run()
    again = h.add(range(1000), 1)
    assert h.run() == 1
    assert again.num_cached_tokens == 992


def test_a_prompt_still_running_shares_its_prefix_as_soon_as_it_is_committed(hand) -> None:
    h = hand(chunk=16)
    h.add(range(40), 20)
    h.step()
    h.step()
    h.step()
    twin = h.add(range(40), 2)
    h.step()
    assert twin.num_cached_tokens == 36


def test_nothing_is_matched_before_its_step_is_committed(hand) -> None:
    h = hand()
    h.add([*range(20), 500], 4)
    batch = h.batch()
    twin = h.add([*range(20), 501], 4)
    second = h.batch(batch)
    assert twin.num_planned == 21
    assert second.num_prior[-1] == 0
    assert twin.num_cached_tokens == 0


def test_without_a_cache_chunked_prompts_run_and_nothing_stays(hand) -> None:
    h = hand(chunk=256, page_size=16, num_pages=128, prefix_cache=False)
    first, second = h.add(range(900), 5), h.add(range(900), 5)
    h.run()
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.num_outputs == second.num_outputs == 5
    assert h.memory.pages.num_free == 128


def test_salts_keep_prefixes_apart(hand) -> None:
    h = hand()
    for salt in ("a", None):
        h.add(range(20), 1, salt=salt)
        h.run()
    for salt, num_cached in (("a", 16), ("b", 0), (None, 16)):
        request = h.add(range(20), 1, salt=salt)
        h.run()
        assert request.num_cached_tokens == num_cached


def test_a_table_is_remapped_to_the_trees_pages_before_the_duplicates_are_free(hand) -> None:
    """Two alike prompts in the same step: the second one's pages are duplicates of what the first one put in the tree."""
    h = hand(num_pages=40, chunk=64)
    first, second = h.add([*range(16), 500], 40), h.add([*range(16), 501], 40)
    third = h.batch()
    own = list(second.pages)
    fourth = h.batch(third)  # launched before the duplicates are known: it reads them through the old table
    h.commit(third)
    assert second.pages[:4] == first.pages[:4]
    assert h.memory.pages.held_pages() == {fourth.step: tuple(own[:4])}, "held for the step that reads them"
    assert h.table(second, 16) == own[:4]
    fifth = h.batch(fourth)
    assert h.table(second, 16) == first.pages[:4], "remapped by the first step launched afterwards"
    h.commit(fourth)
    assert not h.memory.pages.held_pages()
    assert set(own[:4]) <= h.memory.pages.free_pages()
    newcomer = h.add([900] * 60, 2)
    sixth = h.batch(fifth)
    assert set(own[:4]) & set(newcomer.pages), "the freed pages are used again"
    assert not set(own[:4]) & set(h.table(second, 16))
    h.commit(fifth)
    h.commit(sixth)


def test_at_depth_0_duplicates_are_free_at_once_and_the_next_step_remaps_before_it_writes(hand) -> None:
    h = hand(num_pages=40)
    first, second = h.add([*range(16), 500], 40), h.add([*range(16), 501], 40)
    batch = h.batch()
    own = list(second.pages)
    h.commit(batch)
    assert h.memory.pages.num_held == 0
    newcomer = h.add([900] * 60, 2)
    h.batch()
    assert set(own[:4]) & set(newcomer.pages)
    assert h.table(second, 16) == h.table(first, 16) == first.pages[:4]


def test_a_full_pool_of_cached_pages_is_evicted_for_who_needs_it(hand) -> None:
    h = hand(num_pages=20)
    for number in range(6):
        request = h.add([number] * 50, 2)
        h.run()
        assert request.num_outputs == 2
    whole = h.add(range(78), 2)
    h.run()
    assert whole.num_outputs == 2
    assert h.num_home_pages == 20


def test_a_row_is_introduced_once_for_each_admission(hand) -> None:
    h = hand(chunk=8)
    request = h.add(range(20), 4, seed=11, temperature=0.5)
    first = h.step()
    assert [start.row for start in first.starts] == [request.row]
    assert isinstance(first.starts[0], RowStart)
    assert (first.starts[0].sampling.seed, first.starts[0].sampling.temperature) == (11, 0.5)
    while not request.has_ended:
        assert h.step().starts == ()


def test_only_what_changed_is_written_to_the_row_table(hand) -> None:
    h = hand()
    h.add(range(10), 20)
    assert len(h.step().table_pages) == 4 * 3
    assert len(h.step().table_pages) == 0
    assert [len(h.step().table_pages) for _ in range(5)] == [0, 4, 0, 0, 0]
