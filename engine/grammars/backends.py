"""Who serves a tokenizer's grammars: automata, and the grammar library that is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from ..errors import RequestError
from ..grammar_triggers import TriggeredBackend
from ..schema_forms import schemas_within
from .automaton_backend import AutomatonBackend

if TYPE_CHECKING:
    from ..config import GrammarBackendName
    from ..grammar_session import CompiledGrammar, GrammarBackend, GrammarSpec
    from ..text.tokenization import TextTokenizer

MAX_NAMES: Final = 100  # of an object's properties: xgrammar takes 0.7 s for so many, and 12 for 200


def make_grammar_backend(name: GrammarBackendName, tokenizer: TextTokenizer, vocab_size: int) -> GrammarBackend:
    """`auto`: automata, and for schemas that these do not read xgrammar where it is installed (with the package for GPUs), else
    llguidance. A library by its name serves everything.

    Ids beyond the tokenizer and special tokens add no text and are never allowed. Raises: RequestError if the model has
    no end token: a text could not end where its grammar does.
    """
    end_ids = sorted(token_id for token_id in tokenizer.eos_ids if token_id < vocab_size)
    if not end_ids:
        raise RequestError("structured output needs a model with an end token", param="structured_output")
    spelled = [tokenizer.token_bytes(index) for index in range(vocab_size)]
    token_bytes = [b"" if index in tokenizer.special_ids else text for index, text in enumerate(spelled)]

    if name == "auto":
        backend: GrammarBackend = AutomatonBackend(token_bytes, end_ids, _Libraries(token_bytes, end_ids))
    else:
        backend = _library(name, token_bytes, end_ids)
    return TriggeredBackend(backend, spelled, end_ids)


class _Libraries:
    """What automata leave, and what may be too large for anybody; each is loaded with the first that it is to serve.

    llguidance soon says what is too large; xgrammar goes on for minutes, in the thread that compiles for everybody, but its
    masks take a fraction: it gets the schemas with which it is quick.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self._vocabulary = (token_bytes, end_ids)
        self._has_xgrammar = find_spec("xgrammar") is not None
        self._made: dict[str, GrammarBackend] = {}

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        name: GrammarBackendName = "xgrammar" if self._has_xgrammar and _is_quick(spec) else "llguidance"
        if name not in self._made:
            self._made[name] = _library(name, *self._vocabulary)
        return self._made[name].compile_blocking(spec)


def _is_quick(spec: GrammarSpec) -> bool:
    """For xgrammar."""
    if spec.kind != "json_schema":
        return False
    return all(len(each.get("properties", ())) <= MAX_NAMES for each in schemas_within(json.loads(spec.source)))


def _library(name: GrammarBackendName, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> GrammarBackend:
    if name == "xgrammar":
        from .xgrammar_backend import XgrammarBackend

        return XgrammarBackend(token_bytes, end_ids)
    from .llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(token_bytes, end_ids)
