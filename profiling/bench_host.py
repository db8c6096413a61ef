"""What the host pays for a step, without a device: plan, commit, deliver, wake, and how well they hide behind a lane.

Costs are CPU time of the loop's thread, so that what else the machine does counts little; the overlapped steps are wall time.

python -m slipstream.profiling.bench_host [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import uvloop

from ..engine.config import SchedulePolicy
from ..engine.engine import Engine
from ..engine.outbox import Outbox
from ..engine.outputs import End
from ..engine.request import Request
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler.schedule_batch import RowSampling, ScheduleBatch
from ..engine.scheduler.scheduler import Scheduler
from ..engine.scripted_worker import Script, ScriptedWorker
from ..engine.step_loop import deliver
from ..engine.text.text_stream import TextStream
from ..engine.text.tokenization import TextTokenizer
from ..engine.worker import StepOutcome, WorkerLimits
from .results import write_json

VOCAB = 32_000
PROMPT_TOKENS = 64
STEPS = 400
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class NoSink:
    """Takes everything and keeps nothing: what remains is the cost of delivering."""

    def push(self, token_ids: Sequence[int], text: str, *more: object) -> None:
        pass

    def end(self, end: End) -> None:
        pass


def host_step_us(num_rows: int, tokenizer: TextTokenizer | None, *, page_size: int = 16) -> dict[str, float]:
    """Median microseconds of plan, commit and deliver for a steady decode of `num_rows`, one step in flight."""
    limits = WorkerLimits(
        num_pages=num_rows * (PROMPT_TOKENS + STEPS + 64) // page_size + num_rows,
        page_size=page_size,
        num_rows=num_rows,
        max_model_len=PROMPT_TOKENS + STEPS + 64,
        vocab_size=VOCAB,
    )
    scheduler = Scheduler(
        limits,
        chunked_prefill_size=1 << 20,
        max_prefill_tokens=1 << 20,
        max_queued_requests=1 << 20,
        prefix_cache=True,
    )
    vocabulary = tokenizer.vocab_size if tokenizer is not None else VOCAB
    for number in range(num_rows):
        scheduler.add(_request(number, tokenizer, limits.max_model_len))
    plans, commits, delivers = [], [], []
    in_flight: ScheduleBatch | None = None
    for step in range(STEPS):
        start = time.thread_time_ns()
        plan = scheduler.plan(in_flight)
        planned = time.thread_time_ns()
        assert isinstance(plan, ScheduleBatch)
        if in_flight is not None:
            ids = tuple((step * 7919 + index * 104729) % vocabulary for index in range(num_rows))
            scheduler.sample_inputs(plan)
            before = time.thread_time_ns()
            updates = scheduler.commit(in_flight, StepOutcome(token_ids=ids))
            committed = time.thread_time_ns()
            deliver(updates)
            delivered = time.thread_time_ns()
            if step > STEPS // 4:
                plans.append(planned - start)
                commits.append(committed - before)
                delivers.append(delivered - committed)
        in_flight = plan
    parts = {"plan": plans, "commit": commits, "deliver": delivers}
    result = {name: statistics.median(times) / 1e3 for name, times in parts.items()}
    result["total"] = sum(result.values())
    return result


def plan_us(policy: SchedulePolicy, *, num_running: int, num_waiting: int, is_memory_full: bool) -> float:
    """Median microseconds of plan with many waiting behind a full engine: full of rows, or, with rows to spare, of pages."""
    page_size, max_total_tokens = 16, PROMPT_TOKENS + STEPS + 96
    pages_each = max_total_tokens // page_size
    num_pages = (num_running + 1) * pages_each - 1  # one page short of another one
    limits = WorkerLimits(
        num_pages=num_pages if is_memory_full else 2 * num_pages,
        page_size=page_size,
        num_rows=2 * num_running if is_memory_full else num_running,
        max_model_len=max_total_tokens,
        vocab_size=VOCAB,
    )
    scheduler = Scheduler(
        limits,
        chunked_prefill_size=1 << 20,
        max_prefill_tokens=1 << 20,
        max_queued_requests=1 << 20,
        prefix_cache=True,
        schedule_policy=policy,
    )
    for number in range(num_running):
        scheduler.add(_request(number, None, max_total_tokens))
    in_flight: ScheduleBatch | None = None
    for number in range(num_running, num_running + num_waiting):
        scheduler.add(_request(number, None, max_total_tokens))
    times = []
    for _ in range(STEPS // 2):
        start = time.perf_counter_ns()
        plan = scheduler.plan(in_flight)
        times.append(time.perf_counter_ns() - start)
        assert isinstance(plan, ScheduleBatch)
        if in_flight is not None:
            scheduler.commit(in_flight, StepOutcome(token_ids=(1,) * sum(in_flight.samples)))
        in_flight = plan
    assert scheduler.stats.num_running == num_running
    return statistics.median(times) / 1e3


def _request(number: int, tokenizer: TextTokenizer | None, max_total_tokens: int) -> Request:
    from ..engine.text.detokenizer import Detokenizer

    text = None if tokenizer is None else TextStream(Detokenizer(tokenizer), ("\n\nUser:", "###"))
    return Request(
        request_id=f"r{number}",
        prompt_ids=array("i", [number % VOCAB] * PROMPT_TOKENS),
        params=SamplingParams(ignore_eos=True),
        sampling=GREEDY,
        stop_ids=frozenset({1 << 30}),
        max_total_tokens=max_total_tokens,
        sink=NoSink(),
        text=text,
    )


async def wake_us(num_consumers: int) -> float:
    """Median microseconds of the loop's thread from the first push to the last of `num_consumers` tasks having its delta."""
    outboxes = [Outbox() for _ in range(num_consumers)]
    got = 0
    all_got = asyncio.Event()

    async def consume(outbox: Outbox) -> None:
        nonlocal got
        while True:
            await outbox.take()
            got += 1
            if got == num_consumers:
                all_got.set()

    times = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(consume(outbox)) for outbox in outboxes]
        await asyncio.sleep(0)
        for step in range(200):
            got = 0
            all_got.clear()
            start = time.thread_time_ns()
            for outbox in outboxes:
                outbox.push((step,), "")
            await all_got.wait()
            times.append(time.thread_time_ns() - start)
        for task in tasks:
            task.cancel()
    return statistics.median(times) / 1e3


