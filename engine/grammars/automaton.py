"""The states that texts of a network's rules lead to, numbered as they are met.

What a text leads to is a set of places, each a state of the network and the states to return to; such a set is a state here
(subsets). Where no rule calls itself there are finitely many; otherwise texts that nest deeper meet new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from .text_rules import END, Network, Unsupported

MAX_STATES: Final = 16_384
MAX_PLACES: Final = 2048  # where one text may lead at once
MAX_PLACES_IN_ALL: Final = 200_000
_PLACE_BYTES: Final = 600  # roughly, of a place in its set, with what leads there
_STATE_BYTES: Final = 600  # roughly, of a state of the network
DEAD, START = 0, 1  # states of every automaton: what no text leads on from, and where a text begins
UNKNOWN: Final = -1
_BOTTOM: Final = 0  # nothing to return to

Place = tuple[int, int]  # a state of the network, and the number of a stack


class Automaton:
    """The numbered states of a network, from START on in the order in which they were met.

    Raises, also as it grows: Unsupported.
    `table` [states or more, classes] int32: the state after a byte of each class; a row of UNKNOWN where nobody came yet.
    `accepts`: where a text may end.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.classes = network.classes  # [256] uint8, of each byte
        self.class_of = network.classes.tobytes()  # the same
        self._rows: dict[int, tuple[int, ...]] = {}
        self.table = np.full((64, network.num_classes), UNKNOWN, dtype=np.int32)
        self.table[DEAD] = DEAD
        self.accepts = [False]
        self._sets: list[frozenset[Place]] = [frozenset()]
        self._numbers: dict[frozenset[Place], int] = {frozenset(): DEAD}
        self._known: dict[frozenset[Place], int] = {}  # the same, by the places from which free steps lead there
        self._nearby: dict[int, tuple[list[tuple[int, tuple[int, ...]]], bool]] = {}
        self._num_places = 0
        self._num_held = 0  # places in the sets
        self.num_places_left = MAX_PLACES_IN_ALL  # that may be met: whoever is in a hurry sets it
        self._stacks: list[Place] = [(END, _BOTTOM)]
        self._stack_numbers: dict[Place, int] = {}
        if self._number([(network.start, _BOTTOM)]) != START:
            raise Unsupported("it has no text")

    def __len__(self) -> int:
        return len(self.accepts)

    @property
    def num_bytes(self) -> int:
        return 3 * self.table.nbytes + self._num_held * _PLACE_BYTES + len(self._network.steps) * _STATE_BYTES

    @property
    def is_full(self) -> bool:
        return len(self) > MAX_STATES or self._num_places > MAX_PLACES_IN_ALL

    def close(self) -> None:
        """Keep the table only. Every row must be known."""
        self._sets.clear()
        self._num_held = 0
        self._numbers.clear()
        self._known.clear()
        self._nearby.clear()

    def adopted(self, other: Automaton, states: Iterable[int]) -> list[int]:
        """The states that are here what those are in another of the same network, which is not closed."""
        stacks = {_BOTTOM: _BOTTOM}  # there → here

        def here(stack: int) -> int:
            above = []
            while stack not in stacks:
                above.append(stack)
                stack = other._stacks[stack][1]
            for each in reversed(above):
                back, below = other._stacks[each]
                stacks[each] = self._pushed(back, stacks[below])
                stack = each
            return stacks[stack]

        return [self._number([(at, here(stack)) for at, stack in other._sets[state]]) for state in states]

    def row(self, state: int) -> tuple[int, ...]:
        """The states behind it, by the class of the next byte. May meet new states."""
        row = self._rows.get(state)
        if row is None:
            targets: dict[int, set[Place]] = {}
            for at, stack in self._sets[state]:
                for each, target in self._network.moves[at]:
                    targets.setdefault(each, set()).add((target, stack))
            found = [DEAD] * self.table.shape[1]
            for each, places in targets.items():
                found[each] = self._number(places)
            row = self._rows[state] = tuple(found)
            self.table[state] = row
        return row

    def stays(self, state: int) -> bool:
        """Whether it does, after some byte."""
        return state in self.row(state)

    def after(self, state: int, text: bytes) -> int:
        """The state behind these bytes."""
        for each in text.translate(self.class_of):
            state = self.row(state)[each]
            if state == DEAD:
                break
        return state

    def know(self, states: np.ndarray[Any, Any]) -> None:
        """Fill the rows of all of these."""
        for state in set(states[self.table[states, 0] == UNKNOWN].tolist()):
            self.row(state)

    def _number(self, places: Iterable[Place]) -> int:
        """Of all the places that can be reached from these without a byte."""
        key = frozenset(places)
        number = self._known.get(key)
        if number is None:
            reached = self._without_byte(key)
            number = self._numbers.get(reached)
            if number is None:
                if len(self) > 2 * MAX_STATES or self.num_places_left < 0:
                    raise Unsupported("its texts nest in too many ways")
                number = self._numbers[reached] = len(self)
                self._sets.append(reached)
                self._num_held += len(reached)
                self.accepts.append((END, _BOTTOM) in reached)
                if number == len(self.table):
                    self.table = np.concatenate((self.table, np.full_like(self.table, UNKNOWN)))
            self._known[key] = number
        return number

    def _without_byte(self, places: frozenset[Place]) -> frozenset[Place]:
        """What can be reached from these places without a byte, and has a next byte or is the end."""
        kept: set[Place] = set()
        seen, todo = set(places), list(places)
        while todo:
            state, stack = todo.pop()
            near, ends = self._near(state)
            for each, calls in near:
                top = stack
                for back in calls:
                    top = self._pushed(back, top)
                kept.add((each, top))
            if ends and stack == _BOTTOM:
                kept.add((END, _BOTTOM))
            elif ends and self._stacks[stack] not in seen:
                seen.add(self._stacks[stack])
                todo.append(self._stacks[stack])
            if len(kept) + len(seen) > MAX_PLACES:
                raise Unsupported("it can be read in too many ways")
        self._num_places += len(kept) + len(seen)
        self.num_places_left -= len(kept) + len(seen)
        return frozenset(kept)

    def _near(self, start: int) -> tuple[list[tuple[int, tuple[int, ...]]], bool]:
        """The same for one state of the network, whatever is below it: with the calls on the way, and whether its rule
        can end there.
        """
        known = self._nearby.get(start)
        if known is None:
            network = self._network
            place: tuple[int, tuple[int, ...]] = (start, ())
            seen, todo = {place}, [place]
            while todo:
                state, calls = todo.pop()
                more = [(each, calls) for each in network.free[state]]
                for rule, back in network.calls[state]:
                    more.append((rule, calls if network.only_returns[back] else (*calls, back)))
                if state == END and calls:
                    more.append((calls[-1], calls[:-1]))
                more = [each for each in more if each not in seen]
                seen.update(more)
                todo += more
                if len(seen) > 8 * MAX_PLACES:
                    raise Unsupported("it can be read in too many ways")
            known = self._nearby[start] = ([each for each in seen if network.moves[each[0]]], (END, ()) in seen)
        return known

    def _pushed(self, back: int, stack: int) -> int:
        if self._network.only_returns[back]:
            return stack
        top = (back, stack)
        number = self._stack_numbers.setdefault(top, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(top)
        return number
