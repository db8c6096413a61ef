"""Structured output by xgrammar, but for schemas that it would misread: llguidance serves those."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from ..errors import RequestError
from ..grammar_session import CompiledGrammar, GrammarSpec
from ..schema_forms import schemas_within
from .grammar_llguidance import LlguidanceBackend
from .grammar_sources import choice_as_ebnf, json_schema, plain_error

MAX_WHITESPACE = 16  # between two tokens of JSON: a model that likes white space must not fill its answer with it
MAX_MULTIPLE = 1024
_PATTERNS = frozenset({"pattern", "patternProperties", "propertyNames"})


class XgrammarBackend:
    """One tokenizer's grammars. `token_bytes`: what each id of the model's vocabulary adds to a text, nothing for ids
    that add none; `end_ids`: those that may follow a complete text.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self._vocabulary = (token_bytes, end_ids)
        self._other: LlguidanceBackend | None = None  # made with the first schema that it is for
        self._compiler = _compiler(token_bytes, end_ids)
        # The library lets control characters into the strings of JSON, where they are not allowed: without such tokens
        # it cannot. White space between the tokens of JSON is blanks then.
        plain = [b"" if min(text, default=0) < 0x20 else text for text in token_bytes]
        self._json_compiler = _compiler(plain, end_ids)
        self._num_words = -(-len(token_bytes) // 32)

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises: RequestError."""
        try:
            if spec.kind == "json_schema" and _is_misread(json.loads(spec.source)):
                if self._other is None:
                    self._other = LlguidanceBackend(*self._vocabulary)
                return self._other.compile_blocking(spec)
            return XgrammarGrammar(self._compiled(spec), self._num_words)
        except RequestError:
            raise
        except Exception as error:  # of the library about what it was given
            raise RequestError(
                f"the {spec.kind} cannot be used: {plain_error(error)}", param="structured_output"
            ) from error

    def _compiled(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        if spec.kind in ("json_schema", "json_object"):
            schema = json.dumps(json_schema(spec))
            return self._json_compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
        if spec.kind == "regex":
            return compiler.compile_regex(spec.source)
        return compiler.compile_grammar(choice_as_ebnf(spec.source) if spec.kind == "choice" else spec.source)


def _is_misread(schema: Any) -> bool:
    """In patterns, `a(bx*)?` would let "ax" pass, and `b|b(a|b)?` "bab"; a large multiple would not be asked for."""
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


class XgrammarGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, num_words: int) -> None:
        self._compiled = compiled
        self._num_words = num_words

    @property
    def num_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def session(self) -> XgrammarSession:
        return XgrammarSession(xgrammar.GrammarMatcher(self._compiled), self._num_words)


class XgrammarSession:
    """A matcher and its mask."""

    __slots__ = ("_mask", "_matcher")

    def __init__(self, matcher: xgrammar.GrammarMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._mask: np.ndarray[Any, np.dtype[np.int32]] = np.full((1, num_words), -1, dtype=np.int32)

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self) -> bytes:
        if not self._matcher.fill_next_token_bitmask(self._mask, 0):
            self._mask.fill(-1)  # everything may come: the library left the mask alone
        return self._mask.tobytes()

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
