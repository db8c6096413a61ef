"""What the step loop does when, as the front tells it: histograms for /metrics, the last steps for the page."""

from __future__ import annotations

from array import array
from collections import deque
from time import perf_counter_ns
from typing import Any, NamedTuple

from ..engine.engine import Engine
from .metrics import INTER_TOKEN_S, Histogram

STEP_S = (0.0005, *INTER_TOKEN_S)
HOST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
KEPT_RANGES = 512  # some eighty steps
KEPT_STEPS = 64
KEPT_LAUNCHES = 4096
NO_WAIT_NS = 30_000  # a shorter wait means that the results were there before the loop asked for them


class Range(NamedTuple):
    """One finished phase of the loop. Units: nanoseconds of `perf_counter_ns`."""

    name: str
    step: int
    start_ns: int
    end_ns: int


class StepTimes:
    """Marks that are always on while nobody records others: a few hundred nanoseconds a phase, six phases a step.

    A step's time runs from the end of the one before (or its own launch, if that is later) to the end of its commit.
    Its host time is that without the wait for its results. `exposed_s` is an upper bound of the host time that the
    device waited for: all of it where the results were there before the loop asked, none where it had to wait, since
    the step after was in flight by then. Steps launched with nothing in flight count in `num_alone`.
    """

    def __init__(self) -> None:
        self.step_s = Histogram(STEP_S)
        self.host_s = Histogram(HOST_S)
        self.exposed_s = Histogram(HOST_S)
        self.inter_token_s = Histogram(INTER_TOKEN_S)  # a token's is the time of the step that brought it
        self.phase_s: dict[str, float] = {}
        self.num_alone = 0
        self.num_late = 0  # steps whose results were there before the loop asked for them
        self.waited_s = 0.0
        self.last_step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self.last_host_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self._ranges: deque[Range] = deque(maxlen=KEPT_RANGES)
        self._launched: dict[int, int] = {}  # when, by the steps in flight
        self._past_steps = array("q", [-1]) * KEPT_LAUNCHES
        self._past_launches_ns = array("q", [0]) * KEPT_LAUNCHES
        self._wait_ns = 0
        self._settled_ns = 0

    def attach(self, engine: Engine) -> None:
        """Record `engine` from now on, unless somebody profiles it: then from the first call after that."""
        if engine.marks.marks is not self and not engine.marks.marks.is_on:
            self._launched.clear()
            engine.marks.marks = self

    def ranges(self) -> list[Range]:
        """The last finished ranges, in the order of their ends."""
        return list(self._ranges)

    def launched_at(self, step: int) -> float | None:
        """When a step was launched, on `perf_counter`; None if that was long ago or not recorded."""
        slot = step % KEPT_LAUNCHES
        return self._past_launches_ns[slot] * 1e-9 if self._past_steps[slot] == step >= 0 else None

    # What the step loop calls.

    @property
    def is_on(self) -> bool:
        return False  # the lanes are not timed: that costs events on the device

    def start(self, name: str, step: int, rows: int = 0, tokens: int = 0) -> object:
        now = perf_counter_ns()
        if name == "launch":
            if not self._launched:
                self.num_alone += 1
            self._launched[step] = now
            slot = step % KEPT_LAUNCHES
            self._past_steps[slot], self._past_launches_ns[slot] = step, now
        return name, step, tokens, now

    def end(self, token: Any) -> None:
        now = perf_counter_ns()
        name, step, tokens, begun = token
        self._ranges.append(Range(name, step, begun, now))
        self.phase_s[name] = self.phase_s.get(name, 0.0) + (now - begun) * 1e-9
        if name == "await":
            self._wait_ns = now - begun
        elif name == "commit":
            self._settled(step, tokens, now)

    def lane_start(self, name: str, step: int) -> object:
        return None

    def lane_end(self, token: object) -> None:
        return None

    def records(self) -> list[Any]:
        return []

    def _settled(self, step: int, num_tokens: int, now: int) -> None:
        launched = self._launched.pop(step, None)
        begin, self._settled_ns = self._settled_ns, now
        if launched is None:
            return  # it was launched before these marks were on
        step_ns = now - max(begin, launched)
        host_ns = max(0, step_ns - self._wait_ns)
        self.step_s.observe(step_ns * 1e-9)
        self.host_s.observe(host_ns * 1e-9)
        is_late = self._wait_ns < NO_WAIT_NS
        self.num_late += is_late
        self.waited_s += self._wait_ns * 1e-9
        self.exposed_s.observe(host_ns * 1e-9 if is_late else 0.0)
        self.inter_token_s.observe(step_ns * 1e-9, num_tokens)
        self.last_step_s.append(step_ns * 1e-9)
        self.last_host_s.append(host_ns * 1e-9)
