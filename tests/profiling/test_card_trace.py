"""A trace that torch's profiler wrote of steady decode by CUDA graphs: what the report must find in it, with no marks to help.

The one of a card is `fixtures/decode-h200.torch.json.gz`; profiling/README.md has the command that makes it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from slipstream.profiling.overlap_report import OverlapReport, overlap_report
from slipstream.profiling.read_trace import read_trace
from slipstream.profiling.report_text import report_text
from slipstream.profiling.timeline import LaneKind

CARD = Path(__file__).parent / "fixtures" / "decode-h200.torch.json.gz"
RUNS_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def made_trace(path: Path) -> Path:
    """Nine steps: a graph of 30 kernels on two streams, a graph that draws, a copy; now and then an idle time."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, start: float, length: float, stream: int, **args: Any) -> None:
        on = {"device": 0, "stream": stream, **args} if category != "cuda_runtime" else args
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length, "args": on}
        )

    at = 7_000_000.125
    add("kernel", "tail of a step before", at - 50, 20, 7, correlation=0)
    for step in range(9):
        for number, name in enumerate(("cudaGraphLaunch", "cudaGraphLaunch", "cudaMemcpyAsync")):
            add("cuda_runtime", name, at - 400 + 20 * number, 12, 1, correlation=3 * step + number + 1)
        for kernel in range(30):
            add("kernel", f"k{kernel % 7}", at + 30 * kernel, 29.5, 7 + kernel % 2, correlation=3 * step + 1)
            add("kernel", "beside", at + 30 * kernel + 20, 15, 9, correlation=3 * step + 1)
        add("kernel", "draw", at + 920, 10, 7, correlation=3 * step + 2)
        add("gpu_memcpy", "Memcpy DtoH", at + 931.5, 2, 13, correlation=3 * step + 3)
        add("gpu_user_annotation", "the whole step", at, 1000, 7)
        at += 940 + (60 if step % 4 == 1 else 0)
    document = {"schemaVersion": 1, "deviceProperties": [], "baseTimeNanoseconds": 0, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


@pytest.fixture(params=["made", "card"])
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "made":
        return made_trace(tmp_path / "made.torch.json.gz")
    if not CARD.exists():
        pytest.skip(f"no trace of a card here: {CARD.name} has not been recorded yet")
    return CARD


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def step_launches(events: list[dict[str, Any]]) -> tuple[int, int]:
    """How often the graph with most kernels was launched, and how many kernels it has."""
    launches = {event["args"]["correlation"] for event in events if "GraphLaunch" in event["name"]}
    kernels = Counter(event["args"]["correlation"] for event in events if event.get("cat") == "kernel")
    sizes = Counter(kernels[launch] for launch in launches if kernels[launch])
    most = max(sizes)
    return sizes[most], most


def idle_share(events: list[dict[str, Any]], report: OverlapReport) -> float:
    """1 - union of kernel and copy intervals / wall, over the report's window."""
    spans = sorted(
        (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in events
        if event.get("cat") in RUNS_ON_DEVICE
    )
    busy, reached = 0, report.start_ns
    for start, end in spans:
        end = min(end, report.end_ns)
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (report.end_ns - report.start_ns)


def test_steps_are_found_by_the_launches_of_the_graph_that_has_the_kernels(trace: Path) -> None:
    timeline = read_trace(trace)
    assert not timeline.of_kind(LaneKind.LOOP)
    report = overlap_report(timeline)
    num_launches, num_kernels = step_launches(events_of(trace))
    assert report.steps_are == "graph launches"
    assert num_launches >= 5
    assert num_kernels >= 20
    assert num_launches - 2 <= report.num_steps <= num_launches - 1
    assert report.num_graph_steps == report.num_steps
    assert report.num_graph_launches >= report.num_steps
    assert report.step is not None
    assert report.step.median < 1.5 * report.window_ns / report.num_steps


def test_idle_is_what_no_kernel_and_no_copy_covers(trace: Path) -> None:
    report = overlap_report(read_trace(trace))
    assert report.idle_share == pytest.approx(idle_share(events_of(trace), report), abs=1e-9)
    assert 0 < report.idle_share < 0.5
    assert sum(phase.exposed_ns for phase in report.phases) == report.idle_ns


def test_idle_time_in_which_the_profiler_itself_worked_is_said(trace: Path) -> None:
    report = overlap_report(read_trace(trace))
    assert (report.idle_profiled_ns > 0) == (trace == CARD)
    assert report.idle_profiled_ns < report.idle_ns
    assert ("while the profiler itself worked" in report_text(report)) == (trace == CARD)


def test_each_launch_is_followed_to_the_start_of_its_work(trace: Path) -> None:
    report = overlap_report(read_trace(trace))
    assert report.launch_to_start is not None
    assert report.launch_to_start.count >= report.num_steps
    assert report.launch_to_start.median > 0


def test_a_trace_that_is_kept_is_small(trace: Path) -> None:
    assert trace.stat().st_size < 400_000
