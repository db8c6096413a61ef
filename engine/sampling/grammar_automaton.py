"""Structured output by automata with a mask a state: a step looks its masks up.

Regular expressions, grammars in which no rule begins with itself, and any object of JSON. What has too large an automaton,
what is written otherwise than the standard library's own expressions, and schemas, a grammar library serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..grammar_session import CompiledGrammar, GrammarBackend, GrammarSpec
from .automaton import DEAD, MAX_STATES, START, Automaton
from .patterns import gbnf_rules, regex_rules
from .text_rules import Network, Unsupported

MAX_BYTES: Final = 64 << 20  # of one grammar's different masks
MAX_LOOPS: Final = 64
EAGER_STATES: Final = 512  # where rules are parts of themselves: so many, from the start on, are made at once
# RFC 8259, but for white space: a model that likes it must not fill its answer with it, but may indent.
JSON_OBJECT: Final = r"""
root ::= "{" ws (member ("," ws member)*)? "}"
member ::= string ws ":" ws value ws
value ::= root | "[" ws (value ws ("," ws value ws)*)? "]" | string | number | "true" | "false" | "null"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= " "? | "\n" [ \t]{0,20}
"""
_AT_ONCE: Final = 100_000  # tokens that may be looked at: for so long the interpreter's lock may be held
_STATE_COST: Final = 1000  # of a state whatever comes behind it, in such tokens
_OVER: Final = -1  # behind an end token

_Indices = np.ndarray[Any, np.dtype[np.int64]]


class AutomatonBackend:
    """`token_bytes`: what each id of the model's vocabulary adds to a text, nothing for ids that add none; `end_ids`: those
    that may follow a complete text; `library`: serves all else.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int], library: GrammarBackend) -> None:
        self._token_bytes = token_bytes
        self._end_ids = frozenset(end_ids)
        self._library = library
        self._trie: _TokenTrie | None = None  # made for the first that needs it

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises: RequestError."""
        if spec.kind in ("regex", "ebnf", "json_object"):
            try:
                rules = regex_rules(spec.source) if spec.kind == "regex" else gbnf_rules(spec.source or JSON_OBJECT)
                network = Network(rules, "root")
                self._trie = self._trie or _TokenTrie(self._token_bytes, self._end_ids)
                return AutomatonGrammar(network, self._trie)
            except (Unsupported, RecursionError):
                pass
        return self._library.compile_blocking(spec)


class AutomatonGrammar:
    """A compiled grammar. Raises: Unsupported if it is too large."""

    def __init__(self, network: Network, trie: _TokenTrie) -> None:
        self._network = network
        self._trie = trie
        self._masked = _MaskedStates(network, trie)
        self._masked.prepare(EAGER_STATES if network.is_recursive else MAX_STATES)

    @property
    def num_bytes(self) -> int:
        return self._masked.num_bytes

    def session(self) -> AutomatonSession:
        if self._masked.is_full:  # by the depths of many texts: those that run keep theirs
            self._masked = _MaskedStates(self._network, self._trie)
        return AutomatonSession(self._masked)


class AutomatonSession:
    """The state behind each token."""

    __slots__ = ("_masked", "_states")

    def __init__(self, masked: _MaskedStates) -> None:
        self._masked = masked
        self._states = [START]

    @property
    def is_over(self) -> bool:
        return self._states[-1] == _OVER

    def fill(self) -> bytes:
        return self._masked.mask(self._states[-1])

    def accept(self, token_id: int) -> bool:
        behind = self._masked.after(self._states[-1], token_id)
        if behind == DEAD:
            return False
        self._states.append(behind)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self._states[len(self._states) - num_tokens :]


class _MaskedStates:
    """An automaton's states and their masks. What was not prepared is made when a text comes there."""

    def __init__(self, network: Network, trie: _TokenTrie) -> None:
        self._automaton = Automaton(network)
        self._trie = trie
        self._token_classes = trie.bytes_in(self._automaton)
        self._loops: dict[bytes, _Loop] = {}  # by the classes of bytes that stay
        self._masks: dict[int, bytes] = {}
        self._different: dict[bytes, bytes] = {}

    @property
    def num_bytes(self) -> int:
        return self._automaton.num_bytes + len(self._different) * self._trie.num_mask_bytes

    @property
    def is_full(self) -> bool:
        return self._automaton.is_full or len(self._different) * self._trie.num_mask_bytes > MAX_BYTES

    def prepare(self, num_states: int) -> None:
        """The first states, breadth first; raises if there are more than there may be."""
        state = START
        while state < min(len(self._automaton), num_states + 1):
            self._automaton.explore(state)
            state += 1
            if self.is_full:
                raise Unsupported("it has too many states")
        costs = np.cumsum(self._trie.costs(self._automaton, state))
        first = START
        while first < state:
            end = max(first + 1, int(np.searchsorted(costs, costs[first - 1] + _AT_ONCE, side="right")))
            self._make(range(first, end))
            first = end
            if self.is_full:
                raise Unsupported("it has too many masks")
        if len(self._masks) == len(self._automaton) - 1:
            self._automaton.close()

    def mask(self, state: int) -> bytes:
        mask = self._masks.get(state)
        if mask is None:
            self._make(range(state, state + 1))
            mask = self._masks[state]
        return mask

    def after(self, state: int, token_id: int) -> int:
        """The state behind a token."""
        if token_id in self._trie.end_ids:
            return _OVER if self._automaton.accepts[state] else DEAD
        text = self._trie.token_bytes[token_id]
        return self._automaton.after(state, text) if text else DEAD

    def _make(self, states: range) -> None:
        loops = [self._loop(state) for state in states]
        allowed = self._trie.allowed(self._automaton, self._token_classes, loops, states[0])
        for state, mask in zip(states, _packed(allowed), strict=True):
            self._masks[state] = self._different.setdefault(mask, mask)

    def _loop(self, state: int) -> _Loop:
        """The tokens that do not leave the state. Many states share them: those within texts of JSON, wherever they are."""
        self._automaton.know(np.array([state]))
        stays = self._automaton.table[state] == state
        key = stays.tobytes()
        loop = self._loops.get(key)
        if loop is None:
            loop = self._trie.loop(stays[self._token_classes])
            if len(self._loops) < MAX_LOOPS:
                self._loops[key] = loop
        return loop


