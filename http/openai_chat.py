"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from ..engine.outputs import Finished, TokenLogprobs, Usage
from .bodies import ChatBody, ChatMessage, GenerationBody
from .chat_message import ChatMessages
from .endpoint import Call, answer
from .frames import Collected, Template, event
from .front import Front
from .intake import Intake, Prompts, Texts, take_in
from .logprob_fields import Pieces, chat_logprobs, prompt_logprobs
from .message_reading import reading_of
from .openai_completions import OpenAiShape
from .prompts import encode_chat
from .submission import jobs_of


async def chat_completions(front: Front, call: Call) -> Response:
    """The next message of a chat."""
    front.check_open()
    body, prompts = await take_in(front, call, CHAT)
    call.request_id = body.request_id or call.request_id
    call.names = body.names
    model = front.model(body.model)
    shape = ChatShape(body, response_id=f"chatcmpl-{call.request_id}", model=model, tokenizer=front.engine.tokenizer)
    params = [body.params(choice=choice, default_max_tokens=None) for choice in range(body.n)]
    (prompt_ids,) = await prompts()
    has_format = params[0].structured_output is not None
    reading = reading_of(
        front, body.callable_tools, prompt_ids, has_format=has_format, separates=body.separate_reasoning
    )
    shape.messages = None if reading.is_plain else ChatMessages(reading.parser, reading.form)
    params = [reading.held(each) for each in params]
    jobs = await jobs_of(front, [prompt_ids], params, call.urgency(body.priority, body.deadline_s))
    return await answer(front, call, shape, jobs, stream=body.stream)


async def chat_prompt(texts: Texts, body: ChatBody) -> Prompts:
    """The ids of a chat."""
    ids = await encode_chat(
        texts,
        [template_message(message) for message in body.messages],
        tools=None if body.callable_tools is None else body.callable_tools.for_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        extra=body.chat_template_kwargs,
    )
    return [ids]


CHAT = Intake(name="chat", body=ChatBody, encode=chat_prompt, emptied=lambda body: {"messages": []})


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates know it: they have a system role where newer clients say developer, and would drop the other."""
    role = "system" if message.role == "developer" else message.role
    return {**(message.model_extra or {}), "role": role, "content": message.content}


class ChatShape(OpenAiShape):
    """Chunks of kind chat.completion.chunk, answers of kind chat.completion."""

    def __init__(self, body: GenerationBody, *, response_id: str, model: str, tokenizer: Pieces | None = None) -> None:
        super().__init__(body, response_id=response_id, model=model, kind="chat.completion.chunk", tokenizer=tokenizer)
        self._num_prompt_top = body.prompt_logprobs
        self.messages: ChatMessages | None = None  # how texts are read, unless they are content as they stand
        if not body.stream:
            self._base["object"] = "chat.completion"

    def text(self, index: int) -> Template | None:
        return super().text(index) if self.messages is None else None

    def frame(self, index: int, text: str, usage: Callable[[], Usage]) -> bytes:
        if self.messages is None:
            return super().frame(index, text, usage)
        return self._deltas(index, self.messages.deltas(index, text), None, usage)

    def scored(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], usage: Callable[[], Usage]) -> bytes:
        if self.messages is None:
            return super().scored(index, text, logprobs, usage)
        deltas = self.messages.deltas(index, text) or [{}]  # the tokens' scores do not wait for their text
        return self._deltas(index, deltas, self.told_logprobs(index, logprobs), usage)

    def closing(self, index: int, end: Finished, usage: Callable[[], Usage]) -> bytes:
        if self.messages is None:
            return super().closing(index, end, usage)
        frames = self._deltas(index, self.messages.last_deltas(index), None, usage)
        return frames + super().closing(index, end, usage)

    def _deltas(
        self, index: int, deltas: list[dict[str, Any]], logprobs: dict[str, Any] | None, usage: Callable[[], Usage]
    ) -> bytes:
        """One frame a delta, the first one with the log-probabilities of them all."""
        frames = b""
        for delta in deltas:
            choice = {**_choice(index, delta, None), "logprobs": logprobs}
            frames += event(self.chunk([choice], self.so_far(usage)))
            logprobs = None
        return frames

    def opening(self, index: int, usage: Callable[[], Usage]) -> bytes:
        role = _choice(index, {"role": "assistant", "content": ""}, None)
        return event(self.chunk([role], self.so_far(usage)))

    def piece(self, index: int, text: str, end: Finished | None) -> dict[str, object]:
        choice = _choice(index, {"content": text} if end is None else {}, end)
        if end is not None:
            choice["finish_reason"] = self._reason(index, end)
        return choice

    def _reason(self, index: int, end: Finished) -> str:
        """A message that ended by itself and calls something says so; one that was cut says that it was cut."""
        calls = self.messages is not None and self.messages.has_calls(index)
        return "tool_calls" if calls and end.reason == "stop" else end.reason

    def told_logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._token_texts, logprobs)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        messages = [self._message(choice, self.told(choice.end)) for choice in choices]
        if self._num_prompt_top is None:
            return self.body(messages, usage)
        scores = prompt_logprobs(self._token_texts, choices[0].prompt_logprobs, self._num_prompt_top)
        return self.body(messages, usage, prompt_logprobs=scores)

    def _message(self, choice: Collected, end: Finished) -> dict[str, object]:
        if self.messages is None:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            message = self.messages.whole(choice.index, choice.text)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(self._token_texts, choice.logprobs) if self.wants_logprobs else None,
            "finish_reason": self._reason(choice.index, end),
            "stop_reason": end.stop_reason,
        }


def _choice(index: int, delta: dict[str, object], end: Finished | None) -> dict[str, object]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None if end is None else end.reason,
        "stop_reason": None if end is None else end.stop_reason,
    }
