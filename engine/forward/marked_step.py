"""A step whose parts are marked: what the loop stages, and what the lanes do when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...streams.marks import COPY_OUT, DRAW, FORWARD, STAGE

if TYPE_CHECKING:
    from ...streams.marks import Marks
    from ..worker import SampleInputs, StepOutcome
    from .tp_worker import DeviceStep


class MarkedStep:
    """Passes everything on to the step it was made for. Made only while marks are on: otherwise nothing is in between."""

    def __init__(self, step: DeviceStep, marks: Marks, number: int) -> None:
        self._step = step
        self._marks = marks
        self._number = number

    def forward(self) -> None:
        mark = self._marks.lane_start(FORWARD, self._number)
        self._step.forward()
        self._marks.lane_end(mark)

    def stage_sample(self, inputs: SampleInputs) -> None:
        mark = self._marks.start(STAGE, self._number)
        try:
            self._step.stage_sample(inputs)
        finally:
            self._marks.end(mark)

    def sample(self) -> None:
        mark = self._marks.lane_start(DRAW, self._number)
        self._step.sample()
        self._marks.lane_end(mark)

    def copy_out(self) -> None:
        mark = self._marks.lane_start(COPY_OUT, self._number)
        self._step.copy_out()
        self._marks.lane_end(mark)

    def read(self) -> StepOutcome:
        return self._step.read()
