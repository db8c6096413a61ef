"""Moments at which the loop's thread did not come back to its turn, and what held it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..streams.marks import AWAIT
from .timeline import NO_STEP, Columns, LaneKind, Timeline

# Calls that stop their thread until the device has caught up.
BLOCKING = re.compile(r"Synchronize|^(cuda|hip)(Memcpy|Memset|Malloc|Free|HostAlloc)(?!.*Async)|^cuMem(Alloc|Free)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The loop was held for [start_ns, end_ns) by `name`; `seen` is the code that a watching thread saw it in."""

    start_ns: int
    end_ns: int
    name: str
    step: int
    seen: tuple[str, ...] = ()


def find_stalls(timeline: Timeline, *, limit_ns: int, start_ns: int, end_ns: int) -> tuple[Stall, ...]:
    """Stalls of at least `limit_ns`, the longest first.

    A marked loop: phases (all but the await) and whatever the watch saw outside them. Otherwise: calls that stop the
    thread for the device, on any thread that launches.
    """
    loop = timeline.columns(timeline.of_kind(LaneKind.LOOP))
    watched = timeline.columns(timeline.of_kind(LaneKind.STALLS))
    if len(loop.starts) or len(watched.starts):
        found = _phases(timeline, loop, watched, limit_ns) + _outside_phases(timeline, loop, watched, limit_ns)
    else:
        found = _blocking_calls(timeline, limit_ns)
    inside = [stall for stall in found if stall.start_ns < end_ns and stall.end_ns > start_ns]
    return tuple(sorted(inside, key=lambda stall: stall.start_ns - stall.end_ns))


def _phases(timeline: Timeline, loop: Columns, watched: Columns, limit_ns: int) -> list[Stall]:
    waiting = timeline.names.number(AWAIT)
    found: list[Stall] = []
    outer_end = 0
    for name, start, end, step, _ in zip(*(column.tolist() for column in loop), strict=True):
        if name == waiting or start < outer_end:  # an inner range is part of the outer one's stall
            continue
        outer_end = end
        if end - start >= limit_ns:
            seen = _seen(timeline, watched, start, end)
            found.append(Stall(start_ns=start, end_ns=end, name=timeline.names[name], step=step, seen=seen))
    return found


def _outside_phases(timeline: Timeline, loop: Columns, watched: Columns, limit_ns: int) -> list[Stall]:
    """What the watch saw while the engine awaited or did nothing: other tasks of the same loop."""
    waiting = timeline.names.number(AWAIT)
    found = []
    for name, start, end, _, _ in zip(*(column.tolist() for column in watched), strict=True):
        middle = (start + end) // 2
        in_phase = (loop.names != waiting) & (loop.starts <= middle) & (loop.ends > middle)
        if end - start >= limit_ns and not in_phase.any():
            seen = (timeline.names[name],)
            found.append(Stall(start_ns=start, end_ns=end, name="other tasks of the loop", step=NO_STEP, seen=seen))
    return found


def _seen(timeline: Timeline, watched: Columns, start: int, end: int) -> tuple[str, ...]:
    keep = (watched.starts < end) & (watched.ends > start)
    return tuple(dict.fromkeys(timeline.names[number] for number in watched.names[keep].tolist()))


def _blocking_calls(timeline: Timeline, limit_ns: int) -> list[Stall]:
    names = timeline.names
    blocking = {number for number in range(len(names)) if BLOCKING.search(names[number])}
    launching = timeline.launching()  # a thread that only waits for the device is there to be stopped
    found = []
    for lane in timeline.of_kind(LaneKind.RUNTIME):
        if lane.thread not in launching:
            continue
        columns = lane.columns()
        long = columns.ends - columns.starts >= limit_ns
        for name, start, end, step, _ in zip(*(column[long].tolist() for column in columns), strict=True):
            if name in blocking:
                found.append(Stall(start_ns=start, end_ns=end, name=names[name], step=step, seen=(lane.thread,)))
    return found
