"""What requests see while an engine is recorded: waiting, being answered, and the time their text takes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, cast

from ..engine.engine import Engine
from ..engine.outputs import End, Sink
from ..engine.request import Request
from ..engine.text.text_stream import TextStream
from ..streams.marks import DETOKENIZE
from .timeline import LaneKind, Timeline

WAITING = "waiting"
ANSWERED = "answered"


class RequestWatch:
    """Stands between requests and their sinks and texts, from `start` to `stop`.

    `look` is called at each delivery: at least once a step that brings something.
    """

    def __init__(self, engine: Engine, look: Callable[[], None]) -> None:
        self._engine = engine
        self._look = look
        self._watched: list[_Watched] = []

    def start(self) -> None:
        self._start_ns = time.perf_counter_ns()
        self._engine.watch(lambda request: self._watched.append(_Watched(request, self._look)))

    def stop(self) -> None:
        self._engine.watch(None)
        for each in self._watched:
            each.let_go()
        self._end_ns = time.perf_counter_ns()

    def add_to(self, timeline: Timeline, loop_lane: str, thread: str) -> None:
        """Add a lane for each request, and what detokenizing took to the loop's lane."""
        loop = timeline.lane(loop_lane, LaneKind.LOOP, thread=thread)
        for number, each in enumerate(self._watched):
            lane = timeline.lane(f"{number:03} {each.request.request_id}", LaneKind.REQUESTS)
            first, end = each.sink.first_ns or self._end_ns, each.sink.end_ns or self._end_ns
            began = each.seen_ns if each.was_new else self._start_ns
            if each.was_new or not each.sink.first_ns:
                lane.add(WAITING, began, min(first, end))
            answered_from = first if each.was_new else self._start_ns
            if each.sink.num_tokens and end > answered_from:
                lane.add(f"{ANSWERED}, {each.sink.num_tokens} tokens", answered_from, end)
            if each.text is not None:
                for start, stop in zip(each.text.starts, each.text.ends, strict=True):
                    loop.add(DETOKENIZE, start, stop)


class _Watched:
    """One request with our sink and text in the place of its own."""

    def __init__(self, request: Request, look: Callable[[], None]) -> None:
        self.request = request
        self.seen_ns = time.perf_counter_ns()
        self.was_new = request.num_outputs == 0
        self.sink = _WatchedSink(request.sink, look)
        self.text = _WatchedText(request.text) if request.text is not None else None
        request.sink = self.sink
        if self.text is not None:
            request.text = cast("TextStream", self.text)

    def let_go(self) -> None:
        self.request.sink = self.sink.own
        if self.text is not None:
            self.request.text = self.text.own


class _WatchedSink:
    """A Sink that notes when the first token and the end came."""

    def __init__(self, own: Sink, look: Callable[[], None]) -> None:
        self.own = own
        self.first_ns = 0
        self.end_ns = 0
        self.num_tokens = 0
        self._look = look

    def push(self, token_ids: Sequence[int], text: str, *more: Any) -> None:
        if not self.first_ns:
            self.first_ns = time.perf_counter_ns()
        self.num_tokens += len(token_ids)
        self.own.push(token_ids, text, *more)
        self._look()

    def end(self, end: End) -> None:
        self.end_ns = time.perf_counter_ns()
        self.own.end(end)
        self._look()


class _WatchedText:
    """A TextStream that notes when it worked."""

    def __init__(self, own: TextStream) -> None:
        self.own = own
        self.starts = array("q")
        self.ends = array("q")

    def push(self, token_id: int, **options: Any) -> tuple[str, str | None]:
        self.starts.append(time.perf_counter_ns())
        released = self.own.push(token_id, **options)
        self.ends.append(time.perf_counter_ns())
        return released

    def end_at(self, token_id: int) -> str:
        return self.own.end_at(token_id)

    def flush(self) -> str:
        return self.own.flush()
