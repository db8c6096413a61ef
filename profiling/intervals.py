"""Arithmetic of time intervals, exact in integer nanoseconds: unions, gaps, shares, and who is innermost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint, not empty, ascending: [starts[i], ends[i])."""

    starts: Ints
    ends: Ints

    @property
    def total(self) -> int:
        return int((self.ends - self.starts).sum())

    def __len__(self) -> int:
        return len(self.starts)

    def gaps(self, start: int, end: int) -> Intervals:
        """What of [start, end) these leave free."""
        starts = np.concatenate(([start], np.clip(self.ends, start, end)))
        ends = np.concatenate((np.clip(self.starts, start, end), [end]))
        keep = ends > starts
        return Intervals(starts[keep], ends[keep])

    def subset(self, keep: npt.NDArray[np.bool_]) -> Intervals:
        return Intervals(self.starts[keep], self.ends[keep])

    def covered_until(self, times: Ints) -> Ints:
        """For each time, how much of everything before it these cover."""
        if not len(self):
            return np.zeros(len(times), np.int64)
        before = np.concatenate(([0], np.cumsum(self.ends - self.starts)))
        index = np.searchsorted(self.starts, times, side="right")
        last = np.maximum(index - 1, 0)
        beyond = np.where(index > 0, np.maximum(self.ends[last] - times, 0), 0)
        return before[index] - beyond

    def covered(self, starts: Ints, ends: Ints) -> Ints:
        """How much of each [starts[i], ends[i]) these cover."""
        return self.covered_until(ends) - self.covered_until(starts)


class Segments(NamedTuple):
    """Pieces of time, ascending, each with the index of the span that is innermost in it."""

    starts: Ints
    ends: Ints
    spans: Ints


def union(starts: Ints, ends: Ints) -> Intervals:
    """The time in which at least one of these runs. Any order; empty ones count for nothing."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return Intervals(starts, ends)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    begins = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(starts) - 1]))
    return Intervals(starts[begins], ends[last])


def innermost(starts: Ints, ends: Ints) -> Segments:
    """Who has each moment: of the spans that run then, the one that began last; of several, the last one given.

    `starts` ascend, and of spans that begin together the longer one comes first: then nested spans give the innermost.
    """
    if len(starts) and not (starts[1:] < ends[:-1]).any():
        keep = np.flatnonzero(ends > starts)
        return Segments(starts[keep], ends[keep], keep)
    found_starts: list[int] = []
    found_ends: list[int] = []
    found_spans: list[int] = []
    open_spans: list[int] = []
    stops = ends.tolist()
    now = 0

    def emit(until: int, span: int) -> None:
        found_starts.append(now)
        found_ends.append(until)
        found_spans.append(span)

    for index, start in enumerate(starts.tolist()):
        while open_spans:
            span = open_spans[-1]
            stop = stops[span]
            if stop > start:
                if start > now:
                    emit(start, span)
                break
            if stop > now:
                emit(stop, span)
                now = stop
            open_spans.pop()
        now = start
        open_spans.append(index)
    while open_spans:
        span = open_spans.pop()
        if stops[span] > now:
            emit(stops[span], span)
            now = stops[span]
    as_ints = [np.array(column, np.int64) for column in (found_starts, found_ends, found_spans)]
    return Segments(*as_ints)


def least_per_key(keys: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Ascending distinct keys, and the smallest value of each."""
    order = np.lexsort((values, keys))
    keys, values = keys[order], values[order]
    first = np.concatenate(([True], keys[1:] != keys[:-1])) if len(keys) else np.zeros(0, bool)
    return keys[first], values[first]


def look_up(keys: Ints, values: Ints, wanted: Ints, *, missing: int) -> Ints:
    """The value of each wanted key; `keys` ascend and are distinct."""
    if not len(keys):
        return np.full(len(wanted), missing, np.int64)
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], missing)
