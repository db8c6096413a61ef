"""What structured output costs: tokens a second with none, one and all rows constrained, at both depths.

    python -m slipstream.profiling.bench_constrained [--model NAME] [--rows 16] [--tokens 32] [--rounds 3] [--json FILE]

Greedy requests of one length at once; a constrained one writes a JSON array that is never complete. Beside the rate stands
what the host does for each sample (masks, histories) before it lets it go: at depth 1 the forward runs meanwhile. What of the
host's whole work in a step the device stood still for is the exposed time, by marks of the loop and its lanes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..engine.engine import Engine
from ..engine.grammar_session import GrammarSpec
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler.schedule_batch import ScheduleBatch
from ..engine.worker import SampleInputs
from .overlap_report import overlap_report
from .recorder import Recorder
from .results import write_json

SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 8, "maxLength": 40}, "minItems": 1000}


class Measured(NamedTuple):
    """One round."""

    tokens_per_s: float
    host_ms: float  # for one step's sample, in the median
    exposed_ms: float  # of the host's work in a step, in the mean


class HostTimer:
    """Times `Scheduler.sample_inputs` of one engine."""

    def __init__(self, engine: Engine) -> None:
        scheduler = engine._started()
        self._real = scheduler.sample_inputs
        self.seconds: list[float] = []
        scheduler.sample_inputs = self._timed  # type: ignore[method-assign]

    def _timed(self, batch: ScheduleBatch) -> SampleInputs:
        started = time.perf_counter()
        inputs = self._real(batch)
        self.seconds.append(time.perf_counter() - started)
        return inputs


async def measure(engine: Engine, timer: HostTimer, *, rows: int, constrained: int, tokens: int) -> Measured:
    """Run `rows` requests at once, the first `constrained` of them under the schema."""
    spec = GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA))
    plain = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    params = [
        SamplingParams(**plain, structured_output=spec if row < constrained else None)  # type: ignore[arg-type]
        for row in range(rows)
    ]
    recorder = Recorder(engine, kernels=False)
    recorder.start()
    timer.seconds.clear()
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(engine.complete([100 + row, 200, 300, 400], how) for row, how in enumerate(params))
    )
    seconds = time.perf_counter() - started
    report = overlap_report(await recorder.collect())
    drawn = sum(len(answer.token_ids) for answer in answers)
    exposed_ms = report.exposed_ns / report.num_steps / 1e6
    return Measured(drawn / seconds, 1e3 * statistics.median(timer.seconds), exposed_ms)


async def run(model: str, *, rows: int, tokens: int, rounds: int) -> dict[str, object]:
    """Print the table, return its rows."""
    results: dict[str, object] = {}
    print(f"{'depth':>5} {'constrained':>11} {'tokens/s':>9} {'host ms/step':>12} {'exposed ms/step':>15}")
    for overlap in (False, True):
        async with Engine(model=model, overlap=overlap, max_running_requests=rows, max_total_tokens=8192) as engine:
            timer = HostTimer(engine)
            counts = (0, 1, rows)
            found: dict[int, list[Measured]] = {count: [] for count in counts}
            await measure(engine, timer, rows=rows, constrained=rows, tokens=4)
            for _ in range(rounds):
                for count in counts:
                    found[count].append(await measure(engine, timer, rows=rows, constrained=count, tokens=tokens))
            for count, each in found.items():
                middle = Measured(*(statistics.median(column) for column in zip(*each, strict=True)))
                results[f"depth {int(overlap)}, {count} constrained"] = middle._asdict()
                rate, host, exposed = middle
                print(f"{int(overlap):>5} {count:>11} {rate:>9.1f} {host:>12.3f} {exposed:>15.3f}")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench_constrained", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args(arguments)
    results = asyncio.run(run(args.model, rows=args.rows, tokens=args.tokens, rounds=args.rounds))
    if args.json:
        write_json(args.json, "constrained", results)


if __name__ == "__main__":
    main()
