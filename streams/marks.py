"""Named time ranges of the step loop and of its lanes. Off they cost a call; on, the last ones are kept."""

from __future__ import annotations

import importlib
import time
from collections import deque
from typing import Any, Final, NamedTuple, Protocol

# On the loop's thread.
SCHEDULE: Final = "schedule"
STAGE: Final = "stage"
LAUNCH: Final = "launch"
SAMPLE: Final = "sample"
AWAIT: Final = "await"
COMMIT: Final = "commit"
DETOKENIZE: Final = "detokenize"
SEND: Final = "send"
PHASES: Final = (SCHEDULE, STAGE, LAUNCH, SAMPLE, AWAIT, COMMIT, DETOKENIZE, SEND)
# On the lanes.
FORWARD: Final = "forward"
DRAW: Final = "draw"
COPY_OUT: Final = "copy out"
LANE_PHASES: Final = (FORWARD, DRAW, COPY_OUT)

NVTX_DOMAIN: Final = "slipstream"  # ranges of this domain carry the step as their payload


class Mark(NamedTuple):
    """One finished range. Units: nanoseconds of `time.perf_counter_ns`. `rows` and `tokens` where the phase has them."""

    name: str
    step: int
    start_ns: int
    end_ns: int
    rows: int = 0
    tokens: int = 0

    @property
    def is_on_lane(self) -> bool:
        return self.name in LANE_PHASES


class Marks(Protocol):
    """`token = start(name, step)` … `end(token)`. Ranges may overlap and may span awaits: the call stack does not nest them.

    A range is ended by the object that started it. `lane_start` and `lane_end` are called inside a lane's jobs, and time
    what the lane does.
    """

    @property
    def is_on(self) -> bool: ...

    def start(self, name: str, step: int, rows: int = 0, tokens: int = 0) -> object: ...

    def end(self, token: object) -> None: ...

    def lane_start(self, name: str, step: int) -> object: ...

    def lane_end(self, token: object) -> None: ...

    def records(self) -> list[Mark]:
        """The finished ranges that are still kept, by start."""
        ...


class NoMarks:
    """Marks that are off."""

    __slots__ = ()

    @property
    def is_on(self) -> bool:
        return False

    def start(self, name: str, step: int, rows: int = 0, tokens: int = 0) -> object:
        return None

    def end(self, token: object) -> None:
        return None

    def lane_start(self, name: str, step: int) -> object:
        return None

    def lane_end(self, token: object) -> None:
        return None

    def records(self) -> list[Mark]:
        return []


class MarkSwitch:
    """Where everything that marks finds its marks: they are put in and taken out while steps run."""

    __slots__ = ("marks",)

    def __init__(self, marks: Marks | None = None) -> None:
        self.marks: Marks = marks if marks is not None else NoMarks()

    def off(self) -> None:
        self.marks = NoMarks()


class RingMarks:
    """Marks that are on: the last `capacity` ranges, timed by the host's clock. Any thread may start and end them.

    `nvtx`: also emit each range to NVTX, if the `nvtx` package is installed (`emits_nvtx` says whether it does).
    """

    def __init__(self, capacity: int = 65536, *, nvtx: bool = False) -> None:
        # Tuples in a deque: half the cost of columns, and one append is atomic whatever thread makes it.
        self._done: deque[tuple[Any, int]] = deque(maxlen=capacity)
        self._nvtx: _NvtxRanges | None = _NvtxRanges.find() if nvtx else None

    @property
    def is_on(self) -> bool:
        return True

    @property
    def emits_nvtx(self) -> bool:
        return self._nvtx is not None

    def start(self, name: str, step: int, rows: int = 0, tokens: int = 0) -> object:
        range_id = self._nvtx.start(name, step) if self._nvtx is not None else None
        return name, step, rows, tokens, range_id, time.perf_counter_ns()

    def end(self, token: object) -> None:
        self._done.append((token, time.perf_counter_ns()))
        if self._nvtx is not None:
            self._nvtx.end(token[4])  # type: ignore[index]  # what `start` returned

    def lane_start(self, name: str, step: int) -> object:
        return self.start(name, step)

    def lane_end(self, token: object) -> None:
        self.end(token)

    def records(self) -> list[Mark]:
        finished = [
            Mark(name, step, start_ns, end_ns, rows, tokens)
            for (name, step, rows, tokens, _, start_ns), end_ns in list(self._done)
        ]
        return sorted(finished, key=lambda mark: mark.start_ns)


class _NvtxRanges:
    """Ranges of our NVTX domain. Started and ended, never pushed and popped: some span an await."""

    def __init__(self, nvtx: Any) -> None:
        self._domain = nvtx.get_domain(NVTX_DOMAIN)
        # One set of attributes a phase: making them costs more than the range. Only the loop and one lane use each.
        self._attributes = {name: self._domain.get_event_attributes(message=name) for name in PHASES + LANE_PHASES}

    @classmethod
    def find(cls) -> _NvtxRanges | None:
        try:
            ranges = cls(importlib.import_module("nvtx"))
        except ImportError:
            return None
        # Without a tool in the process the package hands out dummies.
        return None if None in ranges._attributes.values() else ranges

    def start(self, name: str, step: int) -> object:
        attributes = self._attributes[name]
        attributes.payload = step
        return self._domain.start_range(attributes)

    def end(self, range_id: object) -> None:
        self._domain.end_range(range_id)
