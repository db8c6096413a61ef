"""Captures what a CUDA worker replays: sampler, decode graphs, prefill graphs, in one shared pool."""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING

import torch

from ...streams.breakable_graph import GraphBreaks
from ...streams.graph import GraphPool
from ..errors import ConfigError
from ..models.fused_decoder import FusedDecoder
from ..sampling.cuda_sampler import CudaSampler
from .cuda_step import CudaParts
from .decode_graph_runner import DecodeForward, DecodeGraphRunner
from .plain_decoder import PlainDecoder
from .prefill_graph_runner import FullPrefill, PrefillGraphRunner
from .row_samplings import RowSamplings

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..worker import WorkerLimits
    from .device_build import Stage
    from .model_runner import ModelRunner


def build_cuda_parts(
    config: EngineConfig, runner: ModelRunner, limits: WorkerLimits, device: torch.device, stage: Stage
) -> CudaParts:
    """Stops the host until everything is captured. Raises ConfigError if a graph mode that was asked for cannot be."""
    sampler = CudaSampler(
        max_rows=limits.num_rows,
        vocab_size=limits.vocab_size,
        table=runner.row_state.sampling,
        next_ids=runner.row_state.relay.table,
        device=device,
    )
    decode_graphs = _decode_graphs(config, runner, sampler, limits)
    prefill_graphs = _prefill_graphs(config, runner)
    # Each capture collects garbage first; what has been loaded by now need not be walked every time.
    gc.collect()
    gc.freeze()
    try:
        with torch.inference_mode():
            pool = GraphPool(device)
            if prefill_graphs is not None:
                prefill_graphs.capture_blocking(pool)
                runner = dataclasses.replace(runner, runners=(prefill_graphs, *runner.runners))
            if decode_graphs is not None:
                decode_graphs.capture_blocking(pool)
    finally:
        gc.unfreeze()
    return CudaParts(
        runner=runner,
        sampler=sampler,
        decode_graphs=decode_graphs,
        samplings=RowSamplings(),
        device=device,
        stage=stage,
    )


def _prefill_graphs(config: EngineConfig, runner: ModelRunner) -> PrefillGraphRunner | None:
    """The runner that the settings mean, nothing captured yet; None for eager prefill. Raises ConfigError."""
    mode = config.prefill_graph
    if mode == "off" or (mode == "auto" and config.row_invariant):
        return None
    full = None
    if mode == "full":
        if "full" not in runner.extend_attention.capabilities.graph_modes:
            raise ConfigError(
                f"attention backend {runner.extend_attention.capabilities.name!r} cannot be captured in full graphs",
                field="prefill_graph",
            )
        full = FullPrefill(
            attention=runner.extend_attention,
            page_table=runner.row_state.page_table,
            max_tokens=config.chunked_prefill_size,
        )
    return PrefillGraphRunner(
        runner.model,
        runner.kv_pool,
        decode_attention=runner.decode_attention,
        extend_attention=runner.extend_attention,
        max_tokens=config.chunked_prefill_size,
        breakable=mode != "full",
        full=full,
        debug=config.debug_cuda_graph,
    )


def _decode_graphs(
    config: EngineConfig, runner: ModelRunner, sampler: CudaSampler, limits: WorkerLimits
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
        decoder = FusedDecoder(
            runner.model, runner.kv_pool, runner.row_state, max_rows=limits.num_rows, row_invariant=False
        )
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
        max_rows=limits.num_rows,
        breaks=breaks,
        is_debug=config.debug_cuda_graph,
    )
