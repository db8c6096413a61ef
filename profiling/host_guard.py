"""Fails if the host's part of a step, or the marks in it, have become slower, by the ratio to a calibration loop on the same
machine.

    python -m slipstream.profiling.host_guard [--write]

Wall times say nothing on a machine that others share. The calibration does what the scheduler does (attributes, lists,
dictionaries, small calls), both are measured in turns, and of all rounds the least time of each counts: noise only ever
adds. `--write` makes the baseline from this machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..streams.marks import PHASES, RingMarks
from .bench_host import host_step_us
from .results import write_json

BASELINE: Final = Path(__file__).parent / "baselines" / "host.json"
ROWS: Final = (1, 64, 256)
ROUNDS: Final = 7
MAX_GROWTH: Final = 1.5
MARKED_STEPS: Final = 2000


class _Cell:
    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []

    def take(self, item: int) -> int:
        self.items.append(item)
        self.count += 1
        return self.count


def calibration_us() -> float:
    """Microseconds of a fixed amount of ordinary Python: the least of some runs."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter_ns()
        cells = {number: _Cell() for number in range(256)}
        for turn in range(20):
            for cell in cells.values():
                cell.take(turn)
            tuple(len(cell.items) for cell in cells.values())
        best = min(best, (time.perf_counter_ns() - start) / 1e3)
    return best


def marks_us() -> float:
    """Microseconds of a step's marks that are on: the mean of many steps, in a loop that does nothing else."""
    marks = RingMarks()
    start = time.perf_counter_ns()
    for step in range(MARKED_STEPS):
        for phase in PHASES:
            marks.end(marks.start(phase, step))
    return (time.perf_counter_ns() - start) / 1e3 / MARKED_STEPS


def ratios() -> dict[str, float]:
    """Over calibration: host time of a step, by number of rows, and of a step's marks; of each the least over the rounds."""
    calibration = marks = float("inf")
    steps = dict.fromkeys(ROWS, float("inf"))
    for _ in range(ROUNDS):
        for rows in ROWS:
            calibration = min(calibration, calibration_us())
            steps[rows] = min(steps[rows], host_step_us(rows, None)["total"])
            marks = min(marks, marks_us())
    return {**{_name(rows): step / calibration for rows, step in steps.items()}, "marks of a step": marks / calibration}


def _name(rows: int) -> str:
    return f"step of {rows} rows"


def judge(measured: dict[str, float], baseline: dict[str, float], *, max_growth: float = MAX_GROWTH) -> list[str]:
    """A line for each part that has become slower by more than `max_growth`."""
    return [
        f"{part}: {measured[part]:.4f} of the calibration, {measured[part] / known:.2f} times the baseline of {known:.4f}"
        for part, known in baseline.items()
        if measured[part] > max_growth * known
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this guard. Exits with 1 if the host has become slower."""
    parser = argparse.ArgumentParser(prog="host_guard", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="make the baseline from this machine")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    options = parser.parse_args(arguments)
    measured = ratios()
    if options.write:
        write_json(options.baseline, "host guard", {"ratio": measured})
    baseline = json.loads(options.baseline.read_text())["results"]["ratio"]
    for part, ratio in measured.items():
        print(f"{part:>16}: {ratio:.4f} of the calibration loop, baseline {baseline[part]:.4f}")
    slower = judge(measured, baseline)
    if slower:
        raise SystemExit("the host has become slower:\n  " + "\n  ".join(slower))


if __name__ == "__main__":
    main()
