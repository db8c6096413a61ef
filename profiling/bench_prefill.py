"""Prefill steps alone, without engine or scheduler, by every runner. Needs CUDA.

    python -m slipstream.profiling.bench_prefill MODEL_FOLDER… [--tokens 128 512 1024 2048 4096] [--kernels 1024]

`wall`: from the staged integers to the sampled id on the device, the device idle before. `host`: of that, until the host
is free again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ..engine.attention.backend import AttentionSpec
from ..engine.attention.registry import make_backend, resolve_name
from ..engine.config import AttentionBackendName
from ..engine.forward.eager_runner import EagerRunner
from ..engine.forward.forward_batch import ForwardBatch
from ..engine.forward.kv_pool import KVPool, KVShape
from ..engine.forward.model_runner import Runner
from ..engine.forward.prefill_graph_runner import Kind, PrefillAttention, PrefillGraphRunner
from ..engine.forward.row_state import RowState
from ..engine.forward.staged_step import StagedStep, pack
from ..engine.forward.token_inputs import TokenInputs
from ..engine.loader.dummy_loader import fill_dummy_weights
from ..engine.loader.model_config import ModelConfig
from ..engine.models.registry import build_model
from ..engine.scheduler.schedule_batch import ScheduleBatch
from ..streams.graph import GraphPool
from .bench_decode import kernel_table
from .results import require_cuda, write_json

PAGE_SIZE = 16
NUM_ROWS = 256
MIXED = (1024, 900)

Block = tuple[torch.Tensor, tuple[int, ...]]
"""A step's integers in pinned memory, and the widths of its columns."""


