"""POST /v1/completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.responses import Response

from ..engine.outputs import Finished, TokenLogprobs, Usage
from .bodies import CompletionBody, GenerationBody
from .endpoint import Call, answer
from .frames import DONE, TEXT, Collected, PlainEnding, Template, event, template, usage_fields
from .front import Front
from .intake import Intake, Prompts, Texts, take_in
from .logprob_fields import CompletionLogprobs, Pieces, TokenTexts, first_of, joined, prompt_logprobs
from .prompts import encode_prompts
from .submission import jobs_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def completions(front: Front, call: Call) -> Response:
    """Text after a prompt, or after each of several."""
    front.check_open()
    body, encoded = await take_in(front, call, COMPLETIONS)
    call.request_id = body.request_id or call.request_id
    call.names = body.names
    model = front.model(body.model)
    shape = CompletionShape(body, response_id=f"cmpl-{call.request_id}", model=model, tokenizer=front.engine.tokenizer)
    params = [body.params(choice=choice, default_max_tokens=DEFAULT_MAX_TOKENS) for choice in range(body.n)]
    shape.prompts = await encoded()
    jobs = await jobs_of(front, shape.prompts, params, call.urgency(body.priority, body.deadline_s))
    return await answer(front, call, shape, jobs, stream=body.stream)


async def completion_prompts(texts: Texts, body: CompletionBody) -> Prompts:
    """The ids of each prompt."""
    return [*await encode_prompts(texts, body.prompt)]


COMPLETIONS = Intake(
    name="completions", body=CompletionBody, encode=completion_prompts, emptied=lambda body: {"prompt": ""}
)


class OpenAiShape(PlainEnding, ABC):
    """What completions and chat completions share: chunks of choices, usage and the end mark."""

    wants_ids = False

    def __init__(
        self, body: GenerationBody, *, response_id: str, model: str, kind: str, tokenizer: Pieces | None
    ) -> None:
        self.wants_logprobs = body.num_logprobs is not None
        self._token_texts = TokenTexts(tokenizer)
        self._counts_usage = body.continuous_usage
        self._includes_usage = body.include_usage
        self._own_stop_ids = frozenset(body.stop_token_ids)
        self._base = {"id": response_id, "object": kind, "created": int(time.time()), "model": model}

    def told(self, end: Finished) -> Finished:
        """An end in OpenAI's words: a deadline cuts like a length, and the model's own end id is no stop to name."""
        if end.reason == "deadline":
            return replace(end, reason="length", stop_reason="deadline")
        if isinstance(end.stop_reason, int) and end.stop_reason not in self._own_stop_ids:
            return replace(end, stop_reason=None)
        return end

    @abstractmethod
    def told_logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities of a choice's next tokens."""

    def scored(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], usage: Callable[[], Usage]) -> bytes:
        piece = {**self.piece(index, text, None), "logprobs": self.told_logprobs(index, logprobs)}
        return event(self.chunk([piece], self.so_far(usage)))

    def so_far(self, usage: Callable[[], Usage]) -> Usage | None:
        """The usage that a chunk carries before the end."""
        return usage() if self._counts_usage else None

    @abstractmethod
    def piece(self, index: int, text: str, end: Finished | None) -> dict[str, object]:
        """One choice of a chunk: a piece of text, or its end."""

    def chunk(self, choices: list[dict[str, object]], usage: Usage | None = None) -> dict[str, object]:
        """One chunk; with usage on request, every chunk has the key."""
        chunk: dict[str, object] = {**self._base, "system_fingerprint": None, "choices": choices}
        if self._includes_usage:
            chunk["usage"] = None if usage is None else usage_fields(usage)
        return chunk

    def text(self, index: int) -> Template | None:
        return None if self._counts_usage else template(self.chunk([self.piece(index, TEXT, None)]))

    def frame(self, index: int, text: str, usage: Callable[[], Usage]) -> bytes:
        return event(self.chunk([self.piece(index, text, None)], usage()))

    def closing(self, index: int, end: Finished, usage: Callable[[], Usage]) -> bytes:
        return event(self.chunk([self.piece(index, "", self.told(end))], self.so_far(usage)))

    def ending(self, usage: Usage) -> bytes:
        return (event(self.chunk([], usage)) if self._includes_usage else b"") + DONE

    def body(self, choices: list[dict[str, object]], usage: Usage, **more: object) -> bytes:
        """The whole answer."""
        return orjson.dumps(
            {**self._base, "system_fingerprint": None, "choices": choices, "usage": usage_fields(usage), **more}
        )


