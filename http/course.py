"""What becomes of one request on its way, for the metrics, the log and the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter

from ..engine.outputs import End, Finished, Usage
from ..engine.sampling_params import SamplingParams
from .failures import failure_of

_TOLD = tuple(
    (field.name, field.default)
    for field in fields(SamplingParams)
    if isinstance(field.default, (int, float)) or field.name in ("max_tokens", "seed", "logprobs", "prompt_logprobs")
)
"""The sampling parameters that the log tells: numbers and switches, nothing of what was asked in words."""


@dataclass(slots=True, kw_only=True)
class Course:
    """Written by the response as it goes. Times are of `perf_counter`, durations in seconds; None: not come to that."""

    request_id: str
    accepted_at: float
    prompts: Sequence[Sequence[int]] = ()
    params: SamplingParams | None = None  # of the first choice
    queue_s: float | None = None
    first_token_s: float | None = None
    seconds: float | None = None
    reasons: list[str] = field(default_factory=list)  # of the choices that finished
    usage: Usage | None = None
    error: str | None = None  # its code
    hung_up: bool = False

    def end(self, ends: Sequence[End | None], usage: Usage, error: Exception | None) -> None:
        """The response is over, however it ended."""
        self.seconds = perf_counter() - self.accepted_at
        self.reasons = [end.reason for end in ends if isinstance(end, Finished)]
        self.usage = usage
        if error is not None:
            self.error = failure_of(error).code or "unknown"

    def fields(self) -> dict[str, object]:
        """What is known, by name, in the order in which it is told."""
        usage = self.usage
        told: dict[str, object | None] = {
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "output_tokens": usage.output_tokens if usage else None,
            "sampling": _sampling(self.params),
            "finish": ",".join(sorted(set(self.reasons))) or None,
            "queue_s": self.queue_s,
            "first_token_s": self.first_token_s,
            "error": self.error,
            "hung_up": True if self.hung_up else None,
        }
        return {name: value for name, value in told.items() if value is not None}


def _sampling(params: SamplingParams | None) -> str | None:
    """What the tokens were drawn with, where it is not the default."""
    values = [(name, getattr(params, name)) for name, default in _TOLD if getattr(params, name, default) != default]
    return ",".join(f"{name}:{str(value).lower()}" for name, value in values) or None
