"""Owns what a forward needs on one device, and picks the runner that computes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch

from ..attention.backend import AttentionBackend, AttentionSpec
from ..attention.registry import make_backends
from ..hidden_mode import HiddenMode, is_above
from ..loader.dummy_loader import fill_dummy_weights
from ..loader.safetensors_loader import iterate_tensors, load_weights
from ..models.registry import build_model
from .eager_runner import EagerRunner
from .forward_batch import ForwardBatch
from .forward_output import ForwardOutput
from .kv_pool import KVPool, KVShape
from .memory_plan import MemoryPlan, device_memory, longest_sequence
from .row_state import RowState
from .token_inputs import TokenInputs

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..loader.model_config import ModelConfig
    from ..models.llama import LlamaForCausalLM
    from ..scheduler.schedule_batch import ScheduleBatch
    from .placement import Placement
    from .staged_step import StagedStep

# Pages that a reserved pool has from the start, for what is captured and warmed up.
FIRST_PAGES: Final = 64
# Rows of every matrix product in row-invariant mode.
ROW_BUCKET: Final = 16


class Runner(Protocol):
    """One way to compute a forward."""

    def can_run(self, batch: ForwardBatch) -> bool: ...

    def execute(self, batch: ForwardBatch) -> ForwardOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunner:
    """Weights, KV pool, row state and runners of one device. Home of all: the compute lane. Lifetime: that of the
    worker.

    `runners` are asked in order: prefill graph, eager. A step that gives more hidden states than `hidden_states` is the last
    one's, which is eager: so much is promised of graphs, and no more.
    """

    model: LlamaForCausalLM
    memory: MemoryPlan
    kv_pool: KVPool
    row_state: RowState
    tokens: TokenInputs | None  # where steps on CUDA leave their tokens
    decode_attention: AttentionBackend
    extend_attention: AttentionBackend
    runners: tuple[Runner, ...]
    hidden_states: HiddenMode
    num_forwards: Counter[str] = field(default_factory=Counter)  # by the runner that computed them

    @classmethod
    def build_blocking(
        cls, config: EngineConfig, model_config: ModelConfig, folder: Path, placement: Placement
    ) -> ModelRunner:
        """Load and allocate everything, in the order that lets the pool have what the weights leave. Raises
        ConfigError.
        """
        if placement.device.type == "cuda":
            torch.cuda.empty_cache()  # what an engine before this one has left counts as free
        model = load_model_blocking(config, model_config, folder, placement)
        shape = KVShape(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            dtype=placement.dtype,
        )
        memory = MemoryPlan.make(
            config, model_config, bytes_per_token=shape.bytes_per_token, memory=device_memory(placement.device)
        )
        # On CUDA this is what the pool may at most become: graphs are captured over a small beginning of it, and then it
        # is backed as far as they leave memory for.
        kv_pool = KVPool(
            shape,
            num_pages=memory.num_pages,
            page_size=memory.page_size,
            device=placement.device,
            first_pages=min(FIRST_PAGES, memory.num_pages) if placement.device.type == "cuda" else None,
        )
        row_state = RowState(
            num_rows=config.max_running_requests, max_pages=memory.max_pages_per_row, device=placement.device
        )
        spec = AttentionSpec(
            kv_pool=kv_pool,
            num_heads=model_config.num_heads,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            num_rows=config.max_running_requests,
            max_model_len=memory.max_model_len,
            row_invariant=config.row_invariant,
            device=placement.device,
            dtype=placement.dtype,
        )
        decode, extend = make_backends(spec, decode=config.decode_attention, prefill=config.prefill_attention)
        eager = EagerRunner(model, kv_pool, decode_attention=decode, extend_attention=extend)
        tokens = None
        if placement.device.type == "cuda":
            # A long chunk and a token of every other row: what prefill graphs are made for.
            tokens = TokenInputs.make(config.chunked_prefill_size + config.max_running_requests, placement.device)
        return cls(
            model=model,
            memory=memory,
            kv_pool=kv_pool,
            row_state=row_state,
            tokens=tokens,
            decode_attention=decode,
            extend_attention=extend,
            runners=(eager,),
            hidden_states=config.hidden_states,
        )

    def forward(self, batch: ScheduleBatch, staged: StagedStep) -> tuple[ForwardBatch, ForwardOutput]:
        """Apply the step's writes, derive its batch, compute it. Runs on the compute lane, in inference mode."""
        self.row_state.apply(staged)
        forward_batch = ForwardBatch.init_new(
            batch, staged, self.row_state, page_size=self.memory.page_size, tokens=self.tokens
        )
        runners = self.runners[-1:] if is_above(batch.hidden_mode, self.hidden_states) else self.runners
        runner = next(runner for runner in runners if runner.can_run(forward_batch))
        self.num_forwards[type(runner).__name__] += 1
        return forward_batch, runner.execute(forward_batch)


def load_model_blocking(
    config: EngineConfig, model_config: ModelConfig, folder: Path, placement: Placement
) -> LlamaForCausalLM:
    """The model with its weights in place, laid out for the device. Raises ConfigError."""
    model = build_model(
        model_config,
        max_position=longest_sequence(config, model_config),
        dtype=placement.dtype,
        device=placement.device,
    )
    if config.load_format == "dummy":
        fill_dummy_weights(model)
    else:
        load_weights(model, iterate_tensors(folder, placement.device))
    model.finish(row_bucket=ROW_BUCKET if config.row_invariant else None)
    return model
