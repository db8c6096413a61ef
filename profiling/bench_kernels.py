"""Times the kernels one by one: CUDA-graph replays over enough copies of the weights or of the cache to miss the L2, medians.

    python -m slipstream.profiling.bench_kernels [linears] [decode] [prefill] [sampler] [pointwise]

A row shows the microseconds of one call, what it moves at least, and the share of the device's own copy rate that this
makes. Where a library does the same, its time stands beside it. Needs CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..engine.kernels.decode_attention import RopeInputs, decode_attention
from ..engine.kernels.decode_plan import make_decode_workspace, plan_decode
from ..engine.kernels.linear import linear
from ..engine.kernels.paged_decode import has_paged_decode
from ..engine.kernels.prefill_attention import prefill_attention
from ..engine.kernels.rmsnorm import rmsnorm
from ..engine.kernels.rope_kv_write import rope_kv_write
from ..engine.kernels.sampling import make_sampler_workspace, sample
from ..engine.kernels.silu_mul import silu_mul
from ..engine.kernels.small_gemm import make_split_workspace
from ..engine.sampling.sampling_table import SamplingTable
from .results import require_cuda, write_json

DEVICE = "cuda"
PAGE_SIZE = 16
HEAD_DIM = 128
STREAMED_BYTES = 256 << 20
"""What one graph reads at least: several times the L2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One product of a decoder layer: `[B, width] @ [features, width].T` and what surrounds it."""

    name: str
    features: int
    width: int
    gated: bool = False
    normed: bool = False

    @property
    def weight_rows(self) -> int:
        return self.features * (2 if self.gated else 1)


MATRICES = (
    Matrix(name="0.6B qkv", features=4096, width=1024, normed=True),
    Matrix(name="0.6B o", features=1024, width=2048),
    Matrix(name="0.6B gate-up", features=3072, width=1024, gated=True, normed=True),
    Matrix(name="0.6B down", features=1024, width=3072),
    Matrix(name="0.6B head", features=151936, width=1024, normed=True),
    Matrix(name="8B qkv", features=6144, width=4096, normed=True),
    Matrix(name="8B o", features=4096, width=4096),
    Matrix(name="8B gate-up", features=14336, width=4096, gated=True, normed=True),
    Matrix(name="8B down", features=4096, width=14336),
    Matrix(name="8B head", features=128256, width=4096, normed=True),
)
LINEAR_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_SHAPES = (
    (1, 200), (1, 1024), (1, 8192), (8, 200), (32, 200), (32, 1024), (32, 8192), (64, 200), (128, 200), (256, 200), (256, 1024),
)  # fmt: skip
HEADS = ((16, 8), (32, 8))


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers: zeros are faster than data."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * scale


def microseconds(calls: Sequence[Callable[[], object]], *, replays: int = 15) -> float:
    """Median time of a graph of `calls`, by call. Few calls are repeated, so that the graph's own start does not show."""
    calls = list(calls) * max(1, 8 // len(calls))
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for index in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(float(start.elapsed_time(end)))
    return statistics.median(times) * 1e3 / len(calls)


def copy_rate() -> float:
    """Bytes a microsecond of a device copy, read and written."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / microseconds([partial(target.copy_, source)])


class Sheet:
    """Prints row by row, and keeps the rows. `rate`: the device's own, of `copy_rate`."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.rows: dict[str, object] = {}

    def show(self, name: str, took: float, num_bytes: float, beside: float | None = None) -> None:
        """One row. `beside`: what a library takes for the same; of prefill attention the TFLOP/s that it makes."""
        share = 100 * num_bytes / self.rate / took
        self.rows[name] = {"call_us": took, "beside": beside}
        last = "" if beside is None else f"{beside:10.2f}"
        print(f"{name:44}{took:10.2f}{num_bytes / 1e6:11.2f}{share:8.0f}%{last}", flush=True)


def separately(
    x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None, gated: bool, residual: torch.Tensor
) -> torch.Tensor:
    """What `linear` computes, by cuBLAS and a kernel for each operation around it."""
    if norm is None:
        return residual.addmm_(x, weight.t())
    y = torch.mm(rmsnorm(x, norm, 1e-6), weight.t())
    return silu_mul(y) if gated else y


def bench_linears(sheet: Sheet) -> None:
    """Products with what surrounds them, against cuBLAS and separate kernels for that."""
    workspace = make_split_workspace(max_features=4096, device=DEVICE)
    for matrix in MATRICES:
        num_bytes = 2 * matrix.weight_rows * matrix.width
        weights = [
            bf16(matrix.weight_rows, matrix.width, scale=0.02) for _ in range(max(1, STREAMED_BYTES // num_bytes))
        ]
        norm = bf16(matrix.width) if matrix.normed else None
        for rows in LINEAR_ROWS:
            x, residual = bf16(rows, matrix.width), bf16(rows, matrix.features)
            add_to = None if matrix.normed else residual
            ours = partial(linear, x, workspace=workspace, norm=norm, gated=matrix.gated, add_to=add_to)
            took = microseconds([partial(ours, weight=weight) for weight in weights])
            beside = microseconds([partial(separately, x, weight, norm, matrix.gated, residual) for weight in weights])
            moved = num_bytes + 2 * rows * (matrix.width + matrix.features)
            sheet.show(f"{matrix.name} {rows} rows", took, moved, beside)


def bench_decode(sheet: Sheet) -> None:
    """Decode attention from the packed projection, the new token's norm, rotation and KV write included."""
    for (num_q_heads, num_kv_heads), (rows, length) in itertools.product(HEADS, DECODE_SHAPES):
        pages = -(-length // PAGE_SIZE)
        num_bytes = rows * length * num_kv_heads * HEAD_DIM * 4
        shape = (rows * pages + 1, PAGE_SIZE, num_kv_heads, HEAD_DIM)
        caches = [(bf16(*shape), bf16(*shape)) for _ in range(min(28, max(2, STREAMED_BYTES // num_bytes)))]
        table = (torch.randperm(rows * pages, device=DEVICE).int() + 1).view(rows, pages)
        chosen = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        seq_lens = torch.full((rows,), length, device=DEVICE, dtype=torch.int32)
        packed, out = bf16(rows, (num_q_heads + 2 * num_kv_heads) * HEAD_DIM), bf16(rows, num_q_heads, HEAD_DIM)
        rope = RopeInputs(
            cos_sin=torch.randn(length + 1, HEAD_DIM, device=DEVICE),
            q_norm=bf16(HEAD_DIM),
            k_norm=bf16(HEAD_DIM),
        )
        workspace = make_decode_workspace(
            max_rows=rows,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIM,
            device=DEVICE,
            has_paged=has_paged_decode(caches[0][0], num_q_heads // num_kv_heads),
        )
        plan_decode(seq_lens, workspace)
        took = microseconds(
            [
                partial(
                    decode_attention, packed, k, v, table, chosen, seq_lens, workspace, rope=rope, ahead=True, out=out
                )
                for k, v in caches
            ]
        )
        sheet.show(f"decode {num_q_heads}/{num_kv_heads} heads {rows} rows of {length}", took, num_bytes)


def bench_prefill(sheet: Sheet) -> None:
    """One prompt without a prefix; the last column is TFLOP/s of the causal half."""
    for (num_q_heads, num_kv_heads), tokens in itertools.product(HEADS, (128, 1024, 4096)):
        pages = -(-tokens // PAGE_SIZE)
        shape = (pages + 1, PAGE_SIZE, num_kv_heads, HEAD_DIM)
        q = bf16(tokens, num_q_heads, HEAD_DIM)
        table = torch.arange(1, pages + 1, device=DEVICE, dtype=torch.int32)[None]
        ends = torch.tensor([0, tokens], device=DEVICE, dtype=torch.int32)
        call = partial(
            prefill_attention, q, bf16(*shape), bf16(*shape), table, ends[:1], ends, ends[1:], out=torch.empty_like(q)
        )
        took = microseconds([call])
        num_bytes = 4 * tokens * (num_q_heads + num_kv_heads) * HEAD_DIM
        rate_tflops = 2 * tokens * tokens * num_q_heads * HEAD_DIM / took / 1e6
        sheet.show(f"prefill {num_q_heads}/{num_kv_heads} heads {tokens} tokens", took, num_bytes, rate_tflops)


def bench_sampler(sheet: Sheet) -> None:
    """From bf16 logits to ids; beside it torch.argmax."""
    kinds = (
        ("greedy", 0.0, 0, 1.0),
        ("temperature", 0.6, 0, 1.0),
        ("top-p", 0.6, 0, 0.9),
        ("top-k", 0.6, 50, 1.0),
        ("top-k top-p", 0.6, 50, 0.9),
    )
    vocab = 151936
    workspace = make_sampler_workspace(max_rows=256, vocab_size=vocab, device=DEVICE)
    for rows in (1, 8, 32, 256):
        logits = bf16(rows, vocab, scale=3.0)
        index = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        live = torch.tensor([rows], device=DEVICE, dtype=torch.int32)
        dead = torch.zeros(rows, device=DEVICE, dtype=torch.bool)
        table = SamplingTable(rows, torch.device(DEVICE))
        table.seed.copy_(index * 7919)
        beside = microseconds([partial(torch.argmax, logits, -1)])
        for name, temperature, top_k, top_p in kinds:
            table.temperature.fill_(temperature)
            table.top_k.fill_(top_k)
            table.top_p.fill_(top_p)
            call = partial(
                sample, logits, index, live, index, dead, table, index.long(), workspace, ids=index.long(),
                bad=index.clone(), greedy=temperature == 0, filters=top_k > 0 or top_p < 1.0,
            )  # fmt: skip
            sheet.show(f"sampler {name} {rows} rows", microseconds([call]), 2.0 * rows * vocab, beside)


def bench_pointwise(sheet: Sheet) -> None:
    """The kernels between the products."""
    for rows, hidden in ((1, 1024), (256, 1024), (256, 4096), (4096, 4096)):
        x, weight, pair = bf16(rows, hidden), bf16(hidden), bf16(rows, 6 * hidden)
        took = microseconds([partial(rmsnorm, x, weight, 1e-6, out=torch.empty_like(x))])
        sheet.show(f"rmsnorm [{rows}, {hidden}]", took, 4.0 * rows * hidden)
        took = microseconds([partial(silu_mul, pair)])
        sheet.show(f"silu · mul [{rows}, 2 x {3 * hidden}]", took, 18.0 * rows * hidden)
    for tokens in (1, 256, 4096):
        k, v = (bf16(tokens // PAGE_SIZE + 2, PAGE_SIZE, 8, HEAD_DIM) for _ in range(2))
        at, cos_sin = torch.arange(tokens, device=DEVICE), torch.randn(tokens, HEAD_DIM, device=DEVICE)
        norm = bf16(HEAD_DIM)
        call = partial(
            rope_kv_write, bf16(tokens, 32 * HEAD_DIM), at, at, cos_sin, k, v, num_q_heads=16, q_norm=norm, k_norm=norm
        )
        sheet.show(f"rope + KV write {tokens} tokens, 16/8 heads", microseconds([call]), tokens * HEAD_DIM * 132.0)


SECTIONS: dict[str, Callable[[Sheet], None]] = {
    "linears": bench_linears,
    "decode": bench_decode,
    "prefill": bench_prefill,
    "sampler": bench_sampler,
    "pointwise": bench_pointwise,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench_kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help="all of them if none is named")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    require_cuda()
    sheet = Sheet(copy_rate())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy moves {sheet.rate / 1e6:.2f} TB/s")
    print(f"{'':44}{'us':>10}{'MB':>11}{'of copy':>9}{'library':>10}")
    for section in options.sections:
        SECTIONS[section](sheet)
    if options.json:
        write_json(options.json, "kernels", sheet.rows)


if __name__ == "__main__":
    main()
