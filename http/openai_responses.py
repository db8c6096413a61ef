"""POST /v1/responses: the stateless subset of OpenAI's newer API, with its own stream events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import Field, model_validator
from starlette.responses import Response

from ..engine.errors import RequestError
from ..engine.grammar_session import GrammarSpec
from ..engine.outputs import Finished, Usage
from ..engine.sampling_params import SamplingParams
from .bodies import HINTS, Strict, without_idle_fields
from .endpoint import Call, answer
from .failures import Failure
from .frames import Collected, Template, TextOnly
from .front import Front
from .intake import Intake, Prompts, Texts, take_in
from .message_parser import MessageParser
from .message_reading import reading_of
from .prompts import encode_chat
from .response_input import messages_of
from .response_output import OutputItems
from .steering import spec_of_format
from .submission import Urgency, jobs_of
from .tools import Tools, tools_of

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
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class TextOptions(Strict):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(Strict):
    model: str | None = None
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=lambda: TextOptions())

    @property
    def format(self) -> GrammarSpec | None:
        """What the answer's text must be. Raises: RequestError naming the field."""
        asked = self.text.format
        if asked is None:
            return None
        try:
            return spec_of_format({"type": asked.get("type"), "json_schema": asked})
        except RequestError as error:
            place = (error.param or "").removeprefix("response_format").replace(".json_schema", "")
            raise RequestError(str(error), param=f"text.format{place}", code=error.code) from error

    @property
    def callable_tools(self) -> Tools | None:
        """Raises: RequestError naming the field."""
        tools = [_nested(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)]
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        try:
            return tools_of(tools, choice, is_parallel=self.parallel_tool_calls)
        except RequestError as error:
            raise _flat(error) from error

    @model_validator(mode="after")
    def _tools_and_format_go_together(self) -> ResponsesBody:
        tools = self.callable_tools
        if tools is not None and self.format is not None:
            try:
                tools.check_beside_format()
            except RequestError as error:
                raise _flat(error) from error
        return self

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return without_idle_fields(fields, own=cls.model_fields, not_supported=NOT_SUPPORTED, hints=HINTS)


def _nested(tool: object, where: str) -> dict[str, Any]:
    """A tool as chats have it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError("only tools of the type function are supported", param=f"{where}.type")
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type" and value is not None},
    }


def _flat(error: RequestError) -> RequestError:
    """The error with the tools' place as it is here."""
    param = None if error.param is None else error.param.replace(".function", "")
    return RequestError(str(error), param=param, code=error.code)


async def responses(front: Front, call: Call) -> Response:
    """The next message of a chat, in the newer API; nothing is stored."""
    front.check_open()
    body, prompts = await take_in(front, call, RESPONSES)
    call.names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
    call.names["structured_output"] = "tools" if body.format is None else "text.format"
    model = front.model(body.model)
    params = SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        structured_output=body.format,
    )
    (prompt_ids,) = await prompts()
    has_format = body.format is not None
    reading = reading_of(front, body.callable_tools, prompt_ids, has_format=has_format, separates=True)
    params = reading.held(params)
    shape = ResponsesShape(body, response_id=f"resp_{call.request_id}", model=model, parser=reading.parser())
    return await answer(front, call, shape, await jobs_of(front, [prompt_ids], [params], Urgency()), stream=body.stream)


async def response_prompt(texts: Texts, body: ResponsesBody) -> Prompts:
    """The ids of the chat that the input stands for."""
    tools = body.callable_tools
    messages = messages_of(body.input, body.instructions)
    return [await encode_chat(texts, messages, tools=None if tools is None else tools.for_template)]


RESPONSES = Intake(
    name="responses",
    body=ResponsesBody,
    encode=response_prompt,
    emptied=lambda body: {"input": "", "instructions": None},
)


class ResponsesShape(TextOnly):
    """One answer as output items. Every event is numbered, so none comes from a template."""

    wants_ids = False

    def __init__(self, body: ResponsesBody, *, response_id: str, model: str, parser: MessageParser) -> None:
        self._numbers = itertools.count()
        self._parser = parser
        self._output = OutputItems(self._event)
        self._status = "in_progress"
        self._base: dict[str, object] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": body.text.format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
            "truncation": "disabled",
            "metadata": {},
        }

    def opening(self, index: int, usage: Callable[[], Usage]) -> bytes:
        in_progress = self._response(usage=None)
        return self._event("response.created", response=in_progress) + self._event(
            "response.in_progress", response=in_progress
        )

    def text(self, index: int) -> Template | None:
        return None

    def frame(self, index: int, text: str, usage: Callable[[], Usage]) -> bytes:
        return self._output.push(self._parser.push(text))

    def closing(self, index: int, end: Finished, usage: Callable[[], Usage]) -> bytes:
        self._status = "completed" if end.reason == "stop" else "incomplete"
        rest = self._output.push(self._parser.finish())
        return rest + self._output.finish(self._status)

    def ending(self, usage: Usage) -> bytes:
        return self._event(f"response.{self._status}", response=self._response(usage=usage))

    def error(self, failure: Failure) -> bytes:
        return self._event("error", code=failure.code, message=failure.message, param=failure.param)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        (choice,) = choices
        self.frame(0, choice.text, lambda: usage)
        self.closing(0, choice.end, lambda: usage)
        return orjson.dumps(self._response(usage=usage))

    def _response(self, *, usage: Usage | None) -> dict[str, object]:
        return {
            **self._base,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": self._output.items,
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, /, **fields: object) -> bytes:
        numbered = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(numbered) + b"\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
