"""Where one checkpoint tensor lands in a model's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """A block of rows of ``param`` that one checkpoint tensor fills.

    ``num_rows=None`` means the whole parameter (``row_start`` must then be 0). Merged parameters
    (q, k, v in one matrix; gate and up in one) are several targets with disjoint row blocks on the
    same ``param``. Lifetime: a target lives only while weights are loaded.
    """

    param: nn.Parameter
    row_start: int = 0
    num_rows: int | None = None
