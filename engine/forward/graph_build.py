"""Captures what a CUDA worker replays: sampler, decode graphs, prefill graphs, in one shared pool."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...streams.breakable_graph import GraphBreaks
from ...streams.graph import GraphPool
from ..attention.fresh_prompt import ServesFreshPrompts
from ..errors import ConfigError
from ..models.fused_decoder import FusedDecoder
from ..sampling.cuda_sampler import CudaSampler, SampleKind
from ..sampling.token_counts import TokenCounts
from .cuda_step import CudaParts
from .decode_graph_runner import DecodeForward, DecodeGraphRunner, decode_buckets
from .forward_output import TokenStates
from .memory_plan import MemoryPlan, device_memory
from .plain_decoder import PlainDecoder
from .prefill_graph_runner import PrefillAttention, PrefillGraphRunner
from .row_samplings import RowSamplings

if TYPE_CHECKING:
    from ..config import EngineConfig
    from .model_runner import ModelRunner
    from .step_parts import Stage


def build_cuda_parts(
    config: EngineConfig, runner: ModelRunner, device: torch.device, stage: Stage, *, num_ids: int
) -> CudaParts:
    """`num_ids`: what is drawn is below. Stops the host until everything is captured and the pool has its memory.

    Raises ConfigError if a graph mode that was asked for cannot be, or if nothing is left for the pool.
    """
    table = MemoryTable(device)
    num_rows = config.max_running_requests
    sampler = CudaSampler(
        max_rows=num_rows,
        num_ids=num_ids,
        table=runner.row_state.sampling,
        next_ids=runner.row_state.relay.table,
        device=device,
    )
    counts = TokenCounts(
        num_rows=num_rows,
        vocab_size=runner.model.config.vocab_size,
        next_ids=runner.row_state.relay.table,
        device=device,
    )
    decode_graphs = _decode_graphs(config, runner, sampler, num_rows)
    prefill_graphs = _prefill_graphs(config, runner)
    logits_counts = decode_buckets(num_rows)
    _load_blocking(runner, sampler, logits_counts)
    if prefill_graphs is None:
        _load_mlp_blocking(runner)
    table.note("workspaces")
    # Each capture collects garbage first; what has been loaded by now need not be walked every time.
    gc.collect()
    gc.freeze()
    try:
        with torch.inference_mode():
            pool = GraphPool(device)
            if prefill_graphs is not None:
                prefill_graphs.capture_blocking(pool)
                table.note("prefill graphs")
                runner = dataclasses.replace(runner, runners=(prefill_graphs, *runner.runners))
            if decode_graphs is not None:
                decode_graphs.capture_blocking(pool)
                table.note("decode graphs")
    finally:
        gc.unfreeze()
    runner = _with_backed_pool(config, runner, device)
    table.note(f"KV pool, {runner.memory.num_pages * runner.memory.page_size} tokens")
    return CudaParts(
        runner=runner,
        sampler=sampler,
        decode_graphs=decode_graphs,
        prefill_graphs=prefill_graphs,
        samplings=RowSamplings(),
        counts=counts,
        device=device,
        stage=stage,
        memory_table=table.text(),
        logits_counts=logits_counts,
    )


def _load_blocking(runner: ModelRunner, sampler: CudaSampler, logits_counts: Sequence[int]) -> None:
    """Compute logits of every row count and draw from them in every way, for nobody: cuBLAS loads its kernels, Triton
    compiles its own, and neither does when a step comes that no decode graph serves.
    """
    rows = torch.zeros(logits_counts[-1], dtype=torch.int32, device=sampler.results.device)
    with torch.inference_mode():
        config = runner.model.config
        residual = runner.model.embedding[:1]
        states = TokenStates(residual=residual, attended=residual.new_zeros(1, config.num_heads, config.head_dim))
        for count in logits_counts:
            logits = runner.model.logits(states, rows[:count])
            for kind in SampleKind:
                sampler.draw(logits, rows[:count], sampler.counts[:1], rows[:count], kind)


def _load_mlp_blocking(runner: ModelRunner) -> None:
    """A kernel serves 64 tokens more or less, another many. Without prefill graphs, which meet all of them, each is compiled
    here, for nobody.
    """
    model = runner.model
    with torch.inference_mode():
        for tokens in (64, 128, 192, 256, 1024):
            x = model.embedding.new_zeros(tokens, model.config.hidden_size)
            model.stack[0].mlp(x, x.clone())


def _with_backed_pool(config: EngineConfig, runner: ModelRunner, device: torch.device) -> ModelRunner:
    """Size the pool by what is really free now, and give it its memory."""
    torch.cuda.empty_cache()
    pool, reserved = runner.kv_pool, runner.memory
    memory = device_memory(device)
    kept = (pool.num_pages + 1) * reserved.page_size * reserved.bytes_per_token  # the pool's own beginning is not lost
    plan = MemoryPlan.make(
        config,
        runner.model.config,
        bytes_per_token=reserved.bytes_per_token,
        memory=dataclasses.replace(memory, used_bytes=memory.used_bytes - kept),
    )
    num_pages = min(plan.num_pages, reserved.num_pages)
    max_model_len = min(reserved.max_model_len, num_pages * reserved.page_size)
    try:
        pool.back(num_pages)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"the KV pool of {num_pages} pages does not fit: {memory.used_bytes >> 20} of {memory.total_bytes >> 20} MiB are"
            f" used; lower kv_memory_fraction ({config.kv_memory_fraction}) or max_total_tokens",
            field="kv_memory_fraction",
        ) from None
    return dataclasses.replace(
        runner, memory=dataclasses.replace(reserved, num_pages=num_pages, max_model_len=max_model_len)
    )


class MemoryTable:
    """What each part of the start took of the device, by what was free before and after it, and how long it took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        self._total = total
        self._free = free
        self._rows: list[tuple[str, int, float | None]] = [("weights, context, others", total - free, None)]
        self._since = time.perf_counter()

    def note(self, name: str) -> None:
        """Since the last note, `name` was made."""
        free, now = torch.cuda.mem_get_info(self._device)[0], time.perf_counter()
        self._rows.append((name, self._free - free, now - self._since))
        self._free, self._since = free, now

    def text(self) -> str:
        rows = [*self._rows, ("free", self._free, None), ("in all", self._total, None)]
        width = max(len(name) for name, _, _ in rows)
        lines = []
        for name, num_bytes, seconds in rows:
            took = "" if seconds is None else f" {seconds:6.1f} s"
            lines.append(f"{name:{width}} {num_bytes / 2**20:10,.0f} MiB{took}")
        return "\n".join(lines)


