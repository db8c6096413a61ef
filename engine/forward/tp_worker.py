"""Places forwards on one device: the real worker behind the waist.

    loop thread    launch N: stage, submit │ resolve N: stage, submit │ launch N+1 …
    compute lane   writes of N, forward N  │ sample N, relay          │ forward N+1 …
    copy lane                                        └ fence ─ ids of N to the host ─ ticket

On the CPU one worker thread is both lanes. Tensor parallelism will add ranks here; today there is one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ...streams.hold import Hold
from ...streams.host_lane import HostLane
from ...streams.staging import StagingRing
from ...streams.ticket import Ticket
from ..errors import MisuseError
from ..loader.model_config import ModelConfig
from ..sampling.sampler import Sampler
from ..worker import Launched, SampleInputs, StepOutcome, WorkerLimits
from .device_step import DeviceStep
from .model_runner import ModelRunner
from .placement import Placement
from .row_samplings import RowSamplings
from .staged_sample import SampleBlock
from .staged_step import StagedStep, pack
from .warm_up import warm_up_batches

if TYPE_CHECKING:
    from ...streams.lane import Lane
    from ...streams.staging import Slot
    from ..config import EngineConfig
    from ..scheduler.schedule_batch import ScheduleBatch

# A slot holds any usual step; one that needs more (very many pages at once) gets memory of its own.
_MAX_SLOT_BYTES: Final = 8 << 20
_INT_BYTES: Final = 4


class TpWorker:
    """`Worker` on one CPU or one CUDA device, for the model in `folder`.

    Called on the loop thread only; what runs elsewhere is what it submits.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._samplings = RowSamplings()
        self._slots: dict[int, Slot] = {}
        self._built: _Built | None = None

    async def start(self) -> WorkerLimits:
        """Load, allocate, and run real prefill and decode steps. Raises ConfigError; StepFailed if the first forward fails."""
        if self._built is not None:
            raise MisuseError("a worker starts once")
        built = await asyncio.to_thread(_Built.make_blocking, self._config, self._folder)
        self._built = built
        for batch in warm_up_batches(built.limits):
            launched = self.launch(batch)
            launched.resolve(SampleInputs())
            if launched.outcome is not None:
                await launched.outcome
            self.committed(batch.step)
        return built.limits

    def launch(self, batch: ScheduleBatch) -> Launched:
        """Stage the step and submit its forward. Raises MisuseError if more steps are open than there are staging slots."""
        built = self._ready()
        slot = built.ring.acquire(batch.step)
        self._slots[batch.step] = slot
        self._samplings.apply(batch.starts)
        packed, widths = pack(batch)
        inputs = StagedStep.of(built.stage(slot, packed), widths)
        step = DeviceStep(built.runner, batch, inputs)
        device = built.device
        built.compute.submit(lambda: step.forward(device))
        outcome: Ticket[StepOutcome] = Ticket()

        def resolve(sample_inputs: SampleInputs) -> None:
            self._resolve(batch, step, sample_inputs, outcome)

        return Launched(batch, outcome, resolve)

    def committed(self, step: int) -> None:
        """The step's staging slot comes back."""
        if self._slots.pop(step, None) is not None:
            self._ready().ring.release(step)

    async def aclose(self) -> None:
        """Take no more steps; what was submitted still runs, on threads that nobody waits for."""
        if self._built is not None:
            self._built.compute.close()
            self._built.copy.close()

    def _resolve(
        self, batch: ScheduleBatch, step: DeviceStep, inputs: SampleInputs, outcome: Ticket[StepOutcome]
    ) -> None:
        """Submit sample, relay write and result copy, and let the copy lane complete `outcome`."""
        built = self._ready()
        num_samples = sum(batch.samples)
        if not num_samples:
            self._fence_copy(built)
            built.copy.ticket(lambda: step.read(None, None, inputs.dead), into=outcome)
            return
        slot = self._slots[batch.step]
        staged = SampleBlock.make(batch, inputs, self._samplings, vocab_size=built.limits.vocab_size)
        block = built.stage(slot, bytearray(b"".join(staged.columns)))
        ids_cpu = slot.take((num_samples,), torch.int64)
        failed_cpu = slot.take((num_samples,), torch.bool)
        sampler, device = built.sampler, built.device
        built.compute.submit(lambda: step.sample(sampler, block, staged, device))
        self._fence_copy(built)
        built.copy.submit(lambda: step.copy_out(ids_cpu, failed_cpu))
        # The ids are the compute lane's; they stay referenced until the copy lane has read them.
        hold = Hold(step)
        built.copy.ticket(lambda: step.read(ids_cpu, failed_cpu, inputs.dead), hold=hold, into=outcome)

    def _fence_copy(self, built: _Built) -> None:
        if built.copy is not built.compute:
            built.copy.wait(built.compute.fence())

    def _ready(self) -> _Built:
        if self._built is None:
            raise MisuseError("the worker has not started")
        return self._built


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """What exists once the worker has started."""

    device: torch.device
    runner: ModelRunner
    sampler: Sampler
    ring: StagingRing
    slot_bytes: int
    result_bytes: int  # of a slot, kept for the results
    compute: Lane
    copy: Lane
    limits: WorkerLimits

    @classmethod
    def make_blocking(cls, config: EngineConfig, folder: Path) -> _Built:
        model_config = ModelConfig.from_folder(folder, max_model_len=config.max_model_len)
        placement = Placement.resolve(config, model_config)
        device = placement.device
        runner = ModelRunner.build_blocking(config, model_config, folder, placement)
        memory, num_rows = runner.memory, config.max_running_requests
        table_entries = num_rows * memory.max_pages_per_row
        num_ints = 16 * (num_rows + 1) + config.max_prefill_tokens + 3 * table_entries
        result_bytes = 16 * num_rows + 256
        slot_bytes = min(num_ints * _INT_BYTES, _MAX_SLOT_BYTES) + 2 * result_bytes
        compute, copy = _lanes(placement)
        return cls(
            device=device,
            runner=runner,
            sampler=Sampler(model_config.vocab_size, device, row_invariant=config.row_invariant),
            ring=StagingRing(slot_bytes, pinned=device.type == "cuda"),
            slot_bytes=slot_bytes,
            result_bytes=result_bytes,
            compute=compute,
            copy=copy,
            limits=WorkerLimits(
                num_pages=memory.num_pages,
                page_size=memory.page_size,
                num_rows=num_rows,
                max_model_len=memory.max_model_len,
                vocab_size=model_config.vocab_size,
            ),
        )

    def stage(self, slot: Slot, packed: bytearray) -> torch.Tensor:
        """`packed` as int32 in the step's slot, or, if it is larger than any usual step, in memory of its own."""
        num_bytes = len(packed)
        if not num_bytes:
            return torch.empty(0, dtype=torch.int32)
        shape = (num_bytes // _INT_BYTES,)
        if slot.used_bytes + num_bytes + self.result_bytes <= self.slot_bytes:
            staged = slot.take(shape, torch.int32)
        else:
            staged = torch.empty(shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return staged.copy_(torch.frombuffer(packed, dtype=torch.int32))


def _lanes(placement: Placement) -> tuple[Lane, Lane]:
    """The compute lane and the copy lane, which on the CPU are one: there is nothing to copy between."""
    if placement.device.type == "cpu":
        lane = HostLane("compute")
        # On the thread that computes: OpenMP keeps the number by thread.
        lane.submit(lambda: torch.set_num_threads(placement.num_threads))
        return lane, lane
    from ...streams.cuda_lane import CudaLane, distinct_streams

    compute, copy = distinct_streams(2, placement.device)
    return (
        CudaLane("compute", placement.device, stream=compute),
        CudaLane("copy", placement.device, stream=copy),
    )
