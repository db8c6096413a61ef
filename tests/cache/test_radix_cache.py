"""The radix cache, case by case. test_radix_model.py compares it with a brute-force model."""

from collections.abc import Sequence

import pytest

from slipstream.engine.cache.page_allocator import PageAllocator
from slipstream.engine.cache.radix_cache import RadixCache
from slipstream.engine.cache.radix_node import CacheEvent, EvictionPolicy, InsertResult, Removed, Stored
from slipstream.engine.cache.token_bytes import decode_token_ids, encode_token_ids
from slipstream.engine.errors import MisuseError


def encoded(*ids: int) -> bytes:
    return encode_token_ids(ids)


def cached(
    num_pages: int = 64, page_size: int = 1, policy: EvictionPolicy = "lru", enabled: bool = True
) -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(num_pages, page_size)
    return allocator, RadixCache(allocator, page_size, policy=policy, enabled=enabled)


def store(
    allocator: PageAllocator,
    cache: RadixCache,
    ids: Sequence[int],
    salt: str | None = None,
    *,
    last_step: int | None = None,
    priority: int = 0,
) -> InsertResult:
    """Compute what is not cached, insert all of it, and give duplicates back: a request from start to end."""
    match = cache.match(encoded(*ids), salt)
    own = allocator.allocate(len(ids) // cache.page_size - len(match.pages))
    return cache.insert(encoded(*ids), match.pages + own, salt, last_step=last_step, priority=priority)


def cached_tokens(cache: RadixCache, ids: Sequence[int], salt: str | None = None) -> int:
    num_tokens = cache.match_length(encoded(*ids), salt)
    assert cache.match(encoded(*ids), salt).num_tokens == num_tokens
    cache.check()
    return num_tokens


def test_a_match_is_the_longest_common_prefix_floored_to_pages() -> None:
    allocator, cache = cached(page_size=4)
    stored = store(allocator, cache, range(12))
    assert stored.num_tree_pages == 3
    assert cached_tokens(cache, range(12)) == 12
    assert cached_tokens(cache, range(15)) == 12
    assert cached_tokens(cache, range(11)) == 8
    assert cached_tokens(cache, [*range(7), 99]) == 4
    assert cached_tokens(cache, [0, 1, 2, 99, 4, 5, 6, 7]) == 0
    assert cached_tokens(cache, []) == 0
    match = cache.match(encoded(*range(9)))
    assert (match.pages, match.num_tokens) == ([1, 2], 8)


def test_branches_share_the_pages_of_their_common_prefix() -> None:
    allocator, cache = cached()
    store(allocator, cache, [1, 2, 3, 4])
    branch = store(allocator, cache, [1, 2, 8, 9])
    assert (branch.num_matched_pages, branch.duplicates) == (2, [])
    assert cache.num_evictable_pages == 6
    assert cache.match(encoded(1, 2, 8, 9)).pages[:2] == cache.match(encoded(1, 2, 3, 4)).pages[:2]
    cache.check()


def test_k01_duplicates_of_an_unfinished_request_are_reported_with_the_page_to_use_instead() -> None:
    # Two identical prompts computed in the same step: the second to be inserted owns copies of the first one's pages.
    allocator, cache = cached(page_size=4)
    ids = encoded(*range(8))
    first, second = allocator.allocate(2), allocator.allocate(2)
    cache.lock(cache.insert(ids, first, last_step=0).node)
    result = cache.insert(ids, second, last_step=0)
    assert result.num_matched_pages == result.num_tree_pages == 2
    assert [tuple(duplicate) for duplicate in result.duplicates] == [(0, second[0], first[0]), (1, second[1], first[1])]
    table = list(second)
    for duplicate in result.duplicates:
        table[duplicate.page_index] = duplicate.tree_page
    cache.lock(result.node)
    allocator.release([duplicate.own_page for duplicate in result.duplicates], 0)
    # Step 0 may still read the copies; nobody else can get them before its commit.
    assert allocator.held_pages() == {0: tuple(second)}
    allocator.commit(0)
    assert table == first
    assert not set(table) & allocator.free_pages()
    cache.check()
    allocator.check(cache.pages())


def test_duplicates_are_reported_only_where_the_pages_differ() -> None:
    allocator, cache = cached()
    store(allocator, cache, [1, 2])
    late = cache.match(encoded(1, 2)).pages
    store(allocator, cache, [1, 2, 3, 4])
    own = allocator.allocate(3)
    result = cache.insert(encoded(1, 2, 3, 4, 5), late + own)
    assert [duplicate.page_index for duplicate in result.duplicates] == [2, 3]
    assert result.num_matched_pages == 4
    assert cache.match(encoded(1, 2, 3, 4, 5)).pages[4] == own[2]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_k02_a_prompt_of_whole_pages_that_is_fully_cached_still_leaves_its_last_page_to_compute(page_size: int) -> None:
    allocator, cache = cached(page_size=page_size)
    prompt = list(range(4 * page_size))
    store(allocator, cache, prompt)
    match = cache.match(encoded(*prompt[:-1]))
    assert match.num_tokens == 3 * page_size
    cache.lock(match.node)
    recomputed = allocator.allocate(1)
    result = cache.insert(encoded(*prompt), match.pages + recomputed)
    assert [(duplicate.page_index, duplicate.own_page) for duplicate in result.duplicates] == [(3, recomputed[0])]
    cache.check()


def test_k13_the_next_turn_finds_the_whole_last_turn_its_answer_included() -> None:
    allocator, cache = cached()
    prompt, outputs = [1, 2, 3, 4, 5], [11, 12, 13]
    # The last output was never fed, so its position was never computed.
    store(allocator, cache, prompt + outputs[:-1])
    turn_two = [*prompt, *outputs, 21, 22]
    assert cached_tokens(cache, turn_two[:-1]) == len(prompt) + len(outputs) - 1


def test_k14_every_chunk_of_a_long_prompt_is_found_not_only_the_first() -> None:
    allocator, cache = cached(num_pages=1000, page_size=4)
    prompt = list(range(2000))
    for end in range(200, 2001, 200):
        store(allocator, cache, prompt[:end])
    assert cached_tokens(cache, prompt[:-1]) == 1996


def test_k11_a_pool_full_of_evictable_prefixes_always_gives_what_is_asked() -> None:
    allocator, cache = cached(num_pages=40)
    for step, start in enumerate(range(0, 4000, 100)):
        if short := 40 - allocator.num_free:
            assert cache.evict(short) == short
        store(allocator, cache, range(start, start + 40), last_step=step)
        allocator.commit(step)
        assert allocator.num_free == 0
        cache.check()


def test_salts_are_separate_namespaces_and_the_empty_salt_is_one_of_them() -> None:
    allocator, cache = cached()
    salts = (None, "", "a", "b")
    for salt in salts:
        assert cached_tokens(cache, [1, 2, 3], salt) == 0
        store(allocator, cache, [1, 2, 3], salt)
    pages = [tuple(cache.match(encoded(1, 2, 3), salt).pages) for salt in salts]
    assert len(set(pages)) == 4
    assert cache.num_evictable_pages == 12


def test_locked_nodes_are_never_evicted_and_count_as_protected_once() -> None:
    allocator, cache = cached()
    node = store(allocator, cache, [1, 2, 3, 4]).node
    store(allocator, cache, [1, 2, 8])
    cache.lock(node)
    cache.lock(node)
    assert (cache.num_protected_pages, cache.num_evictable_pages) == (4, 1)
    assert cache.evict(100) == 1
    cache.unlock(node)
    assert cache.evict(100) == 0
    cache.check()
    cache.unlock(node)
    assert (cache.num_protected_pages, cache.num_evictable_pages) == (0, 4)
    assert cache.evict(100) == 4
    assert allocator.num_free == 64


def test_a_lock_goes_on_protecting_all_of_its_node_when_another_request_splits_it() -> None:
    allocator, cache = cached()
    node = store(allocator, cache, [1, 2, 3, 4]).node
    cache.lock(node)
    store(allocator, cache, [1, 2, 9])
    assert cache.evict(100) == 1
    assert cached_tokens(cache, [1, 2, 3, 4]) == 4
    cache.unlock(node)
    assert cache.num_protected_pages == 0
    cache.check()


def test_a_match_inside_a_node_locks_only_what_it_covers() -> None:
    allocator, cache = cached()
    store(allocator, cache, range(10))
    cache.lock(cache.match(encoded(0, 1, 2)).node)
    assert (cache.num_protected_pages, cache.num_evictable_pages) == (3, 7)
    assert cache.evict(100) == 7


def test_locking_a_match_that_has_been_evicted_since_raises() -> None:
    allocator, cache = cached()
    store(allocator, cache, [1, 2, 3])
    match = cache.match(encoded(1, 2, 3))
    # One page is enough: the node of the match no longer ends where the match did.
    assert cache.evict(1) == 1
    with pytest.raises(MisuseError, match="no longer in the tree"):
        cache.lock(match.node)
    assert cached_tokens(cache, [1, 2, 3]) == 2


def test_unlocking_more_often_than_locking_raises_and_changes_nothing() -> None:
    allocator, cache = cached()
    node = store(allocator, cache, [1, 2]).node
    cache.lock(node)
    cache.unlock(node)
    with pytest.raises(MisuseError, match="not locked"):
        cache.unlock(node)
    cache.check()


def test_eviction_is_exact_and_cuts_the_tail_of_the_last_leaf() -> None:
    allocator, cache = cached()
    store(allocator, cache, range(10))
    assert cache.evict(4) == 4
    assert allocator.num_free == 64 - 6
    assert cached_tokens(cache, range(10)) == 6
    assert cache.evict(0) == 0


def test_pages_that_a_launched_step_may_still_read_are_evicted_only_after_its_commit() -> None:
    allocator, cache = cached()
    older = store(allocator, cache, [1, 2], last_step=0).node
    allocator.commit(0)
    cache.lock(older)
    store(allocator, cache, [8, 9], last_step=1)
    cache.unlock(older, 2)
    assert cache.num_evictable_pages == 4
    assert cache.evict(4) == 0
    allocator.commit(1)
    assert cache.evict(4) == 2
    assert cached_tokens(cache, [1, 2]) == 2
    allocator.commit(2)
    assert cache.evict(4) == 2
    assert allocator.num_held == 0


def test_a_step_in_flight_protects_what_it_names_through_inserts_and_splits() -> None:
    allocator, cache = cached()
    store(allocator, cache, [1, 2, 3, 4], last_step=None)
    store(allocator, cache, [1, 2, 3, 4], last_step=0)
    cache.match(encoded(1, 2))
    assert cache.evict(4) == 0
    allocator.commit(0)
    store(allocator, cache, [1, 2, 3, 4], last_step=1)
    allocator.commit(1)
    # Step 2 names the branch and its prefix; the other branch is free to go.
    store(allocator, cache, [1, 2, 9], last_step=2)
    assert cache.evict(100) == 2
    assert cached_tokens(cache, [1, 2, 9]) == 3


def test_both_halves_of_a_split_node_wait_for_its_step() -> None:
    allocator, cache = cached()
    store(allocator, cache, [1, 2, 3, 4], last_step=5)
    cache.match(encoded(1, 2))
    cache.flush()
    assert allocator.held_pages() == {5: (3, 4, 1, 2)}


def test_a_prefix_is_as_urgent_as_the_most_urgent_request_that_inserted_it() -> None:
    allocator, cache = cached(policy="priority")
    store(allocator, cache, [1, 2], priority=0)
    store(allocator, cache, [8, 9], priority=1)
    store(allocator, cache, [1, 2], priority=2)
    store(allocator, cache, [1, 2], priority=0)
    assert cache.evict(2) == 2
    assert (cached_tokens(cache, [1, 2]), cached_tokens(cache, [8, 9])) == (2, 0)


def three_prefixes(policy: EvictionPolicy) -> tuple[PageAllocator, RadixCache]:
    """A is the oldest, most used and most urgent; B and C are used equally often, B longer ago."""
    allocator, cache = cached(policy=policy)
    a = store(allocator, cache, [1, 10], priority=2).node
    b = store(allocator, cache, [2, 20], priority=1).node
    store(allocator, cache, [3, 30], priority=0)
    for node in (b, a, a):
        cache.lock(node)
        cache.record_use(node)
        cache.unlock(node)
    cache.record_use(cache.match(encoded(3, 30)).node)
    cache.record_use(cache.match(encoded(1, 10)).node)
    return allocator, cache


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", [2, 3, 1]), ("lfu", [2, 3, 1]), ("fifo", [1, 2, 3]), ("priority", [3, 2, 1])]
)
def test_each_policy_evicts_in_its_order(policy: EvictionPolicy, order: list[int]) -> None:
    _, cache = three_prefixes(policy)
    evicted = []
    for _ in range(3):
        assert cache.evict(2) == 2
        left = {ids for ids in (1, 2, 3) if cache.match_length(encoded(ids, 10 * ids))}
        evicted.append(({1, 2, 3} - left - set(evicted)).pop())
        cache.check()
    assert evicted == order


