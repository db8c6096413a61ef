"""What one step computes, in frozen host integers.

The first of the three shapes of a step (ScheduleBatch → ForwardBatch → ForwardOutput). It is picklable and holds no
tensor, no request and no text: what a parallel deployment would broadcast. `B` is the number of rows of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..forward_mode import ForwardMode
from ..hidden_mode import HiddenMode


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How a row samples. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # the draw at sequence length n depends on (seed, n) only, never on batch-mates


class RowPenalties(NamedTuple):
    """Penalties of a row whose tokens the device counts, beginning with `history`: packed int32 ids, of which the first
    `num_prompt` are the prompt's; without a repetition penalty the prompt is left out.
    """

    repetition: float
    frequency: float
    presence: float
    num_tokens: int  # prompt and output so far
    num_prompt: int
    history: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStart:
    """Sent once, with the first step of a row that was just admitted or resumed."""

    row: int
    sampling: RowSampling
    penalties: RowPenalties | None = None  # None also where the host sends them as edits


class PromptScores(NamedTuple):
    """Prompt tokens of one row whose log-probabilities this step computes. `targets`: their ids, packed int32; the
    first one follows the row's new token number `first`, the others the tokens after that.
    """

    place: int  # position in `rows`
    first: int
    targets: bytes
    num_top: int  # likeliest ids at each position beside


class PooledRow(NamedTuple):
    """A row whose hidden states of this step are brought home as one vector: summed over its tokens, or the last one's."""

    place: int  # position in `rows`
    sums: bool


class ShownRow(NamedTuple):
    """A row whose hidden states of this step are brought home as they are, from its new token number `first` on."""

    place: int  # position in `rows`
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBatch:
    """One step. Decode rows come first, extend rows after them; every column has one entry a row.

    Units: rows are indices of the request table (1…num_rows; 0 is padding); pages are indices of the KV pool
    (1…num_pages; 0 is nobody's). Byte columns are packed native int32.
    Lifetime: immutable; alive until the commit of its step.
    """

    step: int
    num_decode: int
    rows: tuple[int, ...]
    num_prior: tuple[int, ...]  # tokens of the row whose KV exists before this step
    num_new: tuple[int, ...]  # tokens computed now: 1 for a decode row
    samples: tuple[bool, ...]  # False for chunks in the middle of a prompt and for scoring rows
    extend_ids: bytes  # int32 ids of the extend rows, concatenated
    # Row-table writes of this step, applied before it: page_table[table_rows[i], table_columns[i]] = table_pages[i].
    table_rows: bytes
    table_columns: bytes
    table_pages: bytes
    starts: tuple[RowStart, ...]
    scored: tuple[PromptScores, ...] = ()
    pooled: tuple[PooledRow, ...] = ()
    shown: tuple[ShownRow, ...] = ()

    @property
    def mode(self) -> ForwardMode:
        return ForwardMode.of(num_decode=self.num_decode, num_extend=self.num_rows - self.num_decode)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step, decode and extend together."""
        return self.num_decode + len(self.extend_ids) // 4

    @property
    def hidden_mode(self) -> HiddenMode:
        """The hidden states that the step has to give: a decode row, or one that starts late, has only its last token's."""
        if not self.shown:
            return "none"
        return "full" if any(first < self.num_new[place] - 1 for place, first in self.shown) else "last"

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """Positions in `rows` that sample, ascending; a StepOutcome has one id for each."""
        return tuple(i for i, samples in enumerate(self.samples) if samples)


class NoBatch(Enum):
    """What plan() says when there is no batch to launch."""

    NOTHING = "nothing"  # no row can run now
    DRAIN = "drain"  # the next batch cannot be decided before the step in flight is committed
