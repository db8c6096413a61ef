"""The paged KV cache on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ...streams.virtual_memory import ReservedMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one token's keys and values take, in every layer together."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Keys and values of all layers in pages of `page_size` tokens. Slot s is token s % page_size of page s //
    page_size.

    Page 0 is nobody's: padded tokens write there. Pages hold finite numbers from the start, since attention
    multiplies what it masks by zero. Home: the compute lane. Lifetime: as long as the worker; tensors never move, so
    graphs may keep their addresses.

    Shapes, one tensor a layer: keys, values [num_pages + 1, page_size, Hk, D]; key_slots, value_slots, the same
    memory by slot, [(num_pages + 1) * page_size, Hk, D].
    """

    def __init__(
        self, shape: KVShape, *, num_pages: int, page_size: int, device: torch.device, first_pages: int | None = None
    ) -> None:
        """`first_pages`: on CUDA, reserve addresses for all pages, page 0 counted in neither, but memory for these only,
        until `back` says how many there are to be.
        """
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        self._device = device
        self._reserved: list[ReservedMemory] = []
        self.keys = self._layers(first_pages)
        self.values = self._layers(first_pages)
        if first_pages is not None:
            self.back(first_pages)
        self.key_slots = [layer.flatten(0, 1) for layer in self.keys]
        self.value_slots = [layer.flatten(0, 1) for layer in self.values]
        # One row a page: what attention gathers.
        self._key_rows = [layer.flatten(1) for layer in self.keys]
        self._value_rows = [layer.flatten(1) for layer in self.values]

    @property
    def num_bytes(self) -> int:
        return (self.num_pages + 1) * self.page_size * self.shape.bytes_per_token

    def back(self, num_pages: int) -> None:
        """Give a reserved pool memory for its first `num_pages`, zeroed; from now on it has that many.

        Raises: torch.OutOfMemoryError.
        """
        page_bytes = self._page_bytes
        for memory in self._reserved:
            start = memory.backed_bytes
            memory.back((num_pages + 1) * page_bytes)
            memory.whole()[start : memory.backed_bytes].zero_()
        self.num_pages = num_pages

    @property
    def _page_bytes(self) -> int:
        """Of the keys, or the values, of one layer."""
        return self.page_size * self.shape.num_kv_heads * self.shape.head_dim * self.shape.dtype.itemsize

    def _layers(self, first_pages: int | None) -> list[torch.Tensor]:
        shape = self.shape
        size = (self.num_pages + 1, self.page_size, shape.num_kv_heads, shape.head_dim)
        if first_pages is None:
            return [_zeros(size, shape.dtype, self._device) for _ in range(shape.num_layers)]
        layers = []
        for _ in range(shape.num_layers):
            memory = ReservedMemory((self.num_pages + 1) * self._page_bytes, self._device)
            memory.back(self._page_bytes)  # a range without any memory is no tensor yet
            memory.whole()[: memory.backed_bytes].zero_()
            self._reserved.append(memory)
            whole = memory.whole()[: (self.num_pages + 1) * self._page_bytes]
            layers.append(whole.view(shape.dtype).view(size))
        return layers

    def clear(self, pages: torch.Tensor) -> None:
        """Zero `pages` [n] int in every layer."""
        index = pages.long()
        for layer in (*self.keys, *self.values):
            layer.index_fill_(0, index, 0)

    def gather(self, layer: int, pages: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of `num_sequences` page lists of equal length.

        Shapes: pages [num_sequences * P] int → two of [num_sequences, P * page_size, Hk, D].
        """
        size = (num_sequences, -1, self.shape.num_kv_heads, self.shape.head_dim)
        return (
            self._key_rows[layer].index_select(0, pages).view(size),
            self._value_rows[layer].index_select(0, pages).view(size),
        )


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on the CPU take memory only where they are written: numpy asks the system for pages that are zero."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)
