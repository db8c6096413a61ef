"""What texts are, by rules of characters, sequences, alternatives, repetitions and other rules; and those rules as a network
of states over UTF-8 bytes (Thompson's, with calls).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

MAX_NETWORK: Final = 100_000  # states
END: Final = 0  # the state at the end of every rule
# Characters whose UTF-8 has one length; between the third and the fourth lie surrogates, which have none.
_LENGTHS: Final = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))

Ranges = tuple[tuple[int, int], ...]
ByteRanges = tuple[tuple[int, int], ...]


class Unsupported(ValueError):
    """No automaton is made of this here; it may be right all the same."""


class Characters(NamedTuple):
    """One character. `ranges`: of code points, both ends included."""

    ranges: Ranges


class Concatenation(NamedTuple):
    """One after the other; without parts the empty text."""

    parts: tuple[Node, ...]


class Alternatives(NamedTuple):
    """Any one of them."""

    parts: tuple[Node, ...]


class Repetition(NamedTuple):
    """`least` to `most` times, without end if None."""

    part: Node
    least: int
    most: int | None


class Reference(NamedTuple):
    """A text of another rule."""

    name: str


Node = Characters | Concatenation | Alternatives | Repetition | Reference


class Network:
    """Rules as states: steps by ranges of bytes, free steps, and calls of rules, which return. Immutable once made.

    Raises: Unsupported if it would be too large, if a rule is not there, or if one begins with itself.
    """

    def __init__(self, rules: Mapping[str, Node], root: str) -> None:
        self.steps: list[list[tuple[int, int, int]]] = [[]]
        self.free: list[list[int]] = [[]]
        self.calls: list[list[tuple[int, int]]] = [[]]  # (the rule's first state, the state to return to)
        self._rules = {name: self._state() for name in rules}
        if root not in rules:
            raise Unsupported(f"it has no rule {root}")
        self.start = self._rules[root]
        for name, node in rules.items():
            self.free[self._add(node, self._rules[name])].append(END)
        edges = {edge for steps in self.steps for low, high, _ in steps for edge in (low, high + 1)}
        bounds = sorted({0, 256} | edges)
        self.num_classes = len(bounds) - 1
        self.classes = np.repeat(np.arange(self.num_classes, dtype=np.uint8), np.diff(bounds))  # [256], of each byte
        self._refuse_left_recursion()
        self.is_recursive = _is_cyclic({name: set(_references(node)) for name, node in rules.items()})
        self._keep(self._ending(by_bytes=True))
        self.moves = [list(self._by_class(steps)) for steps in self.steps]  # the steps: (class, target)
        backs = {back for calls in self.calls for _, back in calls}
        self.only_returns = {back: self._leads_to_end_only(back) for back in backs}

    def _state(self) -> int:
        if len(self.steps) >= MAX_NETWORK:
            raise Unsupported("it is too large")
        self.steps.append([])
        self.free.append([])
        self.calls.append([])
        return len(self.steps) - 1

    def _add(self, node: Node, start: int) -> int:
        """Lead from `start` through `node`. Returns where it ends."""
        match node:
            case Characters(ranges):
                return self._characters(ranges, start)
            case Concatenation(parts):
                for part in parts:
                    start = self._add(part, start)
                return start
            case Alternatives(parts):
                end = self._state()
                for part in parts:
                    self.free[self._add(part, self._behind(start))].append(end)
                return end
            case Repetition(part, least, most):
                for _ in range(least):
                    num_before, start = len(self.steps), self._add(part, start)
                    if len(self.steps) == num_before:
                        break  # the empty text, of which a count may ask for billions
                if most is None:
                    return self._endless(part, start)
                return self._up_to(part, start, most - least) if most > least else start
            case Reference(name):
                if name not in self._rules:
                    raise Unsupported(f"it has no rule {name}")
                end = self._state()
                self.calls[start].append((self._rules[name], end))
                return end

    def _behind(self, start: int) -> int:
        state = self._state()
        self.free[start].append(state)
        return state

    def _endless(self, part: Node, start: int) -> int:
        again = self._behind(start)  # nothing that comes before may be repeated with it
        self.free[self._add(part, again)].append(again)
        return self._behind(again)

    def _up_to(self, part: Node, start: int, times: int) -> int:
        end = self._state()
        for _ in range(times):
            self.free[start].append(end)
            start = self._add(part, self._behind(start))
        self.free[start].append(end)
        return end

    def _characters(self, ranges: Ranges, start: int) -> int:
        end = self._state()
        # What may be left of a character → the state before it.
        before: dict[tuple[ByteRanges, ...], int] = {((),): end}

        def add(texts: Iterable[ByteRanges], state: int) -> None:
            rests: dict[tuple[int, int], list[ByteRanges]] = {}
            for first, *rest in texts:
                rests.setdefault(first, []).append(tuple(rest))
            for first, left in rests.items():
                key = tuple(left)
                if key not in before:
                    before[key] = self._state()
                    add(key, before[key])
                self.steps[state].append((*first, before[key]))

        add(_texts(ranges), start)
        return end

    def _keep(self, useful: set[int]) -> None:
        """Leave out what leads to no end."""
        for state in range(len(self.steps)):
            self.steps[state] = [step for step in self.steps[state] if step[2] in useful]
            self.free[state] = [each for each in self.free[state] if each in useful]
            self.calls[state] = [each for each in self.calls[state] if useful.issuperset(each)]

    def _leads_to_end_only(self, state: int) -> bool:
        """A call that returns there need not: its end is its caller's."""
        seen, todo = {state}, [state]
        while todo:
            at = todo.pop()
            if self.steps[at] or self.calls[at]:
                return False
            more = [each for each in self.free[at] if each not in seen]
            seen.update(more)
            todo += more
        return True

    def _free_of_bytes(self, start: int, empties: Set[int]) -> set[int]:
        """What can be reached without a byte. `empties`: first states of rules that may be passed over."""
        seen, todo = {start}, [start]
        while todo:
            at = todo.pop()
            returns = [back for rule, back in self.calls[at] if rule in empties]
            more = [each for each in (*self.free[at], *returns) if each not in seen]
            seen.update(more)
            todo += more
        return seen

    def _ending(self, *, by_bytes: bool) -> set[int]:
        """The states from which the end of their rule can be reached, with bytes on the way or without any."""
        before: list[list[tuple[int, int]]] = [[] for _ in self.steps]  # the states before, and what these need besides
        for state, (steps, free, calls) in enumerate(zip(self.steps, self.free, self.calls, strict=True)):
            for target in (*(target for _, _, target in steps if by_bytes), *free):
                before[target].append((state, END))
            for rule, back in calls:
                before[rule].append((state, back))
                before[back].append((state, rule))
        reached, todo = {END}, [END]
        while todo:
            more = {state for state, other in before[todo.pop()] if state not in reached and other in reached}
            reached |= more
            todo += more
        return reached

    def _refuse_left_recursion(self) -> None:
        """A rule that begins with itself would be called without end."""
        empties = self._ending(by_bytes=False)
        begins = {start: self._called(self._free_of_bytes(start, empties)) for start in self._rules.values()}
        if _is_cyclic(begins):
            raise Unsupported("a rule begins with itself")

    def _by_class(self, steps: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
        for low, high, target in steps:
            yield from ((each, target) for each in range(self.classes[low], self.classes[high] + 1))

    def _called(self, states: Iterable[int]) -> set[int]:
        return {rule for state in states for rule, _ in self.calls[state]}


def _references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Repetition(part):
            yield from _references(part)
        case Concatenation(parts) | Alternatives(parts):
            for part in parts:
                yield from _references(part)


def _is_cyclic(graph: Mapping[Any, Set[Any]]) -> bool:
    """Whether one can come back to where one was. All that is led to must be in it."""
    before: dict[Any, list[Any]] = {each: [] for each in graph}
    num_left = {}
    for each, others in graph.items():
        num_left[each] = len(others)
        for other in others:
            before[other].append(each)
    todo = [each for each, num in num_left.items() if not num]
    for done in todo:
        for each in before[done]:
            num_left[each] -= 1
            if not num_left[each]:
                todo.append(each)
    return len(todo) < len(graph)


@lru_cache(maxsize=64)
def _texts(ranges: Ranges) -> tuple[ByteRanges, ...]:
    """Large classes come again and again where they are counted."""
    return tuple(each for low, high in ranges for each in utf8_ranges(low, high))


def utf8_ranges(low: int, high: int) -> Iterator[ByteRanges]:
    """The characters from `low` to `high` as byte ranges: any byte of the first, then any of the second, …"""
    for first, last in _LENGTHS:
        a, b = max(low, first), min(high, last)
        if a <= b:
            yield from _byte_ranges(chr(a).encode(), chr(b).encode())


def _byte_ranges(low: bytes, high: bytes) -> Iterator[ByteRanges]:
    a, b, num_more = low[0], high[0], len(low) - 1
    least, most = b"\x80" * num_more, b"\xbf" * num_more
    if a == b and num_more:
        yield from (((a, a), *rest) for rest in _byte_ranges(low[1:], high[1:]))
        return
    if low[1:] != least:
        yield from (((a, a), *rest) for rest in _byte_ranges(low[1:], most))
        a += 1
    if high[1:] != most:
        yield from (((b, b), *rest) for rest in _byte_ranges(least, high[1:]))
        b -= 1
    if a <= b:
        yield ((a, b), *[(0x80, 0xBF)] * num_more)
