"""Decode steps as CUDA graphs by row bucket: one small copy and one launch a step, whatever the model's depth.

    host    rows, new page-table entries ── one copy ──▶ static block
    graph   table writes · prologue (ids, positions, slots, embedding) · plan · layers · LM head ──▶ logits, hidden states
    graph   sample (resolved later) ──▶ ids, relay

Everything a step needs beyond the block is on the device already: lengths, next ids, page tables, parameters. Hidden
states are given where the graphs are captured for them (`hidden_states`); a step that asks for more is not a graph's.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from ...streams.breakable_graph import BreakableGraph, GraphBreaks
from ...streams.graph import CapturedGraph, Graph, GraphPool, noting
from ..hidden_mode import HiddenMode, is_above
from ..kernels.step_prologue import StepInputs, empty_step_inputs
from ..kernels.table_writes import table_writes
from ..models.fused_decoder import DecodeRows
from ..sampling.cuda_sampler import CudaSampler, SampleKind

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import ScheduleBatch
    from .forward_output import ForwardOutput, TokenStates
    from .row_state import RowState

_MAX_WRITES: Final = 1024  # page-table entries of one step; more of them make it an eager step
_HEADER: Final = 2  # number of rows, number of table writes


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that get a graph, ascending: fine where a step is short, at most a fifth of padding above."""
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, max(max_rows, 1) + 64, 64)
    return (*[size for size in sizes if size < max_rows], max_rows)


class DecodeForward(Protocol):
    """A decode forward on static tensors."""

    def forward(self, step: DecodeRows, inputs: StepInputs) -> ForwardOutput: ...


