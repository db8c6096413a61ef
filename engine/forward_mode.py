"""What kind of forward a batch is. Nobody compares modes by hand: they ask the predicates."""

from __future__ import annotations

from enum import Enum


class ForwardMode(Enum):
    """The kinds of forward that exist today."""

    EXTEND = "extend"  # every row brings ids from the host: prompts, chunks, resumed rows
    DECODE = "decode"  # every row brings one id from the relay
    MIXED = "mixed"  # decode rows first, extend rows after them
    IDLE = "idle"  # no rows: a rank that only keeps others company

    @classmethod
    def of(cls, *, num_decode: int, num_extend: int) -> ForwardMode:
        """The mode of a batch with these numbers of rows."""
        if num_extend:
            return cls.MIXED if num_decode else cls.EXTEND
        return cls.DECODE if num_decode else cls.IDLE

    @property
    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    @property
    def has_extend(self) -> bool:
        """Some row brings ids from the host."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    @property
    def has_decode(self) -> bool:
        """Some row takes its id from the relay."""
        return self in (ForwardMode.DECODE, ForwardMode.MIXED)

    @property
    def fits_decode_graph(self) -> bool:
        """Every row has exactly one token, so that a graph by row count can serve it."""
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)
