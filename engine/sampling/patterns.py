"""Regular expressions and grammars in GBNF, read as rules of texts.

Regular expressions are read by the standard library's own parser, so that what is enforced is what `re.fullmatch` takes. The
right side of a grammar's rule differs from one in its signs only: with each sign translated it is read like one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

from .text_rules import Alternatives, Characters, Concatenation, Node, Ranges, Reference, Repetition, Unsupported

LAST: Final = 0x10FFFF
_FIRST_NAME: Final = 0x10F000  # for private use: where a grammar has such a character itself, it is not read here
_BLOCK: Final = 0x1000
_CATEGORIES: Final = {
    sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_GBNF: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<rule>[A-Za-z_][\w-]*)\s*::=
    | (?P<name>[A-Za-z_][\w-]*)
    | "(?P<literal>(?:\\.|[^"\\\n])*)"
    | \[(?P<hat>\^?)(?P<class>(?:\\.|[^\]\\\n])+)\]
    | (?P<symbol>[()|*+?]|\{\d+(?:,\d*)?\})""",
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_NAMED: Final = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "]": "]",
    "[": "[",
    "-": "-",
    "^": "^",
}


def regex_rules(source: str) -> dict[str, Node]:
    """One rule, `root`. Raises: Unsupported, also for what is no regular expression."""
    return {"root": _read(source, {})}


def _read(source: str, names: Mapping[int, str]) -> Node:
    try:
        parsed = _parser.parse(source)
        if parsed.state.flags != re.UNICODE:
            raise Unsupported("it has flags")
        return _sequence(parsed, names)
    except (re.error, OverflowError, RecursionError) as error:
        raise Unsupported(str(error)) from None


def _sequence(parsed: Iterable[tuple[Any, Any]], names: Mapping[int, str]) -> Node:
    return Concatenation(tuple(_node(operation, argument, names) for operation, argument in parsed))


def _node(operation: Any, argument: Any, names: Mapping[int, str]) -> Node:
    if operation is sre.LITERAL and argument in names:
        return Reference(names[argument])
    if operation is sre.LITERAL:
        return Characters(((argument, argument),))
    if operation is sre.NOT_LITERAL:
        return Characters(_others([(argument, argument)]))
    if operation is sre.ANY:
        return Characters(_others([(10, 10)]))
    if operation is sre.IN:
        return Characters(_members(argument))
    if operation is sre.BRANCH:
        return Alternatives(tuple(_sequence(each, names) for each in argument[1]))
    if operation is sre.SUBPATTERN:
        _, added, removed, inner = argument
        if not added and not removed:
            return _sequence(inner, names)
    if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, inner = argument
        return Repetition(_sequence(inner, names), least, None if most is sre.MAXREPEAT else most)
    # Anchors stand where they say what holds anyway: see pattern_check.py.
    if operation is sre.AT and argument in (sre.AT_BEGINNING, sre.AT_END):
        return Concatenation(())
    raise Unsupported(f"it uses {operation}")


def _members(items: Sequence[tuple[Any, Any]]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    negated = False
    for operation, argument in items:
        if operation is sre.NEGATE:
            negated = True
        elif operation is sre.LITERAL:
            ranges.append((argument, argument))
        elif operation is sre.RANGE:
            ranges.append(argument)
        elif operation is sre.CATEGORY and argument in _CATEGORIES:
            ranges += _category(_CATEGORIES[argument])
        else:
            raise Unsupported(f"it uses {operation}")
    return _others(ranges) if negated else tuple(ranges)


def _others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All code points but these."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return (*found, (at, LAST)) if at <= LAST else tuple(found)


@cache
def _category(escape: str) -> Ranges:
    """In small parts: one search through all characters would keep the interpreter's lock."""
    ranges: list[tuple[int, int]] = []
    search = re.compile(f"{escape}+")
    for first in range(0, LAST + 1, _BLOCK):
        for found in search.finditer("".join(map(chr, range(first, first + _BLOCK)))):
            low, high = first + found.start(), first + found.end() - 1
            if ranges and ranges[-1][1] == low - 1:
                low = ranges.pop()[0]
            ranges.append((low, high))
    return tuple(ranges)


def gbnf_rules(source: str) -> dict[str, Node]:
    """The rules, of which `root` is a text. Raises: Unsupported, also for what is no grammar."""
    bodies: dict[str, list[str]] = {}
    names: dict[str, str] = {}  # of rules → the character that stands for a reference, in a group of its own
    body: list[str] | None = None
    at = 0
    while at < len(source):
        found = _GBNF.match(source, at)
        if found is None:
            raise Unsupported("it has other signs")
        at = found.end()
        kind, text = found.lastgroup, found[found.lastgroup or 0]
        if kind == "rule":
            if text in bodies:
                raise Unsupported(f"it has two rules {text}")
            body = bodies[text] = []
        elif kind != "space":
            if body is None:
                raise Unsupported("it begins without a rule")
            if kind == "name":
                body.append(f"({names.setdefault(text, chr(_FIRST_NAME + len(names)))})")
            else:
                body.append(_piece(kind, text, found["hat"]))
            if len(names) > LAST - _FIRST_NAME:
                raise Unsupported("it has too many rules")
    references = {ord(character): name for name, character in names.items()}
    return {name: _read("".join(pieces), references) for name, pieces in bodies.items()}


def _piece(kind: str | None, text: str, hat: str) -> str:
    if kind == "literal":
        return f"(?:{''.join(_escaped(each) for each, _ in _characters(text))})"
    if kind == "class":
        members = _characters(text)
        points = [_escaped(each) for each, _ in members]
        for at, (each, is_plain) in enumerate(members[1:-1], 1):
            if each == "-" and is_plain:
                points[at] = "-"
        return f"[{hat}{''.join(points)}]"
    return "(?:" if text == "(" else text


def _characters(text: str) -> list[tuple[str, bool]]:
    """Of a literal or a class: each character, and whether it stood there itself."""
    found = []
    at = 0
    while at < len(text):
        escape = _ESCAPE.match(text, at)
        if escape is None:
            found.append((text[at], True))
            at += 1
            continue
        code = escape[1] or escape[2] or escape[3]
        character = _NAMED.get(escape[4]) if code is None else chr(int(code, 16)) if int(code, 16) <= LAST else None
        if character is None:
            raise Unsupported(f"it has the escape {escape[0]}")
        found.append((character, False))
        at = escape.end()
    return found


def _escaped(character: str) -> str:
    if ord(character) >= _FIRST_NAME:
        raise Unsupported("it has characters for private use")
    return f"\\U{ord(character):08x}"
