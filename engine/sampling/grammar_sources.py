"""What the grammar libraries are given, and what they answer, in one form."""

from __future__ import annotations

import json
import re

from ..errors import RequestError


def choices(source: str) -> list[str]:
    """The texts of a choice. Raises: RequestError."""
    try:
        texts = json.loads(source)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("a choice is a list of non-empty texts", param="structured_output")
    return texts


def choice_as_ebnf(source: str) -> str:
    """A grammar of these texts and no others."""
    return "root ::= " + " | ".join(_literal(text) for text in choices(source))


def plain_error(error: Exception) -> str:
    """A library's message without its own time and place."""
    text = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _literal(text: str) -> str:
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isascii() and character.isprintable() else f"\\U{ord(character):08x}"
