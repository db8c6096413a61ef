"""Marks on a machine whose lanes are CUDA streams: the loop is timed by the clock, the lanes by events on their streams."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, cast

import torch

from .marks import Mark, RingMarks

_NS_PER_MS: Final = 1e6


class CudaMarks(RingMarks):
    """RingMarks whose lane ranges say when the device worked, not when the host asked it to.

    Events are laid over the host's clock by one recorded on an idle stream, seen by a spinning host: all times of the
    lanes come out late by that look, some 2 µs.
    """

    def __init__(self, device: torch.device, capacity: int = 65536, *, nvtx: bool = False) -> None:
        """Stops the host for some microseconds: the stream that it waits for has nothing else to do."""
        super().__init__(capacity, nvtx=nvtx)
        self._lane_done: deque[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=capacity)
        stream = torch.cuda.Stream(device)
        _timed_event(stream).synchronize()  # the first event of a stream takes longer than any later one
        self._anchor = _timed_event(stream)
        while not self._anchor.query():
            pass
        self._anchor_ns = time.perf_counter_ns()

    def lane_start(self, name: str, step: int) -> object:
        return name, step, _timed_event(torch.cuda.current_stream())

    def lane_end(self, token: object) -> None:
        name, step, started = cast("tuple[str, int, torch.cuda.Event]", token)
        self._lane_done.append((name, step, started, _timed_event(torch.cuda.current_stream())))

    def records(self) -> list[Mark]:
        """The finished ranges; of the lanes those that the device has passed."""
        lanes = [
            Mark(name, step, self._at_ns(started), self._at_ns(ended))
            for name, step, started, ended in list(self._lane_done)
            if ended.query()
        ]
        return sorted([*super().records(), *lanes], key=lambda mark: mark.start_ns)

    def _at_ns(self, event: torch.cuda.Event) -> int:
        return self._anchor_ns + int(self._anchor.elapsed_time(event) * _NS_PER_MS)


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
