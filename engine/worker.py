"""The waist between planning and tensors: a worker launches a batch and hands back its deferred sample.

The scheduler's half above knows only this file. Below it stands a real worker (CPU or CUDA) or the ScriptedWorker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..streams.marks import MarkSwitch
from ..streams.ticket import Ticket
from .errors import MisuseError
from .logit_rules import LogitEdit
from .logits_processor import LogitsProcessor
from .outputs import HiddenStates, TokenLogprobs
from .scheduler.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What the device can hold, known once the worker has started."""

    num_pages: int  # usable pages, without page 0
    page_size: int  # tokens a page
    num_rows: int  # usable rows, without row 0
    max_model_len: int  # longest sequence, prompt and output together, in tokens
    vocab_size: int  # ids 0…vocab_size-1 are valid inputs
    counts_tokens: bool = False  # penalties go with the start of a row, and the device counts; else they come as edits
    memory_table: str = ""  # what the start took of the device's memory, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInputs:
    """What the host adds to a step's logits once everything before that step is committed. Picklable.

    Indices are positions in `batch.rows`; the columns with them hold rows that sample, in order. Log-probabilities are
    taken first; then edits apply, penalties of rows that the device counts for, suppressed ids and masks, and processors
    last.
    """

    dead: frozenset[int] = frozenset()  # rows that ended meanwhile: not sampled, no relay write
    suppressed: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (index, ids that must not be drawn)
    edits: tuple[LogitEdit, ...] = ()
    masks: tuple[tuple[int, bytes], ...] = ()  # (index, packed int32: bit i of word w set if id 32 w + i may be drawn)
    processors: tuple[tuple[int, tuple[LogitsProcessor, ...], bytes], ...] = ()  # (index, in turn, history as int32)
    logprobs: tuple[tuple[int, int], ...] = ()  # (index, how many of the likeliest ids beside the drawn one)

    @property
    def changes_logits(self) -> bool:
        return bool(self.suppressed or self.edits or self.masks or self.processors)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step brought home. `token_ids` is aligned with `batch.sample_indices`; entries of dead rows mean nothing."""

    token_ids: tuple[int, ...]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # by position in rows
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by position in rows
    pooled: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # by position in rows
    hidden_states: Mapping[int, HiddenStates] = field(default_factory=dict)  # by position in rows
    row_errors: Mapping[int, str] = field(default_factory=dict)  # position in rows → why that row alone failed


class Launched:
    """A step on its way: launched, not committed.

    `outcome` is a ticket from launch on. `resolve` is the deferred sample and is called exactly once, also for a
    batch in which no row samples (it then only fences and copies). `error` is set by the step loop when the launch
    itself raised (there is no outcome then), or when `resolve` did (the outcome is not awaited then).
    """

    __slots__ = ("_closure", "batch", "error", "outcome")

    def __init__(
        self,
        batch: ScheduleBatch,
        outcome: Ticket[StepOutcome] | None,
        closure: Callable[[SampleInputs], None] | None,
        *,
        error: Exception | None = None,
    ) -> None:
        self.batch = batch
        self.outcome = outcome
        self.error = error
        self._closure = closure

    def resolve(self, inputs: SampleInputs) -> None:
        """Run the deferred sample. Afterwards the closure, and with it logits and masks, is let go."""
        closure, self._closure = self._closure, None
        if closure is None:
            raise MisuseError(f"step {self.batch.step} was resolved twice, or never launched")
        closure(inputs)


@runtime_checkable
class MarksLanes(Protocol):
    """A worker that marks what its lanes do. The engine puts its own switch there before the start."""

    marks: MarkSwitch


class Worker(Protocol):
    """Runs batches in launch order on one lane."""

    async def start(self) -> WorkerLimits:
        """Build everything and warm it up; nothing is built or compiled afterwards. Raises ConfigError."""
        ...

    def launch(self, batch: ScheduleBatch) -> Launched:
        """Enqueue one step and return at once. Raises what the launch raised; such a step never ran."""
        ...

    def committed(self, step: int) -> None:
        """Step `step` is committed: its staging slots and holds may be reused."""
        ...

    def poison(self, pages: Sequence[int]) -> None:
        """Spoil what is in these free pages, behind every step launched so far: whoever reads them later shows it."""
        ...

    async def aclose(self) -> None:
        """Stop the lanes; returns in bounded time even if a step is stuck."""
        ...
