"""Is the device waiting for the host? One algorithm over one event model, whoever recorded it.

Busy is the union of everything that runs on the device; idle is the rest of the window. Each idle nanosecond is charged
to what the host did then: to the innermost range on its thread, or to "outside" where there is none. So the exposed times
add up to the idle time exactly, and hidden is what the host did while the device was busy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..streams.marks import AWAIT
from .intervals import Intervals, Ints, innermost, least_per_key, look_up, union
from .stalls import Stall, find_stalls
from .steps import Assigned, assign_steps, by_graph, launched_steps
from .timeline import NO_CORRELATION, NO_STEP, Columns, LaneKind, Timeline, TraceError

OUTSIDE: Final = "outside"  # no range on the host's thread: other tasks of the loop, or code without marks
WAITING: Final = re.compile(rf"^{AWAIT}$|^(cuda|cu|hip)[A-Z]\w*Synchronize")
MAX_GAPS: Final = 20
BURST_GAP_NS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution of times. Units: nanoseconds."""

    median: int
    mean: float
    p99: int
    least: int
    most: int
    count: int

    @classmethod
    def of(cls, values: Ints) -> Spread | None:
        if not len(values):
            return None
        ordered = np.sort(values)
        return cls(
            median=int(ordered[len(ordered) // 2]),
            mean=float(ordered.mean()),
            p99=int(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]),
            least=int(ordered[0]),
            most=int(ordered[-1]),
            count=len(ordered),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What the host did under one name, nested ranges not counted twice. `exposed_ns` while the device was idle,
    `between_ns` of that between two steps, `hidden_ns` while it was busy.
    """

    name: str
    is_wait: bool  # nothing was done in it: the loop awaited, the thread was stopped, or no range was recorded
    count: int
    total_ns: int
    exposed_ns: int
    between_ns: int
    hidden_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The device was idle, and why."""

    start_ns: int
    end_ns: int
    before: int  # the step that ran last
    after: int
    causes: tuple[tuple[str, int], ...]  # phase and nanoseconds, the longest first


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReport:
    """Of the window [start_ns, end_ns): whole steps, from the start of the first to the start of the last.

    `steps_are` says what a step is here: "steps" of the engine, named "ranges", "graph launches" or "bursts" of device work
    where the trace names none. `host` is the thread that idle time is charged to. Without runtime calls or launch marks
    there is no `launch_to_start`; without marks there are no tokens.
    """

    source: str
    host: str
    steps_are: str
    start_ns: int
    end_ns: int
    num_steps: int
    step: Spread | None
    busy_ns: int
    idle_between_ns: int
    idle_within_ns: int
    idle_profiled_ns: int  # of both: while the profiler itself worked, which would not have been without it
    streams: tuple[tuple[str, int], ...]  # name and busy time of each
    phases: tuple[Phase, ...]  # the most exposed first
    gaps: tuple[Gap, ...]  # the longest ones
    launch_to_start: Spread | None
    starts_before_launch: int  # more than a few: the clocks of host and device disagree
    stalls: tuple[Stall, ...]
    stall_limit_ns: int
    num_graph_launches: int
    num_graph_steps: int
    num_tokens: int

    @property
    def window_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def idle_ns(self) -> int:
        return self.idle_between_ns + self.idle_within_ns

    @property
    def idle_share(self) -> float:
        return self.idle_ns / self.window_ns

    @property
    def exposed_ns(self) -> int:
        """Host time, waiting left out, that the device stood still for."""
        return sum(phase.exposed_ns for phase in self.phases if not phase.is_wait)

    @property
    def hidden_ns(self) -> int:
        return sum(phase.hidden_ns for phase in self.phases if not phase.is_wait)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.window_ns * 1e9


def overlap_report(
    timeline: Timeline,
    *,
    stall_ns: int | None = None,
    step_range: str | None = None,
    burst_gap_ns: int = BURST_GAP_NS,
) -> OverlapReport:
    """Charge the device's idle time to what the host did in it.

    `step_range`: a regular expression; host ranges that match it are steps. `burst_gap_ns`: where a trace names no steps,
    an idle time from this on ends one. `stall_ns`: the loop counts as stalled from this on; by default 5 ms, or a step if
    that is shorter. Raises: TraceError if nothing ran on the device.
    """
    device_lanes = timeline.of_kind(LaneKind.DEVICE)
    device = timeline.columns(device_lanes)
    device = Columns(*(column[device.ends > device.starts] for column in device))
    if not len(device.starts):
        raise TraceError(f"{timeline.source}: nothing ran on a device or a lane in this recording")
    runtime = timeline.columns(timeline.of_kind(LaneKind.RUNTIME))
    assigned = assign_steps(timeline, device, runtime, step_range=step_range, burst_gap_ns=burst_gap_ns)
    known = assigned.steps != NO_STEP
    numbers, begins = least_per_key(assigned.steps[known], device.starts[known])
    begins.sort()
    if len(begins) >= 2:
        start, end = int(begins[0]), int(begins[-1])
    else:
        start, end = int(device.starts[0]), int(device.ends.max())
    step = Spread.of(np.diff(begins))
    busy = _within(union(device.starts, device.ends), start, end)
    idle = busy.gaps(start, end)
    before, after = _steps_around(idle, device, assigned.steps)
    between = idle.subset((before != after) | (before == NO_STEP))
    host_name, host = _host(timeline)
    charged = _Charges(timeline, host, start, end)
    limit = stall_ns if stall_ns is not None else min(5_000_000, step.median if step else 5_000_000)
    distances = _launch_to_start(timeline, device, runtime, assigned, start, end)
    of_graphs = by_graph(timeline, device, runtime) & (device.starts >= start) & (device.starts < end)
    return OverlapReport(
        source=timeline.source,
        host=host_name,
        steps_are=assigned.kind,
        start_ns=start,
        end_ns=end,
        num_steps=max(1, len(begins) - 1),
        step=step,
        busy_ns=busy.total,
        idle_between_ns=between.total,
        idle_within_ns=idle.total - between.total,
        idle_profiled_ns=_profiled(timeline, idle),
        streams=tuple((lane.name, _within(union(*lane.columns()[1:3]), start, end).total) for lane in device_lanes),
        phases=charged.phases(idle, between),
        gaps=charged.gaps(idle, before, after),
        launch_to_start=Spread.of(distances),
        starts_before_launch=int((distances < 0).sum()),
        stalls=find_stalls(timeline, limit_ns=limit, start_ns=start, end_ns=end),
        stall_limit_ns=limit,
        num_graph_launches=len(np.unique(device.correlations[of_graphs])),
        num_graph_steps=len(np.unique(assigned.steps[of_graphs & known])),
        num_tokens=_tokens(timeline, numbers, device, assigned, start, end),
    )


class _Charges:
    """The host's thread, cut into pieces that belong to one name each."""

    def __init__(self, timeline: Timeline, host: Columns, start: int, end: int) -> None:
        self._names = timeline.names
        segments = innermost(host.starts, host.ends)
        self._starts = np.clip(segments.starts, start, end)
        self._ends = np.clip(segments.ends, start, end)
        self._of = host.names[segments.spans]
        self._window = end - start
        self._counts = np.bincount(host.names[(host.starts < end) & (host.ends > start)], minlength=len(self._names))

    def phases(self, idle: Intervals, between: Intervals) -> tuple[Phase, ...]:
        totals = self._by_name(self._ends - self._starts)
        exposed = self._by_name(idle.covered(self._starts, self._ends))
        exposed_between = self._by_name(between.covered(self._starts, self._ends))
        found = [
            Phase(
                name=self._names[number],
                is_wait=bool(WAITING.search(self._names[number])),
                count=int(self._counts[number]),
                total_ns=int(totals[number]),
                exposed_ns=int(exposed[number]),
                between_ns=int(exposed_between[number]),
                hidden_ns=int(totals[number] - exposed[number]),
            )
            for number in np.flatnonzero(totals).tolist()
        ]
        rest, rest_exposed = self._window - int(totals.sum()), idle.total - int(exposed.sum())
        if rest:
            found.append(
                Phase(
                    name=OUTSIDE,
                    is_wait=True,
                    count=0,
                    total_ns=rest,
                    exposed_ns=rest_exposed,
                    between_ns=between.total - int(exposed_between.sum()),
                    hidden_ns=rest - rest_exposed,
                )
            )
        return tuple(sorted(found, key=lambda phase: (-phase.exposed_ns, -phase.total_ns)))

    def gaps(self, idle: Intervals, before: Ints, after: Ints) -> tuple[Gap, ...]:
        lengths = idle.ends - idle.starts
        longest = np.argsort(-lengths, kind="stable")[:MAX_GAPS]
        return tuple(self._gap(idle, index, before, after) for index in longest.tolist())

    def _gap(self, idle: Intervals, index: int, before: Ints, after: Ints) -> Gap:
        start, end = int(idle.starts[index]), int(idle.ends[index])
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._starts, end, side="left"))
        causes: dict[str, int] = {}
        for piece in range(first, last):
            shared = min(end, int(self._ends[piece])) - max(start, int(self._starts[piece]))
            if shared > 0:
                name = self._names[int(self._of[piece])]
                causes[name] = causes.get(name, 0) + shared
        rest = end - start - sum(causes.values())
        if rest:
            causes[OUTSIDE] = rest
        ordered = sorted(causes.items(), key=lambda cause: -cause[1])
        return Gap(
            start_ns=start, end_ns=end, before=int(before[index]), after=int(after[index]), causes=tuple(ordered)
        )

    def _by_name(self, values: Ints) -> Ints:
        sums = np.zeros(len(self._names), np.int64)
        np.add.at(sums, self._of, values)
        return sums


