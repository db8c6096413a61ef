"""Read the header of a GGUF file: its metadata and where its tensors lie.

Why not gguf's own reader: it makes several numpy views for each element of each array, seconds
for one vocabulary. This one reads the header once and maps the tensor bytes.
Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ConfigError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_STRING: Final = 8
_ARRAY: Final = 9
# GGUF value type -> struct code, for all scalar types.
_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor of the file. `shape` is outermost first, as torch counts.

    `raw`: [*shape[:-1], bytes of one row] uint8, a read-only view of the mapped file.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Metadata and tensors of one file. Lifetime: the mapping lives as long as any tensor's view."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Map `path` and parse its header. Raises ConfigError if it is no whole, readable GGUF file."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="model") from error
    try:
        return _Parser(path, mapped).parse()
    except (struct.error, UnicodeDecodeError, ValueError, KeyError, OverflowError) as error:
        raise ConfigError(
            f"{path} is damaged or cut short: {error} (an incomplete download?)", field="model"
        ) from error


class _Parser:
    """A cursor over the header. Lives for one `read_gguf`."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._mapped = mapped
        self._offset = 0

    def parse(self) -> GgufFile:
        if self._mapped[:4] != _MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file", field="model")
        self._offset = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{self._path}: unsupported GGUF version {version} (or a big-endian file); "
                f"supported: {', '.join(map(str, _VERSIONS))}",
                field="model",
            )
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise ValueError(f"alignment {alignment}")
        start = -(-self._offset // alignment) * alignment
        return GgufFile(
            path=self._path,
            metadata=metadata,
            tensors=tuple(self._tensor(start, *info) for info in infos),
        )

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._mapped, self._offset)
        self._offset += struct.calcsize("<" + code)
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._offset + num_bytes
        if end > len(self._mapped):
            raise ValueError(f"the header wants byte {end} of {len(self._mapped)}")
        taken = self._mapped[self._offset : end]
        self._offset = end
        return taken

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        element, count = self._scalar("I"), self._scalar("Q")
        if element == _STRING:
            return [self._string() for _ in range(count)]
        if element == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        code = _SCALARS[element]
        block = self._take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", block))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        num_dims = self._scalar("I")
        # The file counts dimensions innermost first.
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, GGMLQuantizationType(self._scalar("I")), self._scalar("Q")

    def _tensor(
        self, start: int, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
    ) -> GgufTensor:
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        row_length = shape[-1]
        if row_length % block_size:
            raise ValueError(f"{name}: rows of {row_length} do not divide into {kind.name} blocks")
        raw_shape = (*shape[:-1], row_length // block_size * block_bytes)
        raw = np.frombuffer(self._mapped, dtype=np.uint8, count=int(np.prod(raw_shape)), offset=start + offset)
        return GgufTensor(name=name, kind=kind, shape=shape, raw=raw.reshape(raw_shape))
