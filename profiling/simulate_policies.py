"""Policies compared on one generated trace of conversations, in virtual time: which answers fast, which reuses most.

python -m slipstream.profiling.simulate_policies [--rate R] [--itl-budget-ms B] [--json FILE]

The scheduler, the cache and the step loop are the real ones; the device is a script whose steps take what `CostModel` says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from ..engine.cache.radix_node import EvictionPolicy
from ..engine.config import SchedulePolicy
from ..engine.outputs import End
from ..engine.request import Request
from ..engine.request_builder import RequestBuilder
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler.schedule_batch import ScheduleBatch
from ..engine.scheduler.scheduler import Scheduler
from ..engine.scheduler.step_times import Load
from ..engine.scripted_worker import Script, ScriptedWorker
from ..engine.step_loop import StepLoop
from ..engine.worker import WorkerLimits
from .results import write_json
from .virtual_time import run_in_virtual_time

VOCAB = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step, of the size of an 8B model on one H200: weights are read once or multiplied with every token,
    whichever takes longer; decode rows read their context; prompts attend in pairs of positions.
    """

    floor_s: float = 4e-3
    token_s: float = 24e-6
    context_s: float = 33e-9
    pair_s: float = 1.3e-9

    def seconds(self, batch: ScheduleBatch) -> float:
        load = Load.of(batch)
        return max(self.floor_s, self.token_s * load.tokens) + self.context_s * load.context + self.pair_s * load.pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What the clients do. Everything follows from the seed."""

    num_conversations: int = 300
    rate: float = 30.0  # conversations that begin a second
    num_system_prompts: int = 6
    system_tokens: int = 1200
    mean_turns: float = 4.0
    mean_user_tokens: int = 250
    mean_output_tokens: int = 150
    mean_pause_s: float = 4.0  # between an answer and the next question
    urgent_share: float = 0.1  # conversations of priority 1; the others have 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the engine has and how it is set."""

    policy: SchedulePolicy = "fcfs"
    preempts: bool = False
    eviction: EvictionPolicy = "lru"
    itl_budget_s: float | None = None
    num_pages: int = 6000
    page_size: int = 16
    num_rows: int = 64
    chunk_tokens: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one run. Times are virtual."""

    hit_rate: float  # of the prompt tokens, found in the cache
    ttft_p50_s: float
    ttft_p99_s: float
    urgent_ttft_p99_s: float
    itl_p99_s: float
    tokens_per_s: float
    num_retractions: int
    seconds: float


class Answer:
    """A sink that keeps an answer, and when its tokens came."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.done = asyncio.Event()

    def push(self, token_ids: Sequence[int], text: str, *logprobs: object) -> None:
        self.token_ids.extend(token_ids)
        self.times.append(self._loop.time())

    def end(self, end: End) -> None:
        self.done.set()


