"""What the HTTP front adds to a step: a client in a process of its own, a worker that only keeps time, or a real model.

    python -m slipstream.profiling.bench_http [--text] [--streams N --step-ms MS] [--sweep] [--json FILE]
    python -m slipstream.profiling.bench_http --model FOLDER [--streams N …] [--mode ids text]

The same load runs once in process, against sinks that only take the time, and once over HTTP. Of the front are told:
the loop thread's CPU time a token that it adds, and the CPU time a stream from render to send (p50 over the fan-out's
slices). `--sweep` halves the step until HTTP is the limit. With --model the weights are dummies, prompts have 128
tokens, and each mode runs in a process of its own: ids over /generate without a tokenizer, text over /v1/completions.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.outputs import End
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler.schedule_batch import ScheduleBatch
from ..engine.text.tokenization import TextTokenizer
from ..engine.worker import Launched, SampleInputs, StepOutcome, WorkerLimits
from ..http.app import create_app
from ..http.collector import calm_collector
from ..http.fan_out import FanOut
from ..http.server import HttpServer
from ..streams.host_lane import HostLane
from ..streams.ticket import Ticket
from .results import write_json
from .stream_client import quantile, run_client, summary

VOCAB = 256
PROMPT_TOKENS = 128
LAUNCH_S = 0.0003
CASES = ((64, 2.0), (256, 5.0), (512, 10.0))
SWEEP_MS = (8.0, 4.0, 2.0, 1.0, 0.5)
MODEL_STREAMS = (1, 16, 64, 256)
MODES = ("ids", "text")
MODEL_VOCAB = 32_000  # ids that every model has
ALONE_REPEATS = 5
REST_S = 0.3
LARGEST_VOCAB = 300_000


class PacedWorker:
    """Each forward takes `step_s` on a lane of its own, each launch LAUNCH_S of the loop; the tokens are anything."""

    def __init__(self, num_rows: int, max_model_len: int, step_s: float, *, vocab_size: int = VOCAB) -> None:
        self._limits = WorkerLimits(
            num_pages=num_rows * (max_model_len // 16 + 2),
            page_size=16,
            num_rows=num_rows,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        self._step_s = step_s
        self._lane: HostLane | None = None

    async def start(self) -> WorkerLimits:
        self._lane = HostLane("paced")
        return self._limits

    def launch(self, batch: ScheduleBatch) -> Launched:
        lane = self._lane
        assert lane is not None
        until = time.perf_counter() + LAUNCH_S
        while time.perf_counter() < until:
            pass
        outcome: Ticket[StepOutcome] = Ticket()
        num_samples = sum(batch.samples)
        result = StepOutcome(token_ids=tuple((batch.step * 7 + row) % 90 + 33 for row in range(num_samples)))
        lane.submit(lambda: time.sleep(self._step_s))

        def resolve(inputs: SampleInputs) -> None:
            lane.submit(lambda: outcome.set_result(result))

        return Launched(batch, outcome, resolve)

    def committed(self, step: int) -> None:
        pass

    def poison(self, pages: Sequence[int]) -> None:
        pass

    async def aclose(self) -> None:
        if self._lane is not None:
            self._lane.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All streams at once, each `output_tokens` long."""

    num_streams: int
    output_tokens: int
    text: bool  # tokens go through the detokenizer and come as text; otherwise as ids
    vocab_size: int = VOCAB
    step_ms: float = 0.0  # of a paced worker

    def prompt(self, number: int) -> list[int]:
        """Each stream has its own, so that the prefix cache helps nobody."""
        return [(number * 7919 + place * 104729) % self.vocab_size for place in range(PROMPT_TOKENS)]

    def body(self, number: int) -> dict[str, object]:
        prompt = self.prompt(number)
        fields = {"max_tokens": self.output_tokens, "ignore_eos": True, "temperature": 0}
        if self.text:
            return {"prompt": prompt, "stream": True, **fields}
        return {"input_ids": prompt, "sampling_params": fields, "stream": True}

    @property
    def path(self) -> str:
        return "/v1/completions" if self.text else "/generate"


class Counting:
    """A sink that only takes the time, and says when all of its kind are over."""

    def __init__(self, over: asyncio.Event, running: set[Counting]) -> None:
        self._over = over
        self._running = running
        running.add(self)
        self.times: list[float] = []

    def push(self, token_ids: Sequence[int], text: str, *more: object) -> None:
        self.times.append(time.perf_counter())

    def end(self, end: End) -> None:
        self._running.discard(self)
        if not self._running:
            self._over.set()


def paced_engine(load: Load, tokenizer: TextTokenizer | None) -> Engine:
    worker = PacedWorker(load.num_streams, PROMPT_TOKENS + load.output_tokens + 16, load.step_ms / 1e3)
    return Engine.on(
        worker, tokenizer=tokenizer if load.text else None, max_running_requests=load.num_streams, prefix_cache=False
    )


