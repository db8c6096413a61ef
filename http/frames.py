"""SSE frames by template: what never changes within a request is serialised once, a token adds its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import orjson

from ..engine.errors import MisuseError
from ..engine.outputs import Finished, HiddenStates, TokenLogprobs, Usage
from .failures import Failure

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
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    hidden_states: HiddenStates | None = None


class WholeShape(Protocol):
    """What an API that does not stream makes of a request's choices."""

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The body of the answer."""
        ...


class Shape(Protocol):
    """What one API makes of a request's choices; made per request, so that ids and names are baked in."""

    wants_ids: bool  # frames by template carry the token ids too, as "output_ids" right after the text

    @property
    def wants_logprobs(self) -> bool:
        """Frames carry log-probabilities: they come from `scored`, never from a template."""
        ...

    def scored(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], usage: Callable[[], Usage]) -> bytes:
        """The frame of a piece of text with the log-probabilities of the tokens since the frame before. The first frame's
        begin with the prompt's, if those were asked for.
        """
        ...

    def hidden(self, index: int, states: HiddenStates) -> bytes:
        """The frame of hidden states, ahead of that of the text whose tokens they belong to; only for who asks for them."""
        ...

    def opening(self, index: int, usage: Callable[[], Usage]) -> bytes:
        """The frame that goes before a choice's first one, or nothing."""
        ...

    def text(self, index: int) -> Template | None:
        """The template for a piece of text; None where more than the text differs from frame to frame."""
        ...

    def frame(self, index: int, text: str, usage: Callable[[], Usage]) -> bytes:
        """The frame of a piece of text where there is no template. `usage` tells the request's so far."""
        ...

    def closing(self, index: int, end: Finished, usage: Callable[[], Usage]) -> bytes:
        """A choice's last frame."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """What follows the last choice: a usage chunk if asked for, and the end mark."""
        ...

    def error(self, failure: Failure) -> bytes:
        """What a stream that fails ends with."""
        ...

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class TextOnly:
    """That most APIs carry no log-probabilities and no hidden states."""

    wants_logprobs = False

    def scored(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], usage: Callable[[], Usage]) -> bytes:
        raise MisuseError("this shape asks for no log-probabilities")

    def hidden(self, index: int, states: HiddenStates) -> bytes:
        raise MisuseError("this shape asks for no hidden states")


class PlainEnding(TextOnly):
    """And how they end a stream."""

    def ending(self, usage: Usage) -> bytes:
        return DONE

    def error(self, failure: Failure) -> bytes:
        return b"data: " + failure.body() + b"\n\n"


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
