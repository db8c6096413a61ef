"""The prefix cache: a radix tree over token ids whose nodes own KV pages."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from ..errors import MisuseError
from .page_allocator import PageAllocator
from .radix_node import (
    EVICTION_ORDERS,
    CacheEvent,
    ChildKey,
    DuplicatePage,
    EvictionPolicy,
    InsertResult,
    Match,
    RadixNode,
    Removed,
    Stored,
)
from .token_bytes import TOKEN_BYTES, common_prefix_units


class RadixCache:
    """Committed prefixes and their pages, shared by every request of a namespace (`salt`).

    Ids come as bytes (`encode_token_ids`); everything is floored to whole pages. The caller inserts only positions
    that a committed step has computed, locks what a running request reads, and unlocks it with that request's last
    launched step.

    Reuse. A finished request may still have a surplus row in flight that reads its pages, so each node carries
    `last_step`, the last launched step that names it. `evict` leaves nodes of uncommitted steps alone, so what it
    frees is free at once and it returns exactly the growth of `allocator.num_free`; every page goes home through
    `allocator.release(pages, last_step)`. A page at home is rewritten only by a step launched later on the same
    compute lane, behind the last step that reads it.

    With `enabled=False` nothing is ever kept or matched: the same calls work, and the caller goes on owning its pages.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        *,
        policy: EvictionPolicy = "lru",
        enabled: bool = True,
        clock: Callable[[], int] | None = None,
    ) -> None:
        if page_size != allocator.page_size:
            raise MisuseError(f"page size {page_size} over an allocator of page size {allocator.page_size}")
        if policy not in EVICTION_ORDERS:
            raise MisuseError(f"no eviction policy {policy!r}; there are {', '.join(EVICTION_ORDERS)}")
        self.page_size = page_size
        self.enabled = enabled
        self._allocator = allocator
        self._page_bytes = page_size * TOKEN_BYTES
        self._order = EVICTION_ORDERS[policy]
        # Must never fall; each call is one moment.
        self._clock = clock if clock is not None else count().__next__
        self._serials = count()
        self._root = RadixNode(
            salt=None, key=b"", pages=[], parent=None, serial=next(self._serials), created=0, last_used=0
        )
        # (order when queued, serial, node), at most one entry a node. Lazy: entries are judged when they are popped.
        self._heap: list[tuple[tuple[int, int], int, RadixNode]] = []
        self._listeners: list[Callable[[CacheEvent], None]] = []
        self._num_evictable_pages = 0
        self._num_protected_pages = 0
        self._change_counter = 0

    @property
    def num_evictable_pages(self) -> int:
        """Pages of unlocked nodes; those of uncommitted steps become evictable with their commit."""
        return self._num_evictable_pages

    @property
    def num_protected_pages(self) -> int:
        """Pages of locked nodes."""
        return self._num_protected_pages

    @property
    def change_counter(self) -> int:
        """Rises whenever some match may have become longer or shorter."""
        return self._change_counter

    def match(self, ids: bytes, salt: str | None = None) -> Match:
        """Return the longest cached prefix of `ids`. Splits a node where the match ends inside it; counts as no use.

        To have at least one token computed, leave the last one out of `ids`.
        """
        path, partial, num_partial_pages = self._walk(ids, salt)
        if partial is not None:
            path.append(self._split(partial, num_partial_pages))
        pages: list[int] = []
        for node in path:
            pages.extend(node.pages)
        return Match(node=path[-1] if path else self._root, pages=pages, num_tokens=len(pages) * self.page_size)

    def match_length(self, ids: bytes, salt: str | None = None) -> int:
        """Return how many tokens `match` would return, changing nothing: for policies that rank waiting requests."""
        path, _, num_partial_pages = self._walk(ids, salt)
        return (sum(len(node.pages) for node in path) + num_partial_pages) * self.page_size

    def lock(self, node: RadixNode) -> None:
        """Keep `node` and all above it from eviction until as many `unlock`s. O(depth).

        Raises: MisuseError if `node` is no longer in the tree.
        """
        for above in self._path_up(node):
            if above.lock_count == 0:
                self._num_evictable_pages -= len(above.pages)
                self._num_protected_pages += len(above.pages)
            above.lock_count += 1

    def unlock(self, node: RadixNode, last_step: int | None = None) -> None:
        """Undo one `lock`; `last_step` is the last launched step in which the holder names these pages, if any.

        Raises: MisuseError if `node` is not locked.
        """
        if node is not self._root and node.lock_count == 0:
            raise MisuseError("unlock of a node that is not locked")
        now = self._clock()
        for above in self._path_up(node):
            above.lock_count -= 1
            above.last_used = now
            above.last_step = max(above.last_step, -1 if last_step is None else last_step)
            if above.lock_count == 0:
                self._num_protected_pages -= len(above.pages)
                self._num_evictable_pages += len(above.pages)
                self._queue(above)

    def record_use(self, node: RadixNode) -> None:
        """Count one request's use of `node` and all above it: once for each request admitted with this match."""
        now = self._clock()
        for above in self._path_up(node):
            above.num_uses += 1
            above.last_used = now

    def insert(
        self,
        ids: bytes,
        pages: Sequence[int],
        salt: str | None = None,
        *,
        last_step: int | None = None,
        priority: int = 0,
    ) -> InsertResult:
        """Give the tree a computed prefix: `pages` are those of the whole pages of `ids`, from the first token on.

        The tree takes the pages whose positions it lacks. Positions that it has with another page come back as
        duplicates: the caller rewrites its page table to the tree's pages first, and then releases its own under the
        hold law. `last_step` is the last launched step that names `pages`. New nodes are unlocked: lock the result's
        node before anything is evicted. A node's priority is the highest it was inserted with.

        Raises: MisuseError if `pages` are not as many as the whole pages of `ids`.
        """
        num_pages = len(ids) // self._page_bytes
        if len(pages) != num_pages:
            raise MisuseError(f"{len(pages)} pages inserted for {num_pages} whole pages of ids")
        if not self.enabled:
            return InsertResult(node=self._root, num_tree_pages=0, num_matched_pages=0, duplicates=[])
        path, partial, num_partial_pages = self._walk(ids, salt)
        if partial is not None:
            path.append(self._split(partial, num_partial_pages))
        now = self._clock()
        step = -1 if last_step is None else last_step
        duplicates: list[DuplicatePage] = []
        num_matched = 0
        for node in path:
            node.last_used = now
            node.last_step = max(node.last_step, step)
            node.priority = max(node.priority, priority)
            own = list(pages[num_matched : num_matched + len(node.pages)])
            # Usually the request's pages are the tree's already: one comparison in C settles a node.
            if own != node.pages:
                triples = zip(range(num_matched, num_pages), own, node.pages, strict=False)
                duplicates += [DuplicatePage._make(triple) for triple in triples if triple[1] != triple[2]]
            num_matched += len(node.pages)
        node = path[-1] if path else self._root
        if num_matched < num_pages:
            node = self._add_leaf(
                RadixNode(
                    salt=salt,
                    key=ids[num_matched * self._page_bytes : num_pages * self._page_bytes],
                    pages=list(pages[num_matched:]),
                    parent=node,
                    serial=next(self._serials),
                    created=now,
                    last_used=now,
                    priority=priority,
                    last_step=step,
                )
            )
        return InsertResult(node=node, num_tree_pages=num_pages, num_matched_pages=num_matched, duplicates=duplicates)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, lowest unlocked leaf of the policy first, and return how many became free.

        The last leaf is cut so that no more than `num_pages` go. Fewer come only when every other page is locked, named
        by a step not yet committed, or above such a page. O(log nodes) a node touched.
        """
        return self._evict(num_pages, self._allocator.committed_step)

    def flush(self) -> None:
        """Drop everything. Pages of uncommitted steps join those steps' hold lists.

        Raises: MisuseError while anything is locked.
        """
        if self._num_protected_pages:
            raise MisuseError(f"flush with {self._num_protected_pages} pages locked")
        self._evict(self._num_evictable_pages, None)

    def subscribe(self, listener: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `listener` after each change, deepest prefixes removed first, until the returned function is called.

        Nothing is computed for events while nobody listens. A listener must neither raise nor call the cache.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root, parents first. The tree must not change meanwhile."""
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def pages(self) -> Iterator[int]:
        """Every page that the tree owns, for the ownership check. The tree must not change meanwhile."""
        return (page for node in self.nodes() for page in node.pages)

    def check(self) -> None:
        """Prove the tree's invariants by walking all of it. Raises: MisuseError naming the first that is broken."""
        entries = [node for _, _, node in self._heap]
        queued = {node.serial for node in entries}
        num_evictable = num_protected = 0
        problem = "" if len(entries) == len(queued) else "a node is queued twice"
        if self._root.lock_count or self._root.pages or self._root.parent:
            problem = "the root is locked, owns pages or has a parent"
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(self._child_key(node.salt, node.key, 0)) is not node:
                problem = "a node is not its parent's child under its own key"
            elif parent is not self._root and parent.salt != node.salt:
                problem = "a node has another salt than its parent"
            elif not node.pages or len(node.key) != len(node.pages) * self._page_bytes:
                problem = "a node's key and pages differ in length, or are empty"
            elif node.lock_count < sum(child.lock_count for child in node.children.values()):
                problem = "a node has fewer locks than its children"
            elif node.queued != (node.serial in queued):
                problem = "a node's queued flag is wrong"
            elif self._is_evictable(node) and not node.queued:
                problem = "an evictable leaf is not queued"
            if node.lock_count:
                num_protected += len(node.pages)
            else:
                num_evictable += len(node.pages)
        if (num_evictable, num_protected) != (self._num_evictable_pages, self._num_protected_pages):
            problem = "the page counts are wrong"
        owned = list(self.pages())
        if len(owned) != len(set(owned)):
            problem = "a page is owned by two nodes"
        if problem:
            raise MisuseError(problem)

    def _child_key(self, salt: str | None, ids: bytes, start: int) -> ChildKey:
        return salt, ids[start : start + self._page_bytes]

    def _walk(self, ids: bytes, salt: str | None) -> tuple[list[RadixNode], RadixNode | None, int]:
        """Return the nodes that `ids` covers whole, then the one it covers in part, if any, and its pages covered."""
        if len(ids) % TOKEN_BYTES:
            raise MisuseError(f"{len(ids)} bytes are no whole number of token ids")
        path: list[RadixNode] = []
        node = self._root
        start, stop = 0, len(ids) - len(ids) % self._page_bytes
        while start < stop:
            child = node.children.get(self._child_key(salt, ids, start))
            if child is None:
                break
            if not ids.startswith(child.key, start):
                return path, child, common_prefix_units(child.key, ids, start, self._page_bytes)
            path.append(child)
            node = child
            start += len(child.key)
        return path, None, 0

    def _path_up(self, node: RadixNode) -> list[RadixNode]:
        """Return `node` and all above it without the root. Raises: MisuseError if `node` is no longer in the tree."""
        path = []
        above: RadixNode | None = node
        while above is not None and above is not self._root:
            path.append(above)
            above = above.parent
        if above is None:
            raise MisuseError("this node is no longer in the tree: lock a match before the tree changes")
        return path

    def _split(self, lower: RadixNode, num_pages: int) -> RadixNode:
        """Put a new node with the first `num_pages` of `lower` above it, and return the new one.

        The lower part keeps its identity, so that whoever has locked it still protects all of what it locked.
        """
        parent, cut = lower.parent, num_pages * self._page_bytes
        # The upper node takes the list over, so that cutting a few pages off a long leaf copies only those.
        upper_pages, lower.pages = lower.pages, lower.pages[num_pages:]
        del upper_pages[num_pages:]
        assert parent is not None, "only nodes in the tree are split"
        upper = RadixNode(
            salt=lower.salt,
            key=lower.key[:cut],
            pages=upper_pages,
            parent=parent,
            serial=next(self._serials),
            created=lower.created,
            last_used=lower.last_used,
            num_uses=lower.num_uses,
            priority=lower.priority,
            lock_count=lower.lock_count,
            last_step=lower.last_step,
        )
        parent.children[self._child_key(lower.salt, lower.key, 0)] = upper
        lower.key = lower.key[cut:]
        lower.parent = upper
        upper.children[self._child_key(lower.salt, lower.key, 0)] = lower
        return upper

    def _add_leaf(self, leaf: RadixNode) -> RadixNode:
        assert leaf.parent is not None, "the root is no leaf"
        leaf.parent.children[self._child_key(leaf.salt, leaf.key, 0)] = leaf
        self._num_evictable_pages += len(leaf.pages)
        self._change_counter += 1
        self._queue(leaf)
        if self._listeners:
            num_tokens = len(leaf.pages) * self.page_size
            self._emit(Stored(salt=leaf.salt, prefix=self._prefix(leaf), num_tokens=num_tokens))
        return leaf

    def _is_evictable(self, node: RadixNode) -> bool:
        return node.parent is not None and not node.children and node.lock_count == 0

    def _queue(self, node: RadixNode) -> None:
        """Give an evictable leaf its entry in the heap, unless it has one."""
        if not node.queued and self._is_evictable(node):
            node.queued = True
            heapq.heappush(self._heap, (self._order(node), node.serial, node))

    def _evict(self, num_pages: int, newest_step: int | None) -> int:
        """Remove up to `num_pages` pages from leaves whose last step is at most `newest_step` (None: any)."""
        num_removed = 0
        in_flight: list[RadixNode] = []
        while num_removed < num_pages and self._heap:
            order, _, node = heapq.heappop(self._heap)
            node.queued = False
            if self._is_evictable(node) and self._order(node) != order:
                # Used since it was queued, so its turn comes later: orders only rise.
                self._queue(node)
            elif self._is_evictable(node) and newest_step is not None and node.last_step > newest_step:
                in_flight.append(node)
            elif self._is_evictable(node):
                num_spared = num_removed + len(node.pages) - num_pages
                if num_spared > 0:
                    # Splitting first leaves the cut node without a parent: a stale match of it is caught.
                    self._split(node, num_spared)
                num_removed += len(node.pages)
                self._remove(node)
        for node in in_flight:
            self._queue(node)
        return num_removed

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None, "the root is never evicted"
        prefix = self._prefix(leaf) if self._listeners else b""
        del parent.children[self._child_key(leaf.salt, leaf.key, 0)]
        leaf.parent = None
        self._num_evictable_pages -= len(leaf.pages)
        self._change_counter += 1
        self._allocator.release(leaf.pages, leaf.last_step)
        self._queue(parent)
        if self._listeners:
            self._emit(Removed(salt=leaf.salt, prefix=prefix, num_tokens=len(leaf.pages) * self.page_size))

    def _prefix(self, node: RadixNode) -> bytes:
        return b"".join(above.key for above in reversed(self._path_up(node)))

    def _emit(self, event: CacheEvent) -> None:
        for listener in tuple(self._listeners):
            listener(event)
