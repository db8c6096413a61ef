"""Automata for regular expressions and grammars: exactly the texts, and in every state exactly the tokens."""

from __future__ import annotations

import json
import random
import re
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.errors import RequestError
from slipstream.engine.grammar_session import CompiledGrammar, GrammarSession, GrammarSpec
from slipstream.engine.grammars import automaton, text_rules, token_trie
from slipstream.engine.grammars.automaton_backend import AutomatonBackend
from slipstream.engine.grammars.patterns import gbnf_rules, regex_rules
from slipstream.engine.grammars.text_rules import Network, Unsupported, utf8_ranges

END, OTHER_END = 256, 257
MERGED = [
    b"ab",
    b"ab",
    b"ba",
    b"((",
    b"a)",
    b"  ",
    "ü".encode(),
    "日本".encode(),
    b'{"',
    b'":',
    b'"}',
    b'"}}',
    b"\xac-",
    b"12",
]
# No multiple of 32; the second end token has a text, and some ids add nothing.
VOCABULARY = [*(bytes((byte,)) for byte in range(256)), b"", b"</s>", *MERGED, b"", b""]


class Refuses:
    """A library that is not asked."""

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        raise RequestError(f"the library was asked for the {spec.kind}", param="structured_output")


BACKEND = AutomatonBackend(VOCABULARY, [END, OTHER_END], Refuses())


def grammar(kind: str, source: str) -> CompiledGrammar:
    return BACKEND.compile_blocking(GrammarSpec(kind=kind, source=source))  # type: ignore[arg-type]


def allowed(session: GrammarSession) -> set[int]:
    mask = session.fill()
    assert mask is not None
    assert len(mask) == -(-len(VOCABULARY) // 32) * 4
    bits = int.from_bytes(mask, "little")
    assert bits < 1 << len(VOCABULARY)
    return {token_id for token_id in range(len(VOCABULARY)) if bits >> token_id & 1}


def can_end(session: GrammarSession) -> bool:
    ends = allowed(session) & {END, OTHER_END}
    assert ends in (set(), {END, OTHER_END})
    return bool(ends)


def takes(session: GrammarSession, text: bytes) -> bool:
    """Byte by byte; the mask must say the same as the session."""
    for byte in text:
        is_allowed = byte in allowed(session)
        assert session.accept(byte) == is_allowed
        if not is_allowed:
            return False
    return can_end(session)


def assert_masks_are_exact(session: GrammarSession) -> None:
    """Each token is allowed if the session takes it, and only then."""
    expected = set()
    for token_id in range(len(VOCABULARY)):
        if session.accept(token_id):
            assert session.is_over == (token_id in (END, OTHER_END))
            expected.add(token_id)
            session.rollback(1)
    assert allowed(session) == expected


PATTERNS = [
    r"\d{4}-\d{2}-\d{2}", r"[a-z0-9._]+@[a-z0-9.]+\.(com|org)", r"[A-Z][a-z]+( [a-z]+){0,3}\.", r"(ab|a)*b?", r"a{2,3}|b{,2}",
    r"[^a-z]+", r".{0,3}", r"\w+?\s\W", r"(?:x|(?P<name>y))z", r"|a", r"a??b*?", r"[\d\-x]+", r"\S\D", r"^ab$|^c$",
    r"[ü-ÿ日]\u20ac", r"(a*)*b", r"((a|b)?){3}",
    r"[\w\d]+", "[aab]", r"[\Sé]x?", r"[^\W\d]", "(){3}a",
]  # fmt: skip
LETTERS = "abxyz019 .-@ü日€\n_Z"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_takes_the_texts_that_match_it_and_no_others(pattern):
    compiled = grammar("regex", pattern)
    chance = random.Random(pattern)
    found = set()
    for _ in range(150):
        text = "".join(chance.choice(LETTERS) for _ in range(chance.randint(0, 7)))
        session = compiled.session()
        matches = re.fullmatch(pattern, text) is not None
        assert takes(session, text.encode()) == matches, text
        found.add(matches)
    for _ in range(60):
        text = walked(compiled, chance)
        assert text is None or re.fullmatch(pattern, text), text


def walked(compiled: CompiledGrammar, chance: random.Random, limit: int = 60) -> str | None:
    """A text of random allowed tokens; every mask on the way is checked in full."""
    session, text = compiled.session(), b""
    for _ in range(limit):
        choices = allowed(session)
        assert choices, "no text ends in nothing"
        token_id = END if END in choices and chance.random() < 0.3 else chance.choice(sorted(choices))
        assert session.accept(token_id)
        if session.is_over:
            return text.decode()
        text += VOCABULARY[token_id]
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_mask_on_the_way_is_exact(pattern):
    compiled = grammar("regex", pattern)
    chance = random.Random(pattern)
    for _ in range(5):
        session = compiled.session()
        for _ in range(8):
            assert_masks_are_exact(session)
            session.accept(chance.choice(sorted(allowed(session))))
            if session.is_over:
                break


def test_masks_are_exact_whether_loops_are_kept_or_made_again(monkeypatch):
    monkeypatch.setattr(token_trie, "MAX_LOOPS", 1)
    compiled = [grammar("regex", pattern) for pattern in ("[a-z]+ [a-zü]+", "[^b]*b[^,]*", "[a-y]*z[a-z]*")]
    sessions = [each.session() for each in compiled]
    for _ in range(3):
        for session in sessions:
            assert_masks_are_exact(session)
            assert session.accept(ord("a"))


def test_random_expressions_mean_what_they_mean_to_the_standard_library():
    @settings(max_examples=150, deadline=None)
    @given(expressions(), st.lists(st.text("ab(ü", max_size=6), max_size=12))
    def holds(pattern: str, texts: list[str]) -> None:
        compiled = grammar("regex", pattern or "(?:)")
        for text in texts:
            assert takes(compiled.session(), text.encode()) == (re.fullmatch(pattern, text) is not None), (
                pattern,
                text,
            )
        assert_masks_are_exact(compiled.session())

    holds()


def expressions() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(["a", "b", r"\(", "[ab]", "[^a]", ".", "ü", r"\w", ""])
    counts = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "*?"])

    def more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        groups = st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
        return st.lists(st.tuples(groups, counts).map("".join), min_size=1, max_size=3).map("".join)

    return st.recursive(atoms, more, max_leaves=8)


