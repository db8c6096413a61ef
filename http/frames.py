"""SSE frames by template: what never changes within a request is serialised once, a token adds its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import orjson

from ..engine.outputs import Finished, Usage

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
TEXT = "@@text@@"  # stands for the text in a chunk from which a template is cut


class Template(NamedTuple):
    """A frame with a hole: `head + orjson.dumps(text) + tail`."""

    head: bytes
    tail: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One choice of an answer, whole."""

    index: int
    text: str
    token_ids: Sequence[int]
    end: Finished


class Shape(Protocol):
    """What one API makes of a request's choices; made per request, so that ids and names are baked in."""

    wants_ids: bool  # frames carry the token ids too, as "output_ids" right after the text
    continuous_usage: bool  # each frame carries the usage so far

    def opening(self, index: int) -> bytes:
        """The frame that goes before a choice's first one, or nothing."""
        ...

    def text(self, index: int) -> Template:
        """The frame of a piece of text. With `continuous_usage` its tail ends where `usage_tail` goes on."""
        ...

    def usage_tail(self, usage: Usage) -> bytes:
        """The end of a text frame, with the usage so far."""
        ...

    def closing(self, index: int, end: Finished, usage: Usage | None) -> bytes:
        """A choice's last frame. `usage` is the request's so far where `continuous_usage` asks for it."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """What follows the last choice: a usage chunk if asked for, and the end mark."""
        ...

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


def event(chunk: Mapping[str, object]) -> bytes:
    """`chunk` as one SSE event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def template(chunk: Mapping[str, object]) -> Template:
    """Cut the event of `chunk` at its last value that is TEXT."""
    head, _, tail = event(chunk).rpartition(b'"' + TEXT.encode() + b'"')
    return Template(head, tail)


def usage_fields(usage: Usage) -> dict[str, object]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
