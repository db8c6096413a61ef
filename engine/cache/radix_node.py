"""What the radix tree is made of: nodes, the orders in which leaves are evicted, and the records it hands out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

ChildKey: TypeAlias = tuple[str | None, bytes]
EvictionPolicy: TypeAlias = Literal["lru", "lfu", "fifo", "priority"]


@dataclass(slots=True, eq=False, kw_only=True)
class RadixNode:
    """A run of whole pages below its parent's. Owned and written by the tree; others only hand it back.

    Lifetime: a node that is locked, or lies above a locked one, stays; any other may be gone after the next call that
    changes the tree. A detached node has no parent, and the tree refuses it.
    """

    salt: str | None
    key: bytes
    pages: list[int]
    parent: "RadixNode | None"
    serial: int
    created: int
    last_used: int
    num_uses: int = 1
    priority: int = 0
    # Locks on this node and on all below it.
    lock_count: int = 0
    # The last launched step that may read these pages; -1 for none.
    last_step: int = -1
    # Whether the eviction heap has an entry for this node: at most one, possibly outdated.
    queued: bool = False
    children: "dict[ChildKey, RadixNode]" = field(default_factory=dict)


# Lowest first. A node's value may only rise while it is in the tree: the lazy heap relies on that.
EVICTION_ORDERS: Mapping[EvictionPolicy, Callable[[RadixNode], tuple[int, int]]] = MappingProxyType(
    {
        "lru": lambda node: (node.last_used, 0),
        "lfu": lambda node: (node.num_uses, node.last_used),
        "fifo": lambda node: (node.created, 0),
        "priority": lambda node: (node.priority, node.last_used),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest cached prefix. `node` ends exactly there (the root for none); `pages` holds its `num_tokens` tokens.

    Lifetime: until the next call that changes the tree, unless `node` is locked before.
    """

    node: RadixNode
    pages: list[int]
    num_tokens: int


class DuplicatePage(NamedTuple):
    """Page `page_index` of the inserted prefix is in the tree as `tree_page`, the canonical one; the caller's is spare."""

    page_index: int
    own_page: int
    tree_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertResult:
    """What became of the inserted pages.

    The tree owns the first `num_tree_pages` positions (all of them, or none if the cache is disabled), of which the
    first `num_matched_pages` were in it before. The caller still owns its page of each duplicate and every later page.
    `node` ends at the last position that the tree owns.
    """

    node: RadixNode
    num_tree_pages: int
    num_matched_pages: int
    duplicates: list[DuplicatePage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The last `num_tokens` tokens of `prefix` (int32 bytes from the first token on) became cached."""

    salt: str | None
    prefix: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The last `num_tokens` tokens of `prefix` (int32 bytes from the first token on) are cached no longer."""

    salt: str | None
    prefix: bytes
    num_tokens: int


CacheEvent: TypeAlias = Stored | Removed
