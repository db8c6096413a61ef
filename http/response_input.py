"""The input of /v1/responses as chat messages."""

from __future__ import annotations

from typing import Any

import orjson

from ..engine.errors import RequestError

ROLES = ("system", "developer", "user", "assistant")


def messages_of(given: object, instructions: str | None) -> list[dict[str, Any]]:
    """The input as messages, the instructions before them. What one turn of the assistant brought as several items
    (reasoning, text, calls) is one message again.

    Raises: RequestError naming the place in the input.
    """
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input must be a string or a list of items", param="input")
    reader = _Items(messages)
    for index, item in enumerate(given):
        reader.add(item, f"input[{index}]")
    return messages


class _Items:
    """Messages as the items come."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._turn: dict[str, Any] | None = None  # the assistant's message under way
        self._call_ids: set[str] = set()

    def add(self, item: object, where: str) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(item, dict) or kind not in ("message", "function_call", "function_call_output", "reasoning"):
            message = "an input item is a message, a function_call, a function_call_output or reasoning"
            raise RequestError(message, param=f"{where}.type")
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._output(item, where)
        else:
            self._reasoning(item, where)

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(f"role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant" and self._turn is not None and self._turn["content"] is None:
            self._turn["content"] = content
            return
        self._append({"role": "system" if role == "developer" else role, "content": content})

    def _call(self, item: dict[str, Any], where: str) -> None:
        call_id, name, arguments = (_text_of(item, key, where) for key in ("call_id", "name", "arguments"))
        try:
            is_object = isinstance(orjson.loads(arguments or "{}"), dict)
        except orjson.JSONDecodeError:
            is_object = False
        if not is_object:
            raise RequestError("arguments must be a JSON object", param=f"{where}.arguments")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)
        self._call_ids.add(call_id)

    def _output(self, item: dict[str, Any], where: str) -> None:
        call_id = _text_of(item, "call_id", where)
        if call_id not in self._call_ids:
            raise RequestError(f"no call before it has the id {call_id!r}", param=f"{where}.call_id")
        content = _content(item.get("output"), f"{where}.output")
        self._append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        parts = item.get("content") or []
        self._turn = None  # a turn begins with its reasoning
        if parts:
            self._assistant()["reasoning_content"] = _content(parts, f"{where}.content", ("reasoning_text",))

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._append({"role": "assistant", "content": None})
        assert self._turn is not None
        return self._turn

    def _append(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._turn = message if message["role"] == "assistant" else None


def _text_of(item: dict[str, Any], key: str, where: str) -> str:
    text = item.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{key} must be a string", param=f"{where}.{key}")
    return text


def _content(content: object, where: str, kinds: tuple[str, ...] = ("input_text", "output_text")) -> str:
    if isinstance(content, list):
        content = "".join(_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError("it must be a string or a list of text parts", param=where)
    return content


def _text(part: object, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds:
        raise RequestError("only text parts are supported", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError("text must be a string", param=f"{where}.text")
    return text
