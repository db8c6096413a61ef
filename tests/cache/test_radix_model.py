"""The radix cache against a brute-force model: a dict from every page-aligned prefix to its page.

Generated requests match, compute, checkpoint, finish and abort while up to two steps are in flight. After each rule both
sides must agree on every page, on who may be evicted and in which order, and each page table must still lead to the content
that was computed for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.engine.cache.page_allocator import PageAllocator
from slipstream.engine.cache.radix_cache import RadixCache
from slipstream.engine.cache.radix_node import CacheEvent, EvictionPolicy, RadixNode, Stored
from slipstream.engine.cache.token_bytes import TOKEN_BYTES, encode_token_ids
from slipstream.engine.errors import MisuseError

NUM_PAGES = 40
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "fifo", "priority")


@dataclass
class CachedPage:
    """One page of the model, with what the eviction orders look at."""

    page: int
    created: int
    last_used: int
    last_step: int
    priority: int
    num_uses: int = 1
    num_locks: int = 0


@dataclass
class Model:
    """What the cache promises, one page at a time and without any cleverness."""

    page_bytes: int
    policy: EvictionPolicy
    now: int = 0
    pages: dict[tuple[str | None, bytes], CachedPage] = field(default_factory=dict)

    def prefixes(self, salt: str | None, ids: bytes, num_pages: int) -> list[tuple[str | None, bytes]]:
        return [(salt, ids[: (at + 1) * self.page_bytes]) for at in range(num_pages)]

    def match(self, salt: str | None, ids: bytes) -> list[int]:
        found = []
        for prefix in self.prefixes(salt, ids, len(ids) // self.page_bytes):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix].page)
        return found

    def tick(self) -> int:
        self.now += 1
        return self.now

    def touched(self, salt: str | None, ids: bytes, num_pages: int) -> Iterator[CachedPage]:
        now = self.tick()
        for prefix in self.prefixes(salt, ids, num_pages):
            self.pages[prefix].last_used = now
            yield self.pages[prefix]

    def insert(self, salt: str | None, ids: bytes, pages: list[int], step: int, priority: int) -> list[tuple[int, int]]:
        now, duplicates = self.tick(), []
        for at, prefix in enumerate(self.prefixes(salt, ids, len(pages))):
            entry = self.pages.setdefault(prefix, CachedPage(pages[at], now, now, step, priority))
            entry.last_used = now
            entry.last_step, entry.priority = max(entry.last_step, step), max(entry.priority, priority)
            if entry.page != pages[at]:
                duplicates.append((at, entry.page))
        return duplicates

    def order(self, entry: CachedPage) -> tuple[int, int]:
        if self.policy == "fifo":
            return (entry.created, 0)
        rank = {"lru": 0, "lfu": entry.num_uses, "priority": entry.priority}[self.policy]
        return (rank, entry.last_used)

    def evict(self, num_pages: int, committed_step: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < num_pages:
            inner = {(salt, ids[: -self.page_bytes]) for salt, ids in self.pages}
            candidates = [
                (self.order(entry), prefix)
                for prefix, entry in self.pages.items()
                if prefix not in inner and entry.num_locks == 0 and entry.last_step <= committed_step
            ]
            if not candidates:
                break
            evicted.append(self.pages.pop(min(candidates, key=lambda candidate: candidate[0])[1]).page)
        return evicted


@dataclass(eq=False)
class Running:
    """A request: its page table, of which the first `num_tree_pages` are the tree's, and the lock it holds."""

    salt: str | None
    ids: bytes
    priority: int
    node: RadixNode
    table: list[int]
    num_tree_pages: int
    last_step: int = -1


