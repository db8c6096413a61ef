"""What the HTTP front adds to a step: a client in a process of its own, a worker that only keeps time.

    python -m slipstream.profiling.bench_http [--text] [--streams N --step-ms MS] [--json FILE]

The client reads all streams with epoll and takes the time at each recv; it parses when everything is over. The same
load runs once against sinks that do nothing: the difference in the loop thread's CPU time is what a frame costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import uvloop

from ..engine.engine import Engine
from ..engine.outputs import End, TokenLogprobs
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler.schedule_batch import ScheduleBatch
from ..engine.text.tokenization import TextTokenizer
from ..engine.worker import Launched, SampleInputs, StepOutcome, WorkerLimits
from ..http.app import create_app
from ..http.server import HttpServer
from ..streams.host_lane import HostLane
from ..streams.ticket import Ticket
from .results import write_json

VOCAB = 256
PROMPT_TOKENS = 128
LAUNCH_S = 0.0003
CASES = ((64, 2.0), (256, 5.0), (512, 10.0))


class PacedWorker:
    """Each forward takes `step_s` on a lane of its own, each launch LAUNCH_S of the loop; the tokens are anything."""

    def __init__(self, num_rows: int, output_tokens: int, step_s: float) -> None:
        longest = PROMPT_TOKENS + output_tokens + 16
        self._limits = WorkerLimits(
            num_pages=num_rows * (longest // 16 + 2),
            page_size=16,
            num_rows=num_rows,
            max_model_len=longest,
            vocab_size=VOCAB,
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
    step_ms: float
    output_tokens: int
    text: bool  # tokens go through the detokenizer and come as text; otherwise as ids

    def body(self, number: int) -> dict[str, object]:
        prompt = [number % VOCAB, *range(PROMPT_TOKENS - 1)]
        if self.text:
            return {"prompt": prompt, "max_tokens": self.output_tokens, "ignore_eos": True, "stream": True}
        sampling = {"max_tokens": self.output_tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}

    @property
    def path(self) -> str:
        return "/v1/completions" if self.text else "/generate"


class Counting:
    """A sink that only counts, and says when all of its kind are over."""

    def __init__(self, over: asyncio.Event, running: set[Counting]) -> None:
        self._over = over
        self._running = running
        running.add(self)
        self.times: list[float] = []

    def push(self, token_ids: Sequence[int], text: str, *logprobs: Sequence[TokenLogprobs]) -> None:
        self.times.append(time.perf_counter())

    def end(self, end: End) -> None:
        self._running.discard(self)
        if not self._running:
            self._over.set()


def make_engine(load: Load, tokenizer: TextTokenizer | None) -> Engine:
    worker = PacedWorker(load.num_streams, load.output_tokens, load.step_ms / 1e3)
    return Engine.on(
        worker, tokenizer=tokenizer if load.text else None, max_running_requests=load.num_streams, prefix_cache=False
    )


async def in_process(load: Load, tokenizer: TextTokenizer | None) -> dict[str, float]:
    """The load without HTTP."""
    async with make_engine(load, tokenizer) as engine:
        over, running = asyncio.Event(), set[Counting]()
        params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=True)
        watch = asyncio.create_task(watch_loop(engine, load), name="watch")
        start = time.perf_counter()
        sinks = [Counting(over, running) for _ in range(load.num_streams)]
        for number, sink in enumerate(sinks):
            engine.submit([number % VOCAB, *range(PROMPT_TOKENS - 1)], params, sink)
        await over.wait()
        wall = time.perf_counter() - start
        watch.cancel()
        return {**summary([sink.times for sink in sinks], wall), **await watch}


async def over_http(load: Load, tokenizer: TextTokenizer | None) -> dict[str, float]:
    """The load through a socket each, read by another process."""
    async with make_engine(load, tokenizer) as engine:
        app = create_app(engine, served_model_name="bench")
        async with HttpServer(app, port=0) as server:
            watch = asyncio.create_task(watch_loop(engine, load), name="watch")
            client = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "slipstream.profiling.bench_http",
                "--client",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            bodies = [load.body(number) for number in range(load.num_streams)]
            asked = json.dumps({"port": server.port, "path": load.path, "bodies": bodies})
            output, _ = await client.communicate(asked.encode())
            watch.cancel()
            return {**json.loads(output), **await watch}


async def watch_loop(engine: Engine, load: Load) -> dict[str, float]:
    """Until cancelled: how late the loop calls back, and its thread's CPU time a token between a fifth and nine tenths
    of the load, where nothing starts or ends."""
    late: list[float] = []
    spent: list[tuple[int, float]] = []
    num_tokens = load.num_streams * load.output_tokens
    try:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            late.append((time.perf_counter() - due) * 1e3)
            done = engine.stats.num_output_tokens
            if 0.2 * num_tokens < done < 0.9 * num_tokens:
                spent.append((done, time.thread_time()))
    except asyncio.CancelledError:
        (first, began), (last, ended) = spent[0], spent[-1]
        cpu_us = (ended - began) / max(last - first, 1) * 1e6
        return {"cpu_us_per_token": cpu_us, "lag_ms_p99": quantile(late, 0.99), "lag_ms_max": max(late)}


def read_streams(port: int, path: str, bodies: Sequence[dict[str, object]]) -> dict[str, float]:
    """The client: send everything, note when bytes arrive, look at them afterwards."""
    poll = select.epoll()
    socks: dict[int, socket.socket] = {}
    for body in bodies:
        payload = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", port))
        head = f"POST {path} HTTP/1.1\r\nhost: b\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
        socks[sock.fileno()] = sock
        sock.sendall(head.encode() + payload)
        sock.setblocking(False)
        poll.register(sock, select.EPOLLIN)
    start = time.perf_counter()
    seen: list[tuple[float, int, bytes]] = []
    num_open = len(socks)
    while num_open:
        for descriptor, _ in poll.poll():
            received = socks[descriptor].recv(65536)
            if received:
                seen.append((time.perf_counter(), descriptor, received))
            else:
                poll.unregister(descriptor)
                num_open -= 1
    wall = seen[-1][0] - start
    times: dict[int, list[float]] = {descriptor: [] for descriptor in socks}
    for at, descriptor, received in seen:
        # Every token's frame, and not the last frame or the end mark, has an empty finish_reason or no meta_info.
        count = received.count(b'"finish_reason":null') + received.count(b'"meta_info":null')
        times[descriptor].extend([at] * count)
    for sock in socks.values():
        sock.close()
    return summary(list(times.values()), wall)


def summary(times: Sequence[Sequence[float]], wall_s: float) -> dict[str, float]:
    """Inter-token milliseconds over all streams, and tokens a second."""
    gaps = [(after - before) * 1e3 for stream in times for before, after in pairwise(stream)]
    num_frames = sum(map(len, times))
    return {
        "itl_ms_p50": quantile(gaps, 0.5),
        "itl_ms_p99": quantile(gaps, 0.99),
        "frames": num_frames,
        "frames_per_s": num_frames / wall_s,
    }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def byte_tokenizer() -> TextTokenizer:
    """256 tokens, one a byte: text without a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


