"""What the sample of a step must know of its requests' histories."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import RequestError, SlipstreamError, StepFailed
from ..logit_rules import LogitEdit, LogitRules, without
from ..request import Request, RequestState
from ..worker import SampleInputs
from .schedule_batch import ScheduleBatch


class _Notes:
    """Columns of SampleInputs as they are gathered."""

    def __init__(self) -> None:
        self.dead: list[int] = []
        self.suppressed: list[tuple[int, tuple[int, ...]]] = []
        self.edits: list[LogitEdit] = []
        self.masks: list[tuple[int, bytes]] = []
        self.processors: list[tuple[int, bytes]] = []


def gather_sample_inputs(batch: ScheduleBatch, members: Sequence[Request], *, vocab_size: int) -> SampleInputs:
    """The host's part in the sample of `batch`; call when every step before it is committed.

    A request whose rules raise is marked: it is left out of the sample, and fails when the step is committed.
    """
    notes = _Notes()
    logprobs: list[tuple[int, int]] = []
    running, samples = RequestState.RUNNING, batch.samples
    for index, request in enumerate(members):
        if request.state is not running:
            notes.dead.append(index)
            continue
        if request.is_plain or not samples[index]:
            continue
        params = request.params
        if params.logprobs is not None:
            logprobs.append((index, params.logprobs))
        if request.rules is not None:
            _note_rules(notes, index, request, request.rules, step=batch.step, vocab_size=vocab_size)
        elif params.min_tokens > request.num_outputs:
            notes.suppressed.append((index, tuple(sorted(request.stop_ids))))
    return SampleInputs(
        dead=frozenset(notes.dead),
        suppressed=tuple(notes.suppressed),
        edits=tuple(notes.edits),
        masks=tuple(notes.masks),
        processors=tuple((index, members[index].params.logits_processors, ids) for index, ids in notes.processors),
        logprobs=tuple(logprobs),
    )


def _note_rules(notes: _Notes, index: int, request: Request, rules: LogitRules, *, step: int, vocab_size: int) -> None:
    try:
        edit = rules.edit(index, request.ids)
        banned = rules.bans(request.ids)
        mask = rules.mask()
    except Exception as error:
        request.fault = StepFailed(f"the rules for its logits failed: {error}", step=step)
        request.fault.__cause__ = error
        notes.dead.append(index)
        return
    if request.params.min_tokens > request.num_outputs:
        may_end = tuple(sorted(request.stop_ids))
        # Where a grammar allows nothing but the end, the request ends, min_tokens or not.
        if mask is None or any(without(mask, may_end, vocab_size)):
            banned = (*banned, *may_end)
    if edit is not None:
        notes.edits.append(edit)
    if banned:
        notes.suppressed.append((index, banned))
    if mask is not None:
        notes.masks.append((index, mask))
    if request.params.logits_processors:
        notes.processors.append((index, request.ids.tobytes()))


def row_fault(request: Request, reason: str, *, step: int, vocab_size: int) -> SlipstreamError:
    """The error of a request whose row failed in `step`; call before anything follows its history. It is the request's own
    where what it asks for leaves no token at all: a text that the vocabulary cannot spell, a choice among bad words.
    """
    rules = request.rules
    if rules is None or not _leaves_nothing(request, rules, vocab_size):
        return StepFailed(reason, step=step)
    spec = request.params.structured_output
    if spec is None:
        return RequestError("the bad words leave none of allowed_token_ids to draw", param="allowed_token_ids")
    message = f"the {spec.kind} cannot go on: no token of this model that it allows here is left to draw"
    return RequestError(message, param="structured_output")


def _leaves_nothing(request: Request, rules: LogitRules, vocab_size: int) -> bool:
    try:
        mask = rules.mask()
    except Exception:
        return False
    return mask is not None and not any(without(mask, rules.bans(request.ids), vocab_size))
