"""All tokens of a vocabulary as one tree of bytes, and the walks over it that make masks.

A walk meets each node that a text can reach with the state that it has there. Where many nodes are left it goes level by
level in numpy, where few are, node by node. Where a state stays what it is, as within a string of JSON, the tokens that
stay in it are known from the bytes that it takes, whatever automaton it belongs to.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .automaton import DEAD, Automaton

MAX_LOOPS: Final = 16
_ELSEWHERE: Final = -1  # in a loop: after a byte that leads nowhere, or behind an exit
_EXIT: Final = -2
_MANY: Final = 512  # nodes: with fewer below it, a loop is walked like anything else
_FEW: Final = 1024  # nodes: so many are walked one by one

_Indices = np.ndarray[Any, np.dtype[np.int64]]
_Places = np.ndarray[Any, np.dtype[np.int16]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]


class _Loop(NamedTuple):
    """Where texts lead from a state that comes back to itself after each of some characters. Once from the root of the tree
    on, and once from the nodes below it.
    """

    runs: tuple[_Places, _Places]  # [nodes]: 0 the state, 1 … within one of its characters, negative elsewhere
    exits: tuple[_Indices, _Indices]  # nodes, ascending, where a byte behind the state is of no such character


class TokenTrie:
    """Nodes are numbered depth first, so that all below one follow it at once. Node 0 is the root.

    `token_bytes`: what each id adds to a text, nothing for ids that add none; `end_ids`: those that may follow a text.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: frozenset[int]) -> None:
        self.token_bytes = token_bytes
        self.end_ids = end_ids
        self.num_mask_bytes = -(-len(token_bytes) // 32) * 4
        self._twins: list[tuple[int, int]] = []  # a token, and one before it that is spelled alike
        parents, steps, depths, tokens = self._nodes()
        self._parents = np.array(parents)
        self._bytes = np.array(steps, dtype=np.uint8)
        self._depths = np.array(depths)
        self._tokens = np.array(tokens)  # each node's; without one, the column behind all ids
        self._by_depth = np.split(np.argsort(self._depths, kind="stable"), np.cumsum(np.bincount(depths))[:-1])
        self._num_below = np.zeros(len(parents), dtype=np.int64)
        for nodes in reversed(self._by_depth[1:]):
            np.add.at(self._num_below, self._parents[nodes], 1 + self._num_below[nodes])
        self._firsts = np.zeros(len(parents), dtype=np.uint8)  # each node's first byte
        for child in np.flatnonzero(self._depths == 1).tolist():
            self._firsts[child : child + 1 + self._num_below[child]] = steps[child]
        self._num_children = np.bincount(self._parents[1:], minlength=len(parents))
        self._first_child = np.cumsum(self._num_children) - self._num_children
        self._children = 1 + np.argsort(self._parents[1:], kind="stable")  # those of node 0, then those of 1, …
        # The same for walks node by node.
        self._few = tuple(array("i", x.astype(np.int32).tobytes()) for x in (
            self._first_child, self._num_children, self._children, self._tokens))  # fmt: skip
        self._steps = bytes(steps)
        self._loops: dict[bytes, _Loop] = {}

    def _nodes(self) -> tuple[list[int], list[int], list[int], list[int]]:
        parents, steps, depths, tokens = [0], [0], [0], [-1]
        path = [0]
        before = b""
        for text, token_id in _sorted(self.token_bytes):
            shared = next((at for at, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
            del path[shared + 1 :]
            for byte in text[len(path) - 1 :]:
                parents.append(path[-1])
                steps.append(byte)
                depths.append(len(path))
                tokens.append(-1)
                path.append(len(parents) - 1)
            if text == before:
                self._twins.append((token_id, tokens[path[-1]]))
            else:
                tokens[path[-1]] = token_id
            before = text
        return parents, steps, depths, tokens

    def mask(self, automaton: Automaton, state: int) -> bytes:
        """The ids that may come next, as packed native int32: bit i of word w stands for id 32 w + i."""
        allowed = np.zeros(8 * self.num_mask_bytes + 1, dtype=np.bool_)
        nodes, states = self._begin(automaton, state, allowed)
        while len(nodes):
            walk = self._walk_few if self._num_below[nodes].sum() <= _FEW else self._walk_level
            nodes, states = walk(automaton, nodes, states, allowed)
        for token_id, twin in self._twins:
            allowed[token_id] = allowed[twin]
        for token_id in self.end_ids:
            allowed[token_id] = automaton.accepts[state]
        return np.packbits(allowed[:-1], bitorder="little").view("<i4").astype(np.int32).tobytes()

    def _begin(self, automaton: Automaton, state: int, allowed: _Flags) -> tuple[_Indices, _Indices]:
        """What is left below the root once all loops that begin there, or behind the first byte, are done."""
        if automaton.stays(state):
            loop = self._loop(automaton, state)
            allowed[self._tokens[loop.runs[0] >= 0]] = True
            return self._reached(automaton, loop.exits[0], np.array(state), allowed)
        row = automaton.row(state)
        behind: dict[int, list[int]] = {}
        for child in self._children[: self._num_children[0]].tolist():
            reached = row[automaton.class_of[self._steps[child]]]
            if reached != DEAD:
                behind.setdefault(reached, []).append(child)
        left: list[tuple[_Indices, _Indices]] = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
        for reached, children in behind.items():
            nodes = np.array(children)
            if self._num_below[nodes].sum() >= _MANY and automaton.stays(reached):
                firsts = np.zeros(256, dtype=np.bool_)
                firsts[self._bytes[nodes]] = True
                loop = self._loop(automaton, reached)
                allowed[self._tokens[(loop.runs[1] >= 0) & firsts[self._firsts]]] = True
                exits = loop.exits[1][firsts[self._firsts[loop.exits[1]]]]
                left.append(self._reached(automaton, exits, np.array(reached), allowed))
            else:
                allowed[self._tokens[nodes]] = True
                left.append((nodes, np.full(len(nodes), reached)))
        return np.concatenate([each for each, _ in left]), np.concatenate([each for _, each in left])

    def _walk_level(
        self, automaton: Automaton, nodes: _Indices, states: _Indices, allowed: _Flags
    ) -> tuple[_Indices, _Indices]:
        """All children of these nodes at once. Returns those that a text reaches, with their states."""
        counts = self._num_children[nodes]
        parents = np.repeat(np.arange(len(nodes)), counts)
        children = self._children[
            np.arange(len(parents)) + (self._first_child[nodes] - (np.cumsum(counts) - counts))[parents]
        ]
        automaton.know(states)
        return self._reached(automaton, children, states[parents], allowed)

    def _reached(
        self, automaton: Automaton, nodes: _Indices, above: _Indices, allowed: _Flags
    ) -> tuple[_Indices, _Indices]:
        """Those of `nodes` that a text reaches. `above`: the states of the nodes above them, or one for all."""
        states = automaton.table[above, automaton.classes[self._bytes[nodes]]]
        alive = np.flatnonzero(states)
        nodes = nodes[alive]
        allowed[self._tokens[nodes]] = True
        return nodes, states[alive].astype(np.int64)

    def _walk_few(
        self, automaton: Automaton, nodes: _Indices, states: _Indices, allowed: _Flags
    ) -> tuple[_Indices, _Indices]:
        """All below these nodes, one by one. Nothing is left then."""
        first_child, num_children, children, tokens = self._few
        steps, classes = self._steps, automaton.class_of
        found: list[int] = []
        todo = list(zip(nodes.tolist(), states.tolist(), strict=True))
        while todo:
            node, state = todo.pop()
            first, count = first_child[node], num_children[node]
            if count:
                row = automaton.row(state)
                for child in children[first : first + count]:
                    behind = row[classes[steps[child]]]
                    if behind != DEAD:
                        found.append(tokens[child])
                        todo.append((child, behind))
        allowed[found] = True
        return nodes[:0], states[:0]

    def _loop(self, automaton: Automaton, state: int) -> _Loop:
        table = _characters(automaton, state)[:, automaton.classes]
        key = table.tobytes()
        loop = self._loops.get(key)
        if loop is None:
            runs, exits = [], []
            for start in (0, 1):
                run = np.full(len(self._bytes), _ELSEWHERE, dtype=np.int16)
                run[self._by_depth[start]] = 0
                for nodes in self._by_depth[start + 1 :]:
                    above = run[self._parents[nodes]]
                    run[nodes] = np.where(above >= 0, table[np.maximum(above, 0), self._bytes[nodes]], _ELSEWHERE)
                runs.append(run)
                exits.append(np.flatnonzero(run == _EXIT))
            loop = _Loop((runs[0], runs[1]), (exits[0], exits[1]))
            # The thread that compiles walks too: each of these is one step to the other.
            if len(self._loops) >= MAX_LOOPS:
                self._loops.clear()
            self._loops[key] = loop
        return loop


def _characters(automaton: Automaton, state: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """The state and those within its characters of several bytes, numbered in the order of their bytes: [numbers, classes],
    what follows each, or that another state does.
    """
    numbers = {DEAD: _ELSEWHERE, state: 0}
    rows = [automaton.row(state)]
    for behind in rows[0][automaton.class_of[0x80] :]:
        _number_within(automaton, behind, numbers, rows, 3)
    return np.array([[numbers.get(behind, _EXIT) for behind in row] for row in rows], dtype=np.int16)


def _number_within(
    automaton: Automaton, state: int, numbers: dict[int, int], rows: list[tuple[int, ...]], num_left: int
) -> bool:
    """Whether nothing but the rest of a character leads on from the state, and back to where it began."""
    if state not in numbers and num_left:
        row = automaton.row(state)
        if all(_number_within(automaton, behind, numbers, rows, num_left - 1) for behind in dict.fromkeys(row)):
            numbers[state] = len(rows)
            rows.append(row)
    return state in numbers


def _sorted(token_bytes: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
    """By their bytes, those that add nothing left out. In small parts: one sort of all would keep the interpreter's lock."""
    parts: dict[bytes, list[tuple[bytes, int]]] = {}
    for token_id, text in enumerate(token_bytes):
        parts.setdefault(text[:2], []).append((text, token_id))
    parts.pop(b"", None)
    for start in sorted(parts):
        yield from sorted(parts[start])
