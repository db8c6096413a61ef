"""The backends, on a vocabulary of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from slipstream.engine.grammars.automaton_backend import AutomatonBackend

if TYPE_CHECKING:
    from slipstream.engine.grammar_session import GrammarBackend

BackendOf = Callable[[str, Sequence[bytes], Sequence[int]], "GrammarBackend"]


@pytest.fixture(scope="session")
def backend_of() -> BackendOf:
    """By name: a library, skipped where it is not installed, or automata before llguidance."""

    def made(name: str, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> GrammarBackend:
        if name == "automaton":
            return AutomatonBackend(token_bytes, end_ids, made("llguidance", token_bytes, end_ids))
        pytest.importorskip(name)
        if name == "xgrammar":
            from slipstream.engine.grammars.xgrammar_backend import XgrammarBackend

            return XgrammarBackend(token_bytes, end_ids)
        from slipstream.engine.grammars.llguidance_backend import LlguidanceBackend

        return LlguidanceBackend(token_bytes, end_ids)

    return made
