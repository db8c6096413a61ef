"""Draws one id a row from its logits, on the device, all rows at once.

Greedy rows take the largest logit, the lowest id among equals. The others race: with p the filtered probabilities and
e exponential variates of (seed, length, id), the id of the largest p / e is distributed as p. A race needs no
cumulative sum, and a small change of the logits moves the draw only where it moves the probabilities.

Filters apply in the order temperature, top-k, top-p (of what top-k left), min-p; ids as probable as the last one kept
are kept too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from .counter_random import exponential
from .sample_needs import SampleNeeds
from .sampling_table import SamplingTable

# How many of the most probable ids are sorted at first; a flatter distribution needs more.
_HEAD: Final = 128
_WIDEN: Final = 8
# Logits that are drawn from together: a dozen passes go over them, which should find them in the cache.
_PART: Final = 400_000
# Ids searched together for a row's maximum.
_BLOCK: Final = 256
_SMALL: Final = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Shapes: ids [S] int64, valid ids always; failed [S] bool: rows whose logits held NaN, +inf, or nothing but
    -inf.
    """

    ids: torch.Tensor
    failed: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What is sampled. Shapes: rows [S] int: request rows; lengths [S] int32: tokens the row has so far; random [n]
    int64: indices into S of the rows that are not greedy, None for all.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    random: torch.Tensor | None
    needs: SampleNeeds


class Sampler:
    """Stateless but for the list of ids, those below `num_ids`: no others are drawn. `row_invariant` draws row by row, so
    that no reduction's order depends on the batch.
    """

    def __init__(self, num_ids: int, device: torch.device, *, row_invariant: bool = False) -> None:
        self._ids = torch.arange(num_ids, dtype=torch.int32, device=device)
        self._row_invariant = row_invariant

    def sample(self, logits: torch.Tensor, request: SampleRequest, table: SamplingTable) -> Sampled:
        """Draw. Shapes: logits [S, vocab], left as they are."""
        logits = logits[:, : len(self._ids)]
        best, chosen = _first_maximum(logits)
        if request.needs.any_random:
            chosen = self._with_random(logits, chosen, request, table)
        failed = ~best.isfinite()
        return Sampled(ids=chosen.masked_fill(failed, 0), failed=failed)

    def _with_random(
        self, logits: torch.Tensor, greedy: torch.Tensor, request: SampleRequest, table: SamplingTable
    ) -> torch.Tensor:
        rows, lengths, random = request.rows, request.lengths, request.random
        if random is not None:
            logits, rows, lengths = (part.index_select(0, random) for part in (logits, rows, lengths))
        size = 1 if self._row_invariant else max(1, _PART // logits.shape[1])
        parts = zip(logits.split(size), rows.split(size), lengths.split(size), strict=True)
        drawn = torch.cat([self._draw(*part, table, request.needs) for part in parts])
        return drawn if random is None else greedy.index_copy(0, random, drawn)

    def _draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        table: SamplingTable,
        needs: SampleNeeds,
    ) -> torch.Tensor:
        temperature = table.temperature.index_select(0, rows)
        probs = torch.softmax(logits.float() / temperature[:, None], -1)
        if needs.any_filter:
            threshold = _threshold(probs, rows, table, needs)
            # Below every real key, which are not negative.
            probs = probs.masked_fill_(probs < threshold[:, None], -1.0)
        variates = exponential(table.seed.index_select(0, rows), lengths, self._ids)
        return _first_maximum(probs.div_(variates))[1]


def _threshold(probs: torch.Tensor, rows: torch.Tensor, table: SamplingTable, needs: SampleNeeds) -> torch.Tensor:
    """The least probability that each row's filters keep. Shapes: probs [n, V], rows [n] → [n]."""
    vocab_size = probs.shape[1]
    top_k, top_p, min_p = (column.index_select(0, rows) for column in (table.top_k, table.top_p, table.min_p))
    if not needs.max_top_k and not needs.any_top_p:
        return min_p * probs.amax(-1)
    # On the CPU a look at the result costs nothing, so most rows get by with a partial sort; elsewhere it would stop
    # the host.
    width = min(max(_HEAD, needs.max_top_k), vocab_size) if probs.device.type == "cpu" else vocab_size
    while True:
        head = probs.topk(width).values
        limited = (top_k > 0) & (top_k <= width)
        num_kept = torch.where(limited, top_k, width)
        inside = torch.arange(width, device=probs.device) < num_kept[:, None]
        mass = (head * inside).cumsum(-1)
        target = top_p * torch.where(limited, mass[:, -1], 1.0)
        if width == vocab_size or bool(((mass[:, -1] >= target) | (top_p >= 1.0)).all()):
            break
        width = min(width * _WIDEN, vocab_size)
    last_of_k = head.gather(1, num_kept[:, None].long() - 1)[:, 0]
    last_of_p = head.gather(1, (mass < target[:, None]).sum(-1, keepdim=True).clamp_(max=width - 1))[:, 0]
    threshold = torch.where(limited, last_of_k, 0.0)
    threshold = torch.maximum(threshold, torch.where(top_p < 1.0, last_of_p, 0.0))
    return torch.maximum(threshold, min_p * head[:, 0])


def _first_maximum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value of each row and the lowest index that has it. NaN counts as largest. Shapes: x [n, V] → [n], [n] int64.

    Large ones by blocks, of which the first with the row's maximum is then searched: torch finds values five times as
    fast as places on a CPU.
    """
    width = x.shape[1]
    num_whole = width // _BLOCK * _BLOCK
    if not num_whole or x.numel() < _SMALL:
        return _search(x)
    maxima = x[:, :num_whole].unflatten(1, (-1, _BLOCK)).amax(-1)
    if num_whole < width:
        maxima = torch.cat((maxima, x[:, num_whole:].amax(-1, keepdim=True)), 1)
    # The last block is taken to end with the row: what it shares with the one before it is smaller than its maximum.
    start = (_search(maxima)[1] * _BLOCK).clamp_(max=width - _BLOCK)
    columns = start[:, None] + torch.arange(_BLOCK, device=x.device)
    best, offset = _search(x.gather(1, columns))
    return best, start + offset


def _search(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = torch.max(x, -1)
    return found[0], found[1]
