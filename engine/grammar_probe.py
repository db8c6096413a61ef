"""Tries a compiled grammar before anybody uses it: one that allows nothing, or takes long over a token, is refused.

Sessions run on the event loop, where a token that takes a second stops everybody. What a grammar costs does not show in
its source, so a text of it is written. What shows only in longer texts is stopped by `LogitRules`.
"""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Iterable
from typing import Final

from .errors import RequestError
from .grammar_session import CompiledGrammar, GrammarSpec

NUM_TOKENS: Final = 32
MAX_TOKEN_S: Final = 0.05  # of this thread's own time
_ANY: Final = re.compile(rb"[^\0]")


def probed_blocking(grammar: CompiledGrammar, spec: GrammarSpec) -> CompiledGrammar:
    """The grammar itself. Raises: RequestError."""
    session = grammar.session()
    chance = random.Random(0)  # of its own: the same grammar is always judged alike
    ends: set[int] = set()  # a text that ends tells little: it goes on by something else
    for number in range(NUM_TOKENS):
        started, num_collected = time.thread_time(), _num_collections()
        try:
            mask = session.fill()
            token_id = None if mask is None else _some_id(mask, ends, chance)
            accepted = token_id is not None and session.accept(token_id)
        except ValueError as error:
            reason = str(error).splitlines()[0] if str(error) else "it allows nothing"
            raise RequestError(f"the {spec.kind} cannot be used: {reason}", param="structured_output") from error
        if token_id is None:
            if mask is not None and not number:
                raise RequestError(f"the {spec.kind} cannot be used: it allows nothing", param="structured_output")
            break
        if time.thread_time() - started > MAX_TOKEN_S and num_collected == _num_collections():
            raise RequestError(f"the {spec.kind} takes too long over each token", param="structured_output")
        if not accepted:
            break
        if session.is_over:
            session.rollback(1)
            ends.add(token_id)
    return grammar


def _num_collections() -> int:
    """Full ones, which take longer than any token, whose grammar need not be to blame."""
    return int(gc.get_stats()[-1]["collections"])


def _some_id(mask: bytes, ends: Iterable[int], chance: random.Random) -> int | None:
    left = bytearray(mask)
    for token_id in ends:
        left[token_id >> 3] &= ~(1 << (token_id & 7))
    found = _ANY.search(left, chance.randrange(len(mask))) or _ANY.search(left)
    if found is None:
        return None
    byte = left[found.start()]
    return found.start() * 8 + chance.choice([bit for bit in range(8) if byte >> bit & 1])
