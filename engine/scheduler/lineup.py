"""The rows of the step being planned, gathered in columns and frozen into a ScheduleBatch."""

from __future__ import annotations

from array import array

from ..request import Request
from .schedule_batch import PooledRow, PromptScores, RowPenalties, RowStart, ScheduleBatch, ShownRow


class Lineup:
    """Decode rows first, then extend rows. Gathers; the scheduler decides and owns the requests."""

    def __init__(self) -> None:
        self.decodes: list[Request] = []
        self.shows_decodes = False  # some decode row has its hidden states brought home
        self.extends: list[tuple[Request, int, bool]] = []  # request, tokens computed now, whether it samples

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.extends

    def extend(self, request: Request, num_new: int) -> None:
        """Take in the next `num_new` positions of a request whose pages are there."""
        ends_prefill = request.num_planned + num_new == len(request.ids)
        self.extends.append((request, num_new, ends_prefill and request.max_total_tokens > len(request.ids)))

    def freeze(self, step: int) -> tuple[ScheduleBatch, list[Request]]:
        """Return the batch and its requests in row order, and move every request past this step."""
        decodes = self.decodes
        rows = [request.row for request in decodes]
        prior = [request.num_planned for request in decodes]
        for request in decodes:
            request.num_planned += 1
            request.last_step = step
        num_new = [1] * len(decodes)
        samples = [True] * len(decodes)
        members = list(decodes)
        ids = array("i")
        starts: list[RowStart] = []
        scored: list[PromptScores] = []
        pooled: list[PooledRow] = []
        shown: list[ShownRow] = []
        if self.shows_decodes:
            shown = [ShownRow(at, 0) for at, request in enumerate(decodes) if request.next_hidden is not None]
        for request, num_tokens, does_sample in self.extends:
            start = request.num_planned
            if request.next_scored is not None:
                scored += _scores(request, len(rows), start, start + num_tokens)
            pooling = request.params.pooling
            if pooling is not None and (pooling == "mean" or start + num_tokens == len(request.ids)):
                pooled.append(PooledRow(len(rows), pooling == "mean"))
            if request.next_hidden is not None and request.next_hidden < start + num_tokens:
                shown.append(ShownRow(len(rows), max(0, request.next_hidden - start)))
            rows.append(request.row)
            prior.append(start)
            num_new.append(num_tokens)
            samples.append(does_sample)
            members.append(request)
            ids.extend(request.ids[start : start + num_tokens])
            request.num_planned = start + num_tokens
            request.last_step = step
            request.decoding = does_sample
            if not request.started:
                request.started = True
                starts.append(RowStart(row=request.row, sampling=request.sampling, penalties=_penalties(request)))
        table_rows, table_columns, table_pages = _table_writes(members)
        batch = ScheduleBatch(
            step=step,
            num_decode=len(decodes),
            rows=tuple(rows),
            num_prior=tuple(prior),
            num_new=tuple(num_new),
            samples=tuple(samples),
            extend_ids=ids.tobytes(),
            table_rows=table_rows,
            table_columns=table_columns,
            table_pages=table_pages,
            starts=tuple(starts),
            scored=tuple(scored),
            pooled=tuple(pooled),
            shown=tuple(shown),
        )
        return batch, members


def _penalties(request: Request) -> RowPenalties | None:
    """What the device needs to count on by itself. A row that starts is in no step in flight: its history is exact."""
    if not request.is_counted:
        return None
    params, ids = request.params, request.ids
    first = request.num_prompt_tokens if params.repetition_penalty == 1 else 0
    return RowPenalties(
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        num_tokens=len(ids),
        num_prompt=request.num_prompt_tokens - first,
        history=ids[first:].tobytes(),
    )


def _scores(request: Request, index: int, start: int, end: int) -> list[PromptScores]:
    """What is scored by computing positions [start, end) of `request`: each position scores the token after it."""
    assert request.next_scored is not None
    first, last = max(start + 1, request.next_scored), min(end, request.num_prompt_tokens - 1)
    if first > last:
        return []
    targets = request.ids[first : last + 1].tobytes()
    return [PromptScores(index, first - 1 - start, targets, request.params.prompt_logprobs or 0)]


def _table_writes(members: list[Request]) -> tuple[bytes, bytes, bytes]:
    rows, columns, pages = array("i"), array("i"), array("i")
    for request in members:
        if request.table_pages:
            rows.extend(array("i", (request.row,)) * len(request.table_pages))
            columns.extend(request.table_columns)
            pages.extend(request.table_pages)
            request.table_columns, request.table_pages = array("i"), array("i")
    return rows.tobytes(), columns.tobytes(), pages.tobytes()
