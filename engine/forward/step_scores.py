"""The log-probabilities of one step: what the host ships for them, what the device computes, and how it is read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING

import torch

from ..outputs import TokenLogprobs
from ..sampling.logprobs import RawLogprobs, read_scored, scored_prompt

if TYPE_CHECKING:
    from ..models.llama import LlamaForCausalLM
    from ..scheduler.schedule_batch import PromptScores, ScheduleBatch
    from ..worker import SampleInputs
    from .forward_output import TokenStates


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """Of prompt tokens. `packed`: int32, the places of the tokens before those scored, then the ids scored."""

    packed: bytes
    num_tokens: int
    scores: tuple[PromptScores, ...]

    @classmethod
    def of(cls, batch: ScheduleBatch) -> PromptScoring | None:
        """None for a step that scores nothing."""
        if not batch.scored:
            return None
        starts = (0, *accumulate(batch.num_new))
        places, targets = array("i"), bytearray()
        for score in batch.scored:
            first = starts[score.place] + score.first
            places.extend(range(first, first + len(score.targets) // 4))
            targets += score.targets
        return cls(packed=places.tobytes() + bytes(targets), num_tokens=len(places), scores=batch.scored)

    def compute(self, model: LlamaForCausalLM, states: TokenStates, block: torch.Tensor) -> torch.Tensor:
        """Shapes: block: `packed` on the device → [N, 1 + 2 k] fp64."""
        places, targets = block.long().view(2, self.num_tokens)
        num_top = max(score.num_top for score in self.scores)
        return scored_prompt(lambda at: model.logits(states, at), places, targets, num_top)

    def read(self, rows: Sequence[Sequence[float]]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By position in the batch's rows."""
        left = iter(rows)
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for score in self.scores:
            ids = array("i", score.targets)
            mine = list(islice(left, len(ids)))
            found[score.place] = tuple(read_scored(mine, ids, [score.num_top] * len(ids)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawScoring:
    """Of drawn tokens. `places`: of the rows that want them, among the rows that sample."""

    places: tuple[int, ...]
    indices: tuple[int, ...]  # the same rows, in the batch
    num_top: tuple[int, ...]

    @classmethod
    def of(cls, inputs: SampleInputs, sampling: Sequence[int]) -> DrawScoring | None:
        """None if no row wants any."""
        if not inputs.logprobs:
            return None
        place = {index: k for k, index in enumerate(sampling)}
        indices = tuple(index for index, _ in inputs.logprobs)
        return cls(
            places=tuple(place[index] for index in indices),
            indices=indices,
            num_top=tuple(num_top for _, num_top in inputs.logprobs),
        )

    @property
    def packed(self) -> bytes:
        return array("i", self.places).tobytes()

    def keep(self, logits: torch.Tensor, places: torch.Tensor) -> RawLogprobs:
        """The rows as the model left them. Shapes: logits [S, vocab]; places: `packed` on the device."""
        return RawLogprobs.of(logits.index_select(0, places), max(self.num_top))

    def read(self, rows: Sequence[Sequence[float]], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By position in the batch's rows. `token_ids`: of all rows that sample."""
        ids = [token_ids[place] for place in self.places]
        return dict(zip(self.indices, read_scored(rows, ids, self.num_top), strict=True))
