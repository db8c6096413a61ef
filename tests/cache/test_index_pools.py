"""Pages and rows: exactly one place each, and home only when no launched step names them."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.engine.cache.page_allocator import PageAllocator
from slipstream.engine.cache.request_table import RequestTable
from slipstream.engine.errors import MisuseError

NUM_PAGES = 12


def test_fresh_pages_come_out_as_one_ascending_run_and_never_include_page_zero() -> None:
    allocator = PageAllocator(8, 16)
    assert allocator.allocate(3) == [1, 2, 3]
    assert allocator.allocate(5) == [4, 5, 6, 7, 8]
    assert allocator.num_free == 0


def test_a_run_that_comes_home_goes_out_again_in_order() -> None:
    allocator = PageAllocator(8, 1)
    run = allocator.allocate(4)
    allocator.free(run)
    assert allocator.allocate(4) == run


def test_asking_for_more_than_is_free_raises_and_takes_nothing() -> None:
    allocator = PageAllocator(4, 1)
    with pytest.raises(MisuseError, match="5 pages asked for, 4 free"):
        allocator.allocate(5)
    assert allocator.free_pages() == {1, 2, 3, 4}


@pytest.mark.parametrize("bad", [[0], [5], [-1], [1, 1], [1, 3], [1, 2, 0]])
def test_freeing_what_is_not_taken_raises_and_changes_nothing(bad: list[int]) -> None:
    allocator = PageAllocator(4, 1)
    allocator.allocate(2)
    with pytest.raises(MisuseError):
        allocator.free(bad)
    with pytest.raises(MisuseError):
        allocator.release(bad, 7)
    allocator.check([1, 2])
    assert allocator.free_pages() == {3, 4}


@pytest.mark.parametrize(
    "bad",
    [
        [*range(1, 13), 13],  # one that is free, at the end of a run
        [*range(12)],  # page zero
        [*range(30, 42)],  # beyond the last
        [*range(1, 11), 12, 11, 12],  # one named twice, in what is no run
        [*range(12, 0, -1), 13],
    ],
)
def test_freeing_a_long_run_that_is_not_taken_raises_and_changes_nothing(bad: list[int]) -> None:
    allocator = PageAllocator(40, 1)
    taken = allocator.allocate(12)
    with pytest.raises(MisuseError):
        allocator.free(bad)
    allocator.check(taken)
    allocator.free([*range(1, 10)])
    allocator.check([10, 11, 12])
    allocator.free([12, 10, 11])
    allocator.check([])


def test_a_page_named_by_a_launched_step_comes_home_with_its_commit_and_only_once() -> None:
    allocator = PageAllocator(4, 1)
    pages = allocator.allocate(4)
    allocator.commit(4)
    allocator.release(pages[:1], 4)
    allocator.release(pages[1:3], 5)
    allocator.release(pages[3:], 6)
    assert allocator.free_pages() == {1}
    assert allocator.held_pages() == {5: (2, 3), 6: (4,)}
    with pytest.raises(MisuseError, match="page 2 is held"):
        allocator.release([2], None)
    allocator.commit(5)
    assert allocator.free_pages() == {1, 2, 3}
    assert allocator.num_held == 1
    with pytest.raises(MisuseError):
        allocator.commit(5)
    allocator.commit(6)
    allocator.check([])
    assert allocator.num_free == 4


def test_check_finds_lost_foreign_and_doubly_owned_pages() -> None:
    allocator = PageAllocator(4, 1)
    allocator.allocate(2)
    allocator.check([2, 1])
    for claimed in ([1], [1, 2, 3], [1, 2, 2], [1, 2, 0], [1, 2, 9]):
        with pytest.raises(MisuseError):
            allocator.check(claimed)


def test_the_canary_hears_of_every_page_that_becomes_free_when_it_does() -> None:
    home: list[int] = []

    def poison(pages: Sequence[int]) -> None:
        home.extend(pages)

    allocator = PageAllocator(4, 1, on_home=poison)
    pages = allocator.allocate(3)
    allocator.free(pages[:1])
    allocator.release(pages[1:], 0)
    assert home == [1]
    allocator.commit(0)
    assert home == [1, 2, 3]


def test_rows_obey_the_hold_law_and_row_zero_is_padding() -> None:
    table = RequestTable(2)
    assert (table.allocate(), table.allocate(), table.num_rows) == (1, 2, 2)
    with pytest.raises(MisuseError):
        table.allocate()
    table.release(1, 3)
    with pytest.raises(MisuseError):
        table.release(1, 3)
    with pytest.raises(MisuseError):
        table.release(0, None)
    assert (table.num_free, table.num_held) == (0, 1)
    table.commit(3)
    table.release(2, 3)
    table.check([])
    assert table.num_free == 2


class PoolMachine(RuleBasedStateMachine):
    """A pool against three plain sets; one step may be in flight behind the committed one."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, 4)
        self.free = set(range(1, NUM_PAGES + 1))
        self.taken: list[int] = []
        self.held: dict[int, set[int]] = {}
        self.committed = self.launched = -1

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(MisuseError):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert len(set(pages)) == count
        assert set(pages) <= self.free
        self.free -= set(pages)
        self.taken += pages

    @rule()
    def launch(self) -> None:
        self.launched += 1

    @precondition(lambda self: self.committed < self.launched)
    @rule()
    def commit(self) -> None:
        self.committed += 1
        self.allocator.commit(self.committed)
        self.free |= self.held.pop(self.committed, set())

    @rule(pick=st.randoms(use_true_random=False), age=st.integers(0, 3), named=st.booleans())
    def release(self, pick: Random, age: int, named: bool) -> None:
        pages = pick.sample(self.taken, pick.randint(0, len(self.taken)))
        last_step = max(-1, self.launched - age) if named else None
        self.allocator.release(pages, last_step)
        self.taken = [page for page in self.taken if page not in pages]
        if last_step is None or last_step <= self.committed:
            self.free |= set(pages)
        else:
            self.held.setdefault(last_step, set()).update(pages)

    @rule(page=st.integers(-2, NUM_PAGES + 2))
    def release_of_anything_else_raises(self, page: int) -> None:
        if page not in self.taken:
            with pytest.raises(MisuseError):
                self.allocator.release([*self.taken, page], self.launched)

    @invariant()
    def the_sets_agree(self) -> None:
        self.allocator.check(self.taken)
        assert self.allocator.free_pages() == self.free
        assert self.allocator.num_free == len(self.free)
        told = {step: set(pages) for step, pages in self.allocator.held_pages().items()}
        assert told == {step: pages for step, pages in self.held.items() if pages}


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