async def in_process(engine: Engine, load: Load) -> dict[str, float]:
    """The load without HTTP."""
    over, running = asyncio.Event(), set[Counting]()
    params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=True, temperature=0.0)
    watch = asyncio.create_task(watch_loop(engine, load), name="watch")
    start = time.perf_counter()
    sinks = [Counting(over, running) for _ in range(load.num_streams)]
    for number, sink in enumerate(sinks):
        engine.submit(load.prompt(number), params, sink)
    await over.wait()
    wall = time.perf_counter() - start
    watch.cancel()
    first = [(sink.times[0] - start) * 1e3 for sink in sinks]
    numbers = summary([sink.times for sink in sinks], wall, load.output_tokens)
    return {"ttft_ms_p50": quantile(first, 0.5), "ttft_ms_p99": quantile(first, 0.99), **numbers, **await watch}


def server_of(engine: Engine) -> HttpServer:
    return HttpServer(create_app(engine, served_model_name="bench"), port=0)


async def over_http(server: HttpServer, engine: Engine, load: Load) -> dict[str, float]:
    """The load through a socket each, read by another process."""
    watch = asyncio.create_task(watch_loop(engine, load), name="watch")
    bodies = [load.body(number) for number in range(load.num_streams)]
    with timed_fan_out() as slices_us, calm_collector():
        numbers = await run_client(server.port, load.path, bodies, load.output_tokens)
    watch.cancel()
    return {**numbers, "render_to_send_us_p50": quantile(slices_us, 0.5), **await watch}


@contextmanager
def timed_fan_out() -> Iterator[list[float]]:
    """CPU microseconds a stream of each slice that the fan-out writes, the kernel's part of sending included."""
    slices_us: list[float] = []
    run = FanOut._run

    def timed(self: FanOut) -> None:
        before, start = len(self._ready), time.thread_time()
        run(self)
        spent, written = time.thread_time() - start, before - len(self._ready)
        if written:
            slices_us.append(spent / written * 1e6)

    FanOut._run = timed  # type: ignore[method-assign]
    try:
        yield slices_us
    finally:
        FanOut._run = run  # type: ignore[method-assign]


async def watch_loop(engine: Engine, load: Load) -> dict[str, float]:
    """Until cancelled: how late the loop calls back, and its thread's CPU time a token between a fifth and nine tenths
    of the load, where nothing starts or ends."""
    late: list[float] = []
    spent: list[tuple[int, float]] = []
    num_tokens, before = load.num_streams * load.output_tokens, engine.stats.num_output_tokens
    try:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            late.append((time.perf_counter() - due) * 1e3)
            done = engine.stats.num_output_tokens - before
            if 0.2 * num_tokens < done < 0.9 * num_tokens:
                spent.append((done, time.thread_time()))
    except asyncio.CancelledError:
        (first, began), (last, ended) = (spent[0], spent[-1]) if spent else ((0, 0.0), (0, 0.0))
        cpu_us = (ended - began) / max(last - first, 1) * 1e6
        return {"cpu_us_per_token": cpu_us, "lag_ms_p99": quantile(late, 0.99), "lag_ms_max": max(late, default=0.0)}