def measure(load: Load, repeats: int) -> dict[str, float]:
    """Medians over `repeats` of the load with and without HTTP, and what a frame costs the loop."""
    tokenizer = byte_tokenizer()
    pairs = [(uvloop.run(in_process(load, tokenizer)), uvloop.run(over_http(load, tokenizer))) for _ in range(repeats)]
    http = {name: statistics.median(pair[1][name] for pair in pairs) for name in pairs[0][1]}
    alone = {name: statistics.median(pair[0][name] for pair in pairs) for name in pairs[0][0]}
    cpu = statistics.median(pair[1]["cpu_us_per_token"] - pair[0]["cpu_us_per_token"] for pair in pairs)
    return {
        **http,
        "engine_itl_ms_p50": alone["itl_ms_p50"],
        "engine_tokens_per_s": alone["frames_per_s"],
        "http_cpu_us_per_token": cpu,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_http", description=__doc__.splitlines()[0])
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--text", action="store_true", help="through the detokenizer, as completions")
    parser.add_argument("--streams", type=int, help="instead of the three standard cases")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=256, help="outputs of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    if options.client:
        print(json.dumps(read_streams(**json.load(sys.stdin))))
        return
    cases = ((options.streams, options.step_ms),) if options.streams else CASES
    results: dict[str, object] = {}
    for num_streams, step_ms in cases:
        load = Load(num_streams=num_streams, step_ms=step_ms, output_tokens=options.tokens, text=options.text)
        numbers = measure(load, options.repeats)
        results[f"{num_streams} streams, {step_ms:g} ms"] = numbers
        print(f"{num_streams} streams, {step_ms:g} ms a step: " + ", ".join(f"{k} {v:.4g}" for k, v in numbers.items()))
    if options.json:
        write_json(options.json, "http", results)


if __name__ == "__main__":
    main()
