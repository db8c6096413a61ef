"""What one request does to its logits, in host integers kept up to date with its history.

The device is told sparse changes: ids with a factor and an addend each, ids that are out, a packed mask of those that are
in. A request that changes nothing has no LogitRules at all. Everything follows from the ids committed so far, so a
request's changes are the same at any depth, after retraction, and in any company.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from .grammar_session import GrammarSession
from .sampling_params import SamplingParams

# Of the loop's own time, which stands still meanwhile, for one token of a grammar; and for all slow ones in a row: what
# grows with the text is stopped while it is small, and one token alone may compile something.
SLOW_TOKEN_S: Final = 0.02
MAX_SLOW_S: Final = 0.1


class LogitEdit(NamedTuple):
    """Changes of one row, each id once: x + bias is divided by the factor, or multiplied if negative, and then what is
    to be taken off is subtracted.

    `place`: position in the batch's rows. The others are packed native int32 and three times fp32.
    """

    place: int
    ids: bytes
    biases: bytes
    factors: bytes
    takes: bytes


class LogitRules:
    """The changes of one request. Owned by the scheduler, like the request itself."""

    __slots__ = (
        "_bans",
        "_biases",
        "_counts",
        "_counts_from",
        "_factors",
        "_frequency",
        "_ids",
        "_mask",
        "_places",
        "_presence",
        "_repetition",
        "_seen",
        "_sequences",
        "_slow_s",
        "_spent_s",
        "_takes",
        "grammar",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        vocab_size: int,
        bad_sequences: Sequence[tuple[int, ...]] = (),
        grammar: GrammarSession | None = None,
        penalises: bool = True,
    ) -> None:
        """`penalises`: False where the device counts for the penalties; the edits are then without them."""
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._counts_from = num_prompt_tokens
        biases = dict(params.logit_bias)
        self._counts: dict[int, int] = {}  # of the output
        self._places: dict[int, int] = {}  # id → its place in the columns
        self._ids = array("i", biases)
        self._biases = array("f", biases.values())
        self._factors = array("f", [1.0]) * len(self._ids)
        self._takes = array("f", [0.0]) * len(self._ids)
        self._places.update(zip(self._ids, range(len(self._ids)), strict=True))
        # Without penalties the history changes nothing, and is not walked.
        self._seen: int | None = 0 if self._repetition != 1 else num_prompt_tokens
        if not penalises or (self._repetition == 1 and not self._frequency and not self._presence):
            self._seen = None
        self._bans = tuple(ids[0] for ids in bad_sequences if len(ids) == 1)
        self._sequences = tuple((array("i", ids[:-1]), ids[-1]) for ids in bad_sequences if len(ids) > 1)
        self._mask = mask_of(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None
        self.grammar = grammar
        self._spent_s = 0.0  # by the grammar on the token under way
        self._slow_s = 0.0  # by the slow tokens before it, if the last one was slow

    def edit(self, index: int, ids: array[int]) -> LogitEdit | None:
        """The sparse changes after the history `ids`. O(new tokens), and a copy of the columns."""
        if self._seen is not None:
            self._catch_up(ids, self._seen)
            self._seen = len(ids)
        if not self._ids:
            return None
        return LogitEdit(index, *(x.tobytes() for x in (self._ids, self._biases, self._factors, self._takes)))

    def bans(self, ids: array[int]) -> tuple[int, ...]:
        """Ids that must not follow the history `ids`."""
        if not self._sequences:
            return self._bans
        found = [last for head, last in self._sequences if len(head) <= len(ids) and ids[-len(head) :] == head]
        return (*self._bans, *found)

    def mask(self) -> bytes | None:
        """The packed mask of the ids that may be drawn next, if not all may."""
        if self.grammar is None:
            return self._mask
        started = time.thread_time()
        filled = self.grammar.fill()
        self._spent_s = time.thread_time() - started
        if filled is None or self._mask is None:
            return self._mask if filled is None else filled
        return both(filled, self._mask)

    def accept(self, token_id: int) -> bool:
        """Go on by a drawn token that is no end id. Returns whether nothing can follow it; raises if it may not come, or
        if the grammar is slow token after token.
        """
        if self.grammar is None:
            return False
        started = time.thread_time()
        if not self.grammar.accept(token_id):
            raise ValueError(f"its grammar does not allow the drawn token {token_id}")
        self._spent_s += time.thread_time() - started
        is_slow, before_s = self._spent_s > SLOW_TOKEN_S, self._slow_s
        self._slow_s = before_s + self._spent_s if is_slow else 0.0
        if before_s and self._slow_s > MAX_SLOW_S:
            raise ValueError(f"its grammar takes {1e3 * self._spent_s:.0f} ms a token, which holds up everybody")
        return self.grammar.is_over

    def _catch_up(self, ids: array[int], seen: int) -> None:
        repetition, places = self._repetition, self._places
        for position in range(seen, len(ids)):
            token_id = ids[position]
            place = places.get(token_id)
            if place is None:
                place = places[token_id] = len(self._ids)
                self._ids.append(token_id)
                self._biases.append(0.0)
                self._factors.append(1.0)
                self._takes.append(0.0)
            self._factors[place] = repetition
            if position >= self._counts_from:
                count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
                self._takes[place] = self._frequency * count + self._presence


def mask_of(ids: Iterable[int], vocab_size: int) -> bytes:
    """Those ids and no others, as packed native int32: bit i of word w stands for id 32 w + i."""
    packed = bytearray(-(-vocab_size // 32) * 4)
    for token_id in ids:
        packed[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(packed) if sys.byteorder == "little" else _swapped(packed)


def both(one: bytes, other: bytes) -> bytes:
    """The ids that are in both masks."""
    joint = int.from_bytes(one, "little") & int.from_bytes(other, "little")
    return joint.to_bytes(len(one), "little")


def either(one: bytes, other: bytes) -> bytes:
    """The ids that are in one of the masks, or in both."""
    joint = int.from_bytes(one, "little") | int.from_bytes(other, "little")
    return joint.to_bytes(len(one), "little")


def without(mask: bytes, ids: Iterable[int], vocab_size: int) -> bytes:
    """The mask without these ids."""
    out = int.from_bytes(mask_of(ids, vocab_size), "little")
    return (int.from_bytes(mask, "little") & ~out).to_bytes(len(mask), "little")


def _swapped(packed: bytearray) -> bytes:
    words = array("I", bytes(packed))
    words.byteswap()
    return words.tobytes()
