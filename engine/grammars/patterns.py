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
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from .text_rules import Alternatives, Characters, Concatenation, Node, Ranges, Reference, Repetition, Unsupported

LAST: Final = 0x10FFFF
_FIRST_NAME: Final = 0x10F000  # for private use: where a grammar has such a character itself, it is not read here
_BLOCK: Final = 0x1000
_ANYTHING: Final = Repetition(Characters(((0, LAST),)), 0, None)
_CATEGORIES: Final = {
    sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_WIDER: Final = {r"\s": r"[\s\ufeff]", r"\S": r"[^\s\ufeff]"}  # what is no space must be none in ECMAScript either
_GBNF: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<rule>[A-Za-z_][\w-]*)\s*::=
    | (?P<name>[A-Za-z_][\w-]*)
    | "(?P<literal>(?:\\.|[^"\\\n])*)"
    | \[(?P<hat>\^?)(?P<class>(?:\\.|[^\]\\\n])+)\]
    | (?P<symbol>[()|*+?]|\{\d+(?:,\d*)?\})""",
    re.VERBOSE,
)
_COUNT: Final = re.compile(r"[*+?]|\{.*\}")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_NAMED: Final = {"n": "\n", "r": "\r", "t": "\t", **{each: each for each in "\\\"'][-^"}}


def regex_rules(source: str) -> dict[str, Node]:
    """One rule, `root`. Raises: Unsupported, also for what is no regular expression."""
    return {"root": _Reader().read(source)}


def searched_node(pattern: str) -> Node:
    """The texts in which a pattern of a JSON schema is found. Classes are ECMAScript's, so far as the standard library has
    them too. Raises: Unsupported.
    """
    if "{," in pattern:
        raise Unsupported("it has a count without its lower end")  # no count in ECMAScript
    reader = _Reader(is_ecma=True)
    parsed = _parsed(pattern)
    branches = parsed[0][1][1] if len(parsed) == 1 and parsed[0][0] is sre.BRANCH else [parsed]
    found: list[Node] = []
    for branch in branches:
        items = list(branch)
        begins = items[:1] == [(sre.AT, sre.AT_BEGINNING)]
        ends = items[begins:][-1:] == [(sre.AT, sre.AT_END)]
        inner = reader.sequence(items[begins : len(items) - ends])
        found.append(Concatenation((*([] if begins else [_ANYTHING]), inner, *([] if ends else [_ANYTHING]))))
    return Alternatives(tuple(found))


def _parsed(source: str) -> Any:
    try:
        parsed = _parser.parse(source)
    except (re.error, OverflowError, RecursionError) as error:
        raise Unsupported(str(error)) from None
    if parsed.state.flags != re.UNICODE:
        raise Unsupported("it has flags")
    return parsed


class _Reader(NamedTuple):
    """What parts of an expression mean. `names`: of the rules that a character stands for. `is_ecma`: as in a schema."""

    names: Mapping[int, str] = MappingProxyType({})
    is_ecma: bool = False

    def read(self, source: str) -> Node:
        return self.sequence(_parsed(source))

    def sequence(self, parsed: Iterable[tuple[Any, Any]]) -> Node:
        return Concatenation(tuple(self._node(operation, argument) for operation, argument in parsed))

    def _node(self, operation: Any, argument: Any) -> Node:
        if operation is sre.LITERAL and argument in self.names:
            return Reference(self.names[argument])
        if operation is sre.LITERAL:
            return Characters(((argument, argument),))
        if operation is sre.NOT_LITERAL:
            return Characters(others([(argument, argument)]))
        if operation is sre.ANY:
            return Characters(others((each, each) for each in (10, 13, 0x2028, 0x2029)[: 4 if self.is_ecma else 1]))
        if operation is sre.IN:
            return Characters(self._members(argument))
        if operation is sre.BRANCH:
            return Alternatives(tuple(self.sequence(each) for each in argument[1]))
        if operation is sre.SUBPATTERN:
            _, added, removed, inner = argument
            if not added and not removed:
                return self.sequence(inner)
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = argument
            return Repetition(self.sequence(inner), least, None if most is sre.MAXREPEAT else most)
        # Those of an expression stand where they say what holds anyway: see pattern_check.py.
        if operation is sre.AT and argument in (sre.AT_BEGINNING, sre.AT_END) and not self.is_ecma:
            return Concatenation(())
        raise Unsupported(f"it uses {operation}")

    def _members(self, items: Sequence[tuple[Any, Any]]) -> Ranges:
        ranges: list[tuple[int, int]] = []
        is_negated = items[0][0] is sre.NEGATE
        for operation, argument in items[is_negated:]:
            if operation is sre.LITERAL:
                ranges.append((argument, argument))
            elif operation is sre.RANGE:
                ranges.append(argument)
            elif operation is sre.CATEGORY and argument in _CATEGORIES:
                escape = _CATEGORIES[argument]
                # \d, \w and \s have fewer characters there than here, and so have the others' complements.
                is_ascii = self.is_ecma and is_negated == escape.isupper()
                ranges += _category(_WIDER.get(escape, escape) if self.is_ecma and not is_ascii else escape, is_ascii)
            else:
                raise Unsupported(f"it uses {operation}")
        rest = others(ranges)
        return rest if is_negated else others(rest)  # in order, and none twice


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All code points but these."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return (*found, (at, LAST)) if at <= LAST else tuple(found)


@cache
def _category(escape: str, is_ascii: bool) -> Ranges:
    """In small parts: one search through all characters would keep the interpreter's lock."""
    ranges: list[tuple[int, int]] = []
    search = re.compile(f"{escape}+", re.ASCII if is_ascii else re.UNICODE)
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
                if _COUNT.fullmatch(text) and body and _COUNT.fullmatch(body[-1]):
                    raise Unsupported("it counts a count")  # which an expression would read as something else
                body.append(_piece(kind, text, found["hat"]))
            if len(names) > LAST - _FIRST_NAME:
                raise Unsupported("it has too many rules")
    references = {ord(character): name for name, character in names.items()}
    reader = _Reader(references)
    return {name: reader.read("".join(pieces)) for name, pieces in bodies.items()}


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
