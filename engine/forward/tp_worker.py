"""Places forwards on one device: the real worker behind the waist.

    loop thread    launch N: stage, submit │ resolve N: stage, submit │ launch N+1 …
    compute lane   writes of N, forward N  │ sample N, relay          │ forward N+1 …
    copy lane                                        └ fence ─ ids of N to the host ─ ticket

On the CPU one worker thread is both lanes. Tensor parallelism will add ranks here; today there is one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...streams.hold import Hold
from ...streams.marks import STAGE, MarkSwitch
from ...streams.ticket import Ticket
from ..errors import MisuseError
from ..worker import Launched, SampleInputs, StepOutcome, WorkerLimits
from .device_build import DeviceBuild
from .marked_step import MarkedStep
from .warm_up import warm_up_batches, warm_up_inputs

if TYPE_CHECKING:
    from ...streams.fence import Fence
    from ..config import EngineConfig
    from ..scheduler.schedule_batch import ScheduleBatch


CLOSE_TIMEOUT_S = 5.0


class DeviceStep(Protocol):
    """One step's parts, in the order in which they run: `forward` and `sample` on the compute lane, `copy_out` on the
    copy lane, `read` on any thread once all that has run; the others on the loop thread. Only `read` raises.
    """

    def forward(self) -> None: ...

    def stage_sample(self, inputs: SampleInputs) -> None: ...

    def sample(self) -> None: ...

    def copy_out(self) -> None: ...

    def read(self) -> StepOutcome: ...


class TpWorker:
    """`Worker` on one CPU or one CUDA device, for the model in `folder`.

    Called on the loop thread only, by whoever runs it; what runs elsewhere is what it submits, and its own warm-up.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, marks: MarkSwitch | None = None, *, num_ids: int | None = None
    ) -> None:
        """`num_ids`: what is drawn is below; a model's vocabulary may be padded beyond its tokenizer's. None: all of it."""
        self._num_ids = num_ids
        self.marks = marks if marks is not None else MarkSwitch()
        self._config = config
        self._folder = folder
        self._has_started = False
        self._num_forwards: Counter[str] = Counter()
        self._built: DeviceBuild | None = None
        self._copied: Fence | None = None  # where the copy lane has read the results of the sample before

    async def start(self) -> WorkerLimits:
        """Load, allocate, capture, and run real prefill and decode steps. Raises ConfigError; StepFailed if the first
        forward fails.
        """
        if self._has_started:
            raise MisuseError("a worker starts once")
        self._has_started = True
        built = await asyncio.to_thread(DeviceBuild.make_blocking, self._config, self._folder, self._num_ids)
        self._built = built
        for batch in warm_up_batches(built.limits):
            # Not on the loop: what is compiled here holds its thread for seconds.
            launched = await asyncio.to_thread(self.launch, batch)
            await asyncio.to_thread(launched.resolve, warm_up_inputs(batch, built.limits))
            if launched.outcome is not None:
                await launched.outcome
            self.committed(batch.step)
        built.num_forwards.clear()
        self._num_forwards = built.num_forwards
        return built.limits

    @property
    def num_forwards(self) -> Mapping[str, int]:
        """Forwards since the start, by the runner that computed them: what went through a graph, what did not."""
        return self._num_forwards

    def launch(self, batch: ScheduleBatch) -> Launched:
        """Stage the step and submit its forward. Raises MisuseError if more steps are open than there are staging
        slots.
        """
        built = self._ready()
        marks = self.marks.marks
        mark = marks.start(STAGE, batch.step)
        step: DeviceStep = built.make_step(batch, built.ring.acquire(batch.step))
        marks.end(mark)
        if marks.is_on:
            step = MarkedStep(step, marks, batch.step)
        built.canary.clean(batch)
        built.compute.submit(step.forward)
        outcome: Ticket[StepOutcome] = Ticket()
        return Launched(batch, outcome, lambda inputs: self._resolve(step, inputs, outcome))

    def committed(self, step: int) -> None:
        """The step's staging slot comes back."""
        self._ready().ring.release(step)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill these free pages with NaN, behind every step launched so far."""
        self._ready().canary.poison(pages)

    async def aclose(self) -> None:
        """Take no more steps. Waits a little for those that were submitted: an interpreter that exits while a lane's
        thread is inside torch aborts. A stuck step is left behind, on a thread that nobody waits for.
        """
        if self._built is None:
            return
        lanes = {self._built.compute, self._built.copy}
        tickets = [lane.ticket(lambda: None) for lane in lanes]
        for lane in lanes:
            lane.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for ticket in tickets:
                    await ticket
        except Exception:
            # Too late, or a fault that a step left in its lane: its own ticket has told that, and closing must not fail.
            return
        # The device's memory comes back now, whoever still holds this worker, not when the cycle collector comes by.
        self._built.release()
        self._built = self._copied = None

    def _resolve(self, step: DeviceStep, inputs: SampleInputs, outcome: Ticket[StepOutcome]) -> None:
        """Submit sample, relay write and result copy, and let the copy lane complete `outcome`."""
        built = self._ready()
        step.stage_sample(inputs)
        crosses = built.copy is not built.compute
        if crosses and self._copied is not None:
            built.compute.wait(self._copied)  # a sample overwrites the results of the one before
        built.compute.submit(step.sample)
        if crosses:
            built.copy.wait(built.compute.fence())
        built.copy.submit(step.copy_out)
        if crosses:
            self._copied = built.copy.fence()
        # What the copy reads stays referenced until it is over.
        built.copy.ticket(step.read, hold=Hold(step), into=outcome)

    def _ready(self) -> DeviceBuild:
        if self._built is None:
            raise MisuseError("the worker has not started, or is closed")
        return self._built