class PrefillBench:
    """A model with dummy weights, a pool for a few long rows, and runners over them."""

    def __init__(self, folder: Path, *, max_tokens: int) -> None:
        self.device = torch.device("cuda", 0)
        self.config = ModelConfig.from_folder(folder)
        self.max_tokens = max_tokens
        self.model = build_model(self.config, max_position=max_tokens + 64, dtype=torch.bfloat16, device=self.device)
        fill_dummy_weights(self.model)
        self.model.finish()
        config = self.config
        shape = KVShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
        )
        pages_per_row = max_tokens // PAGE_SIZE + 2
        self.pool = KVPool(shape, num_pages=2 * pages_per_row, page_size=PAGE_SIZE, device=self.device)
        self.rows = RowState(num_rows=NUM_ROWS, max_pages=pages_per_row, device=self.device)
        pages = torch.arange(1, pages_per_row + 1, device=self.device, dtype=torch.int32)
        self.rows.page_table.copy_(pages)  # every row's pages are the same: nothing here reads what another row wrote
        self.tokens = TokenInputs.make(max_tokens, self.device)
        self.spec = AttentionSpec(
            kv_pool=self.pool,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_rows=NUM_ROWS,
            max_model_len=max_tokens + 64,
            row_invariant=False,
            device=self.device,
            dtype=torch.bfloat16,
        )

    def runners(self) -> dict[str, Runner]:
        """Every way to run a prefill here, graphs captured."""
        best = resolve_name("auto", self.spec, phase="prefill")
        made: dict[str, Runner] = {}
        names: tuple[AttentionBackendName, ...] = (best, "triton")
        for eager_name in dict.fromkeys(names):
            eager = self.attention(eager_name, has_short=False)
            made[f"eager, {eager_name}"] = EagerRunner(
                self.model, self.pool, decode_attention=eager.decode, extend_attention=eager.extend
            )
        pool = GraphPool(self.device)
        variants: dict[str, tuple[PrefillAttention, Sequence[Kind]]] = {}
        # Every runner has backends of its own: a backend's graphs share one state.
        for name, extend_name, short in (("breakable", best, False), ("whole", best, False), ("auto", best, True)):
            attention = self.attention(extend_name, has_short=short)
            label = name if name == "auto" else f"{name}, {extend_name}"
            variants[label] = attention, attention.kinds("breakable" if name == "breakable" else "full")
        whole = self.attention("triton", has_short=False)
        variants["whole, triton"] = whole, whole.kinds("full")
        for name, (attention, kinds) in variants.items():
            graphs = PrefillGraphRunner(
                self.model,
                self.pool,
                attention,
                self.tokens,
                kinds=kinds,
                chunk_tokens=self.tokens.capacity,
                page_table=self.rows.page_table,
            )
            before = pool.growth_bytes
            graphs.capture_blocking(pool)
            growth = pool.growth_bytes - before + graphs.num_bytes
            print(
                f"  captured {name}: {graphs.num_graphs} graphs, {graphs.capture_s:.2f} s, {growth / 2**20:.0f} MiB",
                flush=True,
            )
            made[name] = graphs
        return made

    def attention(self, extend: AttentionBackendName, *, has_short: bool) -> PrefillAttention:
        """Backends of one runner, decode by Triton."""
        triton = make_backend("triton", self.spec, field="decode_attention")
        made = triton if extend == "triton" else make_backend(extend, self.spec, field="prefill_attention")
        return PrefillAttention(decode=triton, extend=made, short=triton if has_short else None)

    def stage(self, prompts: Sequence[int], num_decode: int = 0) -> tuple[ScheduleBatch, Block]:
        """A step of `num_decode` rows of 100 tokens and of new prompts, staged in pinned memory."""
        num_rows = num_decode + len(prompts)
        batch = ScheduleBatch(
            step=0,
            num_decode=num_decode,
            rows=tuple(range(1, num_rows + 1)),
            num_prior=(100,) * num_decode + (0,) * len(prompts),
            num_new=(1,) * num_decode + tuple(prompts),
            samples=(True,) * num_rows,
            extend_ids=array("i", [7] * sum(prompts)).tobytes(),
            table_rows=b"",
            table_columns=b"",
            table_pages=b"",
            starts=(),
        )
        columns, widths = pack(batch)
        pinned = torch.frombuffer(columns, dtype=torch.int32).pin_memory()
        return batch, (pinned, widths)

    def step(self, runner: Runner, batch: ScheduleBatch, block: Block) -> torch.Tensor:
        """One step as the worker does it, with a greedy sample."""
        pinned, widths = block
        staged = StagedStep.of(pinned.to(self.device, non_blocking=True), widths)
        forward_batch = ForwardBatch.init_new(batch, staged, self.rows, page_size=PAGE_SIZE, tokens=self.tokens)
        if not runner.can_run(forward_batch):
            raise ValueError(f"no graph for {batch.num_tokens} tokens")
        return runner.execute(forward_batch).logits.argmax(-1)

    def measure(self, runner: Runner, prompts: Sequence[int], num_decode: int = 0) -> tuple[float, float]:
        """Median wall and host milliseconds of a step."""
        batch, block = self.stage(prompts, num_decode)
        walls, hosts = [], []
        for turn in range(9):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.step(runner, batch, block)
            launched = time.perf_counter()
            torch.cuda.synchronize()
            if turn >= 2:
                hosts.append(1e3 * (launched - started))
                walls.append(1e3 * (time.perf_counter() - started))
        return statistics.median(walls), statistics.median(hosts)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_prefill", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--kernels", nargs="*", type=int, default=[], help="also list the kernels at these tokens")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    require_cuda()
    results = {}
    for folder in options.folders:
        results[Path(folder).name] = report(Path(folder), tokens=options.tokens, kernels=options.kernels)
        torch.cuda.empty_cache()
    if options.json:
        write_json(options.json, "prefill", results)


def report(folder: Path, *, tokens: Sequence[int], kernels: Sequence[int]) -> dict[str, dict[str, float]]:
    """Print what one model takes, and return it: milliseconds by load and runner."""
    results: dict[str, dict[str, float]] = {}
    print(folder.name, flush=True)
    bench = PrefillBench(folder, max_tokens=max(2048, *tokens) + NUM_ROWS)
    runners = bench.runners()
    for num_tokens in tokens:
        for kind, runner in runners.items():
            wall, host = bench.measure(runner, [num_tokens])
            results[f"{num_tokens} tokens, {kind}"] = {"wall_ms": wall, "host_ms": host}
            print(f"  {num_tokens:5} tokens  {kind:22} wall {wall:8.3f} ms  host {host:7.3f} ms", flush=True)
    for kind, runner in runners.items():
        wall, host = bench.measure(runner, MIXED, num_decode=100)
        results[f"100 decode rows and {len(MIXED)} prompts, {kind}"] = {"wall_ms": wall, "host_ms": host}
        print(f"  100 decode rows and {MIXED}  {kind:22} wall {wall:8.3f} ms  host {host:7.3f} ms", flush=True)
    for num_tokens in kernels:
        batch, block = bench.stage([num_tokens])
        for kind, runner in runners.items():
            kernel_table(partial(_drained, bench, runner, batch, block), f"  {num_tokens}: {kind}")
    return results


def _drained(bench: PrefillBench, runner: Runner, batch: ScheduleBatch, block: Block) -> None:
    bench.step(runner, batch, block)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