class CompletionShape(OpenAiShape):
    """Chunks and answers of kind text_completion."""

    def __init__(self, body: CompletionBody, *, response_id: str, model: str, tokenizer: Pieces | None = None) -> None:
        super().__init__(body, response_id=response_id, model=model, kind="text_completion", tokenizer=tokenizer)
        self.prompts: Prompts = []  # set once they are encoded
        self._choices_each = body.n
        self._echoes = body.echo
        self._skips_special = body.skip_special_tokens
        self._num_top = body.num_logprobs or 0
        self._num_prompt_top = body.prompt_logprobs
        self._tokenizer = tokenizer
        self._scored: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int, usage: Callable[[], Usage]) -> bytes:
        """The prompt, unless it comes with its log-probabilities."""
        if not self._echoes or self.wants_logprobs:
            return b""
        return event(self.chunk([self.piece(index, self._echo(index), None)], self.so_far(usage)))

    def scored(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], usage: Callable[[], Usage]) -> bytes:
        is_first = self._echoes and index not in self._scored
        return super().scored(index, self._echo(index) + text if is_first else text, logprobs, usage)

    def closing(self, index: int, end: Finished, usage: Callable[[], Usage]) -> bytes:
        lacks_echo = self._echoes and self.wants_logprobs and index not in self._scored
        return (self.scored(index, "", (), usage) if lacks_echo else b"") + super().closing(index, end, usage)

    def _echo(self, index: int) -> str:
        """The text of a choice's prompt, special tokens left out as in its answer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(self._prompt(index))

    def _prompt(self, index: int) -> Sequence[int]:
        return self.prompts[index // self._choices_each]

    def told_logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if index in self._scored:
            return self._scored[index].piece(logprobs)
        scored = self._scored[index] = self._scores_of(index)
        if not self._echoes:
            return scored.piece(logprobs)
        num_scored = len(self._prompt(index)) - 1
        prompt = scored.prompt(self._prompt(index)[0], logprobs[:num_scored])
        return joined(prompt, scored.piece(logprobs[num_scored:]))

    def _scores_of(self, index: int) -> CompletionLogprobs:
        """Of a choice's text, which has its prompt in front of it or continues it."""
        return CompletionLogprobs(
            self._token_texts,
            has_top=self._num_top > 0,
            skips_special=self._skips_special,
            prompt_ids=() if self._echoes else self._prompt(index),
        )

    def _whole(self, choice: Collected, prompt_scores: Sequence[TokenLogprobs]) -> dict[str, object]:
        text = self._echo(choice.index) + choice.text if self._echoes else choice.text
        piece = self.piece(choice.index, text, self.told(choice.end))
        if self._num_prompt_top is not None:
            piece["prompt_logprobs"] = prompt_logprobs(self._token_texts, prompt_scores, self._num_prompt_top)
        if self.wants_logprobs:
            before = first_of(prompt_scores, self._num_top) if self._echoes else []
            piece["logprobs"] = self.told_logprobs(choice.index, [*before, *choice.logprobs])
        return piece

    def piece(self, index: int, text: str, end: Finished | None) -> dict[str, object]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None if end is None else end.reason,
            "stop_reason": None if end is None else end.stop_reason,
        }

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        firsts = [choices[choice.index - choice.index % self._choices_each] for choice in choices]
        told = [self._whole(choice, first.prompt_logprobs) for choice, first in zip(choices, firsts, strict=True)]
        return self.body(told, usage)
