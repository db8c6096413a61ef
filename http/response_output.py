"""The output of /v1/responses: items as their pieces come, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from .message_parser import Piece


class MakeEvent(Protocol):
    """Numbers an event and writes it down."""

    def __call__(self, kind: str, /, **fields: object) -> bytes: ...


_ITEM_OF = {"content": "message", "reasoning": "reasoning"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """A message, reasoning and calls, in the order in which they came. Each is told by events from its begin to its end."""

    def __init__(self, event: MakeEvent) -> None:
        self._event = event
        self._text = ""  # of the item under way
        self.items: list[dict[str, Any]] = []

    def push(self, pieces: Sequence[Piece]) -> bytes:
        """The events of new pieces."""
        events = b""
        for piece in pieces:
            kind = _ITEM_OF.get(piece.kind, "function_call")
            if piece.kind == "call":
                events += self._begin(kind, piece.text)
            else:
                if not self._is_open(kind):
                    events += self._begin(kind, "")
                events += self._add(kind, piece.text)
        return events

    def finish(self, status: str) -> bytes:
        """The last events. `status`: of the response, and of the item with which it ends; without any there is an empty
        message.
        """
        events = b"" if self.items else self._begin("message", "")
        return events + self._end(status)

    def _is_open(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1]["type"] == kind

    def _begin(self, kind: str, name: str) -> bytes:
        events = self._end("completed") if self.items else b""
        item: dict[str, Any] = {"type": kind, "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": f"call_{uuid.uuid4().hex}", "name": name, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self.items.append(item)
        self._text = ""
        events += self._event("response.output_item.added", output_index=self._index, item=item)
        if kind != "function_call":
            events += self._part_event("response.content_part.added", part=_part(kind, ""))
        return events

    def _add(self, kind: str, text: str) -> bytes:
        self._text += text
        if kind == "function_call":
            return self._item_event("response.function_call_arguments.delta", delta=text)
        return self._part_event(f"response.{_TEXT_EVENTS[kind]}.delta", delta=text, **_no_logprobs(kind))

    def _end(self, status: str) -> bytes:
        item, text = self.items[-1], self._text
        kind = item["type"]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            events = self._item_event("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            item["content"] = [_part(kind, text)]
            events = self._part_event(f"response.{_TEXT_EVENTS[kind]}.done", text=text, **_no_logprobs(kind))
            events += self._part_event("response.content_part.done", part=item["content"][0])
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _item_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self.items[-1]["id"], output_index=self._index, **fields)

    def _part_event(self, kind: str, **fields: object) -> bytes:
        return self._item_event(kind, content_index=0, **fields)


def _part(kind: str, text: str) -> dict[str, object]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _no_logprobs(kind: str) -> dict[str, object]:
    return {"logprobs": []} if kind == "message" else {}
