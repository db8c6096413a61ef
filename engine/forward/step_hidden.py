"""The hidden states that a step brings home as they are: of which tokens, and how they are read."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from ..outputs import HiddenStates

if TYPE_CHECKING:
    from ..models.llama import LlamaForCausalLM
    from ..scheduler.schedule_batch import ScheduleBatch
    from .forward_output import TokenStates


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCut:
    """`packed`: int32, the places of the tokens among the step's; `ends`: where each row's end in that list, from 0 on;
    `firsts`: each row's position in the batch, and that of its first token in the sequence.
    """

    packed: bytes
    ends: tuple[int, ...]
    firsts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, batch: ScheduleBatch) -> HiddenCut | None:
        """None for a step that brings none."""
        if not batch.shown:
            return None
        starts = (0, *accumulate(batch.num_new))
        places = array("i")
        ends = [0]
        for place, first in batch.shown:
            places.extend(range(starts[place] + first, starts[place + 1]))
            ends.append(len(places))
        return cls(
            packed=places.tobytes(),
            ends=tuple(ends),
            firsts=tuple((place, batch.num_prior[place] + first) for place, first in batch.shown),
        )

    def take(self, model: LlamaForCausalLM, states: TokenStates, places: torch.Tensor) -> torch.Tensor:
        """Shapes: places: `packed` on the device → [N, H], behind the last norm, on its own."""
        normed: torch.Tensor = model.norm(model.hidden(states, places))
        return normed

    def read(self, states: torch.Tensor) -> dict[int, HiddenStates]:
        """By position in the batch's rows. Shapes: states [N, H] on the host."""
        size = states.shape[1]
        values = states.float().numpy()
        return {
            place: HiddenStates(first, size, values[start:end].tobytes())
            for (place, first), (start, end) in zip(self.firsts, pairwise(self.ends), strict=True)
        }
