"""Who serves a tokenizer's grammars: automata, and the grammar library that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import RequestError
from ..grammar_triggers import TriggeredBackend
from .automaton_backend import AutomatonBackend

if TYPE_CHECKING:
    from ..config import GrammarBackendName
    from ..grammar_session import GrammarBackend
    from ..text.tokenization import TextTokenizer


def make_grammar_backend(name: GrammarBackendName, tokenizer: TextTokenizer, vocab_size: int) -> GrammarBackend:
    """`auto`: automata, and for what these do not read xgrammar where it is installed (with the package for GPUs), else
    llguidance. A library by its name serves everything.

    Ids beyond the tokenizer and special tokens add no text and are never allowed. Raises: RequestError if the model has
    no end token: a text could not end where its grammar does.
    """
    end_ids = sorted(token_id for token_id in tokenizer.eos_ids if token_id < vocab_size)
    if not end_ids:
        raise RequestError("structured output needs a model with an end token", param="structured_output")
    spelled = [tokenizer.token_bytes(index) for index in range(vocab_size)]
    token_bytes = [b"" if index in tokenizer.special_ids else text for index, text in enumerate(spelled)]

    def library() -> GrammarBackend:
        return _library(name, token_bytes, end_ids)

    return TriggeredBackend(
        AutomatonBackend(token_bytes, end_ids, library) if name == "auto" else library(), spelled, end_ids
    )


def _library(name: GrammarBackendName, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> GrammarBackend:
    if name == "xgrammar" or (name == "auto" and find_spec("xgrammar") is not None):
        from .xgrammar_backend import XgrammarBackend

        return XgrammarBackend(token_bytes, end_ids)
    from .llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(token_bytes, end_ids)
