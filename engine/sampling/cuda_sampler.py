"""The sampler on CUDA: one fused kernel a step, eager or captured, its results in one static block."""

from __future__ import annotations

from enum import Enum

import torch

from ..kernels.sampling import make_sampler_workspace, sample
from .sample_needs import SampleNeeds
from .sampling_table import SamplingTable


class SampleKind(Enum):
    """What the rows of a step ask for together: each kind is a kernel variant, and a graph of its own."""

    GREEDY = "greedy"
    RANDOM = "random"
    FILTERED = "filtered"  # some row has top-k, top-p or min-p: a second kernel

    @classmethod
    def of(cls, needs: SampleNeeds) -> SampleKind:
        """The cheapest kind that serves these needs."""
        if not needs.any_random:
            return cls.GREEDY
        return cls.FILTERED if needs.any_filter else cls.RANDOM


class CudaSampler:
    """Draws, and leaves the ids in the relay and in `results`.

    `results` [2 max_rows] int32: of a step with B rows the ids are the first B, the flags of rows that failed the next B.
    `dead` [max_rows] uint8: rows whose relay entry is not written. Home: the compute lane; written by each sample, so
    the copy lane's read of `results` must be over before the next one. `num_ids`: ids from there on are never drawn.
    """

    def __init__(
        self, *, max_rows: int, num_ids: int, table: SamplingTable, next_ids: torch.Tensor, device: torch.device
    ) -> None:
        self.results = torch.zeros(2 * max_rows, dtype=torch.int32, device=device)
        self.dead = torch.zeros(max_rows, dtype=torch.uint8, device=device)
        # A count that the device reads: entry n is n, so that no step has to ship one.
        self.counts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._num_ids = num_ids
        self._table = table
        self._next_ids = next_ids
        self._workspace = make_sampler_workspace(max_rows=max_rows, vocab_size=num_ids, device=device)

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        num_rows: torch.Tensor,
        lengths: torch.Tensor,
        kind: SampleKind,
    ) -> None:
        """Sample the first `num_rows` of B rows. Can be captured.

        Shapes: logits [B, vocab]; rows, lengths [B] int32: request rows, and the tokens each has so far; num_rows [1] int32.
        """
        bucket = logits.shape[0]
        sample(
            logits[:, : self._num_ids],
            rows,
            num_rows,
            lengths,
            self.dead,
            self._table,
            self._next_ids,
            self._workspace,
            ids=self.results[:bucket],
            bad=self.results[bucket : 2 * bucket],
            greedy=kind is SampleKind.GREEDY,
            filters=kind is SampleKind.FILTERED,
        )
