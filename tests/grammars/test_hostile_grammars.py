"""Grammars that would take long or much memory are bounded."""

from __future__ import annotations

import gc
import random
import time

import pytest

from slipstream.engine import grammar_probe
from slipstream.engine.errors import MisuseError, RequestError
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


BACKEND = AutomatonBackend(VOCABULARY, [END], Refuses())


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


def test_texts_that_fill_the_states_up_stop_nobody(monkeypatch):
    monkeypatch.setattr(automaton, "MAX_STATES", 150)
    monkeypatch.setattr(automaton_backend, "EAGER_STATES", 8)
    compiled = grammar("ebnf", 'root ::= "(" root ")" | "[" root "]" | "{" root? "}" | "x"')
    chance = random.Random(1)
    sessions = [(compiled.session(), bytearray()) for _ in range(8)]
    for _ in range(150):
        for session, opened in sessions:
            session.fill()
            opened.append(chance.choice(b"([{"))
            assert session.accept(opened[-1])
    assert compiled.num_bytes < 2 << 20
    for session, opened in sessions:
        assert session.accept(ord("x"))
        for each in reversed(opened):
            mask = session.fill()
            assert mask is not None
            closing = {ord("("): ord(")"), ord("["): ord("]"), ord("{"): ord("}")}[each]
            assert [bool(mask[byte >> 3] >> (byte & 7) & 1) for byte in b")]}"] == [byte == closing for byte in b")]}"]
            assert session.accept(closing)
        session.rollback(20)
        for each in reversed(opened[:20]):
            assert session.accept({ord("("): ord(")"), ord("["): ord("]"), ord("{"): ord("}")}[each])
        assert session.accept(END)
        with pytest.raises(MisuseError):
            session.rollback(1000)


def test_masks_that_fill_the_memory_up_are_made_anew(monkeypatch):
    monkeypatch.setattr(automaton_backend, "MAX_BYTES", 2000)
    compiled = grammar("regex", "".join(f"[a-{chr(98 + at % 20)}]" for at in range(300)))
    for _ in range(2):
        session = compiled.session()
        for _ in range(300):
            session.fill()
            assert session.accept(ord("a"))
        assert session.accept(END)
    assert len(compiled._masked._different) < 100  # type: ignore[attr-defined]


def test_a_full_collection_is_no_slow_token():
    class Collects:
        """A session over which the collector runs."""

        is_over = False

        def fill(self) -> bytes:
            started = time.thread_time()
            while time.thread_time() - started < 1.2 * grammar_probe.MAX_TOKEN_S:
                gc.collect()
            return b"\x02\x00\x00\x00"

        def accept(self, token_id: int) -> bool:
            return False

    class Compiled:
        num_bytes = 0

        def session(self) -> Collects:
            return Collects()

    compiled = Compiled()
    assert grammar_probe.probed_blocking(compiled, GrammarSpec(kind="json_object")) is compiled  # type: ignore[arg-type]
