"""Incremental text against the full decode of the tokenizers library."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.text.detokenizer import Detokenizer, decode_utf8
from slipstream.engine.text.tokenization import TextTokenizer

FAMILY = "👨‍👩‍👧‍👦"
TEXTS = [
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "ภาษาไทยเขียนติดกัน",
    "한국어 문장 流れる水は腐らず",
    f"one {FAMILY} family 🇨🇿🏳️‍🌈 e\u0301",
    "a    b\n        indented\n\ttab  ",
    " leading space",
    "literal \N{REPLACEMENT CHARACTER} stays",
]
FAMILIES = ["byte_level", "byte_fallback", "metaspace", "wordpiece"]
any_id = st.one_of(st.integers(0, 500), st.sampled_from([-1, 10**6, 2**31, 2**32, 2**40]))
any_ids = st.lists(any_id, max_size=40)
cuts = st.lists(st.integers(1, 4), max_size=50)


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return request.getfixturevalue(request.param)


def streamed(detokenizer: Detokenizer, ids: list[int], sizes: list[int] = ()) -> list[str]:
    deltas, start = [], 0
    for size in (*sizes, *[1] * len(ids)):
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*deltas, detokenizer.flush()]


def full(tokenizer: TextTokenizer, ids: list[int], *, skip: bool) -> str:
    """What the library itself decodes; it refuses ids that are not unsigned 32-bit."""
    return tokenizer.backend.decode([i for i in ids if 0 <= i < 2**32], skip_special_tokens=skip)


def spoils_valid_bytes(tokenizer: TextTokenizer, ids: list[int], *, skip: bool) -> bool:
    """Whether a run of byte tokens holds both valid characters and invalid bytes; the library drops all of it."""
    hidden = tokenizer.special_ids if skip else frozenset()
    tokens = [tokenizer.id_to_piece(i) for i in ids if i not in hidden]
    marked = "".join(t if re.fullmatch("<0x..>", t) else "|" for t in tokens if t is not None)
    for run in marked.split("|"):
        content = bytes.fromhex(run.replace("<0x", "").replace(">", ""))
        text = content.decode(errors="replace")
        if "\ufffd" in text and text.strip("\ufffd"):
            return True
    return False


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_text_in_any_language_comes_back_exactly(name, text, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    deltas = streamed(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == text == tokenizer.decode(ids)
    assert all(delta in text for delta in deltas)
    assert deltas[-1] == ""


@settings(deadline=None, max_examples=150)
@given(text=st.text(max_size=60), sizes=cuts)
def test_any_text_streams_as_it_decodes(byte_level, byte_fallback, text, sizes):
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text, add_special_tokens=False)
        got = "".join(streamed(Detokenizer(tokenizer, skip_special_tokens=False), ids, sizes))
        assert got == full(tokenizer, ids, skip=False)
        if not re.search(r"<\||<[/su]|<｜|<think", text):
            assert got == text


@settings(deadline=None, max_examples=200)
@given(ids=any_ids, sizes=cuts, skip=st.booleans())
def test_random_ids_stream_as_the_library_decodes_them(
    byte_level, byte_fallback, metaspace, wordpiece, ids, sizes, skip
):
    for tokenizer in (byte_level, byte_fallback, metaspace, wordpiece):
        got = "".join(streamed(Detokenizer(tokenizer, skip_special_tokens=skip), ids, sizes))
        assert got == tokenizer.decode(ids, skip_special_tokens=skip)
        if not (tokenizer is byte_fallback and spoils_valid_bytes(tokenizer, ids, skip=skip)):
            assert got == full(tokenizer, ids, skip=skip)


@settings(deadline=None, max_examples=200)
@given(prompt=any_ids, ids=st.lists(any_id, min_size=1, max_size=30), skip=st.booleans())
def test_the_text_is_the_continuation_of_the_prompt(byte_level, byte_fallback, metaspace, prompt, ids, skip):
    for tokenizer in (byte_level, byte_fallback, metaspace):
        before = Detokenizer(tokenizer, skip_special_tokens=skip)
        shown = before.push(prompt)
        after = Detokenizer(tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
        text = "".join(streamed(after, ids))
        if text:  # a prompt's own incomplete end is no text of a continuation that adds none
            assert shown + text == tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)


def test_a_first_space_is_kept_after_a_prompt_and_dropped_at_the_start_of_a_text(byte_fallback):
    the, stones = (byte_fallback.token_id(piece) for piece in ("▁the", "▁stones"))
    assert None not in (the, stones)
    alone = Detokenizer(byte_fallback)
    assert [alone.push([the]), alone.push([stones])] == ["the", " stones"]
    after_bos = Detokenizer(byte_fallback, prompt_ids=[byte_fallback.bos_id])
    assert after_bos.push([the]) == "the"
    after_text = Detokenizer(byte_fallback, prompt_ids=[byte_fallback.bos_id, the])
    assert after_text.push([stones]) == " stones"
    assert Detokenizer(byte_fallback, prompt_ids=[the]).push([the, stones]) == " the stones"


def test_an_incomplete_character_waits_and_a_broken_one_is_replaced_at_once(byte_level):
    first, second, third = (byte_level.encode(char)[-1] for char in ("a", "b", "c"))
    e4, bd, a0 = (byte_level.backend.token_to_id(char) for char in ("ä", "½", "ł"))
    assert [byte_level.token_bytes(i) for i in (e4, bd, a0)] == [b"\xe4", b"\xbd", b"\xa0"]
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push([i]) for i in (first, e4, bd, a0, second)] == ["a", "", "", "你", "b"]
    assert [detokenizer.push([i]) for i in (e4, bd, third, a0)] == ["", "", "\ufffdc", "\ufffd"]
    assert detokenizer.flush() == ""


def test_an_incomplete_tail_is_flushed_once(byte_level, byte_fallback):
    for tokenizer, pieces, lost in (
        (byte_level, ("ä", "½"), "\ufffd"),
        (byte_fallback, ("<0xE4>", "<0xBD>"), "\ufffd" * 2),
    ):
        ids = [tokenizer.token_id(piece) for piece in pieces]
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.push(ids) == ""
        assert (detokenizer.flush(), detokenizer.flush()) == (lost, "")
        assert full(tokenizer, ids, skip=True) == lost


def test_a_character_that_the_prompt_left_open_is_completed(byte_level):
    e4, bd, a0 = (byte_level.token_id(char) for char in ("ä", "½", "ł"))
    assert Detokenizer(byte_level, prompt_ids=[e4, bd]).push([a0]) == "你"
    assert Detokenizer(byte_level, prompt_ids=[e4, bd]).flush() == ""


def test_byte_tokens_show_valid_characters_beside_invalid_bytes(byte_fallback):
    ids = [byte_fallback.token_id(f"<0x{byte:02X}>") for byte in (*"你".encode(), 0xFF, 0xE4)]
    detokenizer = Detokenizer(byte_fallback)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "你", "\ufffd", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_shown_without_extra_spaces_or_skipped(byte_level):
    ids = byte_level.encode("a<｜end▁of▁text｜>b<|end|> c<think>")
    shown = "".join(streamed(Detokenizer(byte_level, skip_special_tokens=False), ids))
    assert shown == "<|begin|>a<｜end▁of▁text｜>b<|end|> c<think>"
    assert "".join(streamed(Detokenizer(byte_level), ids)) == "ab c<think>"


def test_ids_that_are_no_tokens_add_nothing(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    stray = [tokenizer.vocab_size + 5, -1, 2**31, 2**32, 2**63]
    assert [detokenizer.push([i]) for i in stray] == [""] * len(stray)
    assert detokenizer.push([]) == detokenizer.flush() == ""


def test_stray_ids_do_not_fill_the_table(byte_level):
    before = len(byte_level.piece_table.shown)
    Detokenizer(byte_level, skip_special_tokens=False).push(range(10**6, 10**6 + 1000))
    assert len(byte_level.piece_table.shown) == before


@given(st.binary(max_size=40))
def test_each_byte_mode_loses_only_invalid_bytes(content):
    text, used = decode_utf8(content, each_byte=True, final=True)
    assert used == len(content)
    assert text.replace("\ufffd", "") == content.decode(errors="ignore").replace("\ufffd", "")


@given(st.binary(max_size=40), st.booleans())
def test_what_is_not_final_leaves_only_an_incomplete_character(content, each_byte):
    text, used = decode_utf8(content, each_byte=each_byte, final=False)
    rest, _ = decode_utf8(content[used:], each_byte=each_byte, final=True)
    assert text + rest == decode_utf8(content, each_byte=each_byte, final=True)[0]
    assert len(content) - used <= 3


@settings(deadline=None, max_examples=60)
@given(ids=any_ids, prompt=any_ids, skip=st.booleans())
def test_single_ids_give_what_lists_of_one_give(byte_level, byte_fallback, metaspace, wordpiece, ids, prompt, skip):
    for tokenizer in (byte_level, byte_fallback, metaspace, wordpiece):
        by_list = Detokenizer(tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
        by_id = Detokenizer(tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
        for token_id in (*ids, *ids):  # the second time every piece is known
            assert by_id.push_one(token_id) == by_list.push([token_id])
        assert by_id.flush() == by_list.flush()


@pytest.mark.parametrize(
    ("name", "space", "lost"), [("byte_level", "Ġ", "\ufffd"), ("byte_fallback", "▁", "\ufffd" * 2)]
)
def test_a_space_behind_an_incomplete_character_settles_it_and_what_comes_late_is_lost_alone(
    name, space, lost, request
):
    """The character can no longer be completed: it is given up once, as the library does, and no text is held or doubled."""
    tokenizer = request.getfixturevalue(name)
    spell = ("ä", "½", "ł") if name == "byte_level" else ("<0xE4>", "<0xBD>", "<0xA0>")
    first, second, third = (tokenizer.token_id(piece) for piece in spell)
    word = next(
        tokenizer.token_id(f"{space}{text}") for text in ("the", "stones") if tokenizer.token_id(f"{space}{text}")
    )
    shown = tokenizer.token_bytes(word).decode()
    assert shown.startswith(" ")
    ids = [first, second, word, third, word]
    detokenizer = Detokenizer(tokenizer, prompt_ids=[word])
    assert [detokenizer.push([each]) for each in ids] == ["", "", lost + shown, "\ufffd", shown]
    assert detokenizer.flush() == ""
    assert tokenizer.decode([word, *ids]) == full(tokenizer, [word, *ids], skip=True)
