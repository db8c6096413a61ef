"""Sampling parameters of every request row, on the device."""

from __future__ import annotations

import torch


class SamplingTable:
    """One column a parameter, one entry a request row; row 0 is padding and greedy. Home: the compute lane, which
    alone writes it.

    Shapes, [num_rows], row 0 counted: temperature, top_p, min_p fp32; top_k int32; seed int64.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def write(
        self,
        rows: torch.Tensor,
        *,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
    ) -> None:
        """Set the parameters of `rows` [n] int64, each named once. Shapes: [n], of the columns' dtypes."""
        self.temperature.index_copy_(0, rows, temperature)
        self.top_k.index_copy_(0, rows, top_k)
        self.top_p.index_copy_(0, rows, top_p)
        self.min_p.index_copy_(0, rows, min_p)
        self.seed.index_copy_(0, rows, seed)