class Captured(NamedTuple):
    """What a captured forward writes. Shapes: logits [B, vocab]; states of B tokens, None where graphs are captured without,
    whose memory is used again.
    """

    logits: torch.Tensor
    states: TokenStates | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawable:
    """What a forward leaves for its sample, on the compute lane. Shapes: logits [B, vocab]; rows, lengths [B]; num_rows [1];
    states of B tokens, of a graph that gives them.

    Lifetime: of a graph's logits and hidden states until the next replay, which is launched after the sample.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    num_rows: torch.Tensor
    lengths: torch.Tensor
    bucket: DecodeBucket | None
    states: TokenStates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBucket:
    """The graphs of one row count."""

    num_rows: int
    inputs: StepInputs
    drawable_rows: torch.Tensor
    forward: Graph[Captured]
    samples: dict[SampleKind, CapturedGraph[None]]


class DecodeGraphRunner:
    """Owns the static block and the graphs. Home: the compute lane. Lifetime: the worker's."""

    def __init__(
        self,
        decoder: DecodeForward,
        row_state: RowState,
        sampler: CudaSampler,
        *,
        max_rows: int,
        hidden_states: HiddenMode = "none",
        breaks: GraphBreaks | None = None,
        is_debug: bool = False,
    ) -> None:
        """`hidden_states`: the most that steps may ask of the graphs. `breaks`: those of a decoder that breaks; `is_debug`: the
        whole forward is one of them, and no kernel of it is captured.
        """
        device = row_state.page_table.device
        self._decoder = decoder
        self._hidden_states: HiddenMode = hidden_states
        self._breaks = breaks
        self._is_debug = is_debug
        self._row_state = row_state
        self._sampler = sampler
        self._max_rows = max_rows
        self._block = torch.zeros(_HEADER + max_rows + 3 * _MAX_WRITES, dtype=torch.int32, device=device)
        self._num_rows = self._block[:1]
        self._num_writes = self._block[1:2]
        self._rows = self._block[_HEADER : _HEADER + max_rows]
        self._writes = self._block[_HEADER + max_rows :].view(3, _MAX_WRITES)
        self._buckets: list[DecodeBucket] = []
        self._shipped: tuple[int, ...] | None = None  # rows that the block holds, with no writes
        self.num_hits = 0
        self.num_misses = 0

    def capture_blocking(self, pool: GraphPool) -> None:
        """Capture every bucket, largest first. Stops the host; called once, before the first step."""
        for num_rows in reversed(decode_buckets(self._max_rows)):
            with noting(f"while the decode graph of {num_rows} rows was captured; decode_graph=off does without"):
                self._buckets.insert(0, self._capture(num_rows, pool))
        # Warm-up and capture ran real prologues over row 0.
        self._row_state.lengths.zero_()

    def release(self) -> None:
        """Let the graphs go. They refer to this runner, so without this only the cycle collector would free any of it."""
        self._buckets.clear()

    def can_run(self, batch: ScheduleBatch) -> bool:
        """Whether a graph serves this step; counted."""
        fits = (
            batch.mode.fits_decode_graph
            and 0 < batch.num_rows <= self._max_rows
            and len(batch.table_rows) <= 4 * _MAX_WRITES
            and not is_above(batch.hidden_mode, self._hidden_states)
        )
        if batch.mode.fits_decode_graph:
            self.num_hits += fits
            self.num_misses += not fits
        return fits

    def block_of(self, batch: ScheduleBatch) -> bytes | None:
        """What has to be copied into the static block, packed int32; None if it holds all of it already."""
        num_writes = len(batch.table_rows) // 4
        if not num_writes and batch.rows == self._shipped:
            return None
        self._shipped = None if num_writes else batch.rows
        parts = [array("i", (batch.num_rows, num_writes)).tobytes(), array("i", batch.rows).tobytes()]
        if num_writes:
            parts.append(bytes(4 * (self._max_rows - batch.num_rows)))
            gap = bytes(4 * (_MAX_WRITES - num_writes))
            parts += (batch.table_rows, gap, batch.table_columns, gap, batch.table_pages)
        return b"".join(parts)

    def forget_block(self) -> None:
        """A step that is not a graph's was launched: rows may have changed hands since the block was shipped."""
        self._shipped = None

    def execute(self, batch: ScheduleBatch, block_cpu: torch.Tensor | None) -> Drawable:
        """Replay the smallest bucket that holds the step. `block_cpu`: `block_of` in pinned memory."""
        if block_cpu is not None:
            self._block[: block_cpu.shape[0]].copy_(block_cpu, non_blocking=True)
        bucket = next(bucket for bucket in self._buckets if bucket.num_rows >= batch.num_rows)
        output = bucket.forward.replay()
        return Drawable(
            logits=output.logits,
            rows=bucket.drawable_rows,
            num_rows=self._num_rows,
            lengths=bucket.inputs.seq_lens,
            bucket=bucket,
            states=output.states,
        )

    def _capture(self, num_rows: int, pool: GraphPool) -> DecodeBucket:
        step = DecodeRows(rows=self._rows[:num_rows], num_rows=self._num_rows)
        inputs = empty_step_inputs(num_rows, self._block.device)

        def forward() -> Captured:
            table_writes(self._num_writes, self._writes, self._row_state.page_table)
            output = self._decoder.forward(step, inputs)
            return Captured(output.logits, None if self._hidden_states == "none" else output.states)

        captured: Graph[Captured]
        if self._breaks is None:
            captured = CapturedGraph(forward, pool, warmups=1)
        elif self._is_debug:
            captured = BreakableGraph(self._breaks.eager_on_graph(forward), pool, self._breaks, warmups=1)
        else:
            captured = BreakableGraph(forward, pool, self._breaks, warmups=1)
        logits = captured.output.logits

        def draw(kind: SampleKind) -> None:
            self._sampler.draw(logits, step.rows, self._num_rows, inputs.seq_lens, kind)

        samples = {kind: CapturedGraph(lambda kind=kind: draw(kind), pool, warmups=1) for kind in SampleKind}  # type: ignore[misc]
        return DecodeBucket(
            num_rows=num_rows, inputs=inputs, drawable_rows=step.rows, forward=captured, samples=samples
        )
