"""The engine against `transformers` generate on the same machine: same weights, dtype and threads, rounds interleaved.

    python -m slipstream.profiling.bench_engine [--model NAME] [--dtype float32] [--threads 1] [--rounds 3] [--json FILE]

Four workloads: one request; padded batches of 8 and of 32 equal prompts; 64 requests of ragged prompts (16-256 tokens) and
outputs (8-128) against batches of 8 in order of arrival, each as long as its longest. Greedy, no end of text, ids in and out.
Printed are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..engine.engine import Engine
from ..engine.loader.model_source import resolve_model
from ..engine.sampling_params import SamplingParams
from .results import write_json

VOCAB = 40_000  # ids below it are ordinary text in every model this is run on


class Job(NamedTuple):
    """One request: prompt ids, and how many ids to draw."""

    prompt: list[int]
    num_outputs: int


class Workload(NamedTuple):
    """Jobs, and how many of them transformers takes at a time."""

    name: str
    jobs: list[Job]
    batch: int


def workloads(seed: int) -> list[Workload]:
    """The four workloads, with fresh prompts for each seed."""
    choose = random.Random(seed)

    def prompt(num_tokens: int) -> list[int]:
        return [choose.randrange(100, VOCAB) for _ in range(num_tokens)]

    ragged = [Job(prompt(choose.randint(16, 256)), choose.randint(8, 128)) for _ in range(64)]
    return [
        Workload("1 request", [Job(prompt(64), 64)], 1),
        Workload("8 equal", [Job(prompt(64), 48) for _ in range(8)], 8),
        Workload("32 equal", [Job(prompt(64), 48) for _ in range(32)], 32),
        Workload("64 ragged", ragged, 8),
    ]


def transformers_runner(folder: Path, dtype: str, threads: int) -> Callable[[Workload], float]:
    """Seconds that transformers takes for a workload."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def run(workload: Workload) -> float:
        start = time.perf_counter()
        for first in range(0, len(workload.jobs), workload.batch):
            jobs = workload.jobs[first : first + workload.batch]
            longest = max(len(job.prompt) for job in jobs)
            ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, job in enumerate(jobs):
                ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
                mask[row, longest - len(job.prompt) :] = 1
            num_outputs = max(job.num_outputs for job in jobs)
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=num_outputs,
                    min_new_tokens=num_outputs,
                    do_sample=False,
                    use_cache=True,
                )
        return time.perf_counter() - start

    return run


async def engine_s(engine: Engine, workload: Workload) -> float:
    """Seconds that the engine takes, all jobs at once."""
    start = time.perf_counter()
    await asyncio.gather(
        *[
            engine.complete(job.prompt, SamplingParams(max_tokens=job.num_outputs, temperature=0.0, ignore_eos=True))
            for job in workload.jobs
        ]
    )
    return time.perf_counter() - start


async def compare(folder: Path, dtype: str, threads: int, rounds: int) -> dict[str, object]:
    """Run both in turns and print the ratios."""
    reference = await asyncio.to_thread(transformers_runner, folder, dtype, threads)
    results: dict[str, object] = {}
    settings = {"dtype": dtype, "cpu_threads": threads, "skip_tokenizer": True, "max_model_len": 1024}
    async with Engine(model=str(folder), max_running_requests=64, **settings) as engine:
        await engine_s(engine, workloads(999)[0])
        ratios: dict[str, list[tuple[float, float]]] = {}
        for round_number in range(rounds):
            for workload in workloads(round_number):
                ours = await engine_s(engine, workload)
                theirs = await asyncio.to_thread(reference, workload)
                ratios.setdefault(workload.name, []).append((ours, theirs))
    print(f"{'workload':12}{'slipstream s':>14}{'transformers s':>16}{'ratio':>8}")
    for name, pairs in ratios.items():
        ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        results[name] = {"slipstream_s": ours, "transformers_s": theirs, "ratio": ratio}
        print(f"{name:12}{ours:14.2f}{theirs:16.2f}{ratio:8.2f}")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    folder = resolve_model(options.model).path
    results = asyncio.run(compare(folder, options.dtype, options.threads, options.rounds))
    if options.json:
        write_json(options.json, "engine", {"dtype": options.dtype, "threads": options.threads, **results})


if __name__ == "__main__":
    main()
