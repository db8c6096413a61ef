"""What a regular expression may have: what the libraries and whoever checks the answer all read alike."""

from __future__ import annotations

import re
from typing import Final

from .errors import RequestError

_LOOKAROUND: Final = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB1-9])")
# A class without an end goes on to the end of the text: nothing is looked through twice.
_ESCAPE_OR_CLASS: Final = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_LETTERS: Final = frozenset("dDwWsSpPnrtfvxu")
_SETS: Final = re.compile(r"\[|&&|--|~~")


def check_regex(source: str) -> None:
    """Raises: RequestError for what would not be enforced."""
    fault = pattern_fault(source)
    if fault is not None:
        raise RequestError(f"the regex cannot be enforced: it {fault}", param="structured_output")


def pattern_fault(pattern: str) -> str | None:
    """What in it is not read alike everywhere, if anything."""
    if _LOOKAROUND.search(pattern):
        return "uses look-around, back-references or word boundaries"
    if not all(map(_is_common, _ESCAPE_OR_CLASS.findall(pattern))):
        return "uses what is not a pattern everywhere"
    # Libraries read over an anchor within a pattern; at the ends of an alternative it means what they do anyway.
    bare = _ESCAPE_OR_CLASS.sub("x", pattern)
    parts = bare.split("|") if "(" not in bare else [bare]
    if any(anchor in part.removeprefix("^").removesuffix("$") for part in parts for anchor in "^$"):
        return "has an anchor elsewhere than at its ends"
    return None


def _is_common(part: str) -> bool:
    """Of an escape or a class."""
    escaped = _ESCAPE.findall(part)
    if any(each in "<>" or (each.isalnum() and each not in _LETTERS) for each in escaped):
        return False
    inner = _ESCAPE.sub("x", part).removeprefix("[").removeprefix("^").removesuffix("]")
    return bool(inner) and _SETS.search(inner) is None