def made_up_tokenizer(vocab_size: int) -> TextTokenizer:
    """Every id is a word of its own, a byte for the first 256: text of any model, without its files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġ{number:x}" for number in range(256, vocab_size))
    vocab = {word: index for index, word in enumerate((*alphabet, *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


async def both_ways(load: Load) -> tuple[dict[str, float], dict[str, float]]:
    """In process and over HTTP, each on a fresh engine."""
    tokenizer = made_up_tokenizer(VOCAB)
    async with paced_engine(load, tokenizer) as engine:
        alone = await in_process(engine, load)
    async with paced_engine(load, tokenizer) as engine, server_of(engine) as server:
        return alone, await over_http(server, engine, load)


def measure(load: Load, repeats: int) -> dict[str, float]:
    """Medians over `repeats` of the load with and without HTTP, and what a frame costs the loop."""
    pairs = [uvloop.run(both_ways(load)) for _ in range(repeats)]
    alone, http = medians([pair[0] for pair in pairs]), medians([pair[1] for pair in pairs])
    return {
        **http,
        "engine_itl_ms_p50": alone["itl_ms_p50"],
        "engine_tokens_per_s": alone["steady_tokens_per_s"],
        "http_cpu_us_per_token": statistics.median(b["cpu_us_per_token"] - a["cpu_us_per_token"] for a, b in pairs),
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Number by number."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


async def with_model(
    folder: str, streams: Sequence[int], output_tokens: int, repeats: int, *, text: bool
) -> dict[str, object]:
    """The loads on a real model with dummy weights, one engine and one server for all: in process and over HTTP in turn,
    medians. One stream alone has one first token: it is repeated more often.
    """
    from ..engine.forward.tp_worker import TpWorker
    from ..engine.loader.model_source import resolve_model

    found = await asyncio.to_thread(resolve_model, folder, needs_weights=False)
    settings: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "max_model_len": 4096,
        "prefix_cache": False,
    }
    worker = TpWorker(EngineConfig.from_settings(settings), found.path)
    results: dict[str, object] = {}
    tokenizer = made_up_tokenizer(LARGEST_VOCAB) if text else None
    async with Engine.on(worker, tokenizer=tokenizer, **settings) as engine, server_of(engine) as server:
        warm_up = Load(num_streams=8, output_tokens=32, text=text, vocab_size=MODEL_VOCAB)
        await over_http(server, engine, warm_up)
        for num_streams in streams:
            load = Load(num_streams=num_streams, output_tokens=output_tokens, text=text, vocab_size=MODEL_VOCAB)
            pairs = []
            for _ in range(repeats if num_streams > 1 else ALONE_REPEATS * repeats):
                # Over HTTP the engine rests while the client starts, and what has rested is slower: so it does in process.
                await asyncio.sleep(REST_S)
                pairs.append((await in_process(engine, load), await over_http(server, engine, load)))
            alone, http = medians([pair[0] for pair in pairs]), medians([pair[1] for pair in pairs])
            results[f"{num_streams} streams"] = {"in_process": alone, "http": http}
            print(f"{'text' if text else 'ids'}, {num_streams} streams: {told(alone, http)}", flush=True)
    return results


def told(alone: dict[str, float], http: dict[str, float]) -> str:
    """One line: HTTP, and in brackets the same in process."""
    parts = [
        f"{name} {http[name]:.2f} ({alone[name]:.2f})"
        for name in (
            "ttft_ms_p50",
            "ttft_ms_p99",
            "itl_ms_p50",
            "itl_ms_p99",
            "itl_ms_max",
            "events_per_s",
            "steady_tokens_per_s",
        )
    ]
    ratio = http["itl_ms_p50"] / alone["itl_ms_p50"] if alone["itl_ms_p50"] else 0.0
    extra = f"p50 ratio {ratio:.3f}, render to send {http['render_to_send_us_p50']:.1f} us a stream"
    return ", ".join([*parts, extra, f"lag p99 {http['lag_ms_p99']:.2f} max {http['lag_ms_max']:.2f} ms"])


def scripted(options: argparse.Namespace) -> dict[str, object]:
    """The paced worker's cases, or the sweep down to where HTTP is the limit."""
    cases: Sequence[tuple[int, float]] = ((options.streams[0], options.step_ms),) if options.streams else CASES
    if options.sweep:
        cases = tuple((options.streams[0] if options.streams else 64, step_ms) for step_ms in SWEEP_MS)
    results: dict[str, object] = {}
    for num_streams, step_ms in cases:
        load = Load(num_streams=num_streams, step_ms=step_ms, output_tokens=options.tokens, text=options.text)
        numbers = measure(load, options.repeats)
        results[f"{num_streams} streams, {step_ms:g} ms"] = numbers
        print(f"{num_streams} streams, {step_ms:g} ms a step: " + ", ".join(f"{k} {v:.4g}" for k, v in numbers.items()))
        if options.sweep and numbers["steady_tokens_per_s"] < 0.95 * numbers["engine_tokens_per_s"]:
            print(f"HTTP is the limit at {step_ms:g} ms a step")
            break
    return results


def modes_apart(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Each mode in a process of its own: a device's memory is home only when its process has ended."""
    for mode in options.mode:
        command = [sys.executable, "-m", "slipstream.profiling.bench_http", *arguments, "--mode", mode, "--here"]
        subprocess.run(command, check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_http", description=__doc__.splitlines()[0])
    parser.add_argument("--text", action="store_true", help="through the detokenizer, as completions")
    parser.add_argument("--streams", type=int, nargs="+", help="instead of the standard cases")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=256, help="outputs of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="ever shorter steps, until HTTP is the limit")
    parser.add_argument("--model", help="a model folder, computed with dummy weights")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="with --model: what the streams carry")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the results to this file; with --model, one a mode")
    options = parser.parse_args(arguments)
    if options.model and not options.here:
        modes_apart(options, sys.argv[1:] if arguments is None else arguments)
        return
    if options.model:
        streams, is_text = options.streams or MODEL_STREAMS, options.mode == ["text"]
        results = uvloop.run(with_model(options.model, streams, options.tokens, options.repeats, text=is_text))
    else:
        results = scripted(options)
    if options.json:
        path = Path(options.json)
        write_json(path.with_stem(f"{path.stem}-{options.mode[0]}") if options.model else path, "http", results)


if __name__ == "__main__":
    main()
