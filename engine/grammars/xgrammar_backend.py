"""Structured output by xgrammar, but for what it would misread: llguidance serves that."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xgrammar

from ..grammar_session import CompiledGrammar, GrammarSpec
from ..logit_rules import mask_of
from ..schema_forms import schemas_within
from .llguidance_backend import LlguidanceBackend
from .sources import choice_as_ebnf, json_schema, told_plainly

# Between two tokens of JSON. It can be blanks only (see below), of which a model that would break the line here needs no
# more, and a second one that may come costs half of a mask's time again.
MAX_WHITESPACE = 1
MAX_MULTIPLE = 1024
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_PATTERNS = frozenset({"pattern", "patternProperties", "propertyNames"})


class XgrammarBackend:
    """One tokenizer's grammars. `token_bytes`: what each id of the model's vocabulary adds to a text, nothing for ids
    that add none; `end_ids`: those that may follow a complete text.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self._vocabulary = (token_bytes, end_ids)
        self._other: LlguidanceBackend | None = None  # made for the first that it is to serve
        token_bytes = [b"" if _SURROGATE.search(text) else text for text in token_bytes]
        self._halves = _Halves.of(token_bytes)
        self._compiler = _compiler(token_bytes, end_ids)
        # The library lets control characters into the strings of JSON, where they are not allowed: without such tokens
        # it cannot. White space between the tokens of JSON is blanks then.
        plain = [b"" if min(text, default=0) < 0x20 else text for text in token_bytes]
        self._json_compiler = _compiler(plain, end_ids)
        self._num_words = -(-len(token_bytes) // 32)

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises: RequestError."""
        with told_plainly(spec):
            if spec.kind == "regex" or (spec.kind == "json_schema" and _is_misread(json.loads(spec.source))):
                if self._other is None:
                    self._other = LlguidanceBackend(*self._vocabulary)
                return self._other.compile_blocking(spec)
            return XgrammarGrammar(self._compiled(spec), self._num_words, self._halves)

    def _compiled(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        if spec.kind in ("json_schema", "json_object"):
            schema = json.dumps(json_schema(spec))
            return self._json_compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
        return compiler.compile_grammar(choice_as_ebnf(spec.source) if spec.kind == "choice" else spec.source)


def _is_misread(schema: Any) -> bool:
    """In patterns, `a(bx*)?` would let "ax" pass, and `b|b(a|b)?` "bab"; a large multiple would not be asked for. (In
    regular expressions of their own, a dot would be a line end too, and `\\x41b` one character.)
    """
    return any(_PATTERNS & each.keys() or each.get("multipleOf", 0) > MAX_MULTIPLE for each in schemas_within(schema))


def _compiler(token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> xgrammar.GrammarCompiler:
    tokenizer = xgrammar.TokenizerInfo(
        list(token_bytes),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(token_bytes),
        stop_token_ids=sorted(end_ids),
    )
    # One thread: compilation shares the machine with the event loop. The cache of grammars is ours.
    return xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)


class _Halves(NamedTuple):
    """What keeps halves of surrogate pairs out of a text, which are no UTF-8 and which the library takes for characters."""

    leads: frozenset[int]  # ids that end in 0xED: an A0 … BF behind it makes such a half
    others: np.ndarray[Any, np.dtype[np.int32]]  # the mask of all ids that begin otherwise

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> _Halves:
        leads = frozenset(index for index, text in enumerate(token_bytes) if text[-1:] == b"\xed")
        others = (index for index, text in enumerate(token_bytes) if not b"\xa0" <= text[:1] <= b"\xbf")
        return cls(leads, np.frombuffer(mask_of(others, len(token_bytes)), dtype=np.int32))

    def begins(self, token_id: int) -> bool:
        """Whether this id could be the second byte of a half."""
        return not self.others.view(np.uint32)[token_id >> 5] >> (token_id & 31) & 1


class XgrammarGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, num_words: int, halves: _Halves) -> None:
        self._compiled = compiled
        self._num_words = num_words
        self._halves = halves

    @property
    def num_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def session(self) -> XgrammarSession:
        return XgrammarSession(xgrammar.GrammarMatcher(self._compiled), self._num_words, self._halves)


class XgrammarSession:
    """A matcher and its mask."""

    __slots__ = ("_halves", "_leads_at", "_mask", "_matcher", "_num_tokens")

    def __init__(self, matcher: xgrammar.GrammarMatcher, num_words: int, halves: _Halves) -> None:
        self._matcher = matcher
        self._halves = halves
        self._num_tokens = 0
        self._leads_at: list[int] = []  # after how many tokens a half might follow
        self._mask: np.ndarray[Any, np.dtype[np.int32]] = np.full((1, num_words), -1, dtype=np.int32)

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self) -> bytes:
        if not self._matcher.fill_next_token_bitmask(self._mask, 0):
            self._mask.fill(-1)  # everything may come: the library left the mask alone
        return ((self._mask & self._halves.others) if self._is_behind_lead else self._mask).tobytes()

    def accept(self, token_id: int) -> bool:
        if self._is_behind_lead and self._halves.begins(token_id):
            return False
        if not self._matcher.accept_token(token_id):
            return False
        self._num_tokens += 1
        if token_id in self._halves.leads:
            self._leads_at.append(self._num_tokens)
        return True

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._num_tokens -= num_tokens
        while self._leads_at and self._leads_at[-1] > self._num_tokens:
            self._leads_at.pop()

    @property
    def _is_behind_lead(self) -> bool:
        return bool(self._leads_at) and self._leads_at[-1] == self._num_tokens
