"""One step on the CPU's lane, in torch operations throughout: the twin of `cuda_step.py` part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..sampling.sampler import Sampled, Sampler, SampleRequest
from ..worker import SampleInputs, StepOutcome
from .row_samplings import RowSamplings
from .staged_sample import SampleBlock, StagedSample
from .staged_step import StagedStep, pack
from .step_extras import StepExtras
from .step_parts import StepFault, rows_not_finite

if TYPE_CHECKING:
    from ...streams.staging import Slot
    from ..scheduler.schedule_batch import ScheduleBatch
    from .forward_batch import ForwardBatch
    from .forward_output import ForwardOutput
    from .model_runner import ModelRunner
    from .step_parts import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchParts:
    """What the steps of one device share."""

    runner: ModelRunner
    sampler: Sampler
    samplings: RowSamplings
    vocab_size: int
    device: torch.device
    stage: Stage


class TorchStep:
    """A step's parts in order: made and `stage_sample` on the loop thread, `forward`, `sample` and `copy_out` on the
    lane, `read` on any thread once all that has run.

    Lifetime: until the step's ticket is complete; logits and batch go as soon as they have been sampled.
    """

    def __init__(self, parts: TorchParts, batch: ScheduleBatch, slot: Slot) -> None:
        self._parts = parts
        self._batch = batch
        self._slot = slot
        parts.samplings.apply(batch.starts)
        packed, widths = pack(batch)
        self._inputs: StagedStep | None = StagedStep.of(parts.stage(slot, packed), widths)
        self._extras = StepExtras(batch, slot, parts.stage, vocab_size=parts.vocab_size, device=parts.device)
        self._forward: tuple[ForwardBatch, ForwardOutput] | None = None
        self._sample_block: tuple[torch.Tensor, SampleBlock] | None = None
        self._sampled: Sampled | None = None
        self._fault = StepFault(batch.step)
        self._dead: frozenset[int] = frozenset()

    def forward(self) -> None:
        """Write the row state and compute. The staged integers are read in place."""
        inputs, self._inputs = self._inputs, None

        def run() -> None:
            self._extras.start_rows()
            if inputs is not None:
                self._forward = self._parts.runner.forward(self._batch, inputs)
                self._extras.score_prompts(self._parts.runner.model, self._forward[1].states)
                self._extras.pool(self._parts.runner.model, self._forward[1].states)
                self._extras.keep_hidden(self._parts.runner.model, self._forward[1].states)

        self._fault.attempt(run)

    def stage_sample(self, inputs: SampleInputs) -> None:
        """Stage what the host adds to the sample, and the room for its results."""
        parts = self._parts
        num_samples = sum(self._batch.samples)
        self._dead = inputs.dead
        if not num_samples:
            return
        staged = SampleBlock.make(self._batch, inputs, parts.samplings)
        self._sample_block = parts.stage(self._slot, bytearray(b"".join(staged.columns))), staged
        self._extras.stage(inputs)
        self._ids_cpu = self._slot.take((num_samples,), torch.int64)
        self._failed_cpu = self._slot.take((num_samples,), torch.bool)

    def sample(self) -> None:
        """Behind the forward: draw, and leave the ids in the relay for the next step. Logits and batch are let go."""
        forward, self._forward = self._forward, None
        sample_block, self._sample_block = self._sample_block, None

        def run() -> None:
            if forward is None or sample_block is None:
                return
            (batch, output), (block, staged) = forward, sample_block
            state = self._parts.runner.row_state
            on_device = StagedSample.of(block.to(self._parts.device, non_blocking=True), staged)
            request = SampleRequest(
                rows=batch.sample_rows,
                lengths=batch.sample_lens,
                random=on_device.random,
                needs=staged.needs,
            )
            logits = output.logits.float() if self._extras.changes_logits else output.logits
            self._extras.before_draw(logits, batch.sample_rows, batch.sample_lens)
            sampled = self._parts.sampler.sample(logits, request, state.sampling)
            self._extras.after_draw(sampled.ids)
            relay_rows = batch.sample_rows.long() if on_device.relay_rows is None else on_device.relay_rows
            state.relay.scatter(relay_rows, sampled.ids)
            self._sampled = sampled

        self._fault.attempt(run)

    def copy_out(self) -> None:
        """Behind the sample: results into the step's staging slot."""
        sampled, self._sampled = self._sampled, None

        def run() -> None:
            self._extras.copy_out()
            if sampled is not None:
                self._ids_cpu.copy_(sampled.ids, non_blocking=True)
                self._failed_cpu.copy_(sampled.failed, non_blocking=True)

        self._fault.attempt(run)

    def read(self) -> StepOutcome:
        """The outcome. Raises what `StepFault` does if a part failed."""
        self._fault.raise_if_any()
        if not any(self._batch.samples):
            return self._extras.outcome((), {})
        failed = self._failed_cpu.tolist()
        row_errors = rows_not_finite(self._batch, failed, self._dead) if any(failed) else {}
        return self._extras.outcome(tuple(self._ids_cpu.tolist()), row_errors)