class Clients:
    """Holds the conversations of a trace against one scheduler."""

    def __init__(self, trace: Trace, scheduler: Scheduler, steps: StepLoop, limits: WorkerLimits) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._steps = steps
        self._builder = RequestBuilder(limits, None)
        self.answers: list[tuple[int, Answer]] = []  # with their priority

    async def talk(self) -> None:
        """Begin all conversations, each at its time, and wait for the last answer."""
        draw = random.Random(self._trace.seed)
        systems = [_ids(draw, self._trace.system_tokens) for _ in range(self._trace.num_system_prompts)]
        async with asyncio.TaskGroup() as group:
            for _ in range(self._trace.num_conversations):
                await asyncio.sleep(draw.expovariate(self._trace.rate))
                system = systems[min(int(draw.paretovariate(1.0)) - 1, len(systems) - 1)]
                group.create_task(self._converse(random.Random(draw.random()), [*system]))

    async def _converse(self, draw: random.Random, history: list[int]) -> None:
        trace = self._trace
        priority = int(draw.random() < trace.urgent_share)
        for _ in range(1 + int(draw.expovariate(1 / max(trace.mean_turns - 1, 1e-9)))):
            history += _ids(draw, 1 + int(draw.expovariate(1 / trace.mean_user_tokens)))
            max_tokens = 1 + int(draw.expovariate(1 / trace.mean_output_tokens))
            if len(history) + max_tokens > self._scheduler.limits.max_model_len:
                return
            answer = Answer()
            self.answers.append((priority, answer))
            self._scheduler.add(self._request(history, max_tokens, answer, priority))
            self._steps.wake()
            await answer.done.wait()
            history += answer.token_ids
            await asyncio.sleep(draw.expovariate(1 / trace.mean_pause_s))

    def _request(self, history: list[int], max_tokens: int, answer: Answer, priority: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return self._builder.build(history, params, answer, request_id=None, salt=None, priority=priority)


async def _simulate(trace: Trace, machine: Machine, cost: CostModel) -> Outcome:
    limits = WorkerLimits(
        num_pages=machine.num_pages,
        page_size=machine.page_size,
        num_rows=machine.num_rows,
        max_model_len=16_384,
        vocab_size=VOCAB,
    )
    worker = ScriptedWorker(limits, Script(cost_s=cost.seconds, verifies=False))
    await worker.start()
    scheduler = Scheduler(
        limits,
        chunked_prefill_size=machine.chunk_tokens,
        max_prefill_tokens=8 * machine.chunk_tokens,
        max_queued_requests=1 << 20,
        prefix_cache=True,
        schedule_policy=machine.policy,
        priority_preemption=machine.preempts,
        eviction_policy=machine.eviction,
        itl_budget_s=machine.itl_budget_s,
    )
    steps = StepLoop(scheduler, worker, overlap=True)
    steps.clock = asyncio.get_running_loop().time
    clients = Clients(trace, scheduler, steps, limits)
    running = asyncio.ensure_future(steps.run())
    await clients.talk()
    steps.close()
    await running
    await worker.aclose()
    return _outcome(clients.answers, scheduler)


def _outcome(answers: list[tuple[int, Answer]], scheduler: Scheduler) -> Outcome:
    stats = scheduler.stats
    first = [answer.times[0] - answer.began for _, answer in answers]
    urgent = [answer.times[0] - answer.began for priority, answer in answers if priority]
    gaps = [
        after - before for _, answer in answers for before, after in zip(answer.times, answer.times[1:], strict=False)
    ]
    seconds = max(answer.times[-1] for _, answer in answers)
    return Outcome(
        hit_rate=stats.num_cached_tokens / stats.num_prompt_tokens,
        ttft_p50_s=_percentile(first, 0.5),
        ttft_p99_s=_percentile(first, 0.99),
        urgent_ttft_p99_s=_percentile(urgent, 0.99),
        itl_p99_s=_percentile(gaps, 0.99),
        tokens_per_s=stats.num_output_tokens / seconds,
        num_retractions=stats.num_retractions,
        seconds=seconds,
    )


def simulate(trace: Trace, machine: Machine, cost: CostModel | None = None) -> Outcome:
    """Run the whole trace; the same arguments give the same outcome."""
    return run_in_virtual_time(_simulate(trace, machine, cost if cost is not None else CostModel()))


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def _ids(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(VOCAB), k=count)


def compare(trace: Trace, machines: dict[str, Machine]) -> dict[str, Outcome]:
    """Run `trace` on each machine and print one line for each."""
    columns = ("hit rate", "TTFT p50", "p99", "urgent p99", "ITL p99 ms", "tokens/s", "retracted")
    print(f"{'':22}" + "".join(f"{column:>12}" for column in columns))
    outcomes = {}
    for name, machine in machines.items():
        outcome = outcomes[name] = simulate(trace, machine)
        cells = (
            f"{outcome.hit_rate:.1%}",
            f"{outcome.ttft_p50_s:.3f} s",
            f"{outcome.ttft_p99_s:.3f} s",
            f"{outcome.urgent_ttft_p99_s:.3f} s",
            f"{outcome.itl_p99_s * 1e3:.1f}",
            f"{outcome.tokens_per_s:.0f}",
            f"{outcome.num_retractions}",
        )
        print(f"{name:22}" + "".join(f"{cell:>12}" for cell in cells))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this simulation."""
    parser = argparse.ArgumentParser(prog="simulate_policies", description=__doc__.splitlines()[0])
    trace = Trace()
    parser.add_argument("--conversations", type=int, default=trace.num_conversations)
    parser.add_argument("--rate", type=float, default=trace.rate, help="conversations that begin a second")
    parser.add_argument("--seed", type=int, default=trace.seed)
    parser.add_argument("--pages", type=int, default=Machine().num_pages, help="KV pages of 16 tokens")
    parser.add_argument("--eviction", choices=get_args(EvictionPolicy), default="lru")
    parser.add_argument("--itl-budget-ms", type=float)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    trace = Trace(num_conversations=options.conversations, rate=options.rate, seed=options.seed)
    budget_s = None if options.itl_budget_ms is None else options.itl_budget_ms / 1e3
    kinds = [(policy, False) for policy in get_args(SchedulePolicy)] + [("priority", True)]
    machines = {
        f"{policy}{', preempting' if preempts else ''}": Machine(
            policy=policy,
            preempts=preempts,
            eviction=options.eviction,
            num_pages=options.pages,
            itl_budget_s=budget_s,
        )
        for policy, preempts in kinds
    }
    outcomes = compare(trace, machines)
    if options.json:
        results = {name: asdict(outcome) for name, outcome in outcomes.items()}
        write_json(options.json, "policies", {"trace": asdict(trace), "outcomes": results})


if __name__ == "__main__":
    main()
