"""The engine on one GPU with dummy weights, in process: the numbers that engines are compared by, in one table.

    python -m slipstream.profiling.bench_h200 0.6b=FOLDER 8b=FOLDER [--json FILE] [--only step ttft …]

Decode step = (time of 144 outputs - time of 16 outputs) / 128 for a burst of N requests with 128-token prompts. TTFT = one
request, 1 output, median of 7, each after the other; and of 5 after rests, for a card that works all the time is at its power
limit. Set = 256 requests, 100-1024 random prompt ids and outputs, temperature 0.6. Idle = 1 - union
of kernel and copy intervals / wall, over steady decode steps. Arrivals (not in the table, only when asked for) = TTFT of
prompts of 3,500 tokens that come at random: with `--set overlap=false` beside it, what overlap costs a first token.
Everything greedy but the set; ignore_eos throughout. Ready = seconds since the process began. Each shape has a process of its
own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from ..engine.engine import Engine
from ..engine.sampling_params import SamplingParams
from .bench_compare import load
from .results import write_json

STEP_ROWS = (1, 8, 32, 64, 128, 256)
TTFT_TOKENS = (128, 1024, 4096)
REST_S = 0.5
PARTS = ("step", "ttft", "ctx8192", "set", "idle")
MORE_PARTS = (*PARTS, "arrivals")


def _cells(key: str, parts: Sequence[int], must: str, goal: str) -> dict[str, tuple[str, str]]:
    return {f"{key} {part}": pair for part, *pair in zip(parts, must.split(), goal.split(), strict=True)}  # type: ignore[misc]


# What must hold to be ahead of the better peer in every cell, and what the parts and the floors allow.
TARGETS = {
    "0.6b": {
        **_cells("step_ms", STEP_ROWS, "1.3 1.3 1.5 1.8 2.2 3.1", "0.8 0.85 1.1 1.35 1.8 2.8"),
        **_cells("ttft_ms", TTFT_TOKENS, "4.5 10 14", "3 6 12"),
        "ctx8192_ms": ("8.9", "8.2"),
        "set_tok_s": ("26,500", "30,000"),
        "idle_pct": ("8", "3"),
        "ready_s": ("20", "12"),
    },
    "8b": {
        **_cells("step_ms", STEP_ROWS, "4.7 4.8 5.1 5.5 6.5 9.3", "4.3 4.5 4.9 5.3 6.2 9.0"),
        **_cells("ttft_ms", TTFT_TOKENS, "8 25 96", "7 24 92"),
        "ctx8192_ms": ("13.4", "12.6"),
        "set_tok_s": ("11,000", "11,500"),
        "idle_pct": ("2", "1"),
        "ready_s": ("25", "15"),
    },
}


class Bench:
    """One engine and the prompts for it. Prompts never repeat, so the prefix cache helps nobody unasked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._random = random.Random(0)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(1000, 100_000) for _ in range(num_tokens)]

    async def burst_s(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Seconds until all of these have ended."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        await asyncio.gather(*[self.engine.complete(prompt, params) for prompt in prompts])
        return time.perf_counter() - start

    async def step_ms(self, num_rows: int, *, repeats: int = 3) -> float:
        """Decode step in a burst, prefill and ends subtracted."""
        times = []
        for _ in range(repeats):
            short = await self.burst_s([self.prompt(128) for _ in range(num_rows)], 16)
            long = await self.burst_s([self.prompt(128) for _ in range(num_rows)], 144)
            times.append((long - short) / 128 * 1e3)
        return statistics.median(times)

    async def step_at_context_ms(self, num_rows: int, context: int) -> float:
        """Decode step after long prompts of its own for each row; they come out of the prefix cache in both timed runs."""
        prompts = [self.prompt(context) for _ in range(num_rows)]
        await self.burst_s(prompts, 1)
        short = await self.burst_s(prompts, 16)
        long = await self.burst_s(prompts, 144)
        return (long - short) / 128 * 1e3

    async def ttft_ms(self, num_tokens: int, *, repeats: int = 7, rest_s: float = 0.0) -> float:
        """One request alone, one output; the next one after a rest."""
        await self.burst_s([self.prompt(num_tokens)], 1)
        times = []
        for _ in range(repeats):
            await asyncio.sleep(rest_s)
            times.append(await self.burst_s([self.prompt(num_tokens)], 1) * 1e3)
        return statistics.median(times)

    async def set_tok_s(self) -> float:
        """Output tokens a second of 256 ragged requests at once: 141,664 prompt tokens, 150,245 outputs."""
        choose = random.Random(0)
        prompts = [[choose.randrange(10_000) for _ in range(choose.randint(100, 1024))] for _ in range(256)]
        sizes = [choose.randint(100, 1024) for _ in range(256)]
        jobs = [
            self.engine.complete(
                prompt, SamplingParams(max_tokens=num_outputs, temperature=0.6, ignore_eos=True, seed=0)
            )
            for prompt, num_outputs in zip(prompts, sizes, strict=True)
        ]
        start = time.perf_counter()
        await asyncio.gather(*jobs)
        return sum(sizes) / (time.perf_counter() - start)

    async def arrival_ttft_ms(self, *, count: int = 60, load: float = 0.5) -> dict[str, float]:
        """Of prompts of 3,500 tokens and 64 outputs, that come as a Poisson process which keeps prefill busy by `load`."""
        alone_s = await self.ttft_ms(3500) / 1e3
        gaps = random.Random(1)
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.create_task(self._first_token_s(self.prompt(3500))))
            await asyncio.sleep(gaps.expovariate(load / alone_s))
        times = sorted([1e3 * await task for task in tasks])
        return {"mean": statistics.mean(times), "p50": times[count // 2], "p90": times[9 * count // 10]}

    async def _first_token_s(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        first = 0.0
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        async with self.engine.generate(prompt, params) as stream:
            async for _ in stream:
                first = first or time.perf_counter() - start
        return first

    async def idle_pct(self, num_rows: int, *, steps: int = 200) -> dict[str, float]:
        """Share of a steady stretch in which the device does nothing, and the step time with and without the trace."""
        import torch

        params = SamplingParams(max_tokens=2 * steps + 100, temperature=0.0, ignore_eos=True)
        jobs = asyncio.gather(*[self.engine.complete(self.prompt(128), params) for _ in range(num_rows)])
        await self._steps(32)
        untraced_ms = await self._steps(steps // 2) / (steps // 2) * 1e3
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            await self._steps(steps)
        traced = profile.events() or []
        spans = sorted((event.time_range.start, event.time_range.end) for event in traced if _on_device(event))
        await jobs
        if not spans:
            return {"idle_pct": float("nan"), "step_ms": untraced_ms}
        busy, end = 0.0, spans[0][0]
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        wall = end - spans[0][0]
        return {"idle_pct": 100 * (1 - busy / wall), "step_ms": untraced_ms, "traced_step_ms": wall / 1e3 / steps}

    async def _steps(self, count: int) -> float:
        """Seconds that `count` more steps take."""
        start, first = time.perf_counter(), self.engine.num_settled_steps
        while self.engine.num_settled_steps < first + count:  # noqa: ASYNC110  # a turn a look: nothing to be woken by
            await asyncio.sleep(0)
        return time.perf_counter() - start


def _on_device(event: object) -> bool:
    return str(getattr(event, "device_type", "")).endswith("CUDA")


async def measure(name: str, folder: str, parts: Sequence[str], settings: dict[str, object]) -> dict[str, Any]:
    """All asked-for numbers of one shape."""
    engine = Engine(model=folder, load_format="dummy", skip_tokenizer=True, max_model_len=16_384, **settings)
    async with engine:
        results: dict[str, Any] = {"ready_s": _process_age_s()}
        print(f"{name}: ready after {results['ready_s']:.1f} s", flush=True)
        print(engine.limits.memory_table, flush=True)
        bench = Bench(engine)
        await bench.burst_s([bench.prompt(128) for _ in range(8)], 32)
        if "step" in parts:
            steps = {}
            for num_rows in STEP_ROWS:
                steps[str(num_rows)] = await bench.step_ms(num_rows)
                print(f"{name}: step at {num_rows:3} rows {steps[str(num_rows)]:.3f} ms", flush=True)
            results["step_ms"] = steps
        if "ttft" in parts:
            results["ttft_ms"] = {str(tokens): await bench.ttft_ms(tokens) for tokens in TTFT_TOKENS}
            print(f"{name}: TTFT {results['ttft_ms']}", flush=True)
            rested = {str(tokens): await bench.ttft_ms(tokens, repeats=5, rest_s=REST_S) for tokens in TTFT_TOKENS}
            results["ttft_rested_ms"] = rested
            print(f"{name}: TTFT after a rest {rested}", flush=True)
        if "ctx8192" in parts:
            results["ctx8192_ms"] = await bench.step_at_context_ms(32, 8192)
            print(f"{name}: step at 32 rows of context 8192 {results['ctx8192_ms']:.2f} ms", flush=True)
        if "set" in parts:
            results["set_tok_s"] = await bench.set_tok_s()
            print(f"{name}: set {results['set_tok_s']:.0f} tok/s", flush=True)
        if "idle" in parts:
            idle = await bench.idle_pct(8)
            results.update(idle_pct=idle["idle_pct"], idle=idle)
            print(f"{name}: idle {idle}", flush=True)
        if "arrivals" in parts:
            results["arrival_ttft_ms"] = await bench.arrival_ttft_ms()
            print(f"{name}: TTFT of random arrivals {results['arrival_ttft_ms']}", flush=True)
        print(f"{name}: {engine.stats}", flush=True)
    return results


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a number: what was measured, and where this project's floor ("must") and aim ("goal") are for its two shapes."""
    lines = [f"{'':24}{'measured':>10}{'must':>8}{'goal':>8}"]
    for shape, measured in results.items():
        targets = TARGETS.get(shape, {})
        for key, value in measured.items():
            if key in ("idle", "arrival_ttft_ms"):
                continue
            for part, number in value.items() if isinstance(value, dict) else (("", value),):
                must, goal = targets.get(f"{key} {part}".strip(), ("", ""))
                lines.append(f"{f'{shape} {key} {part}':24}{number:10,.2f}{must!s:>8}{goal!s:>8}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_h200", description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", help="NAME=FOLDER, such as 0.6b=models/qwen06b")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--only", nargs="+", choices=MORE_PARTS, default=PARTS)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    options = parser.parse_args(arguments)
    for shape in options.shapes:
        if not all(shape.partition("=")):
            parser.error(f"a shape is NAME=FOLDER, not {shape!r}")
    for setting in options.set:
        if not setting.partition("=")[1]:
            parser.error(f"a setting is NAME=VALUE, not {setting!r}")
    if options.json:  # minutes on the card must not end for want of a folder
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {}
    for setting in options.set:
        key, value = setting.split("=", 1)
        settings[key] = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    results: dict[str, dict[str, Any]] = {}
    for shape in options.shapes:
        name, _, folder = shape.partition("=")
        if len(options.shapes) == 1:
            results[name] = uvloop.run(measure(name, folder, options.only, settings))
        else:
            results |= _apart(shape, options)
    if len(options.shapes) > 1 or not options.quiet:
        print(table(results))
    if options.json:
        write_json(options.json, "h200", results, at_top=True)


def _apart(shape: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One shape in a process of its own: its start is a start, and its device memory is nobody's afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "slipstream.profiling.bench_h200", shape, "--json", str(path), "--quiet"]
        subprocess.run([*command, "--only", *options.only, "--set", *options.set], check=True)
        measured: dict[str, dict[str, Any]] = load(path)["results"]
    return measured


def _process_age_s() -> float:
    """Seconds since this process was started, imports and all. Linux only."""
    after_name = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started_ticks = int(after_name[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
