"""Structured output by llguidance, which needs no other package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from ..grammar_session import GrammarSpec
from .sources import choices, json_schema, plain_error, told_plainly

# Between two tokens of JSON: a model that likes white space must not fill its answer with it, but may indent.
_WHITESPACE = r"\x20?|\x0A[\x20\x09]{0,32}"
# Where a grammar takes any of these, the tokens that are so are not looked at one by one: beside the library's own, which
# serve strings of JSON, the words of regular expressions.
_SLICES = ("[a-z]{1,10}", "[a-zA-Z]{1,10}", *llguidance.LLTokenizer.general_slices())


class _Vocabulary:
    """A tokenizer as llguidance asks for one."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self.tokens = list(token_bytes)
        self.eos_token_id = min(end_ids)
        self.bos_token_id = None
        self.special_token_ids = sorted(
            {token_id for token_id, text in enumerate(token_bytes) if not text} | {*end_ids}
        )
        self._by_text = {text: token_id for token_id, text in reversed(list(enumerate(token_bytes))) if text}
        self._longest = max(map(len, token_bytes))

    def __call__(self, text: str | bytes) -> list[int]:
        """The longest token first, again and again. Asked for texts that a grammar forces: of the ways to spell one, the
        mask allows this.
        """
        content = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        at = 0
        while at < len(content):
            ends = range(min(len(content), at + self._longest), at, -1)
            end = next((end for end in ends if content[at:end] in self._by_text), at + 1)
            token_id = self._by_text.get(content[at:end])
            ids += [] if token_id is None else [token_id]
            at = end
        return ids


class LlguidanceBackend:
    """One tokenizer's grammars; arguments as `XgrammarBackend`'s."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(token_bytes, end_ids))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=len(token_bytes), slices=list(_SLICES))
        self._end_ids = tuple(end_ids)
        self._num_words = -(-len(token_bytes) // 32)

    def compile_blocking(self, spec: GrammarSpec) -> LlguidanceGrammar:
        """Raises: RequestError."""
        with told_plainly(spec):
            source = self._source(spec)
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            matcher.compute_bitmask()  # sessions begin with it
            return LlguidanceGrammar(matcher, len(source), self._end_ids, self._num_words)

    def _source(self, spec: GrammarSpec) -> str:
        matcher = llguidance.LLMatcher
        options: Any = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
        if spec.kind in ("json_schema", "json_object"):
            return str(matcher.grammar_from_json_schema(json_schema(spec, knows_declared=True), options))
        if spec.kind == "regex":
            return str(matcher.grammar_from_regex(spec.source))
        if spec.kind == "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices(spec.source))
            return str(matcher.grammar_from_lark(f"start: {texts}\n"))
        return str(matcher.grammar_from_lark(llguidance.gbnf_to_lark.gbnf_to_lark(spec.source)))


class LlguidanceGrammar:
    """A matcher at its start. Sessions are copies, which share what is compiled; the library goes on compiling as they
    get on.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, num_source_chars: int, end_ids: Sequence[int], num_words: int
    ) -> None:
        self._matcher = matcher
        self._num_source_chars = num_source_chars
        self._end_ids = tuple(end_ids)
        self._num_words = num_words

    @property
    def num_bytes(self) -> int:
        return self._num_source_chars

    def session(self) -> LlguidanceSession:
        return LlguidanceSession(self._matcher.deep_copy(), self._end_ids, self._num_words)


class LlguidanceSession:
    """A matcher."""

    __slots__ = ("_end_ids", "_mask", "_matcher", "_over_by")

    def __init__(self, matcher: llguidance.LLMatcher, end_ids: Sequence[int], num_words: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._mask = np.zeros(num_words, dtype=np.int32)
        self._over_by = 0  # end tokens accepted, which the matcher itself does not count

    @property
    def is_over(self) -> bool:
        return bool(self._over_by)

    def fill(self) -> bytes:
        # A matcher that has stopped allows the end token and nothing else.
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        if self._matcher.is_accepting():
            for token_id in self._end_ids:
                bit = np.uint32(1 << (token_id % 32))
                self._mask.view(np.uint32)[token_id // 32] |= bit
        return self._mask.tobytes()

    def accept(self, token_id: int) -> bool:
        if token_id in self._end_ids:
            if not self._matcher.is_accepting():
                return False
            self._over_by = 1
            return True
        if self._matcher.is_stopped():
            return False
        took = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():  # a limit of the library, and not what the token is
            raise ValueError(plain_error(ValueError(self._matcher.get_error())))
        return took

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens - self._over_by)
        self._over_by = 0
