"""Who serves what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.engine.errors import RequestError
from slipstream.engine.grammar_session import GrammarSpec
from slipstream.engine.grammars import backends


class Vocabulary:
    """A tokenizer of bytes, as far as it is asked."""

    special_ids = frozenset({256})

    def __init__(self, eos_ids: frozenset[int] = frozenset({256, 9999})) -> None:
        self.eos_ids = eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else b"<end>" if token_id == 256 else b""


def schema(**fields: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", source=json.dumps({"type": "object", "properties": fields}))


BOUNDED = {"type": "number", "minimum": 0.5}  # which automata leave to others
WIDE = schema(**{f"name_{index}": BOUNDED for index in range(backends.MAX_NAMES + 1)})
LEFT = GrammarSpec(kind="ebnf", source='root ::= root "a" | "b"')


@pytest.mark.parametrize(
    ("name", "is_installed", "spec", "asked"),
    [
        ("auto", True, schema(a={"type": "integer"}), []),
        ("auto", True, GrammarSpec(kind="regex", source="a+"), []),
        ("auto", True, schema(a=BOUNDED), ["xgrammar"]),
        ("auto", False, schema(a=BOUNDED), ["llguidance"]),
        ("auto", True, WIDE, ["llguidance"]),
        ("auto", True, LEFT, ["llguidance"]),
        ("xgrammar", True, schema(a={"type": "integer"}), ["xgrammar"]),
        ("llguidance", True, LEFT, ["llguidance"]),
    ],
)
def test_a_library_is_asked_for_what_automata_leave(monkeypatch, name, is_installed, spec, asked):
    seen = []

    class Library:
        def compile_blocking(self, spec: GrammarSpec) -> Any:
            raise RequestError("asked", param="structured_output")

    def library(name: str, token_bytes: Any, end_ids: Any) -> Library:
        assert end_ids == [256]
        assert token_bytes[255:] == [b"\xff", b"", b"", b""]
        seen.append(name)
        return Library()

    monkeypatch.setattr(backends, "_library", library)
    monkeypatch.setattr(backends, "find_spec", lambda module: object() if is_installed else None)
    backend = backends.make_grammar_backend(name, Vocabulary(), 259)
    for _ in range(2):  # what was loaded stays
        if asked:
            with pytest.raises(RequestError, match="asked"):
                backend.compile_blocking(spec)
        else:
            assert backend.compile_blocking(spec).session().fill() is not None
    assert seen == asked


def test_a_model_without_an_end_has_no_structured_output():
    with pytest.raises(RequestError, match="an end token"):
        backends.make_grammar_backend("auto", Vocabulary(frozenset({9999})), 259)  # type: ignore[arg-type]
