"""Chat templates, against transformers and against the OpenAI message shapes."""

import json
import re
from pathlib import Path

import pytest

from slipstream.engine.errors import ConfigError, RequestError
from slipstream.engine.text.chat_template import ChatTemplate, plain_messages
from slipstream.engine.text.tokenization import TextTokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|turn|>system\nYou help.<|end|>\n' }}{% endif %}"
    "{{'<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
TRIMMING = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
BLOCKS = """{{ bos_token }}
{%- set seen = namespace(count=0) %}
{% if tools %}
    Tools: {{ tools | tojson }}
    {% for tool in tools %}
        {{- tool.function | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% set seen.count = seen.count + 1 %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% set seen2 = 1 %}{{ eos_token }}{% endgeneration %}
    {% else %}
    {{ seen.count }}: {{ message.content }}{{ seen2 }}
    {% endif %}
    {% if seen.count > 5 %}{% break %}{% endif %}
{% endfor %}
{% if documents is not none %}documents{% endif %}{{ pad_token }}{{ style }}{% if add_generation_prompt %}>>{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "find", "description": "<b>é & 'x'</b>", "parameters": {}}}]
CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Ahoj  světe\n 한국어 👨‍👩‍👧 <|end|>x"},
    {"role": "assistant", "content": "Hi <tag> "},
    {"role": "user", "content": " and?"},
]


@pytest.fixture
def hugging_face(model_folder: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_folder)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", [CHATML, TRIMMING, BLOCKS])
def test_the_ids_equal_those_of_transformers(model_folder, hugging_face, source):
    config = json.loads((model_folder / "tokenizer_config.json").read_text())
    (model_folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
    tokenizer = TextTokenizer.load(model_folder)
    cases = [
        {"conversation": CHAT, "add_generation_prompt": True},
        {"conversation": CHAT[1:], "add_generation_prompt": False},
        {"conversation": CHAT, "add_generation_prompt": True, "tools": TOOLS, "style": "terse"},
        {"conversation": CHAT[:3], "continue_final_message": True, "add_generation_prompt": False},
        {"conversation": [*CHAT[:2], {"role": "skip", "content": "-"}] * 4, "add_generation_prompt": True},
    ]
    for case in cases:
        expected = hugging_face.apply_chat_template(chat_template=source, tokenize=True, return_dict=False, **case)
        extra = {"style": case["style"]} if "style" in case else {}
        arguments = {name: value for name, value in case.items() if name not in ("conversation", "style")}
        text = tokenizer.chat_template.render(case["conversation"], extra=extra, **arguments)
        assert tokenizer.encode(text, add_special_tokens=False) == expected


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("text", ["gamma 한국어", "<|turn|>user\ngamma<|end|> x", ""])
def test_plain_prompts_also_encode_as_in_transformers(model_folder, hugging_face, text):
    tokenizer = TextTokenizer.load(model_folder)
    for add in (True, False):
        expected = hugging_face(text, add_special_tokens=add, truncation=False, padding=False).input_ids
        assert tokenizer.encode(text, add_special_tokens=add) == expected


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_are_joined_for_every_role(role):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": role, "content": parts}
    assert plain_messages([message]) == [{"role": role, "content": "ab"}]
    assert message["content"] is parts


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None, "refusal": None}, {"role": "assistant"}])
def test_content_that_is_null_or_absent_is_empty_and_null_fields_are_dropped(message):
    assert plain_messages([message]) == [{"role": "assistant", "content": ""}]


def test_a_tool_round_trip_reaches_the_template_as_objects():
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "é", "n": 1e3}'}}
    chat = [
        {"role": "user", "content": "find é"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "found"}]},
    ]
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}|{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}"
    )
    assert template.render(chat) == 'find é||{"q": "é", "n": 1000.0}found|'
    assert call["function"]["arguments"].startswith("{")


@pytest.mark.parametrize(("message", "param"), [
    ({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "messages[1].content[1].type"),
    ({"content": [{"text": "a"}]}, "messages[1].content[0].type"),
    ({"content": [{"type": "text", "text": 3}]}, "messages[1].content[0].text"),
    ({"content": ["a"]}, "messages[1].content[0]"),
    ({"content": 7}, "messages[1].content"),
    ("hello", "messages[1]"),
    ({"tool_calls": "x"}, "messages[1].tool_calls"),
    ({"tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0].function"),
    ({"tool_calls": [{"function": {"arguments": "{"}}]}, "messages[1].tool_calls[0].function.arguments"),
    ({"tool_calls": [{"function": {"arguments": "[]"}}]}, "messages[1].tool_calls[0].function.arguments"),
])  # fmt: skip
def test_a_message_that_cannot_be_used_is_named(message, param):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render([{"role": "user", "content": "x"}, message])
    assert caught.value.param == param


@pytest.mark.parametrize("source", [
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages[0].absent.name }}",
    "{{ 'x' + 1 }}",
    "{{ messages[0].__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{{ namespace(_x=1) }}",
    "{{ messages.append(1) }}",
])  # fmt: skip
def test_whatever_fails_in_a_template_is_an_error_of_the_request(source):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_templates_own_message_reaches_the_caller():
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([{"role": "user", "content": "x"}])


def test_no_messages_are_an_error_of_the_request():
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render([])
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_is_a_configuration_error():
    with pytest.raises(ConfigError):
        ChatTemplate("{% for %}")


def test_extra_variables_win_over_special_tokens_but_not_over_the_request():
    template = ChatTemplate("{{ bos_token }}{{ thinking }}", special_tokens={"bos_token": "<s>"})
    message = {"role": "user", "content": "x"}
    assert template.render([message]) == "<s>"
    assert template.render([message], extra={"bos_token": "", "thinking": False}) == "False"
    with pytest.raises(RequestError) as caught:
        template.render([message], extra={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"


def test_lines_that_hold_only_a_tag_leave_no_whitespace():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == "x\n"


def test_the_date_is_the_hosts():
    prompt = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([{"role": "user", "content": "x"}])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", prompt)


def test_a_message_to_continue_keeps_its_spaces_unless_the_template_trims():
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is "}]
    assert ChatTemplate(CHATML).render(chat, continue_final_message=True).endswith("assistant\nThe answer is ")
    assert ChatTemplate(TRIMMING).render(chat, continue_final_message=True).endswith("[assistant]The answer is")
    assert chat[-1]["content"] == "The answer is "


@pytest.mark.parametrize(("source", "content"), [(CHATML, ""), (CHATML, None), ("{{ messages[0].role }}", "text")])
def test_a_message_that_cannot_be_continued_is_an_error_of_the_request(source, content):
    with pytest.raises(RequestError):
        ChatTemplate(source).render([{"role": "assistant", "content": content}], continue_final_message=True)
