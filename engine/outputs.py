"""What a request gives back: deltas while it runs, one terminal event, or the whole at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from .errors import MisuseError

FinishReason = Literal["stop", "length", "abort", "deadline"]


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one position, of the model's own distribution. The token's own is `logprob`, whether
    or not it is among the likeliest, which come in descending order.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class HiddenStates(NamedTuple):
    """States behind the model's last norm, of consecutive positions.

    Shapes: `values` is [positions, size] float32 in native byte order, whatever the model's own dtype:
    `torch.frombuffer(bytearray(values), dtype=torch.float32).view(-1, size)`.
    """

    first: int  # the position of the first one, counted over prompt and output together
    size: int
    values: bytes

    @property
    def num_positions(self) -> int:
        return len(self.values) // (4 * self.size)

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first + self.num_positions

    @classmethod
    def joined(cls, parts: Sequence[HiddenStates]) -> HiddenStates | None:
        """Parts that follow each other, as one; None for no parts. Raises: MisuseError for a gap."""
        if len(parts) < 2:
            return parts[0] if parts else None
        if any(part.end != after.first for part, after in itertools.pairwise(parts)):
            raise MisuseError(f"hidden states with a gap: {[(part.first, part.end) for part in parts]}")
        return cls(parts[0].first, parts[0].size, b"".join([part.values for part in parts]))


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
    embedding: tuple[float, ...] | None = None  # the pooled hidden state, if asked for


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

    def push(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        hidden_states: HiddenStates | None = None,
    ) -> None:
        """New tokens and the text they released (possibly empty: held back for a stop string or a split character).

        Log-probabilities are given only for requests that asked for them: one for each token, and those of the prompt
        once, in the first call. Hidden states likewise: one for each token, behind those of the prompt in the first call.
        """
        ...

    def end(self, end: End) -> None:
        """The one terminal event; nothing is pushed afterwards."""
        ...


class Delta(NamedTuple):
    """What is new since the delta before. The last one of a request carries `finished`."""

    token_ids: tuple[int, ...]
    text: str
    finished: Finished | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # in the first delta, if asked for
    hidden_states: HiddenStates | None = None  # one a token, if asked for; the prompt's before those in the first delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] | None = None
    hidden_states: HiddenStates | None = None

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> Completion:
        """All deltas of one request together. Raises: MisuseError if the last one is missing."""
        finished = deltas[-1].finished if deltas else None
        if finished is None:
            raise MisuseError("a stream ended without its terminal event")
        return cls(
            text="".join([delta.text for delta in deltas]),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finish_reason=finished.reason,
            stop_reason=finished.stop_reason,
            usage=finished.usage,
            logprobs=tuple(each for delta in deltas for each in delta.logprobs),
            prompt_logprobs=tuple(each for delta in deltas for each in delta.prompt_logprobs),
            embedding=finished.embedding,
            hidden_states=HiddenStates.joined([each for delta in deltas if (each := delta.hidden_states) is not None]),
        )
