"""Which hidden states there are to bring home: of no token, of the last one of each row, or of all."""

from __future__ import annotations

from typing import Literal, get_args

HiddenMode = Literal["none", "last", "full"]
HIDDEN_MODES: tuple[HiddenMode, ...] = get_args(HiddenMode)  # each has what the ones before it have


def is_above(wanted: HiddenMode, setting: HiddenMode) -> bool:
    """Whether `wanted` asks for more than `setting` gives."""
    return HIDDEN_MODES.index(wanted) > HIDDEN_MODES.index(setting)
