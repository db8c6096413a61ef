"""Who waits, and in which order they are tried."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ..cache.radix_cache import RadixCache
from ..config import SchedulePolicy
from ..request import Request

WINDOW = 128  # so many of the oldest are ranked by their prefix; matching all that wait would cost milliseconds
MAX_PASSED = 512  # so many later arrivals may go before the oldest; then it is its turn


class WaitingQueue:
    """The waiting requests under one policy.

    `fcfs`: by arrival. `priority`: highest first, equals by arrival. `lpm` (longest prefix match) and `shortest-prefill`
    rank the oldest `window` by what the prefix tree has of them; a match is repeated only when the tree has changed.
    A retracted request comes back with its old place of arrival.
    """

    def __init__(self, policy: SchedulePolicy, tree: RadixCache, *, window: int = WINDOW) -> None:
        self._policy = policy
        self._window = window
        self._tree = tree
        self._keys: list[tuple[int, int]] = []  # (rank, arrival), sorted
        self._requests: dict[int, Request] = {}  # by arrival
        self._ranking: list[Request] | None = None
        self._matches: dict[int, int] = {}  # tokens in the tree, by arrival, as of `_tree_version`
        self._tree_version = -1
        self._num_passed = 0  # requests admitted before the oldest one, since it is the oldest
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        """By arrival, or by priority."""
        requests = self._requests
        return (requests[arrival] for _, arrival in self._keys)

    def add(self, request: Request) -> None:
        """Let a request wait, a new one or one that was retracted. O(log n) and a move of memory."""
        key = self._key(request)
        insort(self._keys, key)
        if self._keys[0] == key:
            self._num_passed = 0
        self._requests[request.arrival] = request
        self.num_tokens += len(request.ids)
        self._ranking = None

    def admit(self, request: Request) -> None:
        """Take out a request that goes on to run."""
        is_oldest = self._keys[0][1] == request.arrival
        self.remove(request)
        self._num_passed = 0 if is_oldest else self._num_passed + 1

    def remove(self, request: Request) -> None:
        """Take out a request that has ended."""
        index = bisect_left(self._keys, self._key(request))
        if index == 0:
            self._num_passed = 0
        del self._keys[index]
        del self._requests[request.arrival]
        self._matches.pop(request.arrival, None)
        self.num_tokens -= len(request.ids)
        self._ranking = None

    def clear(self) -> None:
        self._keys.clear()
        self._requests.clear()
        self._matches.clear()
        self._ranking = None
        self.num_tokens = 0

    def first(self, count: int) -> list[Request]:
        """Up to `count` requests, in the order in which they are to be tried."""
        requests = self._requests
        if self._policy in ("fcfs", "priority"):
            return [requests[arrival] for _, arrival in self._keys[:count]]
        ranked = self._ranked()[:count]
        if self._num_passed >= MAX_PASSED and self._keys:
            oldest = requests[self._keys[0][1]]
            ranked = [oldest, *(request for request in ranked if request is not oldest)]
        ranked.extend(requests[arrival] for _, arrival in self._keys[self._window : self._window + count - len(ranked)])
        return ranked

    def _key(self, request: Request) -> tuple[int, int]:
        return (-request.priority if self._policy == "priority" else 0, request.arrival)

    def _ranked(self) -> list[Request]:
        if self._tree.change_counter != self._tree_version:
            self._tree_version = self._tree.change_counter
            self._matches.clear()
            self._ranking = None
        if self._ranking is None:
            window = [self._requests[arrival] for _, arrival in self._keys[: self._window]]
            for request in window:
                if request.arrival not in self._matches:
                    ids = request.ids[:-1].tobytes()
                    self._matches[request.arrival] = self._tree.match_length(ids, request.salt)
            rank = self._num_to_compute if self._policy == "shortest-prefill" else self._num_unmatched_first
            window.sort(key=rank)  # stable: equals stay by arrival
            self._ranking = window
        return self._ranking

    def _num_unmatched_first(self, request: Request) -> int:
        return -self._matches[request.arrival]

    def _num_to_compute(self, request: Request) -> int:
        return len(request.ids) - self._matches[request.arrival]