async def overlapped_step_ms(*, overlap: bool, lane_s: float = 0.005, host_s: float = 0.002) -> float:
    """Milliseconds a step with a lane of `lane_s` and `host_s` of host work in each launch."""
    limits = WorkerLimits(num_pages=4096, page_size=16, num_rows=8, max_model_len=4096, vocab_size=VOCAB)
    script = Script(step_time_s=lane_s, launch_cost_s=host_s, verifies=False)
    async with Engine.on(ScriptedWorker(limits, script), overlap=overlap) as engine:
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=220))
        times = [time.perf_counter() async for _ in stream]
    gaps = [after - before for before, after in itertools.pairwise(times[20:])]
    return statistics.mean(gaps) * 1e3


def run(tokenizer: TextTokenizer | None) -> dict[str, object]:
    """Measure everything, print the tables, return the numbers."""
    results: dict[str, object] = {}
    print(f"{'host step, us':24}{'plan':>9}{'commit':>9}{'deliver':>9}{'total':>9}")
    for label, text in (("ids only", None), ("text and stops", tokenizer)):
        if label != "ids only" and tokenizer is None:
            continue
        for num_rows in (1, 64, 256):
            parts = host_step_us(num_rows, text)
            results[f"{label}, {num_rows} rows, us"] = parts
            print(f"{label + f', {num_rows} rows':24}" + "".join(f"{value:9.1f}" for value in parts.values()))
    for policy in get_args(SchedulePolicy):
        parts = {
            full: plan_us(policy, num_running=256, num_waiting=10_000, is_memory_full=full == "pages")
            for full in ("rows", "pages")
        }
        results[f"plan, 256 running, 10,000 waiting, {policy}, us"] = parts
        print(
            f"plan, 10,000 wait, {policy:18}"
            + "".join(f"{value:7.1f} us (all {name} in use)" for name, value in parts.items())
        )
    results["wake 256 us"] = uvloop.run(wake_us(256))
    print(f"waking 256 consumers: {results['wake 256 us']:.0f} us")
    for overlap in (True, False):
        step_ms = uvloop.run(overlapped_step_ms(overlap=overlap))
        results[f"5 ms lane, 2 ms host, depth {int(overlap)}, ms"] = step_ms
        print(f"5 ms lane, 2 ms host, depth {int(overlap)}: {step_ms:.2f} ms a step")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_host", description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="a model folder: also measure with text and stop strings")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    tokenizer = TextTokenizer.load(Path(options.tokenizer)) if options.tokenizer else None
    results = run(tokenizer)
    if options.json:
        write_json(options.json, "host", results)


if __name__ == "__main__":
    main()
