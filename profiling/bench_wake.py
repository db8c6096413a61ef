"""How late the event loop learns that the GPU has finished, for each way of waiting, and what the wait costs the loop.

    python -m slipstream.profiling.bench_wake [--samples 200] [--uvloop] [--loops idle] [--strategies NAME…]

A row is one strategy, one gap (how long the GPU works) and one state of the loop: idle, or busy with slices of Python
between turns. The moment of completion is that of the CUDA event on the GPU's own clock, laid over the host's clock by an
event recorded on the idle GPU just before each sample and seen by a spinning host; so all latencies come out short by that
look, some 2 µs. `work` is what a busy loop got done, against a loop that waits for nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..streams.cuda_lane import CudaLane
from ..streams.wake import EventWaiter, LoopWaiter, ThreadWaiter
from .results import require_cuda, write_json

GAPS_MS = (0.2, 1.0, 5.0)
SLICE_LOOPS = 3000  # of an empty Python loop: some 50 to 100 µs between two turns of a busy event loop

STRATEGIES: dict[str, Callable[[], EventWaiter]] = {
    "the loop asks": lambda: LoopWaiter("bench"),
    "a thread sleeps": lambda: ThreadWaiter("bench"),
}


class Row(NamedTuple):
    """Latencies of one strategy at one gap, and the slices per second a busy loop got done meanwhile (0 for an idle one)."""

    median_us: float
    p99_us: float
    slices_per_s: float


class BusyLoop:
    """A task that keeps the event loop's thread busy with Python between turns."""

    def __init__(self) -> None:
        self.num_slices = 0

    async def run(self) -> None:
        while True:
            for _ in range(SLICE_LOOPS):
                pass
            self.num_slices += 1
            await asyncio.sleep(0)


def cycles_per_ms() -> float:
    """What `torch.cuda._sleep` has to be given for a millisecond of this GPU."""
    start, end = timing_event(), timing_event()
    sleep_on_gpu(1_000_000)  # wakes the clock
    start.record()
    sleep_on_gpu(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / float(start.elapsed_time(end))


def sleep_on_gpu(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


async def one_latency_us(lane: CudaLane, cycles: int) -> float:
    """From the completion of a GPU sleep of `cycles` to the line after the await."""
    start, end = timing_event(), timing_event()
    lane.synchronize_blocking()
    start.record(lane.stream)
    while not start.query():
        pass
    start_ns = time.perf_counter_ns()

    def work() -> None:
        sleep_on_gpu(cycles)
        end.record()

    lane.submit(work)
    await lane.ticket(lambda: None)
    wake_ns = time.perf_counter_ns()
    return (wake_ns - start_ns) / 1e3 - float(start.elapsed_time(end)) * 1e3


async def measure(make_waiter: Callable[[], EventWaiter], cycles: int, *, samples: int, busy: bool) -> Row:
    """One row of the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    lane = CudaLane("bench", device, waiter=make_waiter())
    work = BusyLoop()
    task = asyncio.ensure_future(work.run()) if busy else None
    for _ in range(10):
        await one_latency_us(lane, cycles)
    before, started = work.num_slices, time.perf_counter()
    latencies = sorted([await one_latency_us(lane, cycles) for _ in range(samples)])
    rate = (work.num_slices - before) / (time.perf_counter() - started)
    if task is not None:
        await stop(task)
    lane.close()
    return Row(statistics.median(latencies), latencies[int(0.99 * (samples - 1))], rate)


async def free_slices_per_s() -> float:
    """The slices of a busy loop that waits for nothing."""
    work = BusyLoop()
    task = asyncio.ensure_future(work.run())
    started = time.perf_counter()
    await asyncio.sleep(0.5)
    rate = work.num_slices / (time.perf_counter() - started)
    await stop(task)
    return rate


async def stop(task: asyncio.Future[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def print_table(samples: int, loops: Sequence[str], strategies: Sequence[str]) -> dict[str, object]:
    """Measure what is asked for, print one line a row, and return the rows."""
    results: dict[str, object] = {}
    per_ms = cycles_per_ms()
    free = await free_slices_per_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {type(asyncio.get_running_loop()).__module__}")
    print(f"a free busy loop does {free:.0f} slices a second")
    print(f"{'strategy':24} {'loop':5} {'gap ms':>7} {'median µs':>10} {'p99 µs':>9} {'work':>6}")
    for name in strategies:
        make_waiter = STRATEGIES[name]
        for busy in [loop == "busy" for loop in loops]:
            for gap_ms in GAPS_MS:
                row = await measure(make_waiter, int(gap_ms * per_ms), samples=samples, busy=busy)
                share = f"{row.slices_per_s / free:6.0%}" if busy else "     –"
                state = "busy" if busy else "idle"
                results[f"{name}, {state} loop, {gap_ms:g} ms of work"] = row._asdict()
                print(f"{name:24} {state:5} {gap_ms:7.1f} {row.median_us:10.1f} {row.p99_us:9.1f} {share}")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench_wake", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop instead of asyncio's own loop")
    parser.add_argument("--loops", nargs="+", choices=("idle", "busy"), default=("idle", "busy"))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=tuple(STRATEGIES))
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    require_cuda()
    table = print_table(options.samples, options.loops, options.strategies)
    if options.uvloop:
        import uvloop

        results = uvloop.run(table)
    else:
        results = asyncio.run(table)
    if options.json:
        write_json(options.json, "wake", results)


if __name__ == "__main__":
    main()
