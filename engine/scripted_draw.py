"""The scripted worker's stand-in for logits: every row has an id it wishes for, and likes the ids after it ever less.

And for a device that counts: what it knows of a row is what its start said, and what it has drawn since.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from .logit_rules import LogitEdit
from .outputs import TokenLogprobs
from .scheduler.schedule_batch import RowPenalties, RowStart, ScheduleBatch
from .worker import SampleInputs

Penalise = Callable[[list[float]], None]


class ScriptedCounts:
    """What penalties count, by request row."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[RowPenalties, frozenset[int], Counter[int]]] = {}

    def start(self, starts: Iterable[RowStart]) -> None:
        """Forget what these rows held, and count their histories."""
        for start in starts:
            self._rows.pop(start.row, None)
            if start.penalties is not None:
                ids = array("i", start.penalties.history)
                num_prompt = start.penalties.num_prompt
                self._rows[start.row] = start.penalties, frozenset(ids[:num_prompt]), Counter(ids[num_prompt:])

    def penalise(self, row: int, length: int, relayed: int) -> Penalise | None:
        """Once a draw of the row: count the draw before it, if it was since the start. What is to be done to the scores,
        rounded as edits are.
        """
        if row not in self._rows:
            return None
        asked, prompt, outputs = self._rows[row]
        if length > asked.num_tokens:
            outputs[relayed] += 1
        factor = array("f", [asked.repetition])[0]

        def change(scores: list[float]) -> None:
            for token_id in prompt | outputs.keys():
                x = scores[token_id]
                scores[token_id] = x * factor if x < 0 else x / factor
            for token_id, count in outputs.items():
                scores[token_id] -= array("f", [asked.frequency * count + asked.presence])[0]

        return change


class ScriptedDraw:
    """The draws of one step, as the inputs from the host change them."""

    def __init__(self, inputs: SampleInputs, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._suppressed: Mapping[int, tuple[int, ...]] = dict(inputs.suppressed)
        self._edits: Mapping[int, LogitEdit] = {edit.place: edit for edit in inputs.edits}
        self._masks = dict(inputs.masks)
        self._processors = {index: (processors, history) for index, processors, history in inputs.processors}
        self._logprobs = dict(inputs.logprobs)

    def draw(self, index: int, wished: int, *, obeys_mask: bool = True, penalise: Penalise | None = None) -> int:
        """The id that the row draws. Raises what a processor raises."""
        changes = (self._suppressed, self._edits, self._masks, self._processors)
        if penalise is None and not any(index in change for change in changes):
            return wished
        scores = self._scores(wished)
        edit = self._edits.get(index)
        if edit is not None:
            columns = (array("i", edit.ids), *(array("f", column) for column in edit[2:]))
            for token_id, bias, factor, take in zip(*columns, strict=True):
                x = scores[token_id] + bias
                scores[token_id] = (x * factor if x < 0 else x / factor) - take
        if penalise is not None:
            penalise(scores)
        for token_id in self._suppressed.get(index, ()):
            scores[token_id] = -math.inf
        if index in self._masks and obeys_mask:
            allowed = int.from_bytes(self._masks[index], "little")
            scores = [x if allowed >> token_id & 1 else -math.inf for token_id, x in enumerate(scores)]
        if index in self._processors:
            processors, history = self._processors[index]
            for processor in processors:
                scores = processor(array("i", history), scores)
        best = max(scores)
        if best == -math.inf:
            raise ValueError("nothing may be drawn")
        return scores.index(best)

    def logprobs(self, index: int, wished: int, token_id: int) -> TokenLogprobs | None:
        """Of the drawn id, before all changes; None if the row asks for none."""
        num_top = self._logprobs.get(index)
        if num_top is None:
            return None
        scores = self._scores(wished)
        top = [(wished + rank) % self._vocab_size for rank in range(min(num_top, self._vocab_size))]
        return TokenLogprobs(
            token_id, math.log(scores[token_id]), tuple(top), tuple(math.log(scores[each]) for each in top)
        )

    def _scores(self, wished: int) -> list[float]:
        size = self._vocab_size
        return [((wished - token_id) % size or size) / size for token_id in range(size)]


def scripted_pooled(batch: ScheduleBatch) -> dict[int, tuple[float, ...]]:
    """Of each pooled row two numbers: the sum of its tokens and how many they are, or the last token and one."""
    ids = array("i", batch.extend_ids)
    ends = [sum(batch.num_new[batch.num_decode : place + 1]) for place, _ in batch.pooled]
    found: dict[int, tuple[float, ...]] = {}
    for (place, sums), end in zip(batch.pooled, ends, strict=True):
        tokens = ids[end - batch.num_new[place] : end] if sums else ids[end - 1 : end]
        found[place] = (float(sum(tokens)), float(len(tokens)))
    return found


def scripted_prompt_logprobs(batch: ScheduleBatch) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Of each scored token: a number that depends on it and on its position."""
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for score in batch.scored:
        first = batch.num_prior[score.place] + score.first + 1
        top_ids = tuple(range(score.num_top))
        found[score.place] = tuple(
            TokenLogprobs(token_id, -float(token_id) - position / 1024, top_ids, (0.0,) * score.num_top)
            for position, token_id in enumerate(array("i", score.targets), first)
        )
    return found
