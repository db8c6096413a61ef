"""One line a request, in key=value form, with the request's id; the prompt only where the operator asked for it."""

from __future__ import annotations

import json
import logging
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .endpoint import Call
    from .front import Front

log = logging.getLogger("slipstream.http")
MAX_PROMPT_TOKENS = 500
QUIET_BELOW = 400
PROBES = frozenset({"/health", "/ready"})  # asked all the time, and often with 503


class RequestLog:
    """Writes what generated, and what was answered with an error, at INFO; probes and other questions at DEBUG.

    The record carries the same fields as a dict in `record.request`, for handlers that write JSON.
    """

    def __init__(self, *, shows_prompts: bool) -> None:
        self._shows_prompts = shows_prompts

    def write(self, front: Front, call: Call, path: str, status: int) -> None:
        """The response has been sent, or its client is gone."""
        is_quiet = call.course is None and (status < QUIET_BELOW or path in PROBES)
        level = logging.DEBUG if is_quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        fields: dict[str, object] = {
            "request_id": call.request_id,
            "path": path,
            "status": status,
            "seconds": perf_counter() - call.accepted_at,
        }
        if call.course is not None:
            fields |= call.course.fields()
            if self._shows_prompts:
                fields["prompt"] = _prompt_text(front, call)
        log.log(level, " ".join(f"{name}={_shown(value)}" for name, value in fields.items()), extra={"request": fields})


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


def _prompt_text(front: Front, call: Call) -> str:
    """The beginning of the first prompt, as text where there is a tokenizer."""
    ids = list(call.course.prompts[0][:MAX_PROMPT_TOKENS]) if call.course and call.course.prompts else []
    tokenizer = front.engine.tokenizer
    return tokenizer.decode(ids, skip_special_tokens=False) if tokenizer is not None else str(ids)