def _within(intervals: Intervals, start: int, end: int) -> Intervals:
    clipped = Intervals(np.clip(intervals.starts, start, end), np.clip(intervals.ends, start, end))
    return clipped.subset(clipped.ends > clipped.starts)


def _profiled(timeline: Timeline, idle: Intervals) -> int:
    own = timeline.columns(timeline.of_kind(LaneKind.PROFILER))
    working = union(own.starts, own.ends)
    return int(idle.covered(working.starts, working.ends).sum())


def _steps_around(idle: Intervals, device: Columns, steps: Ints) -> tuple[Ints, Ints]:
    """The step of the span that ended last before each gap, and of the one that begins at its end."""
    by_end = np.argsort(device.ends, kind="stable")
    before = steps[by_end[np.searchsorted(device.ends[by_end], idle.starts, side="right") - 1]]
    after = steps[np.minimum(np.searchsorted(device.starts, idle.ends, side="left"), len(steps) - 1)]
    return before, after


def _host(timeline: Timeline) -> tuple[str, Columns]:
    """The thread that feeds the device: the engine's loop if it is marked, else the one that launches most."""
    loops = timeline.of_kind(LaneKind.LOOP)
    if loops:
        return loops[0].name, timeline.columns(loops)
    candidates = timeline.of_kind(LaneKind.RUNTIME) or timeline.of_kind(LaneKind.HOST)
    if not candidates:
        return "none recorded", timeline.columns([])
    launches = timeline.launching()
    busiest = max(candidates, key=lambda lane: (launches.get(lane.thread, 0), len(lane)))
    same = [lane for lane in timeline.of_kind(LaneKind.HOST, LaneKind.RUNTIME) if lane.thread == busiest.thread]
    return busiest.thread or busiest.name, timeline.columns(same)


