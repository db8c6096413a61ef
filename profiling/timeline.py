"""One model of what happened when, whoever wrote it down: lanes of spans, tied together by correlation ids and steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from ..engine.errors import SlipstreamError
from .intervals import Ints

NO_STEP = -1
NO_CORRELATION = 0


class TraceError(SlipstreamError):
    """A trace cannot be read, or holds nothing to report on. The message names file and reason."""


class LaneKind(StrEnum):
    """What the spans of a lane are."""

    LOOP = "loop"  # phases of the engine's loop, from marks
    STALLS = "stalls"  # moments at which the loop did not turn, named after the code it was in
    HOST = "host"  # a thread's operators, annotations, NVTX ranges
    RUNTIME = "runtime"  # a thread's calls of the device's API
    DEVICE = "device"  # kernels and copies of one stream, or the jobs of a CPU lane
    PROFILER = "profiler"  # what the recording itself cost: it stops whoever launches
    REQUESTS = "requests"  # waiting and being answered


class Span(NamedTuple):
    """One range. Units: nanoseconds, from an origin that a timeline's lanes share."""

    name: str
    start_ns: int
    end_ns: int
    step: int = NO_STEP
    correlation: int = NO_CORRELATION  # a runtime call and what it launched have the same


class Columns(NamedTuple):
    """The spans of one lane or several as columns, by start; of spans that begin together the longer one is first.

    `names` are indices into the timeline's `names`.
    """

    names: Ints
    starts: Ints
    ends: Ints
    steps: Ints
    correlations: Ints


class StepFacts(NamedTuple):
    """What a step computed: rows, tokens put in, tokens drawn."""

    rows: int
    tokens: int
    sampled: int


class Names:
    """Each name once, by number."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            if not isinstance(text, str):  # a file's word for it
                raise TypeError(f"a name is text, not {text!r}")
            number = self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return number

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def __len__(self) -> int:
        return len(self._texts)


class Lane:
    """Spans in any order. Kept as columns: millions of them take 32 bytes each.

    `thread`: lanes of the same thread have the same one.
    """

    def __init__(self, name: str, kind: LaneKind, thread: str, names: Names) -> None:
        self.name = name
        self.kind = kind
        self.thread = thread
        self._table = names
        self._names = array("i")
        self._starts = array("q")
        self._ends = array("q")
        self._steps = array("i")
        self._correlations = array("q")
        self._columns: Columns | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def add(
        self, name: str, start_ns: int, end_ns: int, step: int = NO_STEP, correlation: int = NO_CORRELATION
    ) -> None:
        self._names.append(self._table.number(name))
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        self._steps.append(step)
        self._correlations.append(correlation)

    def spans(self) -> Iterator[Span]:
        """By start."""
        columns = self.columns()
        for number, *rest in zip(*(column.tolist() for column in columns), strict=True):
            yield Span(self._table[number], *rest)

    def columns(self) -> Columns:
        if self._columns is None or len(self._columns.starts) != len(self):
            raw = (self._names, self._starts, self._ends, self._steps, self._correlations)
            self._columns = in_order(Columns(*(np.array(each, np.int64) for each in raw)))
        return self._columns


class Timeline:
    """Everything that one recording holds. `source` says what wrote it; `epoch_ns` is the Unix time of its zero, if known."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.epoch_ns: int | None = None
        self.names = Names()
        self.lanes: list[Lane] = []
        self.facts: dict[int, StepFacts] = {}
        self._by_key: dict[tuple[str, LaneKind, str], Lane] = {}

    def lane(self, name: str, kind: LaneKind, *, thread: str = "") -> Lane:
        """The lane of that name, kind and thread, made if there is none."""
        key = name, kind, thread
        lane = self._by_key.get(key)
        if lane is None:
            lane = self._by_key[key] = Lane(name, kind, thread, self.names)
            self.lanes.append(lane)
        return lane

    def of_kind(self, *kinds: LaneKind) -> list[Lane]:
        return [lane for lane in self.lanes if lane.kind in kinds and len(lane)]

    def columns(self, lanes: list[Lane]) -> Columns:
        """The spans of several lanes together."""
        if len(lanes) == 1:
            return lanes[0].columns()
        if not lanes:
            return Columns(*(np.zeros(0, np.int64) for _ in Columns._fields))
        return self.columns_and_lanes(lanes)[0]

    def columns_and_lanes(self, lanes: list[Lane]) -> tuple[Columns, Ints]:
        """The spans of several lanes together, and for each the position of its lane in `lanes`."""
        each = [lane.columns() for lane in lanes]
        together = Columns(*(np.concatenate(parts) for parts in zip(*each, strict=True)))
        order = _order(together)
        lane_of = np.repeat(np.arange(len(lanes)), [len(columns.starts) for columns in each])
        return Columns(*(column[order] for column in together)), lane_of[order]

    def launching(self) -> dict[str, int]:
        """How many calls of each thread brought work to a device. Recorders number calls that bring none, too."""
        brought = np.unique(self.columns(self.of_kind(LaneKind.DEVICE)).correlations)
        brought = brought[brought != NO_CORRELATION]
        counts: dict[str, int] = {}
        for lane in self.of_kind(LaneKind.RUNTIME):
            count = int(np.isin(lane.columns().correlations, brought).sum())
            if count:
                counts[lane.thread] = counts.get(lane.thread, 0) + count
        return counts

    def absorb(self, other: Timeline, *, offset_ns: int = 0, without: tuple[LaneKind, ...] = ()) -> None:
        """Take over another recording of the same time. `offset_ns` is added to its clock to get this one's."""
        for lane in other.lanes:
            if lane.kind in without:
                continue
            mine = self.lane(lane.name, lane.kind, thread=lane.thread)
            for span in lane.spans():
                mine.add(span.name, span.start_ns + offset_ns, span.end_ns + offset_ns, span.step, span.correlation)
        self.facts.update(other.facts)


def in_order(columns: Columns) -> Columns:
    order = _order(columns)
    return Columns(*(column[order] for column in columns))


def _order(columns: Columns) -> Ints:
    return np.lexsort((-columns.ends, columns.starts))
