"""Marks on the card: the lanes' ranges are the device's own, laid over the host's clock."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import Engine, SamplingParams
from slipstream.profiling.overlap_report import overlap_report
from slipstream.profiling.recorder import Recorder
from slipstream.profiling.timeline import LaneKind
from slipstream.streams import marks
from slipstream.streams.cuda_marks import CudaMarks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SLACK_NS = 50_000  # between the two clocks, over a second
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def settings(qwen3_folder: Callable[..., Path]) -> dict[str, Any]:
    return {
        "model": str(qwen3_folder()), "load_format": "dummy", "skip_tokenizer": True, "max_model_len": 2048,
        "max_total_tokens": 16_384, "max_running_requests": 8,
    }  # fmt: skip


def test_what_a_lane_did_lies_between_the_launch_and_the_commit_of_its_step(settings: dict[str, Any]) -> None:
    async def run() -> list[marks.Mark]:
        async with Engine(**settings) as engine:
            await engine.complete([5] * 30, LONG)
            engine.marks.marks = ring = CudaMarks(torch.device("cuda", 0))
            await asyncio.gather(*[engine.complete([7 + at] * 200, LONG) for at in range(3)])
            engine.marks.off()
            torch.cuda.synchronize()
            return ring.records()

    by_step: dict[int, dict[str, marks.Mark]] = defaultdict(dict)
    for mark in asyncio.run(run()):
        by_step[mark.step][mark.name] = mark
    whole = [step for step in by_step.values() if {*marks.LANE_PHASES, marks.LAUNCH, marks.COMMIT} <= step.keys()]
    assert len(whole) >= 40
    for step in whole:
        forward, draw, copy = (step[name] for name in marks.LANE_PHASES)
        assert step[marks.LAUNCH].start_ns - SLACK_NS < forward.start_ns < forward.end_ns
        assert forward.end_ns - SLACK_NS < draw.start_ns < draw.end_ns
        assert draw.end_ns - SLACK_NS < copy.start_ns <= copy.end_ns < step[marks.COMMIT].start_ns + SLACK_NS
    alone = sum(step[marks.FORWARD].end_ns - step[marks.FORWARD].start_ns for step in whole)
    span = max(step[marks.FORWARD].end_ns for step in whole) - min(step[marks.FORWARD].start_ns for step in whole)
    assert alone <= span + SLACK_NS, "one forward at a time"


@pytest.mark.parametrize("kernels", [False, True], ids=["by events", "kernel by kernel"])
def test_a_recording_says_how_busy_the_device_was(settings: dict[str, Any], kernels: bool) -> None:
    async def run() -> Any:
        async with Engine(**settings) as engine:
            await engine.complete([5] * 30, LONG)
            recorder = Recorder(engine, kernels=kernels)
            recorder.start(num_steps=30)
            await engine.complete([9] * 50, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
            return await recorder.collect()

    timeline = asyncio.run(run())
    assert timeline.of_kind(LaneKind.DEVICE)
    names = {span.name for lane in timeline.of_kind(LaneKind.DEVICE) for span in lane.spans()}
    assert (names <= set(marks.LANE_PHASES)) is not kernels
    report = overlap_report(timeline)
    assert report.num_steps >= 20
    assert 0 < report.busy_ns <= report.window_ns
    assert report.busy_ns + report.idle_ns == report.window_ns
