"""The bodies that clients send, and which of OpenAI's parameters are honoured, hints, or not supported yet."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ..engine.errors import RequestError
from ..engine.sampling_params import SamplingParams
from .steering import SteeringFields
from .tools import Tools, tools_of

MAX_N = 128
MAX_LOGPROBS = 20
MAX_DEADLINE_S = 1e6
HINTS = frozenset(
    {
        "metadata",
        "prediction",  # a matter of latency only
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Parameters that do not change what is generated: accepted with any value, and ignored."""

NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "cache_salt": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters that are refused by name unless they have one of these values, which ask for nothing."""


def without_idle_fields(
    fields: dict[str, Any],
    *,
    own: Container[str],
    not_supported: Mapping[str, tuple[object, ...]],
    hints: Container[str],
) -> dict[str, Any]:
    """`fields` without hints and without what has its default; unknown ones stay, to be refused as such.

    Raises: RequestError for a field that is not supported and asks for something.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in own:
            kept[name] = value
        elif name in not_supported:
            if not _is_default(value, not_supported[name]):
                raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
        elif name not in hints:
            kept[name] = value
    return kept


def _is_default(value: object, defaults: tuple[object, ...]) -> bool:
    # True == 1 in Python, but as a penalty it is a mistake.
    return any(value == default and isinstance(value, bool) == isinstance(default, bool) for default in defaults)


def _stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("stop must be a string or a list of strings")
    return tuple(texts)


def _prompt(value: object) -> object:
    _check_parts(value, "prompt")
    if _is_text_or_texts(value) or _is_ids_or_lists(value):
        return value
    raise ValueError("a prompt must be a string, a list of strings, a list of token ids, or a list of such lists")


def _text_prompt(value: object) -> object:
    if _is_text_or_texts(value):
        return value
    raise ValueError("text must be a string or a list of strings")


def _id_prompt(value: object) -> object:
    _check_parts(value, "input_ids")
    if _is_ids_or_lists(value):
        return value
    raise ValueError("input_ids must be a list of token ids or a list of such lists")


def _check_parts(value: object, name: str) -> None:
    if isinstance(value, list) and [] in value:
        raise ValueError(f"{name}[{value.index([])}] is empty")


def _is_text_or_texts(value: object) -> bool:
    return isinstance(value, str) or (_is_full_list(value) and all(isinstance(part, str) for part in value))


def _is_ids_or_lists(value: object) -> bool:
    return _is_full_list(value) and (
        _are_ids(value) or all(isinstance(part, list) and _are_ids(part) for part in value)
    )


def _is_full_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value)


def _are_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}  # not bool, which is an int too


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_FORMS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
]
_ID_FORMS: list[dict[str, Any]] = [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
TextPrompt = Annotated[str | list[str], PlainValidator(_text_prompt), WithJsonSchema({"anyOf": _TEXT_FORMS})]
IdPrompt = Annotated[list[int] | list[list[int]], PlainValidator(_id_prompt), WithJsonSchema({"anyOf": _ID_FORMS})]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [*_TEXT_FORMS, *_ID_FORMS]}),
]
DeadlineSeconds = Annotated[float | None, Field(ge=0, le=MAX_DEADLINE_S)]  # from the request's arrival
RequestId = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]  # it goes into a header


class Strict(BaseModel):
    """No coercion, no unknown fields, nothing changed afterwards."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class GenerationBody(Strict, SteeringFields):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name; wins where both are given
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = Field(1, ge=1, le=MAX_N)
    seed: int | None = None
    stop: Stop = ()
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    priority: int = 0
    deadline_s: DeadlineSeconds = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return without_idle_fields(fields, own=cls.model_fields, not_supported=NOT_SUPPORTED, hints=HINTS)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs are only answered whole: leave out stream", param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def params(self, *, choice: int, default_max_tokens: int | None) -> SamplingParams:
        """Those of one choice: with a seed each choice has its own, so that they differ but can be had again.

        Raises: RequestError naming the field.
        """
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return SamplingParams(
            max_tokens=default_max_tokens if asked is None else asked,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=_seed(self.seed, choice),
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=self.num_logprobs,
            # What is told of a prompt its first choice brings, whole; in a stream each choice begins with its own.
            prompt_logprobs=self.num_prompt_logprobs if self.stream or choice == 0 else None,
            **self.steering(),
        )

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are asked for beside each drawn one; None: no log-probabilities at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def names(self) -> dict[str, str]:
        """What the engine's fields are called in this body."""
        names = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        grammar = self.grammar()
        return names if grammar is None else {**names, "structured_output": grammar[0]}


class CompletionBody(GenerationBody):
    prompt: Prompt
    best_of: int | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = None
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.num_logprobs if self.echo else None]
        return max((each for each in asked if each is not None), default=None)

    @model_validator(mode="after")
    def _best_of_picks_nothing(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError("best_of is not supported", param="best_of", code="unsupported_parameter")
        return self


class ChatMessage(BaseModel):
    """A message. Fields beyond these reach the template; its contents are checked where it is rendered."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = Field(None, validate_default=True)

    @field_validator("content")
    @classmethod
    def _only_the_assistant_may_say_nothing(cls, content: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role", "assistant")  # a wrong one is told by itself
        if content is None and role != "assistant":
            raise ValueError(f"a message of the role {role} has a content")
        return content


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True  # <think> … </think> apart from the content, where the model's template has it
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def callable_tools(self) -> Tools | None:
        """Raises: RequestError naming the field."""
        return tools_of(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls)

    @model_validator(mode="after")
    def _tools_are_tools(self) -> ChatBody:
        tools = self.callable_tools
        if tools is not None and self.grammar() is not None:
            tools.check_beside_format()
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def names(self) -> dict[str, str]:
        names = {**super().names, "prompt": "messages"}
        return names if "structured_output" in names else {**names, "structured_output": "tools"}


def _seed(seed: int | None, choice: int) -> int | None:
    if seed is None or choice == 0:
        return seed
    span = 1 << 64
    return (seed + choice + span // 2) % span - span // 2
