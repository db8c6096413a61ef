"""Captures what a CUDA worker replays: sampler, decode graphs, prefill graphs, in one shared pool."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from ...streams.graph import GraphPool
from ..errors import ConfigError
from ..models.fused_decoder import FusedDecoder
from ..sampling.cuda_sampler import CudaSampler
from .cuda_step import CudaParts
from .decode_graph_runner import DecodeGraphRunner
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
    decode_graphs = None
    if config.decode_graph != "off" and not config.debug_cuda_graph:
        if FusedDecoder.serves(runner.model):
            decode_graphs = _capture_decode(config, runner, sampler, limits, device)
        elif config.decode_graph != "auto":
            raise ConfigError("decode graphs need a model without biases, in bfloat16 or float16", field="decode_graph")
    return CudaParts(
        runner=runner,
        sampler=sampler,
        decode_graphs=decode_graphs,
        samplings=RowSamplings(),
        device=device,
        stage=stage,
    )


def _capture_decode(
    config: EngineConfig, runner: ModelRunner, sampler: CudaSampler, limits: WorkerLimits, device: torch.device
) -> DecodeGraphRunner:
    decoder = FusedDecoder(
        runner.model,
        runner.kv_pool,
        runner.row_state,
        max_rows=limits.num_rows,
        row_invariant=config.row_invariant,
    )
    graphs = DecodeGraphRunner(decoder, runner.row_state, sampler, max_rows=limits.num_rows)
    # Each capture collects garbage first; what has been loaded by now need not be walked every time.
    gc.collect()
    gc.freeze()
    try:
        with torch.inference_mode():
            graphs.capture_blocking(GraphPool(device))
    finally:
        gc.unfreeze()
    return graphs
