"""Tensors nested in tuples, lists, dicts and dataclasses: what captured functions return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .errors import MisuseError


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor changed, in order; what holds no tensors is kept as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: map_tensors(getattr(value, name), change) for name in names})
    return value


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors of `value`, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def copy_into(targets: object, sources: object) -> None:
    """Copy the tensors of `sources` onto those of `targets`, in order, without waiting for the device.

    Raises MisuseError if number, shapes or dtypes differ: what a graph writes has one form for ever.
    """
    old, new = tensors_of(targets), tensors_of(sources)
    if [_form(tensor) for tensor in old] != [_form(tensor) for tensor in new]:
        raise MisuseError(f"a graph's output changed its form from {[*map(_form, old)]} to {[*map(_form, new)]}")
    for target, source in zip(old, new, strict=True):
        if target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
            target.copy_(source, non_blocking=True)


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
