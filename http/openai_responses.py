"""POST /v1/responses: the stateless subset of OpenAI's newer API, with its own stream events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from pydantic import model_validator
from starlette.responses import Response

from ..engine.errors import MisuseError, RequestError
from ..engine.outputs import Finished, TokenLogprobs, Usage
from ..engine.sampling_params import SamplingParams
from .bodies import HINTS, Strict, without_idle_fields
from .endpoint import Call, answer
from .failures import Failure
from .frames import Collected, Template
from .front import Front
from .intake import Intake, Prompts, Texts, take_in
from .prompts import encode_chat
from .submission import Job

NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "store": (False,),  # nothing is kept; left out it means no here
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
ROLES = ("system", "developer", "user", "assistant")


class ResponsesBody(Strict):
    model: str | None = None
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return without_idle_fields(fields, own=cls.model_fields, not_supported=NOT_SUPPORTED, hints=HINTS)


async def responses(front: Front, call: Call) -> Response:
    """The next message of a chat, in the newer API; nothing is stored."""
    front.check_open()
    body, prompts = await take_in(front, call, RESPONSES)
    call.names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
    shape = ResponsesShape(body, response_id=f"resp_{call.request_id}", model=front.model(body.model))
    params = SamplingParams(max_tokens=body.max_output_tokens, temperature=body.temperature, top_p=body.top_p)
    (prompt_ids,) = await prompts()
    return await answer(front, call, shape, [Job(prompt_ids=prompt_ids, params=params)], stream=body.stream)


async def response_prompt(texts: Texts, body: ResponsesBody) -> Prompts:
    """The ids of the chat that the input stands for."""
    return [await encode_chat(texts, messages_of(body))]


RESPONSES = Intake(
    name="responses",
    body=ResponsesBody,
    encode=response_prompt,
    emptied=lambda body: {"input": "", "instructions": None},
)


def messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """The input as chat messages, the instructions before them. Raises: RequestError naming the place in the input."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list) or not body.input:
        raise RequestError("input must be a string or a list of messages", param="input")
    return [*messages, *(_message(item, f"input[{index}]") for index, item in enumerate(body.input))]


def _message(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise RequestError("only messages are supported as input", param=f"{where}.type")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise RequestError(f"role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if isinstance(content, list):
        content = "".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError("content must be a string or a list of text parts", param=f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _text(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text"):
        raise RequestError("only text parts are supported", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError("text must be a string", param=f"{where}.text")
    return text


class ResponsesShape:
    """One assistant message as output. Every event is numbered, so none comes from a template."""

    wants_ids = False
    wants_logprobs = False

    def __init__(self, body: ResponsesBody, *, response_id: str, model: str) -> None:
        self._numbers = itertools.count()
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._pieces: list[str] = []
        self._end: Finished | None = None
        self._base: dict[str, object] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "metadata": {},
        }

    def opening(self, index: int) -> bytes:
        in_progress = self._response("in_progress", output=[], usage=None)
        return (
            self._event("response.created", response=in_progress)
            + self._event("response.in_progress", response=in_progress)
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", content=[]))
            + self._part_event("response.content_part.added", part=_part(""))
        )

    def scored(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], usage: Callable[[], Usage]) -> bytes:
        raise MisuseError("this shape asks for no log-probabilities")

    def text(self, index: int) -> Template | None:
        return None

    def frame(self, index: int, text: str, usage: Callable[[], Usage]) -> bytes:
        self._pieces.append(text)
        return self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def closing(self, index: int, end: Finished, usage: Callable[[], Usage]) -> bytes:
        self._end = end
        part = _part("".join(self._pieces))
        return (
            self._part_event("response.output_text.done", text=part["text"], logprobs=[])
            + self._part_event("response.content_part.done", part=part)
            + self._event("response.output_item.done", output_index=0, item=self._item(_status(end), content=[part]))
        )

    def ending(self, usage: Usage) -> bytes:
        whole = self._finished("".join(self._pieces), self._end, usage)
        return self._event(f"response.{_status(self._end)}", response=whole)

    def error(self, failure: Failure) -> bytes:
        return self._event("error", code=failure.code, message=failure.message, param=failure.param)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        return orjson.dumps(self._finished(choices[0].text, choices[0].end, usage))

    def _finished(self, text: str, end: Finished | None, usage: Usage) -> dict[str, object]:
        status = _status(end)
        return self._response(status, output=[self._item(status, content=[_part(text)])], usage=usage)

    def _response(self, status: str, *, output: list[object], usage: Usage | None) -> dict[str, object]:
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counted = None if usage is None else _usage(usage)
        return {
            **self._base,
            "status": status,
            "error": None,
            "incomplete_details": cut_off,
            "output": output,
            "usage": counted,
        }

    def _item(self, status: str, *, content: list[dict[str, object]]) -> dict[str, object]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    def _part_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        numbered = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(numbered) + b"\n\n"


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(end: Finished | None) -> str:
    return "incomplete" if end is not None and end.reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
