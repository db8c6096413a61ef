"""Which step each piece of device work belongs to."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..streams.marks import LAUNCH
from .intervals import Ints, innermost, least_per_key, look_up, union
from .timeline import NO_CORRELATION, NO_STEP, Columns, LaneKind, Timeline, TraceError

PROFILER_STEPS: Final = r"^ProfilerStep#"  # torch's own name for the iterations of its schedule
MIN_GRAPH_LAUNCHES: Final = 3
MARKED: Final = "steps"


class Assigned(NamedTuple):
    """A step for each span of the device, NO_STEP where there is none, and what these steps are.

    Only if they are the engine's own do they have the numbers that launch marks and facts have.
    """

    steps: Ints
    kind: str

    @property
    def are_numbered(self) -> bool:
        return self.kind == MARKED


def assign_steps(
    timeline: Timeline, device: Columns, runtime: Columns, *, step_range: str | None, burst_gap_ns: int
) -> Assigned:
    """By what is known: the span's own step; the loop's mark around the call that launched it; a named range around
    that call, or around the work itself if the call is not recorded; launches of one graph that has most of the device's
    time; else bursts of work between long idle times.

    Raises: TraceError if there is no range that matches `step_range`, or it is no pattern.
    """
    if step_range is None:
        steps = _by_marks(timeline, device, runtime)
        if (steps != NO_STEP).any():
            return Assigned(steps, MARKED)
    try:
        pattern = re.compile(step_range if step_range is not None else PROFILER_STEPS)
    except re.error as error:
        raise TraceError(f"{step_range!r} is no pattern: {error}") from error
    ranges = _ranges(timeline, pattern)
    if len(ranges.starts):
        called = look_up(*least_per_key(runtime.correlations, runtime.starts), device.correlations, missing=-1)
        moments = np.where((called != -1) & (device.correlations != 0), called, device.starts)
        return Assigned(_range_at(moments, ranges), "ranges")
    if step_range is not None:
        raise TraceError(f"{timeline.source}: no range on the host is called {step_range!r}")
    graphs = _graph_launches(timeline, device, runtime)
    if graphs is not None:
        return Assigned(graphs, "graph launches")
    return Assigned(_bursts(device, burst_gap_ns), "bursts")


def by_graph(timeline: Timeline, device: Columns, runtime: Columns) -> npt.NDArray[np.bool_]:
    """Which work a graph launch brought."""
    numbers = [number for number in range(len(timeline.names)) if "GraphLaunch" in timeline.names[number]]
    launches = runtime.correlations[np.isin(runtime.names, numbers)]
    return np.isin(device.correlations, launches[launches != NO_CORRELATION])


def launched_steps(timeline: Timeline) -> tuple[Ints, Ints]:
    """Steps with a launch mark, ascending, and when that began."""
    marks = timeline.columns(timeline.of_kind(LaneKind.LOOP))
    keep = (marks.names == timeline.names.number(LAUNCH)) & (marks.steps != NO_STEP)
    return least_per_key(marks.steps[keep], marks.starts[keep])


def _by_marks(timeline: Timeline, device: Columns, runtime: Columns) -> Ints:
    marks = timeline.columns(timeline.of_kind(LaneKind.LOOP))
    if not len(marks.starts) or not len(runtime.starts):
        return device.steps
    pieces = innermost(marks.starts, marks.ends)
    index = np.searchsorted(pieces.starts, runtime.starts, side="right") - 1
    inside = (index >= 0) & (runtime.starts < pieces.ends[np.maximum(index, 0)])
    step_of_call = np.where(inside, marks.steps[pieces.spans[np.maximum(index, 0)]], NO_STEP)
    keep = (step_of_call != NO_STEP) & (runtime.correlations != 0)
    calls, called = least_per_key(runtime.correlations[keep], step_of_call[keep])
    return np.where(device.steps != NO_STEP, device.steps, look_up(calls, called, device.correlations, missing=NO_STEP))


def _ranges(timeline: Timeline, pattern: re.Pattern[str]) -> Columns:
    """Host ranges whose name matches, of the lane that has most of them: a step is not counted once a thread."""
    numbers = [number for number in range(len(timeline.names)) if pattern.search(timeline.names[number])]
    best = timeline.columns([])
    for lane in timeline.of_kind(LaneKind.HOST, LaneKind.LOOP):
        columns = lane.columns()
        found = Columns(*(column[np.isin(columns.names, numbers)] for column in columns))
        if len(found.starts) > len(best.starts):
            best = found
    return best


def _range_at(moments: Ints, ranges: Columns) -> Ints:
    """The number of the range in which each moment lies."""
    pieces = innermost(ranges.starts, ranges.ends)
    index = np.searchsorted(pieces.starts, moments, side="right") - 1
    inside = (index >= 0) & (moments < pieces.ends[np.maximum(index, 0)])
    return np.where(inside, pieces.spans[np.maximum(index, 0)], NO_STEP)


def _graph_launches(timeline: Timeline, device: Columns, runtime: Columns) -> Ints | None:
    """Steps that begin with each launch of the graph that has most of the device's time; None if none has half of it.

    Launches are of the same graph if they begin with the same kernel and have as many.
    """
    chosen = by_graph(timeline, device, runtime)
    launches, first, of_launch, counts = np.unique(
        device.correlations[chosen], return_index=True, return_inverse=True, return_counts=True
    )
    if len(launches) < MIN_GRAPH_LAUNCHES:
        return None
    times = np.bincount(of_launch, weights=device.ends[chosen] - device.starts[chosen])
    kinds, of_kind = np.unique(np.stack([device.names[chosen][first], counts]), axis=1, return_inverse=True)
    shares = np.bincount(of_kind.ravel(), weights=times, minlength=kinds.shape[1])
    if shares.max() < 0.5 * (device.ends - device.starts).sum():
        return None
    begins = np.sort(device.starts[chosen][first][of_kind.ravel() == shares.argmax()])
    numbers = np.searchsorted(begins, device.starts, side="right") - 1
    return np.where(numbers >= 0, numbers, NO_STEP)


def _bursts(device: Columns, gap_ns: int) -> Ints:
    busy = union(device.starts, device.ends)
    long_gap = busy.starts[1:] - busy.ends[:-1] >= gap_ns
    number = np.concatenate(([0], np.cumsum(long_gap)))
    return number[np.searchsorted(busy.starts, device.starts, side="right") - 1]
