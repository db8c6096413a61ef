"""Lifetimes that only luck protects: the whole engine with delays on its lanes, with another allocator, and for long."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream import Engine, SamplingParams
from slipstream.streams.cuda_lane import CudaLane

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

# Prompts of many lengths in a pool that is too small for all of them: chunks, mixed steps, retractions, graphs and eager steps.
RUN = """
import asyncio, json, sys
from slipstream import Engine, SamplingParams

async def run(folder):
    settings = dict(model=folder, load_format="dummy", skip_tokenizer=True, row_invariant=True, max_model_len=400,
                    max_total_tokens=400, max_running_requests=12, chunked_prefill_size=64)
    async with Engine(**settings) as engine:
        jobs = []
        for at in range(12):
            params = SamplingParams(max_tokens=150, temperature=0.8 * (at % 2), top_p=0.9 + 0.1 * (at % 3 == 0),
                                    seed=at, repetition_penalty=1.0 + 0.2 * (at % 4 == 3))
            jobs.append(engine.complete([(at * 31 + k * 7) % 5003 for k in range(1 + 4 * at)], params))
        answers = await asyncio.gather(*jobs)
        return [list(answer.token_ids) for answer in answers], engine.stats.num_retractions
"""


@pytest.fixture(scope="module")
def folder(qwen3_folder: Callable[..., Path]) -> Path:
    return qwen3_folder(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )


def drawn(folder: Path) -> tuple[list[list[int]], int]:
    scope: dict[str, Callable[[str], object]] = {}
    exec(RUN, scope)
    return asyncio.run(scope["run"](str(folder)))  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", ["compute", "copy", "compute copy"])
def test_delays_on_the_lanes_change_no_token(slow: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, num_retractions = drawn(folder)
    assert num_retractions > 0
    submit, chance = CudaLane.submit, random.Random(0)

    def submit_late(lane: CudaLane, fn: Callable[[], None]) -> None:
        def late() -> None:
            if lane.name in slow:
                torch.cuda._sleep(chance.choice((0, 200_000, 1_000_000)))  # cycles of about half a nanosecond
            fn()

        submit(lane, late)

    monkeypatch.setattr(CudaLane, "submit", submit_late)
    assert drawn(folder)[0] == expected


def test_an_allocator_that_moves_its_ends_changes_no_token(folder: Path) -> None:
    script = f"{RUN}\nprint(json.dumps(asyncio.run(run(sys.argv[1]))[0]))"
    outputs = []
    for value in ("expandable_segments:False", "expandable_segments:True"):
        run = subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            env={**os.environ, "PYTORCH_ALLOC_CONF": value, "PYTORCH_CUDA_ALLOC_CONF": value},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        outputs.append(json.loads(run.stdout.splitlines()[-1]))
    assert outputs[0] == outputs[1]


@pytest.mark.usefixtures("device_alone")
def test_fifty_thousand_steps_grow_nothing(folder: Path) -> None:
    import psutil

    async def wave(engine: Engine) -> None:
        params = SamplingParams(max_tokens=2000, temperature=1.0, ignore_eos=True)
        await asyncio.gather(*[engine.complete([at + 1] * (5 + at), params) for at in range(4)])

    async def run() -> tuple[int, int, int]:
        settings = {"max_model_len": 2048, "max_total_tokens": 16_384, "max_running_requests": 8}
        async with Engine(
            model=str(folder), load_format="dummy", skip_tokenizer=True, prefix_cache=False, **settings
        ) as engine:
            for _ in range(2):
                await wave(engine)
            gc.collect()
            steps, free, rss = (
                engine.num_settled_steps,
                torch.cuda.mem_get_info()[0],
                psutil.Process().memory_info().rss,
            )
            while engine.num_settled_steps < steps + 50_000:
                await wave(engine)
            gc.collect()
            grown = free - torch.cuda.mem_get_info()[0], psutil.Process().memory_info().rss - rss
            return engine.num_settled_steps - steps, *grown

    num_steps, device_bytes, host_bytes = asyncio.run(run())
    assert num_steps >= 50_000
    assert device_bytes <= 0
    assert host_bytes <= 8 << 20
