"""How a request wants its tokens drawn and when it ends, checked field by field before any compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import RequestError, shown
from .grammar_session import GrammarSpec
from .hidden_mode import HIDDEN_MODES
from .hidden_mode import HiddenMode as HiddenMode
from .logits_processor import LogitsProcessor

GREEDY_BELOW = 1e-5  # a smaller temperature overflows the scaled logits in fp32 and means greedy anyway
MAX_SEED = 2**63 - 1
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_ALLOWED = 1 << 18
MAX_PROCESSORS = 16
MAX_LOGPROBS = 64
Pooling = Literal["last", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    `max_tokens` None fills the context. `temperature` 0 (or under 1e-5) is greedy. `top_k` 0 or -1, `top_p` 1 and
    `min_p` 0 are off. Without a `seed` the request draws from a fresh one. Until `min_tokens` are out, neither the
    model's end ids nor `stop_token_ids` can be drawn and stop strings are not looked for.

    What changes the logits, in this order: `logit_bias` is added; `repetition_penalty` (over prompt and output) divides
    positive logits and multiplies negative ones; `frequency_penalty` times a token's count and `presence_penalty` once
    are subtracted for what is in the output; `bad_words` and `bad_words_ids` (sequences whose last token must not
    complete them), everything outside `allowed_token_ids`, and what the grammar of `structured_output` does not allow
    are ruled out; then come `logits_processors` in turn.

    `logprobs` k gives each token's log-probability and the k likeliest tokens', of the model's own logits: before all
    of the above and before the temperature. `prompt_logprobs` gives the same for the prompt's tokens from position
    `logprob_start` on; the first token of a prompt has none.

    `pooling` brings the prompt's last hidden state, or the mean of all, behind the model's last norm; it draws nothing
    (`max_tokens` 0).

    `hidden_states` brings states behind the model's last norm, as `HiddenStates`. The state at position p is what the
    token at p + 1 is drawn from. "last": of the prompt's last token, then of each output token but the newest: one for
    each token drawn (with `max_tokens` 0, the prompt's last alone). "full": of every token of the prompt before those.

    Raises: RequestError naming the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # kept as pairs
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # all
    logits_processors: tuple[LogitsProcessor, ...] = ()
    structured_output: GrammarSpec | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start: int = 0
    pooling: Pooling | None = None
    hidden_states: HiddenMode = "none"

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, most in _MOST.items():
            if getattr(self, name) is not None or name != "allowed_token_ids":
                object.__setattr__(self, name, _items(name, getattr(self, name), most))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", param=name)
        self._check_numbers()
        self._check_stops()
        self._check_logit_rules()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def _check_numbers(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=0)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({shown(self.min_tokens)}) is above max_tokens ({shown(self.max_tokens)})",
                param="min_tokens",
            )
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _integer("top_k", self.top_k, low=-1)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)  # logits stay finite
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        _integer("logprob_start", self.logprob_start, low=0)
        if self.seed is not None:
            _integer("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED)

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError("stop must be a non-empty string or a list of them", param="stop")
            if len(text) > MAX_STOP_CHARS:
                raise RequestError(f"a stop string is longer than {MAX_STOP_CHARS} characters", param="stop")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, low=0)

    def _check_logit_rules(self) -> None:
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise RequestError("bad_words must be non-empty strings", param="bad_words")
        sequences = [_items("bad_words_ids", ids, MAX_STOP_CHARS) for ids in self.bad_words_ids]
        for ids in sequences:
            if not ids:
                raise RequestError("bad_words_ids must be non-empty lists of ids", param="bad_words_ids")
            for each in ids:
                _integer("bad_words_ids", each, low=0)
        object.__setattr__(self, "bad_words_ids", tuple(sequences))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids allows nothing: it is an empty list", param="allowed_token_ids")
        for token_id in self.allowed_token_ids or ():
            _integer("allowed_token_ids", token_id, low=0)
        is_named = isinstance(self.pooling, str) and self.pooling in get_args(Pooling)
        if self.pooling is not None and not (is_named and self.max_tokens == 0):
            raise RequestError(
                f"pooling is last or mean, with max_tokens 0, and not {shown(self.pooling)}", param="pooling"
            )
        if not isinstance(self.hidden_states, str) or self.hidden_states not in HIDDEN_MODES:
            raise RequestError(
                f"hidden_states is one of {', '.join(HIDDEN_MODES)}, not {shown(self.hidden_states)}",
                param="hidden_states",
            )
        if self.structured_output is not None and not isinstance(self.structured_output, GrammarSpec):
            raise RequestError(
                f"structured_output must be a GrammarSpec, not {shown(self.structured_output)}",
                param="structured_output",
            )
        for processor in self.logits_processors:
            if not callable(processor):
                raise RequestError(
                    f"logits_processors must be callable, not {shown(processor)}", param="logits_processors"
                )


_MOST = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOPS,
    "bad_words": MAX_BIASES,
    "bad_words_ids": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED,
    "logits_processors": MAX_PROCESSORS,
}


def _items(name: str, value: object, most: int) -> tuple[object, ...]:
    if isinstance(value, tuple) and not value:  # as most are, of most requests
        return ()
    if not isinstance(value, (Sequence, Set)) or isinstance(value, (str, bytes, bytearray)):
        raise RequestError(f"{name} must be a list, not {shown(value)}", param=name)
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries; at most {most} are allowed", param=name)
    return tuple(value)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    try:
        biases = dict(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias must map ids to numbers, not {shown(value)}", param="logit_bias") from None
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(biases)} entries; at most {MAX_BIASES}", param="logit_bias")
    for token_id, bias in biases.items():
        _integer("logit_bias", token_id, low=0)
        _number("logit_bias", bias, low=-100.0, high=100.0)
    return tuple(biases.items())


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {shown(value)}", param=name)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {span}, not {shown(value)}", param=name)


def _number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {shown(value)}", param=name)
    if not low <= value <= high or (low_open and value == low):  # NaN is in no span
        raise RequestError(
            f"{name} must be {'above' if low_open else 'from'} {low:g} {'and at most' if low_open else 'to'} {high:g},"
            f" not {shown(value)}",
            param=name,
        )
