"""JSON schemas as rules of texts: for schemas that `check_schema` lets pass, in the form that `enforceable` gives them.

What is not here raises `Unsupported`: bounds of numbers that are no integers, multiples, counted properties, some formats.
A text may be narrower than its schema, never wider: strings of a pattern take the escapes that JSON demands and no others,
and properties come in the order in which they are declared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import ceil, floor
from typing import Any, Final

from ..schema_check import NAMED, referred
from .patterns import gbnf_rules, others, searched_node
from .text_rules import Alternatives, Characters, Concatenation, Node, Reference, Repetition, Unsupported

# RFC 8259, but for white space: a model that likes it must not fill its answer with it, but may indent. Escaped surrogates
# come in pairs, so that a character is one `char` however it is spelled.
JSON: Final = r"""
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (member ("," ws member)*)? "}"
member ::= string ws ":" ws value ws
array ::= "[" ws (value ws ("," ws value ws)*)? "]"
string ::= "\"" char* "\""
char ::= [^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" (unit | [dD] [89abAB] hex{2} "\\u" [dD] [c-fC-F] hex{2}))
unit ::= [0-9a-cA-CefEF] hex{3} | [dD] [0-7] hex{2}
hex ::= [0-9a-fA-F]
number ::= integer ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
integer ::= "-"? ("0" | [1-9] [0-9]*)
ws ::= " "? | "\n" [ \t]{0,20}
"""
_FAR: Final = 10**32  # so many digits take as many states
MAX_COUNTED: Final = 16  # characters of a string: each further count has a mask of its own, of all tokens
_LABEL: Final = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_DATE: Final = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_CLOCK})"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})*",
}
_ESCAPES: Final = {0x22: '\\"', 0x5C: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_NOT_RAW: Final = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # in a string of JSON
_KINDS: Final = ("object", "array", "string", "number", "boolean", "null")


@cache
def _json_rules() -> Mapping[str, Node]:
    return gbnf_rules(JSON)


def schema_rules(schema: Any) -> dict[str, Node]:
    """The rules, of which `root` is a text. Raises: Unsupported."""
    made = _Rules(schema)
    made.rules["root"] = made.value(schema)
    return made.rules


class _Rules:
    """The rules of one schema: one for each schema below it, and JSON's own."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[int, str] = {}  # by a schema's identity
        self.rules = dict(_json_rules())

    def value(self, schema: Any) -> Node:
        if schema is True or schema == {}:
            return Reference("value")
        name = self._names.get(id(schema))
        if name is None:
            name = self._names[id(schema)] = f"schema {len(self._names)}"
            self.rules[name] = self._value(schema)
        return Reference(name)

    def _value(self, schema: dict[str, Any]) -> Node:
        if "$ref" in schema:
            return self.value(referred(self._root, schema["$ref"], "$"))
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return Alternatives(tuple(self.value(each) for each in schema[name]))
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            flat = [json.dumps(each, ensure_ascii=False) for each in values if not isinstance(each, (dict, list))]
            nested = [_constant(each) for each in values if isinstance(each, (dict, list))]
            return Alternatives((*([any_of(flat)] if flat else []), *nested))
        types = schema.get("type", _KINDS)
        return Alternatives(
            tuple(self._of_type(each, schema) for each in ([types] if isinstance(types, str) else types))
        )

    def _of_type(self, kind: str, schema: dict[str, Any]) -> Node:
        makers: Mapping[str, Callable[[dict[str, Any]], Node]] = {
            "object": self._object, "array": self._array, "string": _string, "integer": _integer, "number": _number,
        }  # fmt: skip
        if kind in makers:
            return makers[kind](schema)
        return Alternatives((text("true"), text("false"))) if kind == "boolean" else text("null")

    def _object(self, schema: dict[str, Any]) -> Node:
        declared, required = schema.get("properties", {}), schema.get("required", [])
        if "maxProperties" in schema or schema.get("minProperties", 0) > len(set(required)):
            raise Unsupported("it counts properties")
        further = [
            _member(_spelled(searched_node(pattern), escapes=False), self.value(each))
            for pattern, each in schema.get("patternProperties", {}).items()
        ]
        if not NAMED & schema.keys():  # where names are, `enforceable` left all others out
            any_name = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
            further = [] if any_name is False else [_member(_CHARS, self.value(any_name))]
        first = Alternatives(tuple(further))
        # Behind the last declared one: with a comma before each, where something came before.
        rest = self._rule(Repetition(_after_comma(first), 0, None) if further else Concatenation(()))
        begin = self._rule(Repetition(Concatenation((first, rest)), 0, 1) if further else Concatenation(()))
        for name, each in reversed(declared.items()):
            member = _member(_inner(name), self.value(each))
            options_rest, options_begin = [_after_comma(member, rest)], [Concatenation((member, rest))]
            if name not in required:
                options_rest.append(Concatenation((rest,)))
                options_begin.append(Concatenation((begin,)))
            rest, begin = self._rule(Alternatives(tuple(options_rest))), self._rule(Alternatives(tuple(options_begin)))
        return Concatenation((text("{"), _WS, begin, text("}")))

    def _array(self, schema: dict[str, Any]) -> Node:
        if "unevaluatedItems" in schema:
            raise Unsupported("it has unevaluated items")
        first = schema.get("prefixItems", [])
        least, most = _lengths(schema, "minItems", "maxItems")
        more = schema.get("items", True)
        if more is False:
            most = len(first) if most is None else min(most, len(first))
        items = first[:most]
        tail: Node = Concatenation(())
        if most is None or most > len(items):
            item = self._item(more)
            spare = (max(0, least - len(items)), None if most is None else most - len(items))
            tail = Repetition(_after_comma(item), *spare)
            if not items:
                tail = Concatenation(
                    (item, Repetition(_after_comma(item), max(0, spare[0] - 1), spare[1] and spare[1] - 1))
                )
                tail = Repetition(tail, 0 if least == 0 else 1, 1)
        elif least > len(items):
            raise Unsupported("it asks for more items than there may be")
        for place in range(len(items) - 1, -1, -1):
            here = self._item(items[place])
            tail = Concatenation(((here if place == 0 else _after_comma(here)), tail))
            if least <= place:
                tail = Repetition(tail, 0, 1)
        return Concatenation((text("["), _WS, tail, text("]")))

    def _item(self, schema: Any) -> Node:
        return Concatenation((self.value(schema), _WS))

    def _rule(self, node: Node) -> Node:
        name = f"part {len(self.rules)}"
        self.rules[name] = node
        return Reference(name)


_WS: Final = Reference("ws")
_CHARS: Final = Repetition(Reference("char"), 0, None)


def text(of: str) -> Node:
    """These characters."""
    return Concatenation(tuple(Characters(((ord(each), ord(each)),)) for each in of))


def any_of(texts: Iterable[str]) -> Node:
    """One of these texts, which may be many: they part where they differ."""
    ordered = sorted(set(texts))
    first, last = ordered[0], ordered[-1]
    shared = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    groups: dict[str, list[str]] = {}
    for each in ordered:
        groups.setdefault(each[shared : shared + 1], []).append(each[shared:])
    if len(groups) == 1:
        return text(first)
    parts = (any_of(group) if start else text("") for start, group in groups.items())
    return Concatenation((text(first[:shared]), Alternatives(tuple(parts))))


def _after_comma(*parts: Node) -> Node:
    return Concatenation((text(","), _WS, *parts))


def _inner(name: str) -> Node:
    return text(json.dumps(name, ensure_ascii=False)[1:-1])


def _constant(value: Any) -> Node:
    """A value, with white space where it may be."""
    if isinstance(value, dict):
        members = [_member(_inner(name), _constant(each)) for name, each in value.items()]
        return Concatenation((text("{"), _WS, _listed(members), text("}")))
    if isinstance(value, list):
        return Concatenation(
            (text("["), _WS, _listed([Concatenation((_constant(each), _WS)) for each in value]), text("]"))
        )
    return text(json.dumps(value, ensure_ascii=False))


def _member(name: Node, value: Node) -> Node:
    return Concatenation((text('"'), name, text('"'), _WS, text(":"), _WS, value, _WS))


def _listed(parts: Sequence[Node]) -> Node:
    return Concatenation((*parts[:1], *(_after_comma(each) for each in parts[1:])))


def _lengths(schema: dict[str, Any], lower: str, upper: str) -> tuple[int, int | None]:
    least, most = ceil(schema.get(lower, 0)), schema.get(upper)
    if most is not None and least > most:
        raise Unsupported("it has no length between its bounds")
    return least, None if most is None else floor(most)


def _string(schema: dict[str, Any]) -> Node:
    if "pattern" in schema:
        content = _spelled(searched_node(schema["pattern"]), escapes=True)
    elif "format" in schema:
        if schema["format"] not in _FORMATS:
            raise Unsupported(f"it has the format {schema['format']}")
        content = searched_node(f"^{_FORMATS[schema['format']]}$")
    else:
        least, most = _lengths(schema, "minLength", "maxLength")
        if max(least, most or 0) > MAX_COUNTED:
            raise Unsupported("it counts far")
        content = Repetition(Reference("char"), least, most)
    return Concatenation((text('"'), content, text('"')))


def _spelled(node: Node, *, escapes: bool) -> Node:
    """A text within a string of JSON."""
    match node:
        case Characters(ranges):
            held = [code for code in _ESCAPES if any(low <= code <= high for low, high in ranges)]
            raw = Characters(others([*others(ranges), *_NOT_RAW]))
            return Alternatives((raw, *(text(_ESCAPES[code]) for code in held))) if held and escapes else raw
        case Concatenation(parts):
            return Concatenation(tuple(_spelled(part, escapes=escapes) for part in parts))
        case Alternatives(parts):
            return Alternatives(tuple(_spelled(part, escapes=escapes) for part in parts))
        case Repetition(part, least, most):
            return Repetition(_spelled(part, escapes=escapes), least, most)
    return node


def _number(schema: dict[str, Any]) -> Node:
    if {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} & schema.keys():
        raise Unsupported("it bounds a number")
    return Reference("number")


def _integer(schema: dict[str, Any]) -> Node:
    if "multipleOf" in schema:
        raise Unsupported("it has multiples")
    lows = [ceil(schema["minimum"])] if "minimum" in schema else []
    lows += [floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [floor(schema["maximum"])] if "maximum" in schema else []
    highs += [ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    if not lows and not highs:
        return Reference("integer")
    low, high = max(lows, default=None), min(highs, default=None)
    if max(abs(low or 0), abs(high or 0)) >= _FAR:
        raise Unsupported("its bounds are far")
    parts = []
    if high is None or high >= 0:
        parts.append(_from_to(max(low or 0, 0), high))
    if low is None or low < 0:
        negative = _from_to(max(-high, 1) if high is not None else 1, None if low is None else -low)
        parts.append(Concatenation((text("-"), negative)))
    if not parts or (low is not None and high is not None and low > high):
        raise Unsupported("it has no number between its bounds")
    return Alternatives(tuple(parts))


def _from_to(low: int, high: int | None) -> Node:
    """The decimal numbers from `low` to `high`, neither negative."""
    options: list[Node] = []
    num_digits = len(str(low))
    if high is None:  # longer ones, and those as long as the lowest
        options.append(Concatenation((_digits("1", "9"), Repetition(_digits("0", "9"), num_digits, None))))
        high = 10**num_digits - 1
    for length in range(num_digits, len(str(high)) + 1):
        least, most = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        if least <= most:
            options.append(_as_long(str(least), str(most)))
    return Alternatives(tuple(options))


def _as_long(low: str, high: str) -> Node:
    if not low:
        return Concatenation(())
    rest = len(low) - 1
    if low[0] == high[0]:
        return Concatenation((text(low[0]), _as_long(low[1:], high[1:])))
    options: list[Node] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        options.append(Concatenation((text(low[0]), _as_long(low[1:], "9" * rest))))
        first += 1
    if high[1:] != "9" * rest:
        options.append(Concatenation((text(high[0]), _as_long("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        options.append(Concatenation((_digits(str(first), str(last)), Repetition(_digits("0", "9"), rest, rest))))
    return Alternatives(tuple(options))


def _digits(low: str, high: str) -> Node:
    return Characters(((ord(low), ord(high)),))