def test_flush_drops_everything_but_never_under_a_lock() -> None:
    allocator, cache = cached()
    node = store(allocator, cache, [1, 2, 3], last_step=0).node
    store(allocator, cache, [1, 2, 8])
    cache.lock(node)
    with pytest.raises(MisuseError, match="3 pages locked"):
        cache.flush()
    cache.unlock(node, 0)
    cache.flush()
    cache.check()
    assert cached_tokens(cache, [1, 2, 3]) == 0
    # Step 0 is launched and not committed: its pages wait for it.
    assert (allocator.num_held, allocator.num_free) == (3, 61)
    allocator.commit(0)
    assert allocator.num_free == 64


def test_the_change_counter_rises_only_when_some_match_may_have_changed() -> None:
    allocator, cache = cached()
    start = cache.change_counter
    node = store(allocator, cache, [1, 2, 3]).node
    stored = cache.change_counter
    assert stored > start
    store(allocator, cache, [1, 2, 3])
    cache.lock(node)
    cache.unlock(node)
    cache.match(encoded(1, 2))
    assert cache.change_counter == stored
    cache.evict(1)
    assert cache.change_counter > stored


def test_k09_a_disabled_cache_takes_nothing_and_every_call_still_works() -> None:
    allocator, cache = cached(page_size=4, enabled=False)
    ids = encoded(*range(8))
    pages = allocator.allocate(2)
    match = cache.match(ids)
    cache.lock(match.node)
    result = cache.insert(ids, pages, last_step=0)
    cache.lock(result.node)
    cache.unlock(match.node, 0)
    assert (result.num_tree_pages, result.num_matched_pages, result.duplicates) == (0, 0, [])
    assert (cache.match(ids).num_tokens, cache.evict(5), cache.num_evictable_pages) == (0, 0, 0)
    cache.flush()
    cache.check()
    allocator.check(pages)


