"""How a step fails: part by part, for its own rows only, or for everybody when the device is gone."""

from __future__ import annotations

import weakref

import pytest
import torch

from slipstream.engine.errors import EngineDead, StepFailed
from slipstream.engine.forward.step_parts import StepFault


def test_parts_behind_the_one_that_failed_do_not_run_and_the_step_says_why() -> None:
    fault, ran = StepFault(7), []

    def fail() -> None:
        raise ValueError("odd shape")

    fault.attempt(lambda: ran.append(torch.is_inference_mode_enabled()))
    fault.attempt(fail)
    fault.attempt(lambda: ran.append("too late"))
    assert ran == [True]
    with pytest.raises(StepFailed, match="step 7 failed: odd shape") as caught:
        fault.raise_if_any()
    assert caught.value.step == 7
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_step_without_a_fault_raises_nothing() -> None:
    fault = StepFault(1)
    fault.attempt(lambda: None)
    fault.raise_if_any()


def test_an_error_of_the_device_is_the_end_of_the_engine() -> None:
    fault = StepFault(3)

    def fail() -> None:
        raise torch.AcceleratorError("illegal memory access")

    fault.attempt(fail)
    with pytest.raises(EngineDead, match="the device failed in step 3"):
        fault.raise_if_any()


def test_a_kept_error_does_not_keep_the_tensors_of_its_step() -> None:
    fault, kept = StepFault(2), []

    def fail() -> None:
        tensor = torch.zeros(4)
        kept.append(weakref.ref(tensor))
        raise ValueError("after an allocation")

    fault.attempt(fail)
    assert kept[0]() is None
