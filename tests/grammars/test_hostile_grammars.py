"""Grammars that would take long or much memory are bounded."""

from __future__ import annotations

import time

import pytest

from slipstream.engine.errors import RequestError
from slipstream.engine.grammar_session import CompiledGrammar, GrammarSpec
from slipstream.engine.grammars import automaton, automaton_backend
from slipstream.engine.grammars.automaton_backend import AutomatonBackend
from slipstream.engine.grammars.patterns import gbnf_rules
from slipstream.engine.grammars.text_rules import Network, Unsupported

END = 256
VOCABULARY = [*(bytes((byte,)) for byte in range(256)), b"", b"ab", b"ba", b"bbb", b"{}", b'":']


class Refuses:
    """A library that is not asked."""

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        raise RequestError(f"the library was asked for the {spec.kind}", param="structured_output")


BACKEND = AutomatonBackend(VOCABULARY, [END], Refuses)


def grammar(kind: str, source: str = "") -> CompiledGrammar:
    return BACKEND.compile_blocking(GrammarSpec(kind=kind, source=source))  # type: ignore[arg-type]


def takes(compiled: CompiledGrammar, text: bytes) -> bool:
    session = compiled.session()
    return all(session.accept(byte) for byte in text) and session.accept(END)


@pytest.mark.parametrize(
    "source",
    [
        "\n".join(f"r{at} ::= r{at + 1} | [a-c]" for at in range(2500)) + '\nr2500 ::= ""\nroot ::= r0',
        "\n".join(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(2000)) + '\nr2000 ::= "a"?\nroot ::= r0',
    ],
)
def test_long_chains_of_rules_are_read_at_once(source):
    started = time.thread_time()
    with pytest.raises(Unsupported):
        automaton.Automaton(Network(gbnf_rules(source), "root"))
    assert time.thread_time() - started < 3


def test_the_empty_text_is_counted_at_once():
    for pattern in ("(){4000000000}a", "((){99999}){99999}a"):
        compiled = grammar("regex", pattern)
        assert takes(compiled, b"a")
        assert not takes(compiled, b"")


def test_masks_that_would_take_long_are_made_when_a_text_comes_there(monkeypatch):
    eager = grammar("regex", "[ab]{200}").session()
    monkeypatch.setattr(automaton_backend, "EAGER_S", 0.0)
    lazy = grammar("regex", "[ab]{200}").session()
    for _ in range(200):
        assert lazy.fill() == eager.fill()
        assert lazy.accept(ord("b"))
        assert eager.accept(ord("b"))
    assert not lazy.accept(ord("b"))
    assert lazy.accept(END)
