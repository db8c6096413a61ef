"""Tool calls and reasoning out of text: the same message however the text is cut, and at every length of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.json_call import JsonCall
from slipstream.http.message_parser import CallForm, MessageParser, Piece

NAMES = frozenset({"weather", "add"})
ARGUMENTS = [
    "{}",
    '{"city": "Rome", "days": [1, {"a": "}{"}], "note": "a \\"quoted\\" \\\\ brace }"}',
    '{"x": {"y": {"z": null}}, "s": "<tool_call></tool_call>"}',
]


def joined(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The message that the deltas make."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for kind, text in pieces:
        assert text
        if kind == "call":
            message["calls"].append([text, ""])
        elif kind == "arguments":
            message["calls"][-1][1] += text
        else:
            message[kind] += text
    return message


def parsed(form: CallForm | None, parts: Sequence[str], **how: Any) -> dict[str, Any]:
    parser = MessageParser(form, names=NAMES, **how)
    pieces = [piece for part in parts for piece in parser.push(part)]
    message = joined([*pieces, *parser.finish()])
    assert len(message["calls"]) == parser.num_calls
    return message


def written(form: CallForm, calls: Sequence[tuple[str, str]]) -> str:
    key = "parameters" if form is CallForm.LLAMA else "arguments"
    objects = [f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}' for name, arguments in calls]
    if form is CallForm.HERMES:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form is CallForm.LLAMA:
        return "; ".join(objects)
    return ("[TOOL_CALLS]" if form is CallForm.MISTRAL else "") + f"[{', '.join(objects)}]"


FORMS = [CallForm.HERMES, CallForm.LLAMA, CallForm.MISTRAL, CallForm.ARRAY]


@pytest.mark.parametrize("form", FORMS)
def test_calls_come_out_as_they_were_written(form: CallForm) -> None:
    for count in (1, 2, 3):
        calls = [(name, arguments) for name, arguments in zip(("weather", "add", "add"), ARGUMENTS, strict=True)][
            :count
        ]
        message = parsed(form, [written(form, calls)])
        assert message == {"content": "", "reasoning": "", "calls": [list(call) for call in calls]}
        assert all(json.loads(arguments) is not None for _, arguments in message["calls"])


@pytest.mark.parametrize("form", [*FORMS, CallForm.ARGUMENTS])
def test_every_cut_gives_the_same_message_streamed_and_whole(form: CallForm) -> None:
    calls = [("weather", ARGUMENTS[1]), ("add", ARGUMENTS[2])]
    text = ARGUMENTS[1] if form is CallForm.ARGUMENTS else written(form, calls)
    for end in range(len(text) + 1):
        cut = text[:end]
        whole = parsed(form, [cut])
        assert parsed(form, list(cut)) == whole
        assert parsed(form, [cut[: end // 3], cut[end // 3 :]]) == whole
        for _, arguments in whole["calls"]:
            assert arguments in (ARGUMENTS[1], ARGUMENTS[2]) or any(each.startswith(arguments) for each in ARGUMENTS)


@given(
    st.sampled_from(FORMS),
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "add", ',
                              '"arguments": ', '"parameters": ', "{", "}", "[", "]", '"', "\\", ", ", ";", " ", "\n", "a",
                              "<think>", "</think>", "add", "null", '{"name": "", ', "[ARGS]", "<", ":", "1"]), max_size=25),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
)  # fmt: skip
def test_any_text_at_all_gives_the_same_message_however_it_is_cut(
    form: CallForm, words: list[str], cuts: list[int], reasons: bool
) -> None:
    text = "".join(words)
    whole = parsed(form, [text], reasons=reasons)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert parsed(form, parts, reasons=reasons) == whole
    assert parsed(form, list(text), reasons=reasons) == whole


@pytest.mark.parametrize("form", FORMS[:3])
def test_text_before_and_between_calls_is_content(form: CallForm) -> None:
    call = written(form, [("add", "{}")])
    if form is CallForm.LLAMA:
        call = "<|python_tag|>" + call
    message = parsed(form, ["Let me see. \n", call])
    assert message == {"content": "Let me see.", "reasoning": "", "calls": [["add", "{}"]]}
    assert parsed(form, ["no call, but a < b and {x}\n"])["content"] == "no call, but a < b and {x}\n"


def test_hermes_text_between_calls_is_kept_and_its_spaces_inside() -> None:
    one = written(CallForm.HERMES, [("add", "{}")])
    message = parsed(CallForm.HERMES, [f"first {one} then\n{one}  "])
    assert message["content"] == "first then"
    assert message["calls"] == [["add", "{}"]] * 2


def test_arguments_before_the_name_missing_null_or_as_text_are_read() -> None:
    for text, arguments in (
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"name": "add"}', "{}"),
        ('{"name": "add", "arguments": null}', "{}"),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "add", "id": 3, "arguments": {"a": 1} }', '{"a": 1}'),
    ):
        for parts in ([f"<tool_call>{text}</tool_call>"], list(f"<tool_call>{text}</tool_call>")):
            assert parsed(CallForm.HERMES, parts)["calls"] == [["add", arguments]]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (CallForm.HERMES, "<tool_call>not json</tool_call>"),
        (CallForm.HERMES, '<tool_call>{"nom": 1}</tool_call> after'),
        (CallForm.HERMES, '<tool_call>\n{"na'),
        (CallForm.HERMES, "a <tool"),
        (CallForm.HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (CallForm.MISTRAL, '[TOOL_CALLS]{"nom": "add"} after'),
        (CallForm.MISTRAL, "[TOOL_CALLS] I would call: {x}"),
        (CallForm.MISTRAL, "a [TOOL_CALLS]ad"),
        (CallForm.LLAMA, '{"name": "Bob", "age": 3}'),
        (CallForm.LLAMA, '{"answer": 42}'),
        (CallForm.LLAMA, "<|pyth"),
    ],
)
def test_what_is_no_call_is_content_and_nothing_of_it_is_lost(form: CallForm, text: str) -> None:
    message = parsed(form, list(text))
    assert message["calls"] == []
    assert message["content"] == text


def test_mistral_s_newer_form_names_the_function_before_its_arguments() -> None:
    for text in ('[TOOL_CALLS]add{"a": 1}', '[TOOL_CALLS]add[ARGS]{"a": 1}'):
        assert parsed(CallForm.MISTRAL, list(text))["calls"] == [["add", '{"a": 1}']]
    two = '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]weather{}'
    assert parsed(CallForm.MISTRAL, list(two))["calls"] == [["add", '{"a": 1}'], ["weather", "{}"]]


def test_mistral_calls_that_are_held_to_schemas_are_read_in_no_other_form() -> None:
    held = '[TOOL_CALLS]add[ARGS]{"a": 1}'
    for text in (
        "[TOOL_CALLS]add{}",
        '[TOOL_CALLS][{"name": "add"}]',
        "[TOOL_CALLS] add[ARGS]{}",
        "[TOOL_CALLS]b[ARGS]{}",
    ):
        for parts in ([text + held], list(text + held)):
            message = parsed(CallForm.MISTRAL, parts, args_mark=True)
            assert message == {"content": text, "reasoning": "", "calls": [["add", '{"a": 1}']]}


def test_one_mistral_call_may_stand_without_brackets() -> None:
    text = 'So: [TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}'
    for more, calls in (("", []), (" then [TOOL_CALLS]weather{}", [["weather", "{}"]])):
        message = parsed(CallForm.MISTRAL, list(text + more))
        assert message == parsed(CallForm.MISTRAL, [text + more])
        assert message["calls"] == [["add", '{"a": 1}'], *calls]
        assert message["content"] == ("So: then" if more else "So:")


@pytest.mark.parametrize("is_thinking", [False, True])
def test_reasoning_is_split_from_the_answer(is_thinking: bool) -> None:
    text = ("" if is_thinking else "\n<think>\n") + "so: 1 < 2\n</think>\n\nTwo."
    for parts in ([text], list(text)):
        message = parsed(None, parts, reasons=True, is_thinking=is_thinking)
        assert message == {"content": "Two.", "reasoning": "so: 1 < 2\n", "calls": []}
    assert parsed(None, list("<think>cut </th"), reasons=True)["reasoning"] == "cut </th"
    assert parsed(None, list(" plain"), reasons=True)["content"] == " plain"


def test_a_call_behind_reasoning_is_found() -> None:
    text = "<think>hm</think>\n" + written(CallForm.HERMES, [("add", "{}")])
    for parts in ([text], list(text)):
        assert parsed(CallForm.HERMES, parts, reasons=True) == {
            "content": "",
            "reasoning": "hm",
            "calls": [["add", "{}"]],
        }


LONG = json.dumps({"text": 'ab"\\\n{' * 400, "list": list(range(400)), "deep": [{"a": [{}]}] * 200})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *((form, written(form, [("add", LONG), ("weather", LONG)])) for form in FORMS),
        (CallForm.MISTRAL, f"[TOOL_CALLS]add{LONG}"),
        (CallForm.ARGUMENTS, LONG),
        (CallForm.HERMES, f'<tool_call>{{"arguments": {LONG}, "name": "add"}}</tool_call>'),
        (CallForm.HERMES, f'<tool_call>{{"name": "add", "arguments": {json.dumps(LONG)}}}</tool_call>'),
        (CallForm.HERMES, f"<tool_call>{{{', '.join(f'{json.dumps(str(n))}: 1' for n in range(2000))}}}</tool_call>"),
    ],
)
def test_streamed_calls_are_read_in_work_that_grows_with_their_length(
    form: CallForm, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in characters: those that are looked at, those that are held back and those that are read again."""
    work = []
    take, since = JsonCall._take, JsonCall._from
    monkeypatch.setattr(JsonCall, "_take", lambda call, part: [work.append(len(part)), take(call, part)][1])

    def counted(call: JsonCall, start: int) -> str:
        again = since(call, start)
        work.append(len(again))
        return again

    monkeypatch.setattr(JsonCall, "_from", counted)
    parser = MessageParser(form, names=frozenset({"add"} if form is CallForm.ARGUMENTS else NAMES))
    pieces = []
    for character in text:
        pieces += parser.push(character)
        work.append(len(parser._buffer))
    joined([*pieces, *parser.finish()])
    assert len(text) / 2 < sum(work) < 4 * len(text)
