"""Structured output by automata with a mask a state: a step looks its masks up.

What is not read as rules here, or would have too large an automaton, a grammar library serves: see the page of this room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..errors import MisuseError
from ..grammar_session import MAX_ROLLBACK, CompiledGrammar, GrammarBackend, GrammarSpec
from .automaton import DEAD, MAX_PLACES_IN_ALL, MAX_STATES, START, Automaton
from .patterns import gbnf_rules, regex_rules
from .schema_rules import any_of, schema_rules
from .sources import choices, json_schema
from .text_rules import Network, Node, Unsupported
from .token_trie import TokenTrie

MAX_BYTES: Final = 64 << 20  # of one grammar's different masks
EAGER_STATES: Final = 32  # from the start on: their masks are made at once
EAGER_S: Final = 1.0  # of the compiling thread: further masks are made when a text comes to their states
MAX_PLACES_A_MASK: Final = 20_000  # that may be met for one while texts are written: tens of milliseconds
_OVER: Final = -1  # behind an end token

_READERS: Final[Mapping[str, Callable[[GrammarSpec], dict[str, Node]]]] = {
    "regex": lambda spec: regex_rules(spec.source),
    "ebnf": lambda spec: gbnf_rules(spec.source),
    "json_schema": lambda spec: schema_rules(json_schema(spec)),
    "json_object": lambda spec: schema_rules(json_schema(spec)),
    "choice": lambda spec: {"root": any_of(choices(spec.source))},
}


class AutomatonBackend:
    """`token_bytes`: what each id of the model's vocabulary adds to a text, nothing for ids that add none; `end_ids`: those
    that may follow a complete text; `library`: serves all else.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int], library: GrammarBackend) -> None:
        self._token_bytes = token_bytes
        self._end_ids = frozenset(end_ids)
        self._library = library
        self._trie: TokenTrie | None = None

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises: RequestError."""
        try:
            network = Network(_READERS[spec.kind](spec), "root")
            self._trie = self._trie or TokenTrie(self._token_bytes, self._end_ids)
            # What has no bounds in its source must show them now: later nobody else could serve it.
            is_open = spec.kind in ("regex", "ebnf") and not network.is_recursive
            return AutomatonGrammar(network, self._trie, MAX_STATES if is_open else EAGER_STATES)
        except (Unsupported, RecursionError):
            return self._library.compile_blocking(spec)


class AutomatonGrammar:
    """A compiled grammar. Raises: Unsupported if it is too large."""

    def __init__(self, network: Network, trie: TokenTrie, num_states: int) -> None:
        self._network = network
        self._trie = trie
        self._masked = _MaskedStates(network, trie)
        self._masked.prepare(num_states)

    @property
    def num_bytes(self) -> int:
        return self._masked.num_bytes

    def session(self) -> AutomatonSession:
        return AutomatonSession(self)

    def masked(self) -> _MaskedStates:
        """For who begins, or goes on from others that are full."""
        if self._masked.is_full:  # by the depths of many texts
            self._masked = _MaskedStates(self._network, self._trie)
        return self._masked


class AutomatonSession:
    """The state behind each token."""

    __slots__ = ("_grammar", "_masked", "_states")

    def __init__(self, grammar: AutomatonGrammar) -> None:
        self._grammar = grammar
        self._masked = grammar.masked()
        self._states = [START]

    @property
    def is_over(self) -> bool:
        return self._states[-1] == _OVER

    def fill(self) -> bytes:
        mask = self._masked.made.get(self._states[-1])
        return mask if mask is not None else self._current().mask(self._states[-1], MAX_PLACES_A_MASK)

    def accept(self, token_id: int) -> bool:
        behind = self._masked.after(self._states[-1], token_id)
        if behind == DEAD:
            return False
        self._states.append(behind)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Raises: MisuseError beyond what is kept."""
        if num_tokens >= len(self._states):
            raise MisuseError(f"only the last {len(self._states) - 1} tokens can be taken back, not {num_tokens}")
        del self._states[len(self._states) - num_tokens :]

    def _current(self) -> _MaskedStates:
        """Others may have filled the states up: then this text goes on elsewhere, and they end with the last that is there."""
        if self._masked.is_full:
            masked = self._grammar.masked()
            self._states = masked.adopted(self._masked, self._states[-1 - MAX_ROLLBACK :])
            self._masked = masked
        return self._masked


class _MaskedStates:
    """An automaton's states and their masks. What was not prepared is made when a text comes there."""

    def __init__(self, network: Network, trie: TokenTrie) -> None:
        self._automaton = Automaton(network)
        self._trie = trie
        self.made: dict[int, bytes] = {}
        self._different: dict[bytes, bytes] = {}

    @property
    def num_bytes(self) -> int:
        return self._automaton.num_bytes + len(self._different) * self._trie.num_mask_bytes

    @property
    def is_full(self) -> bool:
        return self._automaton.is_full

    def prepare(self, num_states: int) -> None:
        """The first states, breadth first, and as many of their masks as there is time for; raises if there are more than
        there may be.
        """
        started = time.thread_time()
        state = START
        while state < min(len(self._automaton), num_states + 1):
            if state <= EAGER_STATES:
                self.mask(state, MAX_PLACES_IN_ALL)
            self._automaton.row(state)
            state += 1
            if self.is_full:
                raise Unsupported("it has too many states")
        if state == len(self._automaton):
            self._automaton.close()
        for each in range(EAGER_STATES + 1, state):
            if time.thread_time() - started > EAGER_S:
                break
            self.mask(each, MAX_PLACES_IN_ALL)

    def adopted(self, others: _MaskedStates, states: Sequence[int]) -> list[int]:
        """The states that are here what those are there."""
        self._automaton.num_places_left = MAX_PLACES_IN_ALL
        return self._automaton.adopted(others._automaton, states)

    def mask(self, state: int, max_places: int) -> bytes:
        """Raises: Unsupported if more places than that have to be met for it."""
        mask = self.made.get(state)
        if mask is None:
            if len(self._different) * self._trie.num_mask_bytes > MAX_BYTES:
                self.made.clear()
                self._different.clear()
            self._automaton.num_places_left = max_places
            mask = self._trie.mask(self._automaton, state)
            mask = self.made[state] = self._different.setdefault(mask, mask)
        return mask

    def after(self, state: int, token_id: int) -> int:
        """The state behind a token."""
        if token_id in self._trie.end_ids:
            return _OVER if self._automaton.accepts[state] else DEAD
        text = self._trie.token_bytes[token_id]
        self._automaton.num_places_left = MAX_PLACES_A_MASK
        return self._automaton.after(state, text) if text else DEAD
