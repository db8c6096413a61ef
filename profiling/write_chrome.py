"""Our timelines as Chrome traces: for ui.perfetto.dev, chrome://tracing, and `slipstream overlap-report`."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

import orjson

from ..streams.marks import LAUNCH
from .read_chrome import OWN_MEMBER
from .timeline import NO_CORRELATION, NO_STEP, Lane, LaneKind, StepFacts, Timeline

# Which group of tracks a lane stands in, and in which order.
GROUPS: Final = {
    LaneKind.LOOP: (1, "host"),
    LaneKind.STALLS: (1, "host"),
    LaneKind.RUNTIME: (1, "host"),
    LaneKind.HOST: (1, "host"),
    LaneKind.PROFILER: (1, "host"),
    LaneKind.DEVICE: (2, "device"),
    LaneKind.REQUESTS: (3, "requests"),
}
_EVENTS_A_WRITE: Final = 2000


def write_chrome(timeline: Timeline, path: str | Path) -> None:
    """Write the trace, gzipped if the name ends in .gz. The file is there whole, or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    try:
        with gzip.open(partial, "wb", 5) if path.suffix == ".gz" else partial.open("wb") as file:
            _write(timeline, file)  # type: ignore[arg-type]  # both are binary files
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def chrome_bytes(timeline: Timeline) -> bytes:
    """The trace, gzipped."""
    return gzip.compress(b"".join(_pieces(timeline)), 5)


def _write(timeline: Timeline, file: IO[bytes]) -> None:
    file.writelines(_pieces(timeline))


def _pieces(timeline: Timeline) -> Iterator[bytes]:
    lanes = sorted((lane for lane in timeline.lanes if len(lane)), key=lambda lane: list(GROUPS).index(lane.kind))
    places = [(GROUPS[lane.kind][0], number) for number, lane in enumerate(lanes, 1)]
    origin = min((int(lane.columns().starts[0]) for lane in lanes), default=0)
    own = {
        "source": timeline.source,
        "originNs": origin,
        "steps": {str(step): tuple(facts) for step, facts in timeline.facts.items()},
        "lanes": {f"{pid}/{tid}": (lane.name, lane.thread) for lane, (pid, tid) in zip(lanes, places, strict=True)},
    }
    yield b'{"displayTimeUnit":"ms","' + OWN_MEMBER.encode() + b'":' + orjson.dumps(own) + b',"traceEvents":[\n'
    separator = b""
    batch: list[bytes] = []
    for event in _events(lanes, places, origin, timeline.facts):
        batch.append(orjson.dumps(event))
        if len(batch) == _EVENTS_A_WRITE:
            yield separator + b",\n".join(batch)
            separator, batch = b",\n", []
    yield (separator if batch else b"") + b",\n".join(batch) + b"\n]}\n"


def _events(
    lanes: list[Lane], places: list[tuple[int, int]], origin: int, facts: Mapping[int, StepFacts]
) -> Iterator[dict[str, object]]:
    for pid, name in dict.fromkeys(GROUPS[lane.kind] for lane in lanes):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for lane, (pid, tid) in zip(lanes, places, strict=True):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane.name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    flows = _Flows(lanes)
    for lane, (pid, tid) in zip(lanes, places, strict=True):
        for span in lane.spans():
            args: dict[str, int] = {}
            if span.step != NO_STEP:
                args["step"] = span.step
            if span.correlation != NO_CORRELATION:
                args["correlation"] = span.correlation
            if lane.kind is LaneKind.LOOP and span.name == LAUNCH and span.step in facts:
                args |= facts[span.step]._asdict()
            place = {"pid": pid, "tid": tid, "ts": (span.start_ns - origin) / 1000}
            yield {
                "ph": "X",
                "cat": f"slipstream.{lane.kind.value}",
                "name": span.name,
                **place,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": args,
            }
            end = flows.end_of(lane, span.name, span.step, span.correlation)
            if end is not None:
                phase, number = end
                yield {"ph": phase, "id": number, "cat": "launch", "name": "launch", "bp": "e", **place}


class _Flows:
    """Arrows from a launch to the first thing that it launched: by correlation where calls are recorded, else by step."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._by_calls = any(lane.kind is LaneKind.RUNTIME for lane in lanes)
        self._launched: set[int] = set()
        self._arrived: set[int] = set()

    def end_of(self, lane: Lane, name: str, step: int, correlation: int) -> tuple[str, int] | None:
        """Whether a flow starts ("s") or ends ("f") at this span, and its number. Host lanes come before the device's."""
        number, none = (correlation, NO_CORRELATION) if self._by_calls else (step, NO_STEP)
        if number == none:
            return None
        if lane.kind is LaneKind.DEVICE:
            if number not in self._launched or number in self._arrived:
                return None
            self._arrived.add(number)
            return "f", number
        starts = lane.kind is LaneKind.RUNTIME if self._by_calls else lane.kind is LaneKind.LOOP and name == LAUNCH
        if not starts or number in self._launched:
            return None
        self._launched.add(number)
        return "s", number
