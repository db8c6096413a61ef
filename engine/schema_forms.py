"""A schema in the form that the grammar libraries enforce: whatever fits it fitted the schema before.

They tell names apart as they are spelled: `"\\u0061"` passes for another name than `"a"`, and a further property so called
would escape the schema of `a`. So the names of further properties become a pattern without escapes that leaves the
declared ones out. Where nothing is said of further properties, there are none.

llguidance leaves declared names out of a pattern by itself, but would hold them to its schema too: where that asks for
nothing, the pattern has no names in it, and a mask at the start of a name takes a fiftieth of the time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Final

from .schema_check import NAMED, children, referred

MAX_PREFIX: Final = 16  # no further name begins with so much of a declared one: patterns stay short
_ESCAPED: Final = r'"\\\x00-\x1f'
_HAS_ESCAPED: Final = re.compile(f"[{_ESCAPED}]")
_MEANT: Final = frozenset(r"\^$.|?*+()[]{}-&~")  # in a pattern or in a class of it


def enforceable(schema: Any, *, knows_declared: bool = False) -> Any:
    """The schema, changed in place. For schemas that `check_schema` lets pass. `knows_declared`: for a library that takes
    no declared name for one of a pattern.
    """
    for each in schemas_within(schema):
        if NAMED & each.keys():
            _close(each, knows_declared=knows_declared)
    return schema


def schemas_within(root: Any) -> Iterator[dict[str, Any]]:
    """A schema and all below it, each once. A schema may be changed once it is handed out."""
    seen: set[int] = set()
    left = [root]
    while left:
        each = left.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        left += [below for _, below in children(each, "$")]
        if "$ref" in each:
            left.append(referred(root, each["$ref"], "$"))
        yield each


def _close(schema: dict[str, Any], *, knows_declared: bool) -> None:
    """Further properties by the names that they may have, and no others."""
    unevaluated = schema.pop("unevaluatedProperties", "properties" not in schema)
    further = schema.pop("additionalProperties", unevaluated)
    schema["additionalProperties"] = False
    named = schema.pop("propertyNames", None)
    if further is not False and "patternProperties" not in schema:
        names = () if knows_declared and further in (True, {}) else schema.get("properties", ())
        pattern = named["pattern"] if named is not None else names_except(names)
        schema["patternProperties"] = {pattern: further}


def names_except(names: Collection[str]) -> str:
    """A pattern of names that need no escapes, are none of these and begin with none of the long ones."""
    if not names:
        return f"^[^{_ESCAPED}]*$"
    tree: dict[str, Any] = {}  # by character; "" where a name ends
    for name in names:
        if _HAS_ESCAPED.search(name):
            continue
        node = tree
        for character in name[:MAX_PREFIX]:
            node = node.setdefault(character, {})
        node[""] = {}
    return f"^{_rest(tree, MAX_PREFIX)}$"


def _rest(node: dict[str, Any], num_left: int) -> str:
    """What may follow a prefix of declared names: no two options begin alike."""
    further = [character for character in node if character]
    options = [f"[^{''.join(map(_literal, further))}{_ESCAPED}][^{_ESCAPED}]*"]
    if num_left > 1:
        options += [_literal(character) + _rest(node[character], num_left - 1) for character in further]
    return f"(?:{'|'.join(options)}{'' if '' in node else '|'})"


def _literal(character: str) -> str:
    return "\\" + character if character in _MEANT else character
