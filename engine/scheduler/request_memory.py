"""What requests hold of the device: rows, pages, and their share of the prefix tree.

Owns the allocator, the row table and the tree, and keeps law 5 (a page belongs to exactly one of free list, tree, one
request, one step's hold list) and law 6 (only positions of committed steps enter the tree). Knows nothing of policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from ..cache.page_allocator import PageAllocator
from ..cache.radix_cache import RadixCache
from ..cache.radix_node import EvictionPolicy
from ..cache.request_table import RequestTable
from ..errors import MisuseError
from ..request import Request
from ..worker import WorkerLimits


class FreedPages:
    """How many pages would be free, or evictable, without certain requests: their own, and what they alone have locked."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._locks: dict[int, int] = {}  # of the requests added so far, by the node's serial

    def add(self, request: Request) -> None:
        """Count `request`, which holds pages. O(depth of its prefix in the tree)."""
        self.num_pages += len(request.pages) - request.node_pages
        node = request.node
        while node is not None:
            locks = self._locks[node.serial] = self._locks.get(node.serial, 0) + 1
            if locks == node.lock_count:
                self.num_pages += len(node.pages)
            node = node.parent


class RequestMemory:
    """Rows and pages of one engine."""

    def __init__(
        self,
        limits: WorkerLimits,
        *,
        prefix_cache: bool,
        eviction_policy: EvictionPolicy = "lru",
        on_pages_home: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`on_pages_home`: called with pages whenever some become free."""
        self.page_size = limits.page_size
        self.pages = PageAllocator(limits.num_pages, limits.page_size, on_home=on_pages_home)
        self.rows = RequestTable(limits.num_rows)
        self.tree = RadixCache(self.pages, limits.page_size, policy=eviction_policy, enabled=prefix_cache)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free, or would be after eviction."""
        return self.pages.num_free + self.tree.num_evictable_pages

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold this many positions."""
        return -(-num_positions // self.page_size)

    def secure(self, num_pages: int) -> bool:
        """Have this many pages free, evicting what must go. False if even that is not enough now."""
        short = num_pages - self.pages.num_free
        if short > 0:
            self.tree.evict(short)
        return self.pages.num_free >= num_pages

    def attach_prefix(self, request: Request) -> None:
        """Lock the longest cached prefix for `request`, leaving at least its last token to be computed."""
        match = self.tree.match(request.ids[: request.longest_prefix].tobytes(), request.salt)
        self.tree.lock(match.node)
        request.node = match.node
        request.pages = list(match.pages)
        request.node_pages = len(request.pages)
        request.num_slots = len(request.pages) * self.page_size
        request.num_planned = request.num_prefilled = match.num_tokens

    def detach_prefix(self, request: Request) -> None:
        """Undo attach_prefix for a request that was not admitted after all."""
        assert request.node is not None
        self.tree.unlock(request.node)
        request.node = None
        request.pages = []
        request.node_pages = request.num_slots = request.num_planned = request.num_prefilled = 0

    def seat(self, request: Request) -> None:
        """Give an admitted request a row; its prefix pages are written to the device's table with its first step."""
        assert request.node is not None
        self.tree.record_use(request.node)
        request.row = self.rows.allocate()
        request.table_columns = array("i", range(len(request.pages)))
        request.table_pages = array("i", request.pages)

    def grow(self, request: Request, num_positions: int) -> None:
        """Give `request` room for its first `num_positions` positions, out of free pages (see `secure`)."""
        have = len(request.pages)
        more = self.pages_for(num_positions) - have
        if more <= 0:
            return
        taken = self.pages.allocate(more)
        request.pages.extend(taken)
        request.table_columns.extend(range(have, have + more))
        request.table_pages.extend(taken)
        request.num_slots = (have + more) * self.page_size

    def share(self, request: Request) -> None:
        """Put the committed whole pages of a running request into the tree, so that others match them at once."""
        self._insert(request)

    def release(self, request: Request, *, keep: bool) -> None:
        """Take everything back under the hold law. `keep`: what is committed stays in the tree, evictable."""
        assert request.node is not None
        num_tree_pages = self._insert(request) if keep else request.node_pages
        self.pages.release(request.pages[num_tree_pages:], request.last_step)
        self.tree.unlock(request.node, request.last_step)
        self.rows.release(request.row, request.last_step)
        request.node = None
        request.node_pages = 0
        request.pages = []
        request.table_columns, request.table_pages = array("i"), array("i")
        request.row = request.num_slots = request.num_planned = request.num_prefilled = 0
        request.started = request.decoding = request.prefill_committed = False

    def commit(self, step: int) -> None:
        """Step `step` is committed, failed or not: what it held comes home."""
        self.pages.commit(step)
        self.rows.commit(step)

    def check(self, running: Iterable[Request]) -> None:
        """Prove laws 4 and 5. Raises: MisuseError."""
        running = list(running)
        self.tree.check()
        self.rows.check(request.row for request in running)
        own = [page for request in running for page in request.pages[request.node_pages :]]
        self.pages.check([*self.tree.pages(), *own])

    def check_home(self) -> None:
        """With no request running: every row is free, and every page is free or in the tree. O(1). Raises: MisuseError."""
        num_rows_out = self.rows.num_rows - self.rows.num_free
        num_pages_out = self.pages.num_pages - self.num_available_pages
        if num_rows_out or num_pages_out:
            raise MisuseError(f"idle, but {num_rows_out} rows and {num_pages_out} pages are not home")

    def _insert(self, request: Request) -> int:
        """Insert the committed whole pages; return how many leading pages of the request the tree now owns."""
        assert request.node is not None
        num_pages = request.num_computed // self.page_size
        if num_pages <= request.node_pages:
            return request.node_pages
        ids = request.ids[: num_pages * self.page_size].tobytes()
        result = self.tree.insert(
            ids, request.pages[:num_pages], request.salt, last_step=request.last_step, priority=request.priority
        )
        if result.num_tree_pages == 0:
            return request.node_pages  # no cache: the request goes on owning its pages
        self.tree.lock(result.node)
        self.tree.unlock(request.node, request.last_step)
        # The row is pointed at the tree's pages by its next step; until that is launched our duplicates stay held.
        for index, _, tree_page in result.duplicates:
            request.pages[index] = tree_page
            request.table_columns.append(index)
            request.table_pages.append(tree_page)
        self.pages.release([own_page for _, own_page, _ in result.duplicates], request.last_step)
        request.node = result.node
        request.node_pages = result.num_tree_pages
        return result.num_tree_pages