def _launch_to_start(
    timeline: Timeline, device: Columns, runtime: Columns, assigned: Assigned, start: int, end: int
) -> Ints:
    """From a launch call to the start of the first thing it launched; where calls are not recorded, from a step's launch
    mark to the step's start."""
    linked = device.correlations != NO_CORRELATION
    if linked.any() and len(runtime.starts):
        keys, begins = least_per_key(device.correlations[linked], device.starts[linked])
        calls, called = least_per_key(runtime.correlations, runtime.starts)
    else:
        steps = assigned.steps
        if not assigned.are_numbered:
            return np.zeros(0, np.int64)
        keys, begins = least_per_key(steps[steps != NO_STEP], device.starts[steps != NO_STEP])
        calls, called = launched_steps(timeline)
    at = look_up(calls, called, keys, missing=-1)
    keep = (at != -1) & (begins >= start) & (begins < end)
    distances: Ints = begins[keep] - at[keep]
    return distances


def _tokens(timeline: Timeline, numbers: Ints, device: Columns, assigned: Assigned, start: int, end: int) -> int:
    """Tokens drawn by the steps that begin in the window."""
    steps = assigned.steps
    if not timeline.facts or not assigned.are_numbered:
        return 0
    _, begins = least_per_key(steps[steps != NO_STEP], device.starts[steps != NO_STEP])
    inside: Sequence[int] = numbers[(begins >= start) & (begins < end)].tolist()
    return sum(timeline.facts[number].sampled for number in inside if number in timeline.facts)
