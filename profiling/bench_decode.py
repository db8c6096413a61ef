"""Decode steps as graphs alone, without engine or scheduler: what the kernels allow. Needs CUDA.

python -m slipstream.profiling.bench_decode MODEL_FOLDER… [--rows 1 8 32 64 128 256] [--context 192]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..engine.forward.kv_pool import KVPool, KVShape
from ..engine.forward.row_state import RowState
from ..engine.kernels.step_prologue import empty_step_inputs
from ..engine.kernels.table_writes import table_writes
from ..engine.loader.dummy_loader import fill_dummy_weights
from ..engine.loader.model_config import ModelConfig
from ..engine.models.fused_decoder import DecodeRows, FusedDecoder
from ..engine.models.registry import build_model
from .results import require_cuda, write_json

PAGE_SIZE = 16


class DecodeBench:
    """A model with dummy weights, a pool filled with rows of one length, and graphs over them."""

    def __init__(self, folder: Path, *, max_rows: int, context: int) -> None:
        self.device = torch.device("cuda")
        self.config = ModelConfig.from_folder(folder)
        self.model = build_model(self.config, max_position=context + 64, dtype=torch.bfloat16, device=self.device)
        fill_dummy_weights(self.model)
        self.model.finish()
        pages_per_row = (context + 64) // PAGE_SIZE + 1
        shape = KVShape(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=torch.bfloat16,
        )
        self.pool = KVPool(shape, num_pages=max_rows * pages_per_row, page_size=PAGE_SIZE, device=self.device)
        self.rows = RowState(num_rows=max_rows, max_pages=pages_per_row, device=self.device)
        pages = torch.arange(1, max_rows * pages_per_row + 1, device=self.device, dtype=torch.int32)
        self.rows.page_table[1:].copy_(pages.view(max_rows, pages_per_row))
        for cache in (*self.pool.keys, *self.pool.values):
            cache.normal_()  # zeros cost less power, and so less time
        self.context = context
        self.decoder = FusedDecoder(self.model, self.pool, self.rows, max_rows=max_rows, row_invariant=False)
        self.writes = torch.zeros(3, 1024, dtype=torch.int32, device=self.device)
        self.count = torch.zeros(1, dtype=torch.int32, device=self.device)

    def rewind(self) -> None:
        """Give every row its first length again."""
        self.rows.lengths.fill_(self.context)

    def capture(self, num_rows: int) -> torch.cuda.CUDAGraph:
        """One decode step of `num_rows`, with a greedy sample, as a graph."""
        step = DecodeRows(
            rows=torch.arange(1, num_rows + 1, dtype=torch.int32, device=self.device),
            num_rows=torch.tensor([num_rows], dtype=torch.int32, device=self.device),
        )
        inputs = empty_step_inputs(num_rows, self.device)

        def run() -> None:
            table_writes(self.count, self.writes, self.rows.page_table)
            logits = self.decoder.forward(step, inputs).logits
            self.rows.relay.table.index_copy_(0, step.rows.long(), logits.argmax(-1))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.rewind()
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return graph


def median_ms(replay: Callable[[], None], before: Callable[[], object], *, inner: int = 16, outer: int = 7) -> float:
    """Median milliseconds of one replay, from `outer` runs of `inner` back to back."""
    times = []
    for _ in range(outer):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / inner)
    return statistics.median(times)


def kernel_table(replay: Callable[[], None], title: str) -> None:
    """Print where one replay's device time goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            replay()
        torch.cuda.synchronize()
    print(title)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:14]:
        print(f"  {event.self_device_time_total / 4:9.1f} us {event.count // 4:5d} x  {event.key[:90]}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_decode", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--kernels", nargs="*", type=int, default=[], help="also list the kernels at these rows")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    require_cuda()
    results: dict[str, dict[str, float]] = {}
    for folder in options.folders:
        bench = DecodeBench(Path(folder), max_rows=max(options.rows), context=options.context)
        for num_rows in options.rows:
            graph = bench.capture(num_rows)
            step_ms = median_ms(graph.replay, bench.rewind)
            results.setdefault(f"{Path(folder).name}, step_ms", {})[str(num_rows)] = step_ms
            print(f"{Path(folder).name:12} context {options.context:6} rows {num_rows:4}: {step_ms:.3f} ms", flush=True)
            if num_rows in options.kernels:
                kernel_table(graph.replay, f"kernels of {Path(folder).name} at {num_rows} rows")
    if options.json:
        write_json(options.json, "decode", results)


if __name__ == "__main__":
    main()
