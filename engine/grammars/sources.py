"""What the grammar libraries are given, and what they answer, in one form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import RequestError
from ..grammar_session import GrammarSpec
from ..schema_forms import enforceable


def json_schema(spec: GrammarSpec, *, knows_declared: bool = False) -> Any:
    """What a `json_schema` or a `json_object` asks for, as the libraries enforce it. Raises: RequestError."""
    if not spec.source:
        return {"type": "object"}
    return enforceable(json.loads(spec.source), knows_declared=knows_declared)


def choices(source: str) -> list[str]:
    """The texts of a choice. Raises: RequestError."""
    try:
        texts = json.loads(source)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not texts or not all(map(_is_text, texts)):
        raise RequestError("a choice is a list of non-empty texts", param="structured_output")
    return texts


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and not any("\ud800" <= character <= "\udfff" for character in value)


def choice_as_ebnf(source: str) -> str:
    """A grammar of these texts and no others."""
    return "root ::= " + " | ".join(_literal(text) for text in choices(source))


@contextmanager
def told_plainly(spec: GrammarSpec) -> Iterator[None]:
    """What a library raises about what it was given is the caller's mistake. Raises: RequestError."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"the {spec.kind} cannot be used: {plain_error(error)}", param="structured_output"
        ) from error


def plain_error(error: Exception) -> str:
    """A library's message on one line, without its own time and place and without a drawing of the source."""
    text = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()
    if not text:
        return type(error).__name__
    first, *more = text.splitlines()
    if not first.endswith(":"):
        return first
    # The parser of patterns draws the pattern first, and says what is wrong with it afterwards.
    reason = next((line.removeprefix("error: ") for line in more if line.startswith("error: ")), "")
    return f"{first} {reason}".rstrip(" :")


def _literal(text: str) -> str:
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isascii() and character.isprintable() else f"\\U{ord(character):08x}"
