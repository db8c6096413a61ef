"""One step on its lanes: forward, sample, copy, read, in this order. TpWorker submits them; each finds what the one before left."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import StepFailed
from ..sampling.sampler import Sampled, SampleRequest, Sampler
from ..worker import StepOutcome
from .staged_sample import StagedSample

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import ScheduleBatch
    from .forward_batch import ForwardBatch
    from .forward_output import ForwardOutput
    from .model_runner import ModelRunner
    from .staged_sample import SampleBlock
    from .staged_step import StagedStep

_NOT_FINITE = "the model's logits were not finite"


class DeviceStep:
    """What a step keeps between its parts. A part that fails leaves its error, the parts after it do nothing, and `read` raises StepFailed:
    the lane itself never sees an exception, so the next step starts clean.

    Lifetime: until the step's ticket is complete; logits and batch go as soon as they have been sampled.
    """

    __slots__ = ("_batch", "_error", "_forward", "_inputs", "_runner", "sampled")

    def __init__(self, runner: ModelRunner, batch: ScheduleBatch, inputs: StagedStep) -> None:
        self._runner = runner
        self._batch = batch
        self._inputs: StagedStep | None = inputs
        self._forward: tuple[ForwardBatch, ForwardOutput] | None = None
        self._error: Exception | None = None
        self.sampled: Sampled | None = None

    def forward(self, device: torch.device) -> None:
        """Compute lane: take the staged integers to the device, write the row state, compute."""
        inputs, self._inputs = self._inputs, None

        def run() -> None:
            if inputs is not None:
                self._forward = self._runner.forward(self._batch, inputs.to(device))

        self._attempt(run)

    def sample(self, sampler: Sampler, block: torch.Tensor, staged: SampleBlock, device: torch.device) -> None:
        """Compute lane, behind the forward: draw, and leave the ids in the relay for the next step. Logits and batch are let go."""
        forward, self._forward = self._forward, None

        def run() -> None:
            if forward is None:
                return
            batch, output = forward
            state = self._runner.row_state
            on_device = StagedSample.of(block.to(device, non_blocking=True), staged)
            request = SampleRequest(
                rows=batch.sample_rows,
                lengths=batch.sample_lens,
                random=on_device.random,
                suppressed=on_device.suppressed,
                needs=staged.needs,
            )
            sampled = sampler.sample(output.logits, request, state.sampling)
            relay_rows = batch.sample_rows.long() if on_device.relay_rows is None else on_device.relay_rows
            state.relay.scatter(relay_rows, sampled.ids)
            self.sampled = sampled

        self._attempt(run)

    def copy_out(self, ids_cpu: torch.Tensor, failed_cpu: torch.Tensor) -> None:
        """Copy lane, behind the sample: results into the step's staging slot."""
        sampled = self.sampled

        def run() -> None:
            if sampled is not None:
                ids_cpu.copy_(sampled.ids, non_blocking=True)
                failed_cpu.copy_(sampled.failed, non_blocking=True)

        self._attempt(run)

    def read(self, ids_cpu: torch.Tensor | None, failed_cpu: torch.Tensor | None, dead: frozenset[int]) -> StepOutcome:
        """Any thread, once the copies are done. Raises StepFailed if a part failed."""
        self.sampled = None
        if self._error is not None:
            error = self._error
            raise StepFailed(f"step {self._batch.step} failed: {error}", step=self._batch.step) from error
        if ids_cpu is None or failed_cpu is None:
            return StepOutcome(token_ids=())
        failed = failed_cpu.tolist()
        row_errors: dict[int, str] = {}
        if any(failed):
            for index, bad in zip(self._batch.sample_indices, failed, strict=True):
                if bad and index not in dead:
                    row_errors[index] = _NOT_FINITE
        return StepOutcome(token_ids=tuple(ids_cpu.tolist()), row_errors=row_errors)

    def _attempt(self, run: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            # Jobs run on the lane's thread, which does not inherit the submitter's mode.
            with torch.inference_mode():
                run()
        except Exception as error:
            # The frames' locals are the step's tensors: they must not live as long as the error does.
            traceback.clear_frames(error.__traceback__)
            self._error = error
