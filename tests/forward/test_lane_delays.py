"""Delays on the lane: what only luck puts in order shows when the lane is late (law 10, and case O10 of overlap faults)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.forward import device_build
from slipstream.streams.host_lane import HostLane


@pytest.mark.parametrize("seed", range(3))
async def test_o10_ids_reach_the_next_step_by_dependency_however_late_the_lane_is(
    folder: Path, greedy: Callable[[list[int], int], list[int]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """16 greedy requests at depth 1, each lane job held back by a random time: nothing doubled, nothing skipped."""
    draw = random.Random(seed)
    num_delays = 0

    def delay() -> None:
        nonlocal num_delays
        num_delays += 1
        time.sleep(draw.choice((0.0, 0.0, 0.0005, 0.002)))

    monkeypatch.setattr(device_build, "HostLane", lambda name: HostLane(name, delay=delay))
    prompts = [[3 + number, 40 + number, 7] * (1 + number % 4) for number in range(16)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    settings = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_total_tokens": 2048, "page_size": 4}
    async with Engine(model=str(folder), skip_tokenizer=True, overlap=True, **settings) as engine:
        answers = await asyncio.gather(*[engine.complete(prompt, params) for prompt in prompts])
    assert num_delays > 30
    assert [list(answer.token_ids) for answer in answers] == [greedy(prompt, 12) for prompt in prompts]