@pytest.mark.parametrize(
    "pattern", ["(a", "a**", "(?i)a", r"(a)\1", "(?=a)b", "(?i:a)", "(?>a)b", "a++", "[^\\s\\S]", "a{200000}"]
)
def test_what_is_none_or_not_here_is_left_to_the_library(pattern):
    with pytest.raises(RequestError, match="the library was asked for the regex"):
        grammar("regex", pattern)


@pytest.mark.parametrize(
    "pattern", ["(a|b)*a(a|b){20}", "((a{0,1000}){0,1000}){0,1000}", "(a?){5000}", "(" * 400 + ")" * 400]
)
def test_what_would_be_too_large_is_left_to_it_soon(pattern):
    with pytest.raises(RequestError, match="the library was asked"):
        grammar("regex", pattern)


def test_a_choice_of_many_texts_and_of_one_within_another():
    texts = [f"{'very ' * (index % 4)}{index}" for index in range(1500)] + ["a", "ab", "日本", '"\n']
    compiled = grammar("choice", json.dumps(texts))
    assert all(takes(compiled.session(), text.encode()) for text in chain(texts[:40], texts[-5:]))
    assert not any(takes(compiled.session(), text.encode()) for text in ("", "very ", "1500", "abc", "日"))
    with pytest.raises(RequestError, match="a choice is a list of non-empty texts"):
        grammar("choice", "[]")


def test_any_object_of_json_and_nothing_else():
    compiled = grammar("json_object", "")
    chance = random.Random(0)
    texts = [walked(compiled, chance, 200) for _ in range(40)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)
    assert sum(text is not None for text in texts) > 10
    documents = [{"a": [1, -2.5e-3, {"b": {}, "c": []}], 'ü\n"\\': None, "": [[True, False], "日本"]}, {}]
    for document in documents:
        for spelling in ({}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}):
            assert takes(compiled.session(), json.dumps(document, **spelling).encode())
    for text in (
        "[]",
        "1",
        '{"a"}',
        '{"a": 01}',
        '{"a": 1,}',
        '{"a": "\n"}',
        '{"a": "\\x"}',
        '{"a":  1}',
        " {}",
        '{"a": .5}',
        "{}\n",
    ):
        assert not takes(compiled.session(), text.encode()), text
    session = compiled.session()
    for byte in b'{"a": [{"b':
        assert_masks_are_exact(session)
        assert session.accept(byte)


