"""One HTML file with a zoomable timeline of consecutive steps and the report beside it. It fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .intervals import Ints, least_per_key, union
from .overlap_report import BURST_GAP_NS, OverlapReport
from .report_text import report_json
from .steps import assign_steps, launched_steps
from .timeline import NO_STEP, Columns, Lane, LaneKind, Timeline

TEMPLATE: Final = Path(__file__).with_name("timeline.html")
MAX_STEPS: Final = 60
MAX_SPANS: Final = 60_000
MAX_REQUESTS: Final = 16
MAX_DEPTH: Final = 6


def html_page(
    timelines: Sequence[Timeline],
    reports: Sequence[OverlapReport],
    *,
    step_range: str | None = None,
    burst_gap_ns: int = BURST_GAP_NS,
) -> str:
    """The page. Several timelines are drawn under each other on one scale, each from a step of its own on.

    `step_range`, `burst_gap_ns`: what the reports were made with.
    """
    panels = [
        _panel(timeline, report, step_range, burst_gap_ns) for timeline, report in zip(timelines, reports, strict=True)
    ]
    content = json.dumps(panels, separators=(",", ":")).replace("<", "\\u003c")  # a name must not end the script
    return TEMPLATE.read_text(encoding="utf-8").replace("__PANELS__", content)


def _panel(timeline: Timeline, report: OverlapReport, step_range: str | None, burst_gap_ns: int) -> dict[str, Any]:
    device_lanes = timeline.of_kind(LaneKind.DEVICE)
    device, lane_of = timeline.columns_and_lanes(device_lanes)
    ran = device.ends > device.starts
    device, lane_of = Columns(*(column[ran] for column in device)), lane_of[ran]
    runtime = timeline.columns(timeline.of_kind(LaneKind.RUNTIME))
    assigned = assign_steps(timeline, device, runtime, step_range=step_range, burst_gap_ns=burst_gap_ns)
    steps = assigned.steps
    numbers, begins = least_per_key(steps[steps != NO_STEP], device.starts[steps != NO_STEP])
    start, end = _window(begins, device, report)
    names: dict[str, int] = {}
    lanes = [_lane(timeline, lane, start, end, names) for lane in _host_lanes(timeline)]
    for position, lane in enumerate(device_lanes):
        mine = lane_of == position
        columns = Columns(*(column[mine] for column in device._replace(steps=steps)))
        lanes.append(_packed(timeline, lane, columns, start, end, names))
    requests = [lane for lane in timeline.of_kind(LaneKind.REQUESTS) if _is_seen(lane, start, end)]
    lanes += [_lane(timeline, lane, start, end, names) for lane in requests[:MAX_REQUESTS]]
    busy = union(device.starts, device.ends)
    idle = busy.gaps(start, end)
    launches, facts = {}, {}
    if assigned.are_numbered:
        launches = dict(zip(*(column.tolist() for column in launched_steps(timeline)), strict=True))
        facts = timeline.facts
    inside = (begins >= start) & (begins < end)
    return {
        "title": report.source,
        "stepsAre": report.steps_are,
        "hasLoop": bool(timeline.of_kind(LaneKind.LOOP)),
        "duration": end - start,
        "names": list(names),
        "lanes": [lane for lane in lanes if lane["spans"]],
        "hiddenRequests": max(0, len(requests) - MAX_REQUESTS),
        "idle": _flat(idle.starts - start, idle.ends - idle.starts),
        "steps": [
            [number, begin - start, launches.get(number, begin) - start]
            for number, begin in zip(numbers[inside].tolist(), begins[inside].tolist(), strict=True)
        ],
        "facts": {number: facts[number] for number in numbers[inside].tolist() if number in facts},
        "report": report_json(report),
    }


def _is_seen(lane: Lane, start: int, end: int) -> bool:
    columns = lane.columns()
    return bool(((columns.starts < end) & (columns.ends > start)).any())


def _window(begins: Ints, device: Columns, report: OverlapReport) -> tuple[int, int]:
    """Whole steps from the middle of the recording, as many as may be drawn."""
    if len(begins) < 3:
        return report.start_ns, min(report.end_ns, int(device.starts[min(MAX_SPANS, len(device.starts)) - 1]) + 1)
    a_step = max(1, len(device.starts) // len(begins))
    count = min(MAX_STEPS, len(begins) - 1, max(2, MAX_SPANS // a_step))
    ordered = np.sort(begins)
    first = max(0, (len(ordered) - 1 - count) // 2)
    return int(ordered[first]), int(ordered[first + count])


def _host_lanes(timeline: Timeline) -> list[Lane]:
    """The loop and its thread's calls; of a trace without marks the threads with most to show."""
    loops = timeline.of_kind(LaneKind.LOOP)
    others = timeline.of_kind(LaneKind.RUNTIME, LaneKind.HOST)
    threads = {lane.thread for lane in loops}
    if threads:
        others = [lane for lane in others if lane.thread in threads]
    others = sorted(sorted(others, key=len, reverse=True)[:4], key=lambda lane: lane.kind is LaneKind.HOST)
    return [*loops, *timeline.of_kind(LaneKind.STALLS), *others, *timeline.of_kind(LaneKind.PROFILER)]


def _lane(timeline: Timeline, lane: Lane, start: int, end: int, names: dict[str, int]) -> dict[str, Any]:
    return _packed(timeline, lane, lane.columns(), start, end, names)


def _packed(
    timeline: Timeline, lane: Lane, columns: Columns, start: int, end: int, names: dict[str, int]
) -> dict[str, Any]:
    """Spans of the window as one flat list: name, start, duration, step, depth of nesting."""
    keep = np.flatnonzero((columns.starts < end) & (columns.ends > start) & (columns.ends > columns.starts))[:MAX_SPANS]
    numbers = {
        number: names.setdefault(timeline.names[number], len(names))
        for number in np.unique(columns.names[keep]).tolist()
    }
    starts, ends = columns.starts[keep], columns.ends[keep]
    shown = np.array([numbers[number] for number in columns.names[keep].tolist()], np.int64)
    begins = np.maximum(starts, start)
    lengths = np.minimum(ends, end) - begins
    depths = _depths(starts.tolist(), ends.tolist())
    spans = _flat(shown, begins - start, lengths, columns.steps[keep], np.array(depths, np.int64))
    return {"name": lane.name, "kind": lane.kind.value, "depth": max(depths, default=0) + 1, "spans": spans}


def _depths(starts: list[int], ends: list[int]) -> list[int]:
    """The first row that is free: inner spans stand under outer ones, and such as overlap, as kernels of one stream may,
    take turns. What finds none stands in the last one.
    """
    depths = []
    free_from = [min(starts, default=0)] * MAX_DEPTH
    for start, end in zip(starts, ends, strict=True):
        depth = next((row for row, free in enumerate(free_from) if free <= start), MAX_DEPTH - 1)
        depths.append(depth)
        free_from[depth] = max(free_from[depth], end)
    return depths


def _flat(*columns: Ints) -> list[int]:
    if not len(columns[0]):
        return []
    flat: list[int] = np.stack(columns, axis=1).ravel().tolist()
    return flat
