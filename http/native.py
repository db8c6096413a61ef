"""The engine's own endpoints: /generate (text or ids), /tokenize, /detokenize, /abort_request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from pydantic import Field, model_validator
from starlette.responses import Response

from ..engine.errors import MisuseError, RequestError
from ..engine.outputs import Finished, HiddenStates, TokenLogprobs, Usage
from ..engine.sampling_params import HiddenMode, SamplingParams
from .bodies import ChatMessage, DeadlineSeconds, IdPrompt, RequestId, Stop, Strict, TextPrompt
from .endpoint import Call, answer, json_response
from .frames import TEXT, Collected, PlainEnding, Template, event, template
from .front import Front
from .intake import Intake, Prompts, Texts, take_in
from .logprob_fields import TokenTexts
from .native_logprobs import NativeLogprobs, NativeScores
from .openai_chat import template_message
from .prompts import encode_chat, encode_prompts
from .request_body import checked, read_json
from .steering import SteeringFields
from .submission import jobs_of

INLINE_IDS = 2000  # decoded on the loop: more would stop it for longer than a slice


class NativeSampling(Strict, SteeringFields):
    """SamplingParams by their own names; `max_new_tokens` is another name of `max_tokens`."""

    max_tokens: int | None = None
    max_new_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Stop = ()
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    hidden_states: HiddenMode = "none"

    def params(self, more: Mapping[str, Any]) -> SamplingParams:
        """`more`: what other fields of the body ask for. Raises: RequestError naming the field."""
        values = {name: getattr(self, name) for name in self.model_fields_set & _OWN_FIELDS}
        if self.max_new_tokens is not None:
            values["max_tokens"] = self.max_new_tokens
        return SamplingParams(**values, **self.steering(), **more)


_OWN_FIELDS = NativeSampling.model_fields.keys() - SteeringFields.model_fields.keys() - {"max_new_tokens"}


class GenerateBody(Strict, NativeLogprobs):
    text: TextPrompt | None = None
    input_ids: IdPrompt | None = None
    sampling_params: NativeSampling = Field(default_factory=NativeSampling)
    stream: bool = False
    rid: RequestId | None = None
    priority: int = 0
    deadline_s: DeadlineSeconds = None

    @model_validator(mode="after")
    def _has_one_prompt(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids", param="text")
        return self

    @property
    def is_batch(self) -> bool:
        """Whether it has a list of prompts, and gets a list of answers."""
        return isinstance(self.text, list) or (self.input_ids is not None and isinstance(self.input_ids[0], list))


class TokenizeBody(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[int]


class AbortBody(Strict):
    rid: str | None = None
    abort_all: bool = False


async def generate(front: Front, call: Call) -> Response:
    """Text or ids from text or ids; streams the new text and ids with each event."""
    front.check_open()
    body, encoded = await take_in(front, call, GENERATE)
    call.request_id = body.rid or call.request_id
    call.names = {"prompt": "text" if body.text is not None else "input_ids"}
    params = body.sampling_params.params(body.asked())
    prompts = await encoded()
    jobs = await jobs_of(front, prompts, [params], call.urgency(body.priority, body.deadline_s))
    shape = NativeShape(call.request_id, prompts, is_list=body.is_batch)
    if body.return_logprob:
        shape.score(NativeScores(body, TokenTexts(front.engine.tokenizer)))
    return await answer(front, call, shape, jobs, stream=body.stream)


async def generate_prompts(texts: Texts, body: GenerateBody) -> Prompts:
    """The ids of each prompt."""
    if body.text is not None:
        return [*await encode_prompts(texts, body.text, param="text")]
    return [*await encode_prompts(texts, body.input_ids or [], param="input_ids")]


def _without_prompts(body: GenerateBody) -> dict[str, object]:
    """What is left says which kind of prompt there was, and whether there was a list of them."""
    if body.text is not None:
        return {"text": [] if body.is_batch else ""}
    return {"input_ids": [[]] if body.is_batch else [0]}


GENERATE = Intake(name="generate", body=GenerateBody, encode=generate_prompts, emptied=_without_prompts)


async def tokenize(front: Front, call: Call) -> Response:
    """The ids of a prompt, or of messages through the chat template."""
    front.check_open()
    body, encoded = await take_in(front, call, TOKENIZE)
    front.model(body.model)
    ids = list((await encoded())[0])
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": front.engine.limits.max_model_len})


async def tokenize_prompt(texts: Texts, body: TokenizeBody) -> Prompts:
    """The ids of the one prompt. Raises: RequestError."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is None:
        return [*await encode_prompts(texts, body.prompt or "", add_special_tokens=body.add_special_tokens)]
    ids = await encode_chat(
        texts,
        [template_message(message) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        extra=body.chat_template_kwargs,
    )
    return [ids]


TOKENIZE = Intake(
    name="tokenize",
    body=TokenizeBody,
    encode=tokenize_prompt,
    emptied=lambda body: {"prompt": None, "messages": None},
)


async def detokenize(front: Front, call: Call) -> Response:
    """The text of ids, special tokens shown."""
    front.check_open()
    body = checked(DetokenizeBody, await read_json(call.request, front.settings))
    front.model(body.model)
    tokenizer, vocab_size = front.engine.tokenizer, front.engine.limits.vocab_size
    if tokenizer is None:
        raise RequestError("this server has no tokenizer", param="tokens", code="no_tokenizer")
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:  # a third of what a loop takes
        raise RequestError(f"token ids must lie in 0…{vocab_size - 1}", param="tokens")
    if len(body.tokens) <= INLINE_IDS:
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def abort_request(front: Front, call: Call) -> Response:
    """Abort one request by its id, or all of them."""
    body = checked(AbortBody, await read_json(call.request, front.settings))
    if body.rid is None and not body.abort_all:
        raise RequestError("give a rid or abort_all", param="rid")
    names = set(front.live) if body.abort_all else {body.rid or "", _plain_id(body.rid or "")}
    return json_response({"num_aborted": front.abort(names)})


def _plain_id(shown: str) -> str:
    """A request's id without what the OpenAI shapes put before it: clients know it only with that."""
    for prefix in ("chatcmpl-", "cmpl-", "resp_"):
        if shown.startswith(prefix):
            return shown.removeprefix(prefix)
    return shown


class NativeShape(PlainEnding):
    """SGLang's fields, with the new text and ids in each event instead of all so far."""

    wants_ids = True

    def __init__(self, request_id: str, prompts: Prompts, *, is_list: bool) -> None:
        self._request_id = request_id
        self._prompts = prompts
        self._is_list = is_list
        self._scores: NativeScores | None = None
        self._begun: set[int] = set()  # choices whose prompt's log-probabilities are out

    def score(self, scores: NativeScores) -> None:
        """Tell log-probabilities too."""
        self._scores = scores
        self.wants_logprobs = True

    def opening(self, index: int, usage: Callable[[], Usage]) -> bytes:
        return b""

    def text(self, index: int) -> Template:
        whole = template({"index": index, "text": TEXT, "output_ids": [], "meta_info": None})
        return Template(whole.head, whole.tail.removeprefix(b',"output_ids":[]'))

    def frame(self, index: int, text: str, usage: Callable[[], Usage]) -> bytes:
        raise MisuseError("frames of this shape come from the template")

    def hidden(self, index: int, states: HiddenStates) -> bytes:
        return event(
            {"index": index, "text": "", "output_ids": [], "hidden_states": _fields(states), "meta_info": None}
        )

    def scored(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], usage: Callable[[], Usage]) -> bytes:
        if self._scores is None:
            raise MisuseError("this request asks for no log-probabilities")
        prompt = self._prompts[index]
        told: dict[str, object] = {}
        if index not in self._begun:
            self._begun.add(index)
            num_scored = self._scores.num_of_prompt(prompt)
            told = self._scores.of_prompt(prompt, logprobs[:num_scored])
            logprobs = logprobs[num_scored:]
        told |= self._scores.of_output(logprobs)
        ids = [each.token_id for each in logprobs]
        return event({"index": index, "text": text, "output_ids": ids, "meta_info": told})

    def closing(self, index: int, end: Finished, usage: Callable[[], Usage]) -> bytes:
        told = self._meta_info(end)
        if self._scores is not None and index not in self._begun:  # a prompt of one token, and no output
            told |= self._scores.of_prompt(self._prompts[index], ())
        return event({"index": index, "text": "", "output_ids": [], "meta_info": told})

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        answers = [
            {
                "index": choice.index,
                "text": choice.text,
                "output_ids": list(choice.token_ids),
                **({} if choice.hidden_states is None else {"hidden_states": _fields(choice.hidden_states)}),
                "meta_info": {**self._meta_info(choice.end), **self._told(choice)},
            }
            for choice in choices
        ]
        return orjson.dumps(answers if self._is_list else answers[0])

    def _told(self, choice: Collected) -> dict[str, object]:
        if self._scores is None:
            return {}
        prompt = self._scores.of_prompt(self._prompts[choice.index], choice.prompt_logprobs)
        return {**prompt, **self._scores.of_output(choice.logprobs)}

    def _meta_info(self, end: Finished) -> dict[str, object]:
        return {
            "id": self._request_id,
            "finish_reason": {"type": end.reason, "matched": end.stop_reason},
            "prompt_tokens": end.usage.prompt_tokens,
            "completion_tokens": end.usage.output_tokens,
            "cached_tokens": end.usage.cached_tokens,
        }


def _fields(states: HiddenStates) -> dict[str, object]:
    """As base64: numbers in JSON take five times the bytes, and the loop's time for each."""
    return {
        "first": states.first,
        "shape": [states.num_positions, states.size],
        "dtype": "float32",
        "data": base64.b64encode(states.values).decode(),
    }
