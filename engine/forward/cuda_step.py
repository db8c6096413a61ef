"""One step on CUDA lanes: decode steps by graph, all others through the runners, one sampler for both."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..sampling.cuda_sampler import CudaSampler, SampleKind
from ..worker import SampleInputs, StepOutcome
from .decode_graph_runner import DecodeGraphRunner, Drawable
from .row_samplings import RowSamplings
from .staged_step import StagedStep, pack
from .step_extras import StepExtras
from .step_parts import StepFault, rows_not_finite

if TYPE_CHECKING:
    from ...streams.staging import Slot
    from ..sampling.token_counts import TokenCounts
    from ..scheduler.schedule_batch import ScheduleBatch
    from .model_runner import ModelRunner
    from .prefill_graph_runner import PrefillGraphRunner
    from .step_parts import Stage


@dataclass(slots=True, kw_only=True)
class CudaParts:
    """What the steps of one CUDA device share. Loop thread and compute lane only."""

    runner: ModelRunner
    sampler: CudaSampler
    decode_graphs: DecodeGraphRunner | None
    prefill_graphs: PrefillGraphRunner | None
    samplings: RowSamplings
    counts: TokenCounts
    device: torch.device
    stage: Stage
    memory_table: str  # what the start took of the device, for people
    # Rows of logits that are computed at once, ascending; the last is the most there are.
    logits_counts: tuple[int, ...]
    dead_shipped: bool = False  # the device's dead flags are not all clear
    kind: SampleKind = SampleKind.GREEDY
    kind_of_rows: tuple[int, ...] | None = None

    def num_logits(self, num_samples: int) -> int:
        """How many rows of logits a step computes. For a number that it has not seen cuBLAS may load another kernel,
        which takes 20 ms in the middle of serving; these it has.
        """
        return self.logits_counts[bisect_left(self.logits_counts, num_samples)] if num_samples else 0

    def release(self) -> None:
        """No step comes any more: let the graphs go."""
        for graphs in (self.decode_graphs, self.prefill_graphs):
            if graphs is not None:
                graphs.release()


class CudaStep:
    """A step's parts in order: made and `stage_sample` on the loop thread, `forward` and `sample` on the compute lane,
    `copy_out` on the copy lane, `read` on any thread once all that has run. Lifetime: until its ticket is done.
    """

    def __init__(self, parts: CudaParts, batch: ScheduleBatch, slot: Slot) -> None:
        self._parts = parts
        self._batch = batch
        self._slot = slot
        self._fault = StepFault(batch.step)
        self._drawable: Drawable | None = None
        self._dead_cpu: torch.Tensor | None = None
        self._results_cpu: torch.Tensor | None = None
        self._dead: frozenset[int] = frozenset()
        if batch.starts:
            parts.samplings.apply(batch.starts)
            parts.kind_of_rows = None
        vocab_size = parts.runner.model.config.vocab_size
        self._extras = StepExtras(
            batch, slot, parts.stage, vocab_size=vocab_size, device=parts.device, counts=parts.counts
        )
        graphs = parts.decode_graphs
        self._by_graph = graphs is not None and graphs.can_run(batch)
        self._block_cpu: torch.Tensor | None = None
        self._widths: tuple[int, ...] = ()  # of the block's columns, where no graph reads it
        if graphs is not None and self._by_graph:
            packed = graphs.block_of(batch)
            self._block_cpu = parts.stage(slot, packed) if packed is not None else None
        else:
            if graphs is not None:
                graphs.forget_block()
            columns, self._widths = pack(batch, num_logits=parts.num_logits(len(batch.sample_indices)))
            self._block_cpu = parts.stage(slot, columns)

    def forward(self) -> None:
        """Take the staged integers to the device and compute the logits."""
        self._fault.attempt(self._forward_by_graph if self._by_graph else self._forward_by_runner)

    def stage_sample(self, inputs: SampleInputs) -> None:
        """Take what the host adds to the sample, and find out which kernels it needs."""
        parts, batch = self._parts, self._batch
        self._dead = inputs.dead
        sampling = batch.sample_indices
        if batch.rows != parts.kind_of_rows:
            _, needs = parts.samplings.random_among(batch.rows[index] for index in sampling)
            parts.kind = SampleKind.of(needs)
            parts.kind_of_rows = batch.rows if len(sampling) == batch.num_rows else None
        self._kind = parts.kind
        place = {index: k for k, index in enumerate(sampling)} if inputs.dead else {}
        dead = [place[index] for index in inputs.dead if index in place]
        if dead or parts.dead_shipped:
            flags = bytearray(len(sampling) + -len(sampling) % 4)
            for k in dead:
                flags[k] = 1
            self._dead_cpu = parts.stage(self._slot, bytes(flags)).view(torch.uint8)
            parts.dead_shipped = bool(dead)
        self._extras.stage(inputs)

    def sample(self) -> None:
        """Draw, and leave the ids in the relay for the next step. The logits are let go."""
        self._fault.attempt(self._sample)
        self._drawable = None

    def copy_out(self) -> None:
        """Copy the results into the step's slot."""

        def copy() -> None:
            self._extras.copy_out()
            if self._results_cpu is not None:
                results = self._parts.sampler.results
                self._results_cpu.copy_(results[: self._results_cpu.shape[0]], non_blocking=True)

        self._fault.attempt(copy)

    def read(self) -> StepOutcome:
        """The outcome. Raises what `StepFault` does if a part failed."""
        self._fault.raise_if_any()
        if self._results_cpu is None:
            return self._extras.outcome((), {})
        num_samples = sum(self._batch.samples)
        values = self._results_cpu.tolist()
        failed = values[len(values) // 2 :][:num_samples]
        row_errors = rows_not_finite(self._batch, failed, self._dead) if any(failed) else {}
        return self._extras.outcome(tuple(values[:num_samples]), row_errors)

    def _forward_by_graph(self) -> None:
        graphs = self._parts.decode_graphs
        if graphs is not None:
            self._parts.runner.num_forwards[type(graphs).__name__] += 1
            self._drawable = graphs.execute(self._batch, self._block_cpu)
            if self._drawable.states is not None:
                self._extras.keep_hidden(self._parts.runner.model, self._drawable.states)

    def _forward_by_runner(self) -> None:
        parts = self._parts
        assert self._block_cpu is not None
        self._extras.start_rows()
        staged = StagedStep.of(self._block_cpu.to(parts.device, non_blocking=True), self._widths)
        batch, output = parts.runner.forward(self._batch, staged)
        self._extras.score_prompts(parts.runner.model, output.states)
        self._extras.pool(parts.runner.model, output.states)
        self._extras.keep_hidden(parts.runner.model, output.states)
        if batch.num_samples:
            self._drawable = Drawable(
                logits=output.logits,
                rows=batch.sample_rows,
                num_rows=parts.sampler.counts[batch.num_samples : batch.num_samples + 1],
                lengths=batch.sample_lens,
                bucket=None,
            )

    def _sample(self) -> None:
        drawable, sampler = self._drawable, self._parts.sampler
        if drawable is None:
            return
        if self._dead_cpu is not None:
            sampler.dead[: self._dead_cpu.shape[0]].copy_(self._dead_cpu, non_blocking=True)
        # In the logits' own precision: a kernel for another one would be compiled in the middle of serving.
        self._extras.before_draw(drawable.logits, drawable.rows, drawable.lengths)
        if drawable.bucket is not None:
            drawable.bucket.samples[self._kind].replay()
        else:
            sampler.draw(drawable.logits, drawable.rows, drawable.num_rows, drawable.lengths, self._kind)
        self._extras.after_draw(sampler.results[: drawable.logits.shape[0]])
        self._results_cpu = self._slot.take((2 * drawable.logits.shape[0],), torch.int32)
