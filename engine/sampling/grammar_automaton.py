"""Structured output by automata with a mask a state: a step looks its masks up.

Regular expressions, grammars in which no rule begins with itself, and any object of JSON. What has too large an automaton,
what is written otherwise than the standard library's own expressions, and schemas, a grammar library serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..grammar_session import CompiledGrammar, GrammarBackend, GrammarSpec
from .automaton import DEAD, MAX_PLACES_IN_ALL, MAX_STATES, START, Automaton
from .grammar_sources import json_schema
from .patterns import gbnf_rules, regex_rules
from .schema_rules import schema_rules
from .text_rules import Network, Node, Unsupported
from .token_trie import TokenTrie

MAX_BYTES: Final = 64 << 20  # of one grammar's different masks
EAGER_STATES: Final = 32  # where rules are parts of themselves: so many, from the start on, have their masks at once
MAX_PLACES_A_MASK: Final = (
    20_000  # that may be met for a mask which is made while texts are written: tens of milliseconds
)
_OVER: Final = -1  # behind an end token


_READERS: Final[Mapping[str, Callable[[GrammarSpec], dict[str, Node]]]] = {
    "regex": lambda spec: regex_rules(spec.source),
    "ebnf": lambda spec: gbnf_rules(spec.source),
    "json_schema": lambda spec: schema_rules(json_schema(spec)),
    "json_object": lambda spec: schema_rules(json_schema(spec)),
}


class AutomatonBackend:
    """`token_bytes`: what each id of the model's vocabulary adds to a text, nothing for ids that add none; `end_ids`: those
    that may follow a complete text; `library`: serves all else.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int], library: GrammarBackend) -> None:
        self._token_bytes = token_bytes
        self._end_ids = frozenset(end_ids)
        self._library = library
        self._trie: TokenTrie | None = None  # made for the first that needs it

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises: RequestError."""
        read = _READERS.get(spec.kind)
        if read is not None:
            try:
                network = Network(read(spec), "root")
                self._trie = self._trie or TokenTrie(self._token_bytes, self._end_ids)
                return AutomatonGrammar(network, self._trie)
            except (Unsupported, RecursionError):
                pass
        return self._library.compile_blocking(spec)


class AutomatonGrammar:
    """A compiled grammar. Raises: Unsupported if it is too large."""

    def __init__(self, network: Network, trie: TokenTrie) -> None:
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
        return self._masked.mask(self._states[-1], MAX_PLACES_A_MASK)

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

    def __init__(self, network: Network, trie: TokenTrie) -> None:
        self._automaton = Automaton(network)
        self._trie = trie
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
            self.mask(state, MAX_PLACES_IN_ALL)
            state += 1
            if self.is_full:
                raise Unsupported("it has too many states")
        if state == len(self._automaton):
            self._automaton.close()

    def mask(self, state: int, max_places: int) -> bytes:
        """Raises: Unsupported if more places than that have to be met for it."""
        mask = self._masks.get(state)
        if mask is None:
            self._automaton.num_places_left = max_places
            mask = self._trie.mask(self._automaton, state)
            mask = self._masks[state] = self._different.setdefault(mask, mask)
        return mask

    def after(self, state: int, token_id: int) -> int:
        """The state behind a token."""
        if token_id in self._trie.end_ids:
            return _OVER if self._automaton.accepts[state] else DEAD
        text = self._trie.token_bytes[token_id]
        return self._automaton.after(state, text) if text else DEAD
