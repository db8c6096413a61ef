"""What a request gives back: deltas while it runs, one terminal event, or the whole at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

FinishReason = Literal["stop", "length", "abort", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt came out of the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The request ran to its end. `stop_reason` is the stop string or stop id that ended it, if one did."""

    reason: FinishReason
    stop_reason: str | int | None
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ended by an error."""

    error: Exception
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The request was aborted."""

    usage: Usage


End = Finished | Failed | Cancelled


class Sink(Protocol):
    """Where a request's tokens go. Called on the loop thread by the step loop: must not block, await or raise."""

    def push(self, token_ids: Sequence[int], text: str) -> None:
        """New tokens and the text they released (possibly empty: held back for a stop string or a split character)."""
        ...

    def end(self, end: End) -> None:
        """The one terminal event; nothing is pushed afterwards."""
        ...


class Delta(NamedTuple):
    """What is new since the delta before. The last one of a request carries `finished`."""

    token_ids: tuple[int, ...]
    text: str
    finished: Finished | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
