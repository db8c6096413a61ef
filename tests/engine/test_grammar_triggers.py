"""Text that is free up to a marker and held to a schema behind it, with both libraries."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from slipstream.engine.errors import MisuseError, RequestError
from slipstream.engine.grammar_session import MAX_ROLLBACK, GrammarSpec
from slipstream.engine.grammar_triggers import MAX_LEAD, TriggeredBackend, read_triggers

END, MARK = 256, 257
BYTES = [bytes((byte,)) for byte in range(256)]
MERGED = [b"<call", b">\n", b'>{"', b"a<call>", b"<tag>[", b'{"', b'"}', b"}\n", b"  ", b'; {"']
SPELLED = [*BYTES, b"<end>", b"[MARK]", *MERGED, b"", b""]
PLAIN = [b"" if index in (END, MARK) else text for index, text in enumerate(SPELLED)]
ID = {text: index for index, text in enumerate(SPELLED) if text}
ADD = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["x}", None]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> TriggeredBackend:
    pytest.importorskip(request.param)
    if request.param == "xgrammar":
        from slipstream.engine.grammars.xgrammar_backend import XgrammarBackend

        return TriggeredBackend(XgrammarBackend(PLAIN, [END]), SPELLED, [END])
    from slipstream.engine.grammars.llguidance_backend import LlguidanceBackend

    return TriggeredBackend(LlguidanceBackend(PLAIN, [END]), SPELLED, [END])


def spec(*markers: str, **more: bool) -> GrammarSpec:
    return GrammarSpec(kind="triggered", source=json.dumps({"after": dict.fromkeys(markers, ADD), **more}))


def allowed(session: Any) -> set[int]:
    mask = session.fill()
    if mask is None:
        return set(range(len(SPELLED)))
    assert len(mask) == -(-len(SPELLED) // 32) * 4
    bits = int.from_bytes(mask, "little")
    return {token for token in range(len(SPELLED)) if bits >> token & 1}


def feed(session: Any, *parts: int | str) -> bool:
    """Whether the session takes the ids, and the texts byte by byte; its mask and it must agree at each."""
    for part in parts:
        for token in [part] if isinstance(part, int) else part.encode():
            if token not in allowed(session):
                assert session.is_over or not session.accept(token)
                return False
            assert session.accept(token)
    return True


GOOD = '{"n": 7, "s": "x}"}'


def test_free_text_has_no_mask_and_may_end_anywhere(backend: TriggeredBackend) -> None:
    session = backend.compile_blocking(spec("<call>")).session()
    for token in [*b"a {", ID[b"{"], *b"<<ca", ID[b"<call"], *b"x> [1]"]:
        assert END in allowed(session)
        assert session.accept(token)
    assert session.fill() is None
    assert not session.is_over


def test_behind_a_marker_only_its_schema_can_follow_and_then_all_is_free_again(backend: TriggeredBackend) -> None:
    grammar = backend.compile_blocking(spec("<call>"))
    for start in ["see <call>", "<call>\n \t", "<<call>"]:
        session = grammar.session()
        assert feed(session, start, GOOD, "\n</call> then <call>", GOOD, " and {")
    for bad in ["x", '"', "[", '{"m"', '{"n": 100', '{"n": 7}', '{"n": 7, "s": "y', "</call>"]:
        session = grammar.session()
        assert not feed(session, "<call>", bad)
        assert END not in allowed(session)


def test_markers_split_over_tokens_are_found_and_none_is_stepped_over(backend: TriggeredBackend) -> None:
    grammar = backend.compile_blocking(spec("<call>"))
    session = grammar.session()
    assert session.accept(ID[b"<call"])
    # `>{"` would carry the call's beginning past the marker; `>` and `>` with white space do not.
    assert ID[b'>{"'] not in allowed(session)
    assert not session.accept(ID[b'>{"'])
    assert feed(session, ID[b">\n"], ID[b'{"'], 'n": 1, "s": null', "}")
    assert session.fill() is None
    assert feed(session, ID[b'>{"'])  # no marker has begun
    fresh = grammar.session()
    assert feed(fresh, ID[b"a<call>"])
    assert not feed(fresh, "x")
    assert ID[b"<tag>["] in allowed(grammar.session())
    assert not feed(backend.compile_blocking(spec("<tag>")).session(), ID[b"<tag>["])


def test_a_marker_may_be_a_special_token_and_white_space_behind_it_is_bounded(backend: TriggeredBackend) -> None:
    session = backend.compile_blocking(spec("[MARK]")).session()
    assert feed(session, "a", MARK)
    assert END not in allowed(session)
    for _ in range(MAX_LEAD):
        assert feed(session, " ")
    assert not feed(session, " ")
    assert feed(session, GOOD)
    # Spelled out it is the same text, and the same marker.
    assert not feed(session, "[MARK]", "x")


def test_the_first_marker_decides_where_several_are_watched_for(backend: TriggeredBackend) -> None:
    other = {"type": "object", "properties": {}, "additionalProperties": False}
    source = {"after": {"<a>": ADD, "<b>": other}}
    grammar = backend.compile_blocking(GrammarSpec(kind="triggered", source=json.dumps(source)))
    assert feed(grammar.session(), "<b>{}<a>", GOOD)
    assert not feed(grammar.session(), "<b>", GOOD)
    assert not feed(grammar.session(), "<a>{}")


def test_a_text_that_opens_with_a_brace_is_constrained_where_that_is_asked(backend: TriggeredBackend) -> None:
    grammar = backend.compile_blocking(spec("[MARK]", opens=True))
    assert feed(grammar.session(), "\n", GOOD, "; ", GOOD, "and {")
    assert feed(grammar.session(), "well, {1}")
    assert feed(grammar.session(), "say", MARK, GOOD)
    for first in ['{"m"', "{1", " {1"]:
        assert not feed(grammar.session(), first)
    session = grammar.session()
    assert END in allowed(session)
    assert ID[b'; {"'] not in allowed(session)


def test_a_text_that_may_have_one_part_is_over_behind_it(backend: TriggeredBackend) -> None:
    session = backend.compile_blocking(spec("<call>", once=True)).session()
    assert feed(session, "a <call>", GOOD[:-1])
    assert not session.is_over
    assert feed(session, "}")
    assert session.is_over
    assert not session.accept(ord("x"))


@pytest.mark.parametrize("opens", [False, True])
def test_random_walks_never_leave_a_call_that_breaks_its_schema(backend: TriggeredBackend, opens: bool) -> None:
    grammar = backend.compile_blocking(spec("<call>", opens=opens, once=True))
    rng = random.Random(7)
    calls = 0
    for _ in range(40):
        session, text = grammar.session(), b""
        while not session.is_over and len(text) < 300:
            choices = sorted(allowed(session))
            pushed = [token for token in choices if SPELLED[token][:1] in b'<call>{"}' or SPELLED[token] in MERGED]
            token = rng.choice(pushed or choices)
            assert session.accept(token)
            text += SPELLED[token]
        if session.is_over:
            calls += 1
            start = text.index(b"<call>") + 6 if b"<call>" in text else 0
            value = json.loads(text[start:].lstrip(b" ;,\r\n\t"))
            assert set(value) == {"n", "s"}
            assert 0 <= value["n"] <= 99
    assert calls > 5


def test_what_was_accepted_can_be_taken_back_across_every_border(backend: TriggeredBackend) -> None:
    session = backend.compile_blocking(spec("<call>", once=True)).session()
    tokens = [*b"b<call> ", *GOOD.encode()]
    masks = []
    for token in tokens:
        masks.append(session.fill())
        assert session.accept(token)
    assert session.is_over
    for count in (1, 3, 20):
        session.rollback(count)
        for index in range(len(tokens) - count, len(tokens)):
            assert session.fill() == masks[index]
            assert session.accept(tokens[index])
    with pytest.raises(MisuseError):
        session.rollback(MAX_ROLLBACK + 1)


@pytest.mark.parametrize(
    "source", ["[]", "{}", '{"after": {}}', '{"after": {"": {}}}', '{"after": {"a": {}}, "once": 1}', "x"]
)
def test_a_source_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="markers"):
        read_triggers(source)


@pytest.mark.parametrize("flags", [{"reasons": True}, {"is_thinking": True, "reasons": True}])
def test_markers_within_thoughts_announce_nothing(backend: TriggeredBackend, flags: dict[str, bool]) -> None:
    grammar = backend.compile_blocking(spec("<call>", opens=True, **flags))
    begin = "" if "is_thinking" in flags else " \n<think>"
    assert feed(grammar.session(), begin, "if <call>x {1", "</think>\n", GOOD, "<call>", GOOD)
    assert not feed(grammar.session(), begin, "hm </think>a<call>x")
    assert not feed(grammar.session(), begin, "hm </think> {1")
    if not begin:
        return
    assert not feed(grammar.session(), "<thin <call>", "x")
    assert feed(grammar.session(), "<thi <think> <call>", GOOD)