def _prefill_graphs(config: EngineConfig, runner: ModelRunner) -> PrefillGraphRunner | None:
    """The runner that the settings mean, nothing captured yet; None for eager prefill. Raises ConfigError."""
    mode, debug = config.prefill_graph, config.debug_cuda_graph
    if mode == "off" or runner.tokens is None or (mode == "auto" and config.row_invariant):
        return None
    decode, extend = runner.decode_attention, runner.extend_attention
    plans_on_device = "full" in decode.capabilities.graph_modes and not decode.capabilities.needs_host_plan
    attention = PrefillAttention(
        decode=decode,
        extend=extend,
        short=decode if config.prefill_attention == "auto" and plans_on_device else None,
        fresh=extend.fresh_prompt(config.chunked_prefill_size)
        if mode != "breakable" and isinstance(extend, ServesFreshPrompts)
        else None,
    )
    full, breakable = attention.kinds("full"), attention.kinds("breakable")
    if mode == "auto":
        # Whole graphs cost the host least; in the gaps stand backends that cannot be captured.
        kinds = (*full, *(() if "mixed" in full else breakable))
    else:
        kinds = full if mode == "full" else breakable
    if not kinds and mode != "auto":
        name = runner.extend_attention.capabilities.name
        raise ConfigError(f"attention backend {name!r} cannot be captured in {mode} graphs", field="prefill_graph")
    return PrefillGraphRunner(
        runner.model,
        runner.kv_pool,
        attention,
        runner.tokens,
        kinds=kinds,
        chunk_tokens=config.chunked_prefill_size,
        page_table=runner.row_state.page_table,
        debug=debug,
    )


def _decode_graphs(
    config: EngineConfig, runner: ModelRunner, sampler: CudaSampler, num_rows: int
) -> DecodeGraphRunner | None:
    """The runner that the settings mean, nothing captured yet; None for eager decode. Raises ConfigError."""
    mode, attention = config.decode_graph, runner.decode_attention.capabilities
    if mode == "off":
        return None
    wanted = "full" if mode == "auto" else mode
    breaks = GraphBreaks(runner.row_state.page_table.device) if mode == "breakable" or config.debug_cuda_graph else None
    # A host plan is made of the step's own lengths, which a captured decode forward never sees.
    if attention.needs_host_plan or (breaks is None and wanted not in attention.graph_modes):
        if mode == "auto":
            return None
        raise ConfigError(
            f"attention backend {attention.name!r} cannot be captured in {wanted} graphs", field="decode_graph"
        )
    decoder: DecodeForward
    fuses = attention.name == "triton" and breaks is None and not config.row_invariant
    if fuses and FusedDecoder.serves(runner.model):
        decoder = FusedDecoder(runner.model, runner.kv_pool, runner.row_state, max_rows=num_rows, row_invariant=False)
    else:
        decoder = PlainDecoder(
            runner.model,
            runner.kv_pool,
            runner.row_state,
            runner.decode_attention,
            breaks=None if config.debug_cuda_graph else breaks,
        )
    return DecodeGraphRunner(
        decoder,
        runner.row_state,
        sampler,
        max_rows=num_rows,
        hidden_states=config.hidden_states,
        breaks=breaks,
        is_debug=config.debug_cuda_graph,
    )