class RadixMachine(RuleBasedStateMachine):
    """Requests over a small pool; prompts are drawn page by page from few variants so that they share prefixes."""

    @initialize(page_size=st.sampled_from([1, 4, 16]), policy=st.sampled_from(POLICIES))
    def start(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size, self.page_bytes = page_size, page_size * TOKEN_BYTES
        self.allocator = PageAllocator(NUM_PAGES, page_size)
        self.cache = RadixCache(self.allocator, page_size, policy=policy)
        self.model = Model(self.page_bytes, policy)
        self.running: list[Running] = []
        # The device: what each page contains, and what each launched, uncommitted step reads.
        self.content: dict[int, tuple[str | None, bytes]] = {}
        self.reads: dict[int, set[int]] = {}
        self.launched = -1
        # What a subscriber believes to be cached.
        self.heard: set[tuple[str | None, bytes]] = set()
        self.cache.subscribe(self.hear)

    def hear(self, event: CacheEvent) -> None:
        num_pages = event.num_tokens // self.page_size
        ends = [len(event.prefix) - at * self.page_bytes for at in range(num_pages)]
        told = {(event.salt, event.prefix[:end]) for end in ends}
        if isinstance(event, Stored):
            assert not told & self.heard
            self.heard |= told
        else:
            assert told <= self.heard
            self.heard -= told

    def ids(self, variants: list[int], num_tail_tokens: int) -> bytes:
        """Pages that differ in all tokens (0, 1) or in the last only (0, 2), then a part of a page."""
        tokens: list[int] = []
        for variant in variants:
            tokens += [variant % 2] * (self.page_size - 1) + [variant]
        return encode_token_ids(tokens + [0] * min(num_tail_tokens, self.page_size - 1))

    @rule(
        variants=st.lists(st.integers(0, 2), min_size=1, max_size=7),
        num_tail_tokens=st.integers(0, 3),
        salt=st.sampled_from([None, None, "a", ""]),
        priority=st.integers(0, 2),
    )
    def submit(self, variants: list[int], num_tail_tokens: int, salt: str | None, priority: int) -> None:
        ids = self.ids(variants, num_tail_tokens)
        reusable = ids[:-TOKEN_BYTES]
        assert self.cache.match_length(reusable, salt) == len(self.model.match(salt, reusable)) * self.page_size
        match = self.cache.match(reusable, salt)
        assert match.pages == self.model.match(salt, reusable)
        self.cache.lock(match.node)
        for prefix in self.model.prefixes(salt, ids, len(match.pages)):
            self.model.pages[prefix].num_locks += 1
        request = Running(salt, ids, priority, match.node, list(match.pages), len(match.pages))
        num_missing = -(-len(ids) // self.page_bytes) - len(match.pages)
        self.evict(max(0, num_missing - self.allocator.num_free))
        if num_missing > self.allocator.num_free:
            self.unlock(request)
            return
        self.cache.record_use(match.node)
        for entry in self.model.touched(salt, ids, len(match.pages)):
            entry.num_uses += 1
        own = self.allocator.allocate(num_missing)
        assert not any(pages & set(own) for pages in self.reads.values()), "a launched step still reads these pages"
        for at, page in enumerate(own, len(match.pages)):
            self.content[page] = (salt, ids[: (at + 1) * self.page_bytes])
        request.table += own
        self.running.append(request)

    @rule(num_left_in_flight=st.integers(0, 2))
    def step(self, num_left_in_flight: int) -> None:
        self.launched += 1
        self.reads[self.launched] = {page for request in self.running for page in request.table}
        for request in self.running:
            request.last_step = self.launched
        for step in sorted(self.reads)[: max(0, len(self.reads) - num_left_in_flight)]:
            del self.reads[step]
            self.allocator.commit(step)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), share=st.integers(0, 4))
    def checkpoint(self, which: int, share: int) -> None:
        request = self.running[which % len(self.running)]
        num_whole = len(request.ids) // self.page_bytes
        num_pages = request.num_tree_pages + (num_whole - request.num_tree_pages) * share // 4
        held = Running(request.salt, request.ids, 0, request.node, [], request.num_tree_pages, request.last_step)
        request.node = self.insert(request, num_pages)
        self.cache.lock(request.node)
        for prefix in self.model.prefixes(request.salt, request.ids, num_pages):
            self.model.pages[prefix].num_locks += 1
        request.num_tree_pages = num_pages
        self.unlock(held)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), keep=st.sampled_from([True, True, True, False]))
    def end(self, which: int, keep: bool) -> None:
        request = self.running.pop(which % len(self.running))
        num_tree_pages = request.num_tree_pages
        if keep:
            num_tree_pages = len(request.ids) // self.page_bytes
            self.insert(request, num_tree_pages)
        self.unlock(request)
        self.allocator.release(request.table[num_tree_pages:], request.last_step)

    @precondition(lambda self: len(self.model.pages) > 4)
    @rule(num_pages=st.sampled_from([0, 1, 1, 1, 2, 2, 3, NUM_PAGES]))
    def evict(self, num_pages: int) -> None:
        before = self.allocator.free_pages()
        expected = self.model.evict(num_pages, self.allocator.committed_step)
        assert self.cache.evict(num_pages) == len(expected)
        assert self.allocator.free_pages() - before == set(expected)

    @precondition(lambda self: self.launched % 8 == 7)
    @rule()
    def flush(self) -> None:
        if self.cache.num_protected_pages:
            with pytest.raises(MisuseError):
                self.cache.flush()
            return
        self.cache.flush()
        self.model.pages.clear()

    def insert(self, request: Running, num_pages: int) -> RadixNode:
        """Insert, point the table at the tree's pages, and only then give the duplicates back."""
        ids, pages = request.ids[: num_pages * self.page_bytes], request.table[:num_pages]
        num_matched = len(self.model.match(request.salt, ids))
        expected = self.model.insert(request.salt, ids, pages, request.last_step, request.priority)
        result = self.cache.insert(ids, pages, request.salt, last_step=request.last_step, priority=request.priority)
        assert (result.num_tree_pages, result.num_matched_pages) == (num_pages, num_matched)
        assert [(at, tree_page) for at, _, tree_page in result.duplicates] == expected
        for at, own_page, tree_page in result.duplicates:
            assert request.table[at] == own_page
            request.table[at] = tree_page
        self.allocator.release([duplicate.own_page for duplicate in result.duplicates], request.last_step)
        return result.node

    def unlock(self, request: Running) -> None:
        self.cache.unlock(request.node, request.last_step)
        for entry in self.model.touched(request.salt, request.ids, request.num_tree_pages):
            entry.num_locks -= 1
            entry.last_step = max(entry.last_step, request.last_step)

    @invariant()
    def both_agree_and_every_page_has_one_owner(self) -> None:
        self.cache.check()
        own = [page for request in self.running for page in request.table[request.num_tree_pages :]]
        self.allocator.check([*self.cache.pages(), *own])
        assert sorted(self.cache.pages()) == sorted(entry.page for entry in self.model.pages.values())
        num_protected = sum(1 for entry in self.model.pages.values() if entry.num_locks)
        assert self.cache.num_protected_pages == num_protected
        assert self.cache.num_evictable_pages == len(self.model.pages) - num_protected
        assert self.heard == set(self.model.pages)

    @invariant()
    def every_table_and_every_prefix_leads_to_the_content_computed_for_it(self) -> None:
        for (salt, ids), entry in self.model.pages.items():
            assert self.content[entry.page] == (salt, ids)
            assert self.cache.match_length(ids, salt) == len(ids) // TOKEN_BYTES
        for request in self.running:
            for at, page in enumerate(request.table):
                assert self.content[page] == (request.salt, request.ids[: (at + 1) * self.page_bytes])


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_long_busy_run_agrees_with_the_model(page_size: int, policy: EvictionPolicy) -> None:
    # Generated scripts are short and shrink well; the rarer orders need a tree that has been full for a while.
    rnd, machine = Random(f"{policy}{page_size}"), RadixMachine()
    machine.start(page_size, policy)
    for _ in range(600):
        match rnd.choice(["submit", "submit", "step", "checkpoint", "end", "end", "evict"]):
            case "submit" if len(machine.running) < 6:
                variants = [rnd.randrange(3) for _ in range(rnd.randint(1, 7))]
                machine.submit(variants, rnd.randrange(4), rnd.choice([None, None, "a"]), rnd.randrange(3))
            case "checkpoint" if machine.running:
                machine.checkpoint(rnd.randrange(10), rnd.randint(0, 4))
            case "end" if machine.running:
                machine.end(rnd.randrange(10), rnd.random() < 0.8)
            case "evict":
                machine.evict(rnd.choice([0, 1, 1, 2, 3]))
            case _:
                machine.step(rnd.randint(0, 2))
        machine.both_agree_and_every_page_has_one_owner()
        machine.every_table_and_every_prefix_leads_to_the_content_computed_for_it()
    machine.step(0)
    while machine.running:
        machine.end(0, True)
    machine.flush()
    machine.allocator.check([])
    assert machine.allocator.num_free == NUM_PAGES