class _Loop(NamedTuple):
    """What a set of bytes does to the tokens: those of such bytes only, and the nodes where others leave the set."""

    inside: _Indices  # ids, and the column behind all ids
    exits: _Indices


class _TokenTrie:
    """All tokens as one tree of bytes. Nodes are numbered by depth, and the children of one follow one another."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: frozenset[int]) -> None:
        self.token_bytes = token_bytes
        self.end_ids = end_ids
        self.num_mask_bytes = -(-len(token_bytes) // 32) * 4
        parents, steps, depths, tokens = [0], [0], [0], [-1]
        twins: list[tuple[int, int]] = []  # a token, and one before it that is spelled alike
        path = [0]
        before = b""
        for text, token_id in _sorted(token_bytes):
            shared = next((at for at, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
            del path[shared + 1 :]
            for byte in text[len(path) - 1 :]:
                parents.append(path[-1])
                steps.append(byte)
                depths.append(len(path))
                tokens.append(-1)
                path.append(len(parents) - 1)
            if text == before:
                twins.append((token_id, tokens[path[-1]]))
            else:
                tokens[path[-1]] = token_id
            before = text
        order = np.argsort(depths, kind="stable")
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        self._twins = np.array(twins, dtype=np.int64).reshape(-1, 2)
        self._bytes = np.array(steps, dtype=np.uint8)[order]
        self._tokens = np.array(tokens, dtype=np.int64)[order]  # each node's; without one the column behind all ids
        self._num_children = np.bincount(places[np.array(parents[1:], dtype=np.int64)], minlength=len(order))
        self._first_child = 1 + np.cumsum(self._num_children) - self._num_children
        firsts = [text[0] for text in token_bytes if text]
        self._num_behind = np.bincount(np.array(firsts, dtype=np.int64), minlength=256)  # tokens, by first byte

    def costs(self, automaton: Automaton, num_states: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Of making the masks of the first states, whose rows are known: in tokens to be looked at."""
        alive = automaton.table[:num_states, automaton.classes] != DEAD
        return np.asarray(alive @ self._num_behind + _STATE_COST, dtype=np.int64)

    def bytes_in(self, automaton: Automaton) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Each node's byte, by its class."""
        return automaton.classes[self._bytes]

    def loop(self, staying: np.ndarray[Any, np.dtype[np.bool_]]) -> _Loop:
        """`staying` [nodes]: of each node's last byte."""
        inside: list[_Indices] = []
        exits: list[_Indices] = []
        nodes = np.zeros(1, dtype=np.int64)
        while len(nodes):
            _, children = self._children(nodes)
            stays = staying[children]
            exits.append(children[~stays])
            nodes = children[stays]
            inside.append(self._tokens[nodes])
        return _Loop(np.concatenate(inside), np.concatenate(exits))

    def allowed(
        self, automaton: Automaton, classes: np.ndarray[Any, np.dtype[np.uint8]], loops: Sequence[_Loop], first: int
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The ids that may come next, from each state on: [states, ids]. `classes`: `bytes_in` it."""
        allowed = np.zeros((len(loops), len(self.token_bytes) + 1), dtype=np.bool_)
        for row, loop in enumerate(loops):
            allowed[row, loop.inside] = True
        rows = np.repeat(np.arange(len(loops)), [len(loop.exits) for loop in loops])
        states, children = rows + first, np.concatenate([loop.exits for loop in loops])
        while len(children):
            automaton.know(states)
            behind = automaton.table[states, classes[children]]
            alive = np.flatnonzero(behind)
            rows, nodes = rows[alive], children[alive]
            allowed[rows, self._tokens[nodes]] = True
            parents, children = self._children(nodes)
            rows, states = rows[parents], behind[alive][parents]
        allowed[:, self._twins[:, 0]] = allowed[:, self._twins[:, 1]]
        allowed[:, list(self.end_ids)] = [[accepts] for accepts in automaton.accepts[first : first + len(loops)]]
        return allowed[:, :-1]

    def _children(self, nodes: _Indices) -> tuple[_Indices, _Indices]:
        """All children of these, and for each the place of its parent among them."""
        counts = self._num_children[nodes]
        parents = np.repeat(np.arange(len(nodes)), counts)
        return parents, np.arange(len(parents)) + (self._first_child[nodes] - (np.cumsum(counts) - counts))[parents]


def _sorted(token_bytes: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
    """By their bytes, those that add nothing left out. In small parts: one sort of all would keep the interpreter's lock."""
    parts: dict[bytes, list[tuple[bytes, int]]] = {}
    for token_id, text in enumerate(token_bytes):
        parts.setdefault(text[:2], []).append((text, token_id))
    parts.pop(b"", None)
    for start in sorted(parts):
        yield from sorted(parts[start])


def _packed(allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> Iterator[bytes]:
    """Each row as native int32: bit i of word w stands for id 32 w + i."""
    bits = np.packbits(allowed, axis=1, bitorder="little")
    words = np.zeros((len(bits), -(-allowed.shape[1] // 32) * 4), dtype=np.uint8)
    words[:, : bits.shape[1]] = bits
    return (row.tobytes() for row in words.view("<i4").astype(np.int32))
