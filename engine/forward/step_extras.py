"""What a few rows of a step ask for beside a drawn id: changed logits, log-probabilities, hidden states. Free for others."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ..sampling.logit_changes import LogitChanges
from ..sampling.logprobs import SLICE_POSITIONS
from ..worker import SampleInputs, StepOutcome
from .step_hidden import HiddenCut
from .step_scores import DrawScoring, PromptScoring

if TYPE_CHECKING:
    from ...streams.staging import Slot
    from ..models.llama import LlamaForCausalLM
    from ..sampling.logprobs import RawLogprobs
    from ..sampling.token_counts import CountStarts, TokenCounts
    from ..scheduler.schedule_batch import ScheduleBatch
    from .forward_output import TokenStates
    from .step_parts import Stage


class StepExtras:
    """Made and `stage` on the loop thread; `start_rows`, `score_prompts`, `before_draw`, `after_draw` on the compute lane;
    `copy_out` on the copy lane; `outcome` on any thread once all that has run. The same on every device. Lifetime: that
    of the step.
    """

    def __init__(
        self,
        batch: ScheduleBatch,
        slot: Slot,
        stage: Stage,
        *,
        vocab_size: int,
        device: torch.device,
        counts: TokenCounts | None = None,
    ) -> None:
        """`counts`: where the device counts for penalties; without them they come as edits."""
        self._batch = batch
        self._slot = slot
        self._stage = stage
        self._vocab_size = vocab_size
        self._device = device
        self._prompts = PromptScoring.of(batch)
        self._prompts_block = None if self._prompts is None else stage(slot, self._prompts.packed)
        self._prompt_scores: torch.Tensor | None = None
        self._pooled: torch.Tensor | None = None
        self._cut = HiddenCut.of(batch)
        self._cut_block = None if self._cut is None else stage(slot, self._cut.packed)
        self._hidden: torch.Tensor | None = None
        self._copied: list[torch.Tensor] = []
        self._draws: DrawScoring | None = None
        self._draws_block: torch.Tensor | None = None
        self._draw_scores: torch.Tensor | None = None
        self._raw: RawLogprobs | None = None
        self._changes: LogitChanges | None = None
        self._changes_block: torch.Tensor | None = None
        self._row_errors: dict[int, str] = {}
        self._counts = counts
        self._starts: CountStarts | None = None
        self._places: torch.Tensor | None = None
        if counts is not None and batch.starts:
            self._starts = counts.rows.apply(batch.starts)
        self._starts_block = None if self._starts is None else stage(slot, self._starts.block)

    @property
    def changes_logits(self) -> bool:
        return self._changes is not None or self._places is not None

    def start_rows(self) -> None:
        """Ahead of the forward: count the histories of rows with penalties that start."""
        if self._counts is not None and self._starts is not None and self._starts_block is not None:
            self._counts.start(self._starts, self._starts_block.to(self._device, non_blocking=True))
            self._starts = self._starts_block = None

    def pool(self, model: LlamaForCausalLM, states: TokenStates) -> None:
        """Behind the forward: the hidden states that were asked for, a vector a row."""
        if not self._batch.pooled:
            return
        starts = (0, *accumulate(self._batch.num_new))
        vectors = []
        for place, sums in self._batch.pooled:
            end = starts[place + 1]
            first = starts[place] if sums else end - 1
            parts = [slice(at, min(at + SLICE_POSITIONS, end)) for at in range(first, end, SLICE_POSITIONS)]
            sliced = [model.norm(model.hidden(states, part)).float().sum(0) for part in parts]
            vectors.append(torch.stack(sliced).sum(0))
        self._pooled = torch.stack(vectors)

    def keep_hidden(self, model: LlamaForCausalLM, states: TokenStates) -> None:
        """Behind the forward, before the next one: the hidden states that are brought home as they are, out of what may be
        a graph's own.
        """
        if self._cut is not None and self._cut_block is not None:
            places = self._cut_block.to(self._device, non_blocking=True)
            self._hidden = self._cut.take(model, states, places)

    def score_prompts(self, model: LlamaForCausalLM, states: TokenStates) -> None:
        """Behind the forward."""
        if self._prompts is not None and self._prompts_block is not None:
            block = self._prompts_block.to(self._device, non_blocking=True)
            self._prompt_scores = self._prompts.compute(model, states, block)

    def stage(self, inputs: SampleInputs) -> None:
        """Take what the host adds to the sample."""
        if inputs.changes_logits:
            sampling = self._batch.sample_indices
            self._changes = LogitChanges.packed(inputs, sampling, vocab_size=self._vocab_size)
            if self._changes is not None:
                self._changes_block = self._stage(self._slot, self._changes.block)
        if self._counts is not None:
            places = self._counts.rows.places(self._batch, inputs.dead)
            self._places = self._stage(self._slot, places) if places else None
        if inputs.logprobs:
            self._draws = DrawScoring.of(inputs, self._batch.sample_indices)
            if self._draws is not None:
                self._draws_block = self._stage(self._slot, self._draws.packed)

    def before_draw(self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Keep what log-probabilities need, then change `logits` in place.

        Shapes: logits [S or more, vocab]; rows, lengths likewise: request rows, and the tokens each has so far.
        """
        if self._draws is not None and self._draws_block is not None:
            self._draws_block = self._draws_block.to(self._device, non_blocking=True)
            self._raw = self._draws.keep(logits, self._draws_block)
        changes, self._changes = self._changes, None
        block, self._changes_block = self._changes_block, None
        if changes is not None and block is not None:
            block = block.to(self._device, non_blocking=True)
            changes.edit_(logits, block)
        if self._counts is not None and self._places is not None:
            places, self._places = self._places.to(self._device, non_blocking=True), None
            self._counts.penalise(logits, places, rows, lengths)
        if changes is not None and block is not None:
            self._row_errors = changes.restrict_(logits, block)

    def after_draw(self, ids: torch.Tensor) -> None:
        """Score what was drawn. Shapes: ids [S or more] int."""
        raw, self._raw = self._raw, None
        if raw is not None and self._draws_block is not None:
            self._draw_scores = raw.scored(ids.index_select(0, self._draws_block).long())

    def copy_out(self) -> None:
        """Bring everything to the host. Asynchronous."""
        self._prompt_scores = self._on_host(self._prompt_scores)
        self._draw_scores = self._on_host(self._draw_scores)
        self._pooled = self._on_host(self._pooled)
        self._hidden = self._on_host(self._hidden)

    def outcome(self, token_ids: tuple[int, ...], row_errors: Mapping[int, str]) -> StepOutcome:
        """The step's outcome, with what was asked for in it."""
        prompt_logprobs, logprobs = {}, {}
        if self._prompts is not None and self._prompt_scores is not None:
            prompt_logprobs = self._prompts.read(self._prompt_scores.tolist())
        if self._draws is not None and self._draw_scores is not None:
            logprobs = self._draws.read(self._draw_scores.tolist(), token_ids)
        if self._row_errors:
            row_errors = {**row_errors, **self._row_errors}
        pooled = {}
        if self._pooled is not None:
            pooled = {
                row.place: tuple(values) for row, values in zip(self._batch.pooled, self._pooled.tolist(), strict=True)
            }
        hidden_states = {} if self._cut is None or self._hidden is None else self._cut.read(self._hidden)
        return StepOutcome(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            hidden_states=hidden_states,
            row_errors=row_errors,
        )

    def _on_host(self, source: torch.Tensor | None) -> torch.Tensor | None:
        """A copy in pinned memory of its own: what comes back is too large, and too rare, for the step's slot."""
        if source is None or source.device.type == "cpu":
            return source
        # The allocator knows the compute lane only: let go here, its memory would be written before it has been copied.
        self._copied.append(source)
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
