"""Prefill and mixed steps as CUDA graphs by token bucket: embedding and layers captured, final norm and LM head eager on
the rows that sample, so that a graph does not depend on the number of requests.

    breakable   [ embed · norm · qkv · rope+KV ] ─ attention ─ [ o · norm · MLP · norm · qkv · rope+KV ] ─ attention ─ …
    full        one graph, attention inside, for few rows: token bucket × row slots

What crosses the gaps, and what goes in and out, lies in buffers that all graphs share. Padded tokens have id 0,
position 0 and slot 0 (page 0 is nobody's), and no attention.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from ...streams.breakable_graph import BreakableGraph, GraphBreaks
from ...streams.graph import CapturedGraph, GraphPool
from ..attention.backend import AttentionBackend, AttentionPlan, GraphBucket, StepAttention, prepare_step
from .forward_context import ForwardContext
from .forward_output import ForwardOutput

if TYPE_CHECKING:
    from ...streams.graph import Graph
    from ..models.llama import LlamaForCausalLM
    from .forward_batch import ForwardBatch
    from .kv_pool import KVPool

# Request slots of a full graph: an empty one costs a few idle programs a layer.
FULL_ROWS: Final = 16


def prefill_buckets(max_tokens: int) -> tuple[int, ...]:
    """Token counts that get a graph, ascending, `max_tokens` the last: fine where a step is short, and never more than
    an eighth of padding above 128 tokens.
    """
    steps = ((4, 1), (16, 4), (64, 8), (256, 16), (512, 32), (1024, 64), (2048, 128))
    sizes = [1]
    for end, step in steps:
        while sizes[-1] < min(end, max_tokens):
            sizes.append(sizes[-1] // step * step + step)
    while sizes[-1] < max_tokens:
        sizes.append(sizes[-1] + 256)
    return (*[size for size in sizes if size < max_tokens], max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrefill:
    """What prefill graphs without gaps need. `attention`: a backend that can stand inside a graph; `page_table`: leased
    from the row state. `max_tokens`: the largest bucket that gets one.
    """

    attention: AttentionBackend
    page_table: torch.Tensor
    max_tokens: int


class PrefillGraphRunner:
    """Owns the graphs and their buffers. Home: the compute lane. Lifetime: the worker's.

    `debug`: the whole forward is one eager break: the buffers and the replay of a graph, and no kernel captured.
    Counters: `num_hits` and `num_misses` of steps with new prompt tokens.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_pool: KVPool,
        *,
        decode_attention: AttentionBackend,
        extend_attention: AttentionBackend,
        max_tokens: int,
        breakable: bool = True,
        full: FullPrefill | None = None,
        debug: bool = False,
    ) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._decode_attention = decode_attention
        self._extend_attention = extend_attention
        self._full = full
        self._debug = debug
        device = model.embedding.device
        self._breaks = GraphBreaks(device)
        self._attend = self._breaks.eager_on_graph(self._attend_live)
        self._buffers = _Buffers.make(model, max_tokens)
        sizes = prefill_buckets(max_tokens)
        self._breakable_sizes = sizes if breakable else ()
        self._full_sizes = tuple(size for size in sizes if full is not None and size <= full.max_tokens)
        self._breakable: dict[int, Graph[None]] = {}
        self._full_graphs: dict[int, Graph[None]] = {}
        self._live: _LiveStep | None = None
        self.num_hits = 0
        self.num_misses = 0
        self.capture_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, graphs not counted."""
        return self._buffers.num_bytes + self._breaks.arena.nbytes

    @property
    def num_graphs(self) -> int:
        return len(self._breakable) + len(self._full_graphs)

    def capture_blocking(self, pool: GraphPool) -> None:
        """Capture every bucket, largest first. Stops the host; called once, before the first step."""
        started = time.perf_counter()
        if self._full is not None:
            self._full.attention.graph_state(FULL_ROWS, self._buffers.ids.shape[0], self._full.page_table)
        # Each capture collects garbage: let it not look at everything that lives already.
        gc.collect()
        gc.freeze()
        try:
            with torch.inference_mode():
                for size in reversed(self._breakable_sizes):
                    self._breakable[size] = self._capture_breakable(size, pool)
                for size in reversed(self._full_sizes):
                    self._full_graphs[size] = self._capture_full(size, pool)
        finally:
            gc.unfreeze()
        self.capture_s = time.perf_counter() - started

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a graph serves this step; counted."""
        if not batch.mode.has_extend:
            return False
        fits = self._choose(batch) is not None
        self.num_hits += fits
        self.num_misses += not fits
        return fits

    def execute(self, batch: ForwardBatch) -> ForwardOutput:
        """Replay the smallest bucket that holds the step. The logits are the step's own."""
        chosen = self._choose(batch)
        if chosen is None:
            raise ValueError("no graph serves this batch: ask can_run first")
        size, is_full = chosen
        num_tokens = batch.num_tokens
        self._buffers.fill(batch, size)
        if is_full and self._full is not None:
            self._full.attention.prepare_replay(GraphBucket(num_rows=FULL_ROWS, num_tokens=size), batch)
            self._full_graphs[size].replay()
        else:
            attention = prepare_step(self._decode_attention, self._extend_attention, batch)
            self._live = _LiveStep(attention=attention, num_tokens=num_tokens)
            try:
                self._breakable[size].replay()
            finally:
                self._live = None
        return ForwardOutput(logits=self._model.logits(self._buffers.hidden[:num_tokens], batch.logits_indices))

    def _choose(self, batch: ForwardBatch) -> tuple[int, bool] | None:
        """The bucket for this step, and whether as a full graph."""
        if not batch.mode.has_decode and batch.num_rows <= FULL_ROWS:
            size = _bucket_of(self._full_sizes, batch.num_tokens)
            if size is not None:
                return size, True
        size = _bucket_of(self._breakable_sizes, batch.num_tokens)
        return None if size is None else (size, False)

    def _attend_live(self, layer: int) -> None:
        """The gap of one layer: attention of the step that is replayed; nothing while graphs are captured."""
        live, buffers = self._live, self._buffers
        if live is not None:
            tokens = slice(0, live.num_tokens)
            live.attention.forward(buffers.queries[tokens], layer, buffers.attended[tokens])

    def _capture_breakable(self, size: int, pool: GraphPool) -> BreakableGraph[None]:
        attention = _AttentionInGap(attend=self._attend, attended=self._buffers.attended[:size])
        forward = self._forward_of(size, attention)
        return BreakableGraph(self._breaks.eager_on_graph(forward) if self._debug else forward, pool, self._breaks)

    def _capture_full(self, size: int, pool: GraphPool) -> Graph[None]:
        if self._full is None:
            raise ValueError("there is no attention for full graphs")
        backend, bucket = self._full.attention, GraphBucket(num_rows=FULL_ROWS, num_tokens=size)
        attended = self._buffers.attended[:size]

        def forward() -> None:
            plan = backend.prepare_capture(bucket)
            self._forward_of(size, _AttentionInside(plan=plan, attended=attended))()

        if self._debug:
            return BreakableGraph(self._breaks.eager_on_graph(forward), pool, self._breaks)
        return CapturedGraph(forward, pool)

    def _forward_of(self, size: int, attention: _AttentionInGap | _AttentionInside) -> Callable[[], None]:
        buffers = self._buffers
        ctx = ForwardContext(
            input_ids=buffers.ids[:size],
            positions=buffers.positions[:size],
            slots=buffers.slots[:size],
            kv_pool=self._kv_pool,
            attention=attention,
            queries=buffers.queries[:size],
            hidden=buffers.hidden[:size],
        )

        def forward() -> None:
            self._model(ctx)

        return forward


