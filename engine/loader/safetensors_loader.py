"""Weights from a folder of safetensors into a model's parameters, strictly.

Every checkpoint tensor is used or reported, every parameter is filled, or the start is refused
with the names that are wrong.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import Pattern
from typing import TYPE_CHECKING, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ConfigError, MisuseError
from .weight_target import WeightTarget

if TYPE_CHECKING:
    from torch import nn

_INDEX_NAME: Final = "model.safetensors.index.json"
_SINGLE_NAME: Final = "model.safetensors"
# float8 is left out: it is meaningless without the scales of a quantised checkpoint.
_LOADABLE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_NAMES_SHOWN: Final = 8


class LoadableModel(Protocol):
    """What a model offers to its loader.

    `weight_targets` maps checkpoint names to places. Two names with the same place are aliases (a
    tied embedding): the first in the mapping is the real one, a later one is used only if the
    first is not in the checkpoint. Names that `ignorable` fully matches may be present unused.
    """

    @property
    def ignorable(self) -> Pattern[str]: ...

    def weight_targets(self) -> Mapping[str, WeightTarget]: ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did. `num_bytes` counts checkpoint bytes used; `ignored` names what was not."""

    num_tensors: int
    num_bytes: int
    ignored: tuple[str, ...]
    elapsed_s: float


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up `folder`'s checkpoint, in order, all of them present.

    Raises ConfigError if there are none, if the index names an absent file, or if several files
    lie there without an index (which of them belong together is then unknown).
    """
    index = folder / _INDEX_NAME
    if index.is_file():
        files = tuple(folder / name for name in dict.fromkeys(_weight_map(index).values()))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(f"{index} names absent files: {_some(missing)}", field="model")
        return files
    single = folder / _SINGLE_NAME
    if single.is_file():
        return (single,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        names = _some([file.name for file in found])
        raise ConfigError(
            f"{folder} holds several safetensors files but no {_INDEX_NAME}: {names}",
            field="model",
        )
    raise ConfigError(f"{folder} holds no safetensors files", field="model")


def iterate_tensors(folder: Path, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (name, tensor) of the checkpoint on `device`, in file order.

    Memory: on the CPU tensors are views of the mapped file; elsewhere one tensor is alive at a time
    unless the caller keeps it. Raises ConfigError naming a file that cannot be read, or the tensors
    in which index and files disagree.
    """
    index = folder / _INDEX_NAME
    weight_map = _weight_map(index) if index.is_file() else None
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                names: Sequence[str] = opened.offset_keys()
                if weight_map is not None:
                    _check_shard(file, names, weight_map)
                for name in names:
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {file}: {error} (an incomplete download?)", field="model") from error


def load_weights(model: LoadableModel, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadReport:
    """Copy `tensors` into `model`'s parameters in place, casting to each parameter's dtype.

    Shapes: a target of `num_rows` rows takes a tensor [num_rows, *param.shape[1:]]. Raises
    ConfigError naming unknown, missing, misshapen, quantised or overflowing tensors, and
    MisuseError if the model's own mapping does not cover each of its parameters exactly once.
    """
    start_s = time.perf_counter()
    targets = model.weight_targets()
    first_names = _first_name_by_place(model, targets)
    filled: dict[_Place, str] = {}
    ignored: list[str] = []
    unknown: list[str] = []
    num_bytes: dict[_Place, int] = {}
    for name, tensor in tensors:
        target = targets.get(name)
        if target is None:
            (ignored if model.ignorable.fullmatch(name) else unknown).append(name)
            continue
        place = _place(target)
        if place in filled:
            if filled[place] == name:
                raise ConfigError(f"the checkpoint holds {name} twice", field="model")
            if name != first_names[place]:
                ignored.append(name)
                continue
            ignored.append(filled[place])
        _fill(name, tensor, target)
        filled[place] = name
        num_bytes[place] = tensor.nbytes
    missing = [name for place, name in first_names.items() if place not in filled]
    _refuse_leftovers(unknown, missing)
    return LoadReport(
        num_tensors=len(filled),
        num_bytes=sum(num_bytes.values()),
        ignored=tuple(sorted(ignored)),
        elapsed_s=time.perf_counter() - start_s,
    )


# (identity of the parameter, first row, end row)
_Place = tuple[int, int, int]


def _place(target: WeightTarget) -> _Place:
    total = target.param.shape[0]
    num_rows = total if target.num_rows is None else target.num_rows
    return id(target.param), target.row_start, target.row_start + num_rows


def _first_name_by_place(model: LoadableModel, targets: Mapping[str, WeightTarget]) -> dict[_Place, str]:
    first_names: dict[_Place, str] = {}
    blocks: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for name, target in targets.items():
        place = _place(target)
        if place not in first_names:
            first_names[place] = name
            blocks[place[0]].append(place[1:])
    for name, param in model.named_parameters():
        expected_start = 0
        for row_start, row_end in sorted(blocks.get(id(param), [])):
            if row_start != expected_start:
                break
            expected_start = row_end
        if expected_start != param.shape[0]:
            raise MisuseError(f"weight targets do not cover parameter {name} exactly once")
    return first_names


def _fill(name: str, tensor: torch.Tensor, target: WeightTarget) -> None:
    param = target.param
    _, row_start, row_end = _place(target)
    expected = (row_end - row_start, *param.shape[1:])
    if tuple(tensor.shape) != expected:
        raise ConfigError(
            f"{name} has shape {tuple(tensor.shape)} in the checkpoint, but the model needs {expected}",
            field="model",
        )
    if tensor.dtype not in _LOADABLE_DTYPES:
        raise ConfigError(
            f"{name} is stored as {tensor.dtype}: quantised checkpoints are not supported",
            field="model",
        )
    rows = param.data[row_start:row_end]
    rows.copy_(tensor)
    # bf16 and fp32 reach far beyond fp16: such a model would answer with noise, not fail.
    narrowed = param.dtype == torch.float16 and tensor.dtype != torch.float16
    if narrowed and not bool(torch.isfinite(rows).all()):
        raise ConfigError(
            f"{name} holds values that float16 cannot; use dtype bfloat16 or float32",
            field="dtype",
        )


def _refuse_leftovers(unknown: Sequence[str], missing: Sequence[str]) -> None:
    complaints = []
    if missing:
        complaints.append(f"the checkpoint lacks {_some(missing)}")
    if unknown:
        complaints.append(f"the model has no place for {_some(unknown)}")
    if complaints:
        raise ConfigError("weights do not fit the model: " + "; ".join(complaints), field="model")


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error}", field="model") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} holds an empty weight_map", field="model")
    return weight_map


def _check_shard(file: Path, names: Sequence[str], weight_map: Mapping[str, str]) -> None:
    expected = {name for name, shard in weight_map.items() if shard == file.name}
    wrong = sorted(expected.symmetric_difference(names))
    if wrong:
        raise ConfigError(f"{file} and its index disagree about {_some(wrong)}", field="model")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
