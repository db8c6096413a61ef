"""One choice of a streamed answer: the engine's sink, and the text that waits to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from ..engine.outputs import End, Finished, HiddenStates, TokenLogprobs, Usage
from .fan_out import RELEASE_EVERY_S
from .frames import Shape, Template
from .stream_interval import MAX_HOLD_S

if TYPE_CHECKING:
    from .sse import SseResponse


class Choice:
    """Belongs to its stream, and is pushed to by the step loop."""

    __slots__ = (
        "_due_at",
        "_fan_out",
        "_hidden",
        "_ids",
        "_index",
        "_last_at",
        "_metrics",
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_scores",
        "_stream",
        "_template",
        "ended",
        "is_marked",
        "pending",
    )

    def __init__(self, stream: SseResponse, shape: Shape, index: int, num_prompt_tokens: int) -> None:
        self._stream = stream
        self._index = index
        self._template = shape.text(index)
        self._ids: list[int] | None = [] if shape.wants_ids else None
        self._scores: list[TokenLogprobs] | None = [] if shape.wants_logprobs else None
        self._hidden: list[HiddenStates] = []
        self._metrics = stream.front.metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._due_at = 0  # the number of output tokens at which the next frame is written
        self._fan_out = stream.front.fan_out
        self._last_at: float | None = None  # when the frame before was taken; None: the opening is still to come
        self.is_marked = False
        self.pending = ""
        self.ended: End | None = None

    @property
    def usage(self) -> Usage:
        """As far as it has come; the end brings the final one."""
        if self.ended is not None:
            return self.ended.usage
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._stream.num_cached_tokens(self._index),
            output_tokens=self._num_output_tokens,
        )

    def push(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self._num_output_tokens += len(token_ids)
        if self._scores is not None:
            self._scores.extend((*prompt_logprobs, *logprobs))
        if hidden_states is not None:
            self._hidden.append(hidden_states)
        if self._ids is not None:
            self._ids += token_ids
        elif not text:
            return
        if text:
            self.pending += text
        if self.is_marked:
            return
        if self._num_output_tokens < self._due_at:
            self._fan_out.hold(self)
            return
        self.is_marked = True
        self._stream.mark()

    def lets_go(self, now: float) -> bool:
        """Write what is kept back if it is too old. False while there is something to keep."""
        if self.is_marked or self.ended is not None or self._last_at is None:
            return True
        if now - self._last_at < MAX_HOLD_S - RELEASE_EVERY_S:
            return False
        self.is_marked = True
        self._stream.mark()
        return True

    def end(self, end: End) -> None:
        self.ended = end
        if not self.is_marked:
            self.is_marked = True
            self._stream.mark()
        self._stream.choice_ended(end)

    def take(self, shape: Shape, now: float) -> bytes:
        """What is new, as frames; afterwards nothing is pending."""
        self.is_marked = False
        before, self._last_at = self._last_at, now
        self._due_at = self._num_output_tokens + self._fan_out.interval.tokens
        template = self._template
        if before is None:
            return self._first(shape, now)
        self._metrics.inter_token_s.observe(now - before)
        if self.ended is not None or template is None or self._scores is not None or self._hidden:
            return self._any(shape)
        return self._by_template(template)  # as nearly every frame is

    def _by_template(self, template: Template) -> bytes:
        self._metrics.num_frames += 1
        head, tail = template
        text, self.pending = self.pending, ""
        if self._ids is None:
            return head + orjson.dumps(text) + tail
        frame = b'%b%b,"output_ids":%b%b' % (head, orjson.dumps(text), orjson.dumps(self._ids), tail)
        self._ids.clear()
        return frame

    def _first(self, shape: Shape, now: float) -> bytes:
        """What goes before a choice's first frame, and that frame."""
        self._stream.saw_first(now)
        return shape.opening(self._index, self._stream.usage) + self._any(shape)

    def _any(self, shape: Shape) -> bytes:
        """What is new, whatever it is."""
        frames, usage = b"", self._stream.usage
        hidden = HiddenStates.joined(self._hidden)
        if hidden is not None:
            self._hidden = []
            frames += shape.hidden(self._index, hidden)
        if self._scores and (self.pending or self._ids or self.ended is not None):
            frames += shape.scored(self._index, self.pending, self._scores, usage)
            self._scores = []
            self._ids = None if self._ids is None else []
            self.pending = ""
        elif self.pending or self._ids:
            if self._template is not None:
                frames += self._by_template(self._template)
            else:
                self._metrics.num_frames += 1
                frames += shape.frame(self._index, self.pending, usage)
                self.pending = ""
        if isinstance(self.ended, Finished):
            frames += shape.closing(self._index, self.ended, usage)
        return frames
