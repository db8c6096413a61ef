"""Chrome traces: torch's profiler (Kineto), our own, and any other program's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .json_stream import EventStream
from .timeline import NO_CORRELATION, NO_STEP, Lane, LaneKind, StepFacts, Timeline, TraceError

# What Kineto's categories are here. The device's own projections of annotations run nothing, and synchronisation records
# would count time twice: they are left out.
DEVICE_CATEGORIES: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "xpu_kernel"})
RUNTIME_CATEGORIES: Final = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime"})
LEFT_OUT: Final = frozenset(
    {"gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range", "Trace", "cpu_instant_event"}
)
OWN_CATEGORIES: Final = {f"slipstream.{kind.value}": kind for kind in LaneKind}
_MALFORMED: Final = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
OWN_MEMBER: Final = "slipstream"  # the member of a trace file that holds what Chrome's format has no place for


def read_chrome(path: str | Path) -> Timeline:
    """Read a Chrome trace, plain or gzipped, in pieces. Raises: TraceError."""
    stream = EventStream(path)
    reader = _Reader()
    with _collector_off():
        for events in stream:
            try:
                reader.take(events)
            except _MALFORMED as error:
                raise TraceError(f"{path}: an event is not as Chrome's format has it: {error!r}") from error
    try:
        return reader.finish(stream, Path(path).name)
    except _MALFORMED as error:
        raise TraceError(f"{path}: what is beside the events is not as its format has it: {error!r}") from error


class _Reader:
    """Sorts events into lanes."""

    def __init__(self) -> None:
        self.timeline = Timeline("")
        self._lanes: dict[tuple[object, ...], Lane | None] = {}
        self._thread_names: dict[str, str] = {}

    def take(self, events: list[dict[str, Any]]) -> None:
        lanes = self._lanes
        for event in events:
            if event.get("ph") != "X":
                if event.get("name") == "thread_name" and event.get("ph") == "M":
                    self._thread_names[f"{event['pid']}/{event['tid']}"] = event["args"]["name"]
                continue
            args = event.get("args") or {}
            category = event.get("cat", "")
            key = category, event.get("pid"), event.get("tid"), args.get("device"), args.get("stream")
            try:
                lane = lanes[key]
            except KeyError:
                lane = lanes[key] = self._lane(*key)
            if lane is not None:
                start = round(event["ts"] * 1000)
                lane.add(
                    event["name"],
                    start,
                    start + round(event.get("dur", 0) * 1000),  # in whole nanoseconds the sum is exact
                    args.get("step", NO_STEP) if category in OWN_CATEGORIES else NO_STEP,
                    args.get("correlation", NO_CORRELATION),
                )

    def finish(self, stream: EventStream, file_name: str) -> Timeline:
        timeline, own = self.timeline, stream.extras.get(OWN_MEMBER)
        is_kineto = "schemaVersion" in stream.extras or "deviceProperties" in stream.extras
        kind = "slipstream" if own else "torch profiler" if is_kineto else "Chrome trace"
        timeline.source = str(own["source"]) if own else f"{file_name} ({kind})"
        if is_kineto:
            timeline.epoch_ns = int(stream.extras.get("baseTimeNanoseconds", 0))
        for step, facts in (own or {}).get("steps", {}).items():
            timeline.facts[int(step)] = StepFacts(*map(int, facts))
        for lane in timeline.lanes:
            if own:
                lane.name, lane.thread = map(str, own["lanes"][lane.name])
            elif lane.kind is not LaneKind.DEVICE:
                # A thread's own name, where the file gives one, says more than its number.
                lane.name = self._thread_names.get(lane.thread, lane.name)
        return timeline

    def _lane(self, category: str, pid: object, tid: object, device: object, stream: object) -> Lane | None:
        thread = f"{pid}/{tid}"
        if category in OWN_CATEGORIES:
            return self.timeline.lane(thread, OWN_CATEGORIES[category], thread=thread)
        if category in DEVICE_CATEGORIES:
            name = f"GPU {pid if device is None else device} stream {tid if stream is None else stream}"
            return self.timeline.lane(name, LaneKind.DEVICE)
        if category in RUNTIME_CATEGORIES:
            return self.timeline.lane(thread, LaneKind.RUNTIME, thread=thread)
        if category == "overhead":
            return self.timeline.lane("profiler", LaneKind.PROFILER)
        if category in LEFT_OUT:
            return None
        return self.timeline.lane(thread, LaneKind.HOST, thread=thread)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Millions of short-lived dictionaries without a cycle among them: looking for one takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
