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
MAX_PLACES: Final = 4096  # where one text may lead at once
MAX_PLACES_IN_ALL: Final = 1_000_000
_PLACE_BYTES: Final = 100  # roughly, with its set
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
        self._translation = network.classes.tobytes()
        self.table = np.full((64, network.num_classes), UNKNOWN, dtype=np.int32)
        self.table[DEAD] = DEAD
        self.accepts = [False]
        self._sets: list[frozenset[Place]] = [frozenset()]
        self._numbers: dict[frozenset[Place], int] = {frozenset(): DEAD}
        self._known: dict[frozenset[Place], int] = {}  # the same, by the places from which free steps lead there
        self._num_places = 0
        self._stacks: list[Place] = [(END, _BOTTOM)]
        self._stack_numbers: dict[Place, int] = {}
        if self._number([(network.start, _BOTTOM)]) != START:
            raise Unsupported("it has no text")

    def __len__(self) -> int:
        return len(self.accepts)

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes + sum(map(len, self._sets)) * _PLACE_BYTES

    @property
    def is_full(self) -> bool:
        return len(self) > MAX_STATES or self._num_places > MAX_PLACES_IN_ALL

    def close(self) -> None:
        """Keep the table only. Every row must be known."""
        self._sets.clear()
        self._numbers.clear()
        self._known.clear()

    def explore(self, state: int) -> None:
        """Fill the state's row. May meet new states."""
        targets: dict[int, set[Place]] = {}
        for at, stack in self._sets[state]:
            for each, target in self._network.moves[at]:
                targets.setdefault(each, set()).add((target, stack))
        row = np.full(self.table.shape[1], DEAD, dtype=np.int32)
        for each, places in targets.items():
            row[each] = self._number(places)
        self.table[state] = row

    def after(self, state: int, text: bytes) -> int:
        """The state behind these bytes."""
        for each in text.translate(self._translation):
            if self.table.item(state, each) == UNKNOWN:
                self.explore(state)
            state = self.table.item(state, each)
            if state == DEAD:
                break
        return state

    def know(self, states: np.ndarray[Any, Any]) -> None:
        """Fill the rows of all of these."""
        unknown = states[self.table[states, 0] == UNKNOWN]
        for state in np.unique(unknown).tolist() if len(unknown) else ():
            self.explore(state)

    def _number(self, places: Iterable[Place]) -> int:
        """Of all the places that can be reached from these without a byte."""
        key = frozenset(places)
        number = self._known.get(key)
        if number is None:
            reached = self._without_byte(key)
            number = self._numbers.get(reached)
            if number is None:
                if len(self) > 2 * MAX_STATES or self._num_places > 2 * MAX_PLACES_IN_ALL:
                    raise Unsupported("its texts nest in too many ways")
                number = self._numbers[reached] = len(self)
                self._sets.append(reached)
                self.accepts.append((END, _BOTTOM) in reached)
                if number == len(self.table):
                    self.table = np.concatenate((self.table, np.full_like(self.table, UNKNOWN)))
            self._known[key] = number
        return number

    def _without_byte(self, places: frozenset[Place]) -> frozenset[Place]:
        network = self._network
        reached, todo = set(places), list(places)
        while todo:
            state, stack = todo.pop()
            more = [(each, stack) for each in network.free[state]]
            more += ((rule, self._pushed(back, stack)) for rule, back in network.calls[state])
            if state == END and stack != _BOTTOM:
                more.append(self._stacks[stack])
            more = [place for place in more if place not in reached]
            reached.update(more)
            todo += more
            if len(reached) > MAX_PLACES:
                raise Unsupported("it can be read in too many ways")
        self._num_places += len(reached)
        steps, ends = network.steps, (END, _BOTTOM)
        return frozenset(place for place in reached if steps[place[0]] or place == ends)

    def _pushed(self, back: int, stack: int) -> int:
        if self._network.only_returns[back]:
            return stack
        top = (back, stack)
        number = self._stack_numbers.setdefault(top, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(top)
        return number
