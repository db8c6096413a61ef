"""Chat messages to the text that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, RequestError

Message = Mapping[str, Any]

# Text that no message holds. The space at its end shows whether the template trims what it prints.
_CONTINUE_HERE = "\ue000continue here\ue001 "
_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """A model's chat template, compiled once; `render` may be called from several threads.

    Templates come with models, so they run in Jinja's sandbox, with the names and whitespace rules that
    `transformers` gives them.

    Raises: ConfigError if the source is no template.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}", field="chat_template") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. It carries its own BOS where the model wants one: encode it without special tokens.

        With `continue_final_message` the text ends inside the last message, so that the model goes on with it; no
        generation prompt is added then. `extra` reaches the template as further variables, and wins over the
        special tokens.

        Raises: RequestError, naming the part of the messages or the extra variable that cannot be used.
        """
        chat = plain_messages(messages)
        for name in extra or ():
            if name in _OWN_NAMES:
                raise RequestError(f"{name} cannot be set for the template", param=f"chat_template_kwargs.{name}")
        final_text = _mark_end(chat) if continue_final_message else ""
        variables: dict[str, Any] = {
            "documents": None,
            **self._special_tokens,
            **(extra or {}),
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template can fail in any way; it is this request's messages that it failed on
            raise RequestError(f"the chat template rejects the messages: {error}", param="messages") from error
        return _cut_at_mark(text, final_text) if continue_final_message else text


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """OpenAI messages in the form that templates expect.

    Content becomes a string: null and absent become "", text parts are joined as they are. Other fields that are null
    are dropped. The arguments of tool calls, JSON text in the API, become objects.

    Raises: RequestError naming the field, such as `messages[0].content[1].type`.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError("a message must be an object", param=where)
        plain = {name: value for name, value in message.items() if value is not None}
        plain["content"] = _joined_text(message.get("content"), f"{where}.content")
        if "tool_calls" in plain:
            plain["tool_calls"] = _plain_tool_calls(plain["tool_calls"], f"{where}.tool_calls")
        chat.append(plain)
    return chat


def _joined_text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError("content must be a string or a list of parts", param=where)
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise RequestError("a content part must be an object", param=f"{where}[{index}]")
        if part.get("type") != "text":
            raise RequestError(
                f"content parts of type {part.get('type')!r} are not supported, only 'text'",
                param=f"{where}[{index}].type",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError("text must be a string", param=f"{where}[{index}].text")
        texts.append(text)
    return "".join(texts)


def _plain_tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError("tool_calls must be a list", param=where)
    plain: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError("a tool call must have a function", param=f"{where}[{index}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # Templates print the arguments as JSON themselves; given text they would quote it a second time.
            arguments = _parsed(arguments, f"{where}[{index}].function.arguments")
        plain.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return plain


def _parsed(arguments: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"arguments must be JSON: {error}", param=where) from error
    if not isinstance(value, dict):
        raise RequestError("arguments must be a JSON object", param=where)
    return value


def _mark_end(chat: list[dict[str, Any]]) -> str:
    final_text: str = chat[-1]["content"]
    if not final_text:
        raise RequestError("the final message has no content to continue", param=f"messages[{len(chat) - 1}].content")
    chat[-1]["content"] = final_text + _CONTINUE_HERE
    return final_text


def _cut_at_mark(text: str, final_text: str) -> str:
    at = text.rfind(_CONTINUE_HERE.rstrip())
    if at < 0 or final_text.strip() not in text:
        raise RequestError("the chat template changes the final message, so it cannot be continued", param="messages")
    # A template that trims contents would also have trimmed the spaces that stood before the mark.
    return text[:at] if text.startswith(_CONTINUE_HERE, at) else text[:at].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (read by Jinja from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that lead into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may use it as a name
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _reject_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _reject_private(name)
        super().__setitem__(name, value)


def _reject_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