JSON = r"""
root ::= object   # what llama.cpp's users write
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= "" | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (JSON, ['{"a": [1, {"b": "ü\\n"}], "c": -1.5e3}', "{}", '{\n  "x" : true}'], ["[]", '{"a"}', "{", '{"a": 01}']),
        ('root ::= expr\nexpr ::= term (" "? [-+*/] " "? term)*\nterm ::= [0-9]+ | "(" expr ")" | [a-z]+\n',
         ["(12 + foo) * 3-(7/bar)", "((((x))))", "1"], ["", "()", "(1", "1 +", "1  + 2"]),
        ('root ::= "a" root "b" | ""', ["", "ab", "aaabbb"], ["aab", "abb", "ba"]),
        ('root ::= item ("," root)?\nitem ::= [\\]\\-^x]+', ["x", "]-,^,x"], ["", "x,", ",x"]),
        ('root ::= "\\u00fc" "\\x41" [\\U00010348-\\U00010349]\n', ["üA\U00010348"], ["üB\U00010348", "üA\U00010347"]),
        ('root ::= ("a" | empty) "b"\nempty ::= ""', ["ab", "b"], ["a", "aab"]),
        ("root ::= [a-c-] [-x] ", ["--", "bx"], ["d-", "ab"]),
    ],
)  # fmt: skip
def test_a_grammar_takes_its_texts_and_no_others(source, good, bad):
    if 'two ::= "2" | root' in source:
        with pytest.raises(RequestError, match="the library was asked"):  # a rule begins with itself
            grammar("ebnf", source)
        return
    compiled = grammar("ebnf", source)
    for text in good:
        assert takes(compiled.session(), text.encode()), text
    for text in bad:
        assert not takes(compiled.session(), text.encode()), text
    session = compiled.session()
    for byte in good[0].encode():
        assert_masks_are_exact(session)
        assert session.accept(byte)


@pytest.mark.parametrize(
    "source",
    [
        'root := "a"', '"a"', 'top ::= "a"', "root ::= missing", 'root ::= "a"\nroot ::= "b"', 'root ::= "\\q"', "root ::= []",
        'root ::= root "a" | "a"', 'root ::= a root\na ::= ""', 'root ::= a\na ::= b? a "x"\nb ::= "b"', 'root ::= "a" root',
        "root ::= .", 'root ::= (= "a") "a"', 'root ::= "\U0010f001"', 'root ::= *', 'root ::= ("a"',
        'root ::= "a"+?', 'root ::= "a"{2} ?',
    ],
)  # fmt: skip
def test_what_is_no_such_grammar_is_left_to_the_library(source):
    with pytest.raises(RequestError, match="the library was asked for the ebnf"):
        grammar("ebnf", source)


def test_deep_texts_meet_states_that_were_not_made_before():
    compiled = grammar("ebnf", 'root ::= "(" root ")" | "[" root "]" | "x"')
    chance = random.Random(0)
    opened = [chance.choice("([") for _ in range(60)]
    closed = [{"(": ")", "[": "]"}[each] for each in reversed(opened)]
    session = compiled.session()
    for position, each in enumerate("".join(opened) + "x" + "".join(closed)):
        if position % 10 == 0:
            assert_masks_are_exact(session)
        assert ord(each) in allowed(session)
        assert session.accept(ord(each))
    assert allowed(session) == {END, OTHER_END}


def test_characters_are_their_bytes():
    everything = [each for low, high in ((0, 0xD7FF), (0xE000, 0x10FFFF)) for each in utf8_ranges(low, high)]
    assert [len(each) for each in everything] == sorted(len(each) for each in everything)
    assert sum(_size(each) for each in everything) == 0x110000 - 0x800
    for low, high in ((0x41, 0x41), (0x7F, 0x80), (0x7FF, 0x800), (0xD000, 0xE100), (0xFFFF, 0x10000), (0xE9, 0x20AC)):
        assert sum(_size(each) for each in utf8_ranges(low, high)) == sum(
            1 for code in range(low, high + 1) if not 0xD800 <= code < 0xE000
        )
        for code in {low, high, (low + high) // 2}:
            spelled_out = chr(code).encode(errors="surrogatepass")
            alike = [each for each in utf8_ranges(low, high) if len(each) == len(spelled_out)]
            fits = [all(a <= byte <= b for byte, (a, b) in zip(spelled_out, each, strict=True)) for each in alike]
            assert sum(fits) == (not 0xD800 <= code < 0xE000)


def _size(ranges: tuple[tuple[int, int], ...]) -> int:
    size = 1
    for low, high in ranges:
        size *= high - low + 1
    return size


def test_rules_that_lead_nowhere_are_left_out():
    network = Network(gbnf_rules('root ::= "a" | "b" lost\nlost ::= "c" lost'), "root")
    compiled = grammar("ebnf", 'root ::= "a" | "b" lost\nlost ::= "c" lost')
    assert network.is_recursive
    assert allowed(compiled.session()) == {ord("a")}
    with pytest.raises(Unsupported, match="no rule root"):
        Network({}, "root")
    with pytest.raises(Unsupported, match="too large"):
        Network(regex_rules("a{60000}b{60000}"), "root")


def test_right_recursion_does_not_go_deep():
    """A rule that ends with itself returns to nothing: its texts stay among a few states."""
    automaton_of_list = automaton.Automaton(Network(gbnf_rules('root ::= "a" | "a" "," root'), "root"))
    state = automaton_of_list.after(automaton.START, b"a," * 50)
    assert state != automaton.DEAD
    assert len(automaton_of_list) < 8


def test_a_text_goes_on_after_a_rollback_and_over_an_end():
    session = grammar("regex", "ab?").session()
    assert session.accept(ord("a"))
    assert session.accept(END)
    assert session.is_over
    session.rollback(2)
    assert not session.is_over
    assert not session.accept(END)
    assert session.accept(VOCABULARY.index(b"ab"))
    assert not session.accept(ord("b"))
    assert not session.accept(len(VOCABULARY) - 1), "an id that adds nothing"
    assert text_rules.END == 0