def test_events_describe_exactly_what_is_cached_and_stop_when_asked() -> None:
    allocator, cache = cached(page_size=2)
    events: list[CacheEvent] = []
    store(allocator, cache, [1, 1, 2, 2], "s")
    unsubscribe = cache.subscribe(events.append)
    store(allocator, cache, [1, 1, 3, 3, 4, 4], "s")
    cache.evict(3)
    assert [(type(event), event.salt, decode_token_ids(event.prefix), event.num_tokens) for event in events] == [
        (Stored, "s", [1, 1, 3, 3, 4, 4], 4),
        (Removed, "s", [1, 1, 2, 2], 2),
        (Removed, "s", [1, 1, 3, 3, 4, 4], 4),
    ]
    unsubscribe()
    cache.flush()
    assert len(events) == 3


def test_wrong_arguments_are_refused() -> None:
    allocator, cache = cached(page_size=4)
    with pytest.raises(MisuseError, match="1 pages inserted for 2"):
        cache.insert(encoded(*range(8)), [1])
    with pytest.raises(MisuseError, match="no whole number of token ids"):
        cache.match(b"12345")
    with pytest.raises(MisuseError, match="page size"):
        RadixCache(allocator, 8)
    with pytest.raises(MisuseError, match="no eviction policy"):
        RadixCache(allocator, 4, policy="mru")  # type: ignore[arg-type]


def test_check_finds_a_broken_tree() -> None:
    allocator, cache = cached()
    node = store(allocator, cache, [1, 2]).node
    cache.check()
    node.lock_count = 1
    with pytest.raises(MisuseError, match="page counts"):
        cache.check()
    node.lock_count = 0
    node.queued = False
    with pytest.raises(MisuseError, match="queued"):
        cache.check()
    node.queued = True
    node.key = encoded(7, 2)
    with pytest.raises(MisuseError, match="own key"):
        cache.check()
