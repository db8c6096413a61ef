"""How a request wants its tokens drawn and when it ends, checked field by field before any compute."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from .errors import RequestError, shown

GREEDY_BELOW = 1e-5  # a smaller temperature overflows the scaled logits in fp32 and means greedy anyway
MAX_SEED = 2**63 - 1
MAX_STOPS = 64
MAX_STOP_CHARS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    `max_tokens` None fills the context. `temperature` 0 (or under 1e-5) is greedy. `top_k` 0 or -1, `top_p` 1 and
    `min_p` 0 are off. Without a `seed` the request draws from a fresh one. Until `min_tokens` are out, neither the
    model's end ids nor `stop_token_ids` can be drawn and stop strings are not looked for.

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

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", param=name)
        self._check_numbers()
        self._check_stops()

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


def _items(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, (Sequence, Set)) or isinstance(value, (str, bytes, bytearray)):
        raise RequestError(f"{name} must be a list, not {shown(value)}", param=name)
    if len(value) > MAX_STOPS:
        raise RequestError(f"{name} has {len(value)} entries; at most {MAX_STOPS} are allowed", param=name)
    return tuple(value)


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
