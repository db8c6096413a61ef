"""The steps that a fresh worker runs before it says it is ready."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..logit_rules import LogitEdit, mask_of
from ..scheduler.schedule_batch import PromptScores, RowPenalties, RowSampling, RowStart, ScheduleBatch, ShownRow
from ..worker import SampleInputs

if TYPE_CHECKING:
    from ..worker import WorkerLimits

_MAX_PROMPT_TOKENS: Final = 64
_GREEDY: Final = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_RANDOM: Final = RowSampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0)


def warm_up_batches(limits: WorkerLimits) -> Iterator[ScheduleBatch]:
    """A prefill and a decode step for a greedy row, for one that samples, and for one whose hidden states are brought home:
    by graph or not, as the setting has it. Row 1 and the first pages are used; their next owner writes them before
    reading. Steps count up to -1.
    """
    # The last position stays free for the decode step; a pool of one token takes no decode step.
    longest = min(limits.max_model_len, limits.num_pages * limits.page_size)
    prompt = max(1, min(_MAX_PROMPT_TOKENS, longest - 1))
    has_decode = longest > prompt
    step = -6 if has_decode else -3
    for sampling, shown in ((_GREEDY, ()), (_RANDOM, ()), (_GREEDY, (ShownRow(0, 0),))):
        yield _prefill(step, prompt, min(prompt + 1, longest), sampling, limits.page_size, shown)
        step += 1
        if has_decode:
            yield _decode(step, prompt, shown)
            step += 1


def warm_up_inputs(batch: ScheduleBatch, limits: WorkerLimits) -> SampleInputs:
    """Everything that a host can add to a step at once: none of it shall load a kernel for the first request that asks."""
    floats = array("f", [1.0]).tobytes()
    return SampleInputs(
        suppressed=((0, (1,)),),
        edits=(LogitEdit(0, array("i", [0]).tobytes(), floats, floats, floats),),
        masks=((0, mask_of((0,), limits.vocab_size)),),
        logprobs=((0, 1),),
    )


def _prefill(
    step: int, num_tokens: int, num_planned: int, sampling: RowSampling, page_size: int, shown: tuple[ShownRow, ...]
) -> ScheduleBatch:
    num_pages = -(-num_planned // page_size)
    ids = array("i", [0] * num_tokens).tobytes()
    penalties = RowPenalties(1.1, 0.1, 0.1, num_tokens=num_tokens, num_prompt=num_tokens // 2, history=ids)
    return ScheduleBatch(
        step=step,
        num_decode=0,
        rows=(1,),
        num_prior=(0,),
        num_new=(num_tokens,),
        samples=(True,),
        extend_ids=ids,
        table_rows=array("i", [1] * num_pages).tobytes(),
        table_columns=array("i", range(num_pages)).tobytes(),
        table_pages=array("i", range(1, num_pages + 1)).tobytes(),
        starts=(RowStart(row=1, sampling=sampling, penalties=penalties),),
        scored=(PromptScores(0, 0, array("i", [0] * (num_tokens - 1)).tobytes(), 1),) if num_tokens > 1 else (),
        shown=shown,
    )


def _decode(step: int, num_prior: int, shown: tuple[ShownRow, ...]) -> ScheduleBatch:
    return ScheduleBatch(
        step=step,
        num_decode=1,
        rows=(1,),
        num_prior=(num_prior,),
        num_new=(1,),
        samples=(True,),
        extend_ids=b"",
        table_rows=b"",
        table_columns=b"",
        table_pages=b"",
        starts=(),
        shown=shown,
    )
