"""Prefill and mixed steps as CUDA graphs by token bucket: captured up to the last layer's attention; what follows is eager,
on the rows that sample, so that a graph does not depend on the number of requests.

    breakable   [ embed · norm · qkv · rope+KV ] ─ attention ─ [ o · norm · MLP · norm · qkv · rope+KV ] ─ attention ─ …
    extend      [ embed · norm · qkv · rope+KV ] ─ plan ─ [ attention · … ], token bucket × slots for rows with prompts
    mixed       the same, with slots for decode rows
    fresh       the same, for one long prompt without a prefix, which attends to what the step itself has made

The device starts on a first segment before the host plans attention or launches the long second one. What crosses the
gaps, and what goes in and out, lies in buffers that all graphs share. Padded tokens have id 0, position 0 and slot 0
(page 0 is nobody's), and no attention.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import torch

from ...streams.breakable_graph import BreakableGraph, GraphBreaks
from ...streams.graph import GraphPool, noting
from ..attention.backend import AttentionBackend, AttentionPlan, GraphBucket, StepAttention, prepare_step
from ..attention.fresh_prompt import FreshKV, FreshPrompt
from .forward_context import ForwardContext
from .forward_output import ForwardOutput, TokenStates
from .token_inputs import TokenInputs

if TYPE_CHECKING:
    from ...streams.graph import Graph
    from ..models.llama import LlamaForCausalLM
    from .forward_batch import ForwardBatch
    from .kv_pool import KVPool

Kind = Literal["breakable", "extend", "mixed", "fresh"]

# Slots for rows with prompts in a graph with attention inside. An empty one costs at most some idle programs a layer.
EXTEND_SLOTS: Final = 32
# Measured on an H200: a step of 128 tokens takes 1.51 ms with Triton and 1.77 with a plan for FlashAttention-3, one of 2,048
# takes 5.95 and 5.66 (0.6B shape).
SHORT_TOKENS: Final = 1024
# So many decode rows beside a whole chunk have a graph that fits.
FEW_BESIDE: Final = (0, 16, 32, 64, 128)


def prefill_buckets(max_tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    """Token counts that get a graph, ascending, `max_tokens` the last: fine where a step is short and right above a whole
    chunk, which has decode rows beside it, and never more than an eighth of padding above 128 tokens.
    """
    steps = ((4, 1), (16, 4), (64, 8), (256, 16), (512, 32), (1024, 64), (2048, 128))
    sizes = [1]
    for end, step in steps:
        while sizes[-1] < min(end, max_tokens):
            sizes.append(sizes[-1] // step * step + step)
    while sizes[-1] < max_tokens:
        sizes.append(sizes[-1] + 256)
    sizes += [*(chunk_tokens + few for few in FEW_BESIDE), max_tokens]
    return tuple(sorted({size for size in sizes if size <= max_tokens}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttention:
    """The backends of prefill steps: `decode` for the decode rows of mixed ones; `short`, if there is one that plans on
    the device, inside graphs of up to SHORT_TOKENS, where a plan on the host would cost more than it saves; `fresh`, if
    there is one, for a prompt that is a step by itself, in graphs from SHORT_TOKENS on.
    """

    decode: AttentionBackend
    extend: AttentionBackend
    short: AttentionBackend | None = None
    fresh: FreshPrompt | None = None

    def extend_inside(self, num_tokens: int) -> AttentionBackend:
        """The backend of the extend rows inside a graph of so many tokens."""
        return self.short if self.short is not None and num_tokens <= SHORT_TOKENS else self.extend

    def kinds(self, mode: Literal["full", "breakable"]) -> tuple[Kind, ...]:
        """The kinds of graphs that `mode` means with these backends."""
        decode, extend = self.decode.capabilities, self.extend.capabilities
        if mode == "breakable":
            return ("breakable",) if "breakable" in extend.graph_modes & decode.graph_modes else ()
        if "full" not in extend.graph_modes:
            return ()
        kinds: tuple[Kind, ...] = ("extend",) if self.fresh is None else ("extend", "fresh")
        # Decode rows that are planned on the host have their plan outside the graph.
        return (*kinds, "mixed") if "full" in decode.graph_modes and not decode.needs_host_plan else kinds


class PrefillGraphRunner:
    """Owns the graphs and their buffers. Home: the compute lane. Lifetime: the worker's.

    `tokens`: where steps leave their tokens; as many of them as the largest bucket has. `chunk_tokens`: at most so many of a
    step's tokens are of prompts. `page_table`: leased from the row state. `debug`: the whole forward is one eager break: the
    buffers and the replay of a graph, no kernel captured.
    Counters: `num_hits` and `num_misses` of steps with new prompt tokens.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_pool: KVPool,
        attention: PrefillAttention,
        tokens: TokenInputs,
        *,
        kinds: Sequence[Kind],
        chunk_tokens: int,
        page_table: torch.Tensor,
        debug: bool = False,
    ) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._page_table = page_table
        self._debug = debug
        self._breaks = GraphBreaks(model.embedding.device)
        self._tokens = tokens
        self._buffers = _Buffers.make(model, tokens.capacity)
        self._max_decode = page_table.shape[0] - 1
        sizes = prefill_buckets(tokens.capacity, chunk_tokens)
        # Mixed steps are long or few: coarser buckets do.
        coarse = tuple(
            size for size in sizes if size % 64 == 0 or size - chunk_tokens in FEW_BESIDE or size == sizes[-1]
        )
        alone = tuple(size for size in sizes if size <= chunk_tokens)
        long = tuple(size for size in alone if size >= SHORT_TOKENS)
        of_kind: dict[Kind, tuple[int, ...]] = {"breakable": sizes, "extend": alone, "mixed": coarse, "fresh": long}
        self._sizes: dict[Kind, tuple[int, ...]] = {kind: of_kind[kind] for kind in kinds}
        self._graphs: dict[tuple[Kind, int], Graph[None]] = {}
        self._live: _LiveStep | None = None
        self.num_hits = 0
        self.num_misses = 0
        self.capture_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, graphs not counted."""
        fresh = self._attention.fresh.num_bytes if self._attention.fresh is not None and "fresh" in self._sizes else 0
        return self._buffers.num_bytes + self._breaks.arena.nbytes + self._tokens.num_bytes + fresh

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def capture_blocking(self, pool: GraphPool) -> None:
        """Capture every bucket, largest first. Stops the host; called once, before the first step."""
        started = time.perf_counter()
        largest = self._bucket("mixed", self._tokens.capacity)
        if self._sizes.keys() & {"extend", "mixed"}:
            backends = [self._attention.extend_inside(size) for size in (1, self._tokens.capacity)]
            if "mixed" in self._sizes:
                backends.append(self._attention.decode)
            for backend in dict.fromkeys(backends):
                backend.graph_state(largest, self._page_table)
        with torch.inference_mode():
            for size in sorted(set().union(*self._sizes.values()), reverse=True):
                for kind, sizes in self._sizes.items():
                    note = f"while the prefill graph ({kind}) of {size} tokens was captured; prefill_graph=off does without"
                    if size in sizes:
                        with noting(note):
                            self._graphs[kind, size] = self._capture(kind, size, pool)
        self.capture_s = time.perf_counter() - started

    def release(self) -> None:
        """Let the graphs go. They refer to this runner, so without this only the cycle collector would free any of it."""
        self._graphs.clear()

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
        kind, size = chosen
        num_tokens = batch.num_tokens
        self._fill(batch, size)
        attention = prepare_step(self._attention.decode, self._attention.extend, batch) if kind == "breakable" else None
        self._live = _LiveStep(batch=batch, attention=attention)
        try:
            self._graphs[chosen].replay()
        finally:
            self._live = None
        buffers = self._buffers
        states = TokenStates(residual=buffers.hidden[:num_tokens], attended=buffers.attended[:num_tokens])
        return ForwardOutput(logits=self._model.logits(states, batch.logits_indices), states=states)

    def _choose(self, batch: ForwardBatch) -> tuple[Kind, int] | None:
        """The graph for this step."""
        inside: Kind = "mixed" if batch.mode.has_decode else "extend"
        kinds: list[Kind] = ["breakable"]
        if batch.num_rows - batch.num_decode <= EXTEND_SLOTS:
            kinds.insert(0, inside)
        for kind in kinds:
            size = _bucket_of(self._sizes.get(kind, ()), batch.num_tokens)
            if size is not None:
                return "fresh" if kind == "extend" and self._is_fresh(batch, size) else kind, size
        return None

    def _is_fresh(self, batch: ForwardBatch, size: int) -> bool:
        """Whether the step is one prompt without a prefix, and its bucket has a graph for that."""
        return batch.num_rows == 1 and not batch.prefix_lens_cpu[0] and ("fresh", size) in self._graphs

    def _fill(self, batch: ForwardBatch, size: int) -> None:
        """Have the step's tokens in the graphs' places, and make the rest of the bucket padding."""
        num_tokens, tokens = batch.num_tokens, self._tokens
        padded = slice(num_tokens, size)
        if not tokens.holds(batch.input_ids):
            derived = (batch.input_ids, batch.positions, batch.kv_loc.slots)
            for place, values in zip((tokens.ids, tokens.positions, tokens.slots), derived, strict=True):
                place[:num_tokens].copy_(values)
                place[padded].zero_()
        if num_tokens < size:
            # No layer writes what lies behind the step's tokens, and it must stay finite.
            self._buffers.attended[padded].zero_()

    def _plan_live(self, kind: Kind, size: int) -> None:
        """The gap ahead of attention inside a graph: its plan for the step that is replayed, and none for a capture."""
        live = self._live
        if live is None:
            return
        decode, extend = self._attention.decode, self._attention.extend_inside(size)
        bucket, has_decode = self._bucket(kind, size), kind == "mixed"
        extend.prepare_replay(bucket, live.batch, decode=has_decode and decode is extend, extend=True)
        if has_decode and decode is not extend:
            decode.prepare_replay(bucket, live.batch, decode=True, extend=False)

    def _plan_fresh(self, fresh: FreshPrompt) -> None:
        """The same gap of a graph for a fresh prompt."""
        if self._live is not None:
            fresh.plan(self._live.batch.num_tokens)

    def _attend_live(self, layer: int) -> None:
        """The gap of one layer: attention of the step that is replayed; nothing while graphs are captured."""
        live, buffers = self._live, self._buffers
        if live is not None and live.attention is not None:
            tokens = slice(0, live.batch.num_tokens)
            live.attention.forward(buffers.queries[tokens], layer, buffers.attended[tokens])

    def _bucket(self, kind: Kind, size: int) -> GraphBucket:
        num_decode = min(self._max_decode, size) if kind == "mixed" else 0
        return GraphBucket(num_decode=num_decode, num_extend=EXTEND_SLOTS, num_tokens=size)

    def _capture(self, kind: Kind, size: int, pool: GraphPool) -> Graph[None]:
        attended = self._buffers.attended[:size]
        attention: _AttentionInGap | _AttentionInside
        fresh = self._attention.fresh if kind == "fresh" else None
        if fresh is not None:
            fresh.plan_padding(size)
            kv = fresh.kv.first(size)
            plan = self._breaks.eager_on_graph(partial(self._plan_fresh, fresh))
            attention = _AttentionInside(plan=plan, decode=None, extend=fresh, attended=attended, fresh=kv)
        elif kind == "breakable":
            attention = _AttentionInGap(attend=self._breaks.eager_on_graph(self._attend_live), attended=attended)
        else:
            bucket = self._bucket(kind, size)
            backend = self._attention.extend_inside(size)
            extend = backend.prepare_capture(bucket)
            decode = None
            if kind == "mixed":
                is_same = self._attention.decode is backend
                decode = extend if is_same else self._attention.decode.prepare_capture(bucket)
            plan = self._breaks.eager_on_graph(partial(self._plan_live, kind, size))
            attention = _AttentionInside(plan=plan, decode=decode, extend=extend, attended=attended)
        forward = self._forward_of(size, attention)
        return BreakableGraph(self._breaks.eager_on_graph(forward) if self._debug else forward, pool, self._breaks)

    def _forward_of(self, size: int, attention: _AttentionInGap | _AttentionInside) -> Callable[[], None]:
        tokens, buffers = self._tokens.first(size), self._buffers
        ctx = ForwardContext(
            input_ids=tokens.ids,
            positions=tokens.positions,
            slots=tokens.slots,
            kv_pool=self._kv_pool,
            attention=attention,
            queries=buffers.queries[:size],
            hidden=buffers.hidden[:size],
            fresh=attention.fresh,
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
    """The step that is replayed now. `attention`: planned already, where it runs in the gaps."""

    batch: ForwardBatch
    attention: StepAttention | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionInGap:
    """Attention that runs eagerly between two segments, from buffer to buffer."""

    attend: Callable[[int], None]
    attended: torch.Tensor
    fresh: None = None

    def forward(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        self.attend(layer)
        return self.attended


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionInside:
    """Attention that is captured with the rest, behind the gap in which it is planned."""

    plan: Callable[[], None]
    decode: AttentionPlan | None
    extend: AttentionPlan | FreshPrompt
    attended: torch.Tensor
    fresh: FreshKV | None = None

    def forward(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        if layer == 0:
            self.plan()
        if self.decode is not None:  # first: its padded slots are extend rows' tokens
            self.decode.decode(q, layer, self.attended)
        return self.extend.extend(q, layer, self.attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """What layers leave each other in every graph. Shapes, for T = the largest bucket: queries, attended [T, Hq, D];
    hidden [T, hidden].
    """

    queries: torch.Tensor
    attended: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def make(cls, model: LlamaForCausalLM, num_tokens: int) -> _Buffers:
        config, weight = model.config, model.embedding

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

        return cls(
            queries=zeros(num_tokens, config.num_heads, config.head_dim),
            attended=zeros(num_tokens, config.num_heads, config.head_dim),
            hidden=zeros(num_tokens, config.hidden_size),
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.queries, self.attended, self.hidden))
