"""Random grammars by automata, against a recogniser by spans, which knows nothing of automata."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.errors import RequestError
from slipstream.engine.grammar_session import CompiledGrammar, GrammarSession, GrammarSpec
from slipstream.engine.grammars.automaton_backend import AutomatonBackend
from slipstream.engine.grammars.text_rules import Unsupported

END = 256
VOCABULARY = [*(bytes((byte,)) for byte in range(256)), b"", b"ab", b"a(", b"))"]


class Refuses:
    """A library that is not asked."""

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        raise RequestError("the library was asked", param="structured_output")


BACKEND = AutomatonBackend(VOCABULARY, [END], Refuses())


def takes(session: GrammarSession, text: bytes) -> bool:
    """Byte by byte; the mask must say the same as the session."""
    for token_id in (*text, END):
        mask = session.fill()
        assert mask is not None
        is_allowed = bool(mask[token_id >> 3] >> (token_id & 7) & 1)
        assert session.accept(token_id) == is_allowed
        if not is_allowed:
            return False
    return True


def test_random_grammars_mean_what_they_say():
    found = {True: 0, False: 0}

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, 2**32))
    def holds(seed: int) -> None:
        chance = random.Random(seed)
        rules = {name: alternatives(chance, 0) for name in ("root", "r0", "r1")}
        source = "".join(f"{name} ::= {spelled(rule)}\n" for name, rule in rules.items())
        try:
            compiled = BACKEND.compile_blocking(GrammarSpec(kind="ebnf", source=source))
        except RequestError:
            return
        for _ in range(12):
            text = "".join(chance.choice("aab()") for _ in range(chance.randint(0, 6)))
            try:
                taken = takes(compiled.session(), text.encode())
            except Unsupported:  # ever more ways to read it
                return
            assert taken == is_text(rules, text), (source, text)
            found[taken] += 1

    holds()
    assert min(found.values()) > 20, found


Item = tuple[object, str]


def alternatives(chance: random.Random, depth: int) -> list[list[Item]]:
    def atom() -> object:
        kind = chance.random()
        if kind < 0.3:
            return ("call", chance.choice(["r0", "r1"]))
        if kind < 0.5 and depth < 2:
            return ("group", alternatives(chance, depth + 1))
        return ("text", chance.choice(["a", "b", "ab", "(", ")", "", "a"]))

    def sequence() -> list[Item]:
        return [(atom(), chance.choice(["", "", "*", "+", "?"])) for _ in range(chance.randint(1, 3))]

    return [sequence() for _ in range(chance.randint(1, 2))]


def spelled(rule: list[list[Item]]) -> str:
    def one(atom: object) -> str:
        kind, inner = atom  # type: ignore[misc]
        return {"call": str(inner), "text": f'"{inner}"'}.get(kind) or f"({spelled(inner)})"

    return " | ".join(" ".join(one(atom) + count for atom, count in sequence) for sequence in rule)


def is_text(rules: dict[str, list[list[Item]]], text: str) -> bool:
    @functools.cache
    def called(name: str, at: int) -> frozenset[int]:
        return frozenset(ends(rules[name], at))

    def ends(rule: list[list[Item]], at: int) -> set[int]:
        found: set[int] = set()
        for sequence in rule:
            places = {at}
            for atom, count in sequence:
                places = repeated(atom, count, places)
            found |= places
        return found

    def repeated(atom: object, count: str, places: set[int]) -> set[int]:
        found = set(places) if count in ("*", "?") else set()
        now = places
        for _ in range(1 if count in ("", "?") else len(text) + 1):
            now = {end for place in now for end in once(atom, place)}
            found |= now
        return found

    def once(atom: object, at: int) -> Iterable[int]:
        kind, inner = atom  # type: ignore[misc]
        if kind == "text":
            return [at + len(inner)] if text.startswith(inner, at) else []
        return called(inner, at) if kind == "call" else ends(inner, at)

    return len(text) in called("root", 0)
