"""A choice's text as a chat message: parsed once, told as deltas or whole."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from .message_parser import CallForm, MessageParser, Piece

MakeParser = Callable[[], MessageParser]


class ChatMessages:
    """The messages of one response's choices. `form`: of its calls, which decides how their ids look."""

    def __init__(self, make_parser: MakeParser, form: CallForm | None) -> None:
        self._make_parser = make_parser
        self._form = form
        self._parsers: dict[int, MessageParser] = {}
        self._num_calls: dict[int, int] = {}

    def deltas(self, index: int, text: str) -> list[dict[str, Any]]:
        """What a piece of a choice's text adds; nothing while it may become a call."""
        return [self._delta(index, piece) for piece in self._parser(index).push(text)]

    def last_deltas(self, index: int) -> list[dict[str, Any]]:
        """What was held back, now that the text is over."""
        return [self._delta(index, piece) for piece in self._parser(index).finish()]

    def has_calls(self, index: int) -> bool:
        return self._parser(index).num_calls > 0

    def whole(self, index: int, text: str) -> dict[str, Any]:
        """The message of a text: by definition what its deltas add up to."""
        parser = self._parser(index)
        pieces = [*parser.push(text), *parser.finish()]
        content = _joined(pieces, "content")
        reasoning = _joined(pieces, "reasoning")
        calls: list[dict[str, Any]] = []
        for kind, part in pieces:
            if kind == "call":
                calls.append(self._call(part))
            elif kind == "arguments":
                calls[-1]["function"]["arguments"] += part
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _parser(self, index: int) -> MessageParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._make_parser()
        return parser

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        kind, text = piece
        if kind == "content":
            return {"content": text}
        if kind == "reasoning":
            return {"reasoning_content": text}
        if kind == "call":
            number = self._num_calls[index] = self._num_calls.get(index, -1) + 1
            return {"tool_calls": [{"index": number, **self._call(text)}]}
        return {"tool_calls": [{"index": self._num_calls[index], "function": {"arguments": text}}]}

    def _call(self, name: str) -> dict[str, Any]:
        # Mistral's templates take ids of nine characters and no others.
        random = uuid.uuid4().hex
        call_id = random[:9] if self._form is CallForm.MISTRAL else f"call_{random}"
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def _joined(pieces: Sequence[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)