def _bucket_of(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The smallest size that holds the tokens, unless most of it would be padding."""
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes) or sizes[index] > 2 * num_tokens:
        return None
    return sizes[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveStep:
    """The step that is replayed now."""

    attention: StepAttention
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionInGap:
    """Attention that runs eagerly between two segments, from buffer to buffer."""

    attend: Callable[[int], None]
    attended: torch.Tensor

    def forward(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        self.attend(layer)
        return self.attended


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionInside:
    """Attention that is captured with the rest."""

    plan: AttentionPlan
    attended: torch.Tensor

    def forward(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self.plan.extend(q, layer, self.attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """Static tensors of all graphs, written on the compute lane only.

    Shapes, for T = the largest bucket: ids, slots [T] int64; positions [T] int32; queries, attended [T, Hq, D];
    hidden [T, hidden].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    queries: torch.Tensor
    attended: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def make(cls, model: LlamaForCausalLM, num_tokens: int) -> _Buffers:
        config, weight = model.config, model.embedding

        def zeros(*shape: int, dtype: torch.dtype = weight.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=weight.device)

        return cls(
            ids=zeros(num_tokens, dtype=torch.int64),
            positions=zeros(num_tokens, dtype=torch.int32),
            slots=zeros(num_tokens, dtype=torch.int64),
            queries=zeros(num_tokens, config.num_heads, config.head_dim),
            attended=zeros(num_tokens, config.num_heads, config.head_dim),
            hidden=zeros(num_tokens, config.hidden_size),
        )

    @property
    def num_bytes(self) -> int:
        tensors = (self.ids, self.positions, self.slots, self.queries, self.attended, self.hidden)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Take the step's tokens in, and make the rest of the bucket padding."""
        num_tokens = batch.num_tokens
        self.ids[:num_tokens].copy_(batch.input_ids)
        self.positions[:num_tokens].copy_(batch.positions)
        self.slots[:num_tokens].copy_(batch.kv_loc.slots)
        if num_tokens < size:
            padded = slice(num_tokens, size)
            # `attended` too: no layer writes what lies behind the step's tokens, and it must stay finite.
            for static in (self.ids, self.positions, self.slots, self.attended):
                static[padded].zero_()
