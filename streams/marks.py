"""Named time ranges of the step loop, kept in a ring that is allocated beforehand."""

from __future__ import annotations

import importlib
import itertools
import time
from array import array
from typing import Final, NamedTuple, Protocol

SCHEDULE: Final = "schedule"
STAGE: Final = "stage"
LAUNCH: Final = "launch"
SAMPLE: Final = "sample"
AWAIT: Final = "await"
COMMIT: Final = "commit"
DETOKENIZE: Final = "detokenize"
SEND: Final = "send"
PHASES: Final = (SCHEDULE, STAGE, LAUNCH, SAMPLE, AWAIT, COMMIT, DETOKENIZE, SEND)


class Mark(NamedTuple):
    """One finished range. Units: nanoseconds of `time.perf_counter_ns`."""

    name: str
    step: int
    start_ns: int
    end_ns: int


class Marks(Protocol):
    """`token = start(name, step)` … `end(token)`. Ranges may overlap and may span awaits: the call stack does not nest them."""

    def start(self, name: str, step: int) -> int: ...

    def end(self, token: int) -> None: ...

    def records(self) -> list[Mark]:
        """The finished ranges still in the ring, by start."""
        ...


class NoMarks:
    """Marks that are off."""

    __slots__ = ()

    def start(self, name: str, step: int) -> int:
        return 0

    def end(self, token: int) -> None:
        return None

    def records(self) -> list[Mark]:
        return []


class _Nvtx(Protocol):
    def start_range(self, message: str) -> object: ...

    def end_range(self, range_id: object) -> None: ...


class RingMarks:
    """Marks that are on: the last `capacity` ranges.

    `nvtx`: also emit each range to NVTX, if the `nvtx` package is installed (`emits_nvtx` says whether it does).
    """

    def __init__(self, capacity: int = 65536, *, nvtx: bool = False) -> None:
        self._capacity = capacity
        self._counter = itertools.count()
        self._names: list[str] = [""] * capacity
        self._tokens = array("q", [-1]) * capacity
        self._steps = array("q", [0]) * capacity
        self._starts = array("q", [0]) * capacity
        self._ends = array("q", [0]) * capacity
        self._nvtx: _Nvtx | None = _find_nvtx() if nvtx else None
        self._ranges: list[object] = [None] * capacity if self._nvtx is not None else []

    @property
    def emits_nvtx(self) -> bool:
        return self._nvtx is not None

    def start(self, name: str, step: int) -> int:
        token = next(self._counter)
        slot = token % self._capacity
        self._names[slot] = name
        self._tokens[slot] = token
        self._steps[slot] = step
        self._ends[slot] = 0
        if self._nvtx is not None:
            self._ranges[slot] = self._nvtx.start_range(message=name)
        self._starts[slot] = time.perf_counter_ns()
        return token

    def end(self, token: int) -> None:
        now = time.perf_counter_ns()
        slot = token % self._capacity
        if self._tokens[slot] != token:  # the ring went round while this range was open
            return
        self._ends[slot] = now
        if self._nvtx is not None:
            self._nvtx.end_range(self._ranges[slot])

    def records(self) -> list[Mark]:
        finished = [
            Mark(self._names[slot], self._steps[slot], self._starts[slot], self._ends[slot])
            for slot in range(self._capacity)
            if self._ends[slot]
        ]
        return sorted(finished, key=lambda mark: mark.start_ns)


def _find_nvtx() -> _Nvtx | None:
    try:
        module: _Nvtx = importlib.import_module("nvtx")
    except ImportError:
        return None
    return module
