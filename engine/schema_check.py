"""Refuses a JSON schema for what a grammar of it would not enforce, naming the keyword by its path.

A keyword passes if the grammar libraries enforce it where it stands, or if it is an annotation. What they are known to
drop without a word (measured, library by library) is refused here: an answer that violates its schema is worse than
none. Of a `format` the shape is enforced, not the calendar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .errors import RequestError
from .pattern_check import pattern_fault

MAX_DEPTH: Final = 64
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "$schema", "deprecated", "readOnly",
     "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "$defs", "definitions"}
)  # fmt: skip
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
         "maxProperties", "unevaluatedProperties"}
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
_TYPED: Final = frozenset[str]().union(*_OF_TYPE.values())
_BOUNDS: Final = _OF_TYPE["number"]
_COUNTS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_NAMING: Final = frozenset({"properties", "patternProperties"})
NAMED: Final = frozenset({*_NAMING, "propertyNames"})
_FURTHER: Final = frozenset({"additionalProperties", "unevaluatedProperties"})
_ALONE: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_FORMATS: Final = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uri", "uri-reference", "uuid"}
)  # fmt: skip
_ESCAPED_IN_JSON: Final = re.compile(r'"|\\\\|\\[nrtfvxuc0]')
_MODIFIED: Final = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?!:)")
NUM_DECIMALS: Final = 6  # of a bound of a number: what is below, the libraries drop


def check_schema(schema: Any) -> None:
    """Raises: RequestError with the path of the first keyword that cannot be enforced, such as `$.properties.a.not`."""
    _Check(schema).run()


def _refuse(path: str, why: str) -> RequestError:
    return RequestError(
        f"the schema cannot be enforced: {path} {why}", param="structured_output", code="unsupported_schema"
    )


class _Check:
    """One walk over one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._seen: set[int] = set()  # by identity
        self._targets: list[tuple[Any, str]] = []  # of references, which may point to where no keyword leads

    def run(self) -> None:
        self._visit(self._root, "$", 0)
        while self._targets:
            self._visit(*self._targets.pop(), 0)

    def _visit(self, schema: Any, path: str, depth: int) -> None:
        if schema is True or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if depth > MAX_DEPTH:
            raise _refuse(path, f"is nested deeper than {MAX_DEPTH}")
        if not isinstance(schema, dict):
            raise _refuse(path, "allows nothing" if schema is False else "is no schema")
        types = self._types(schema, path)
        alone = next((name for name in _ALONE if name in schema), None)
        for name, value in schema.items():
            at = f"{path}.{name}"
            if name in _ANNOTATIONS or name == "type" or name.startswith("x-"):
                continue
            if name not in _TYPED and name not in _ALONE:
                raise _refuse(at, "is not supported")
            if alone is not None and name != alone:
                raise _refuse(at, f"is not enforced beside {alone}")
            if name in _TYPED and not types:
                raise _refuse(at, "is only enforced where a type is given beside it")
            self._keyword(schema, name, value, at, types)
        for key, each in children(schema, path):
            self._visit(each, key, depth + 1)

    def _types(self, schema: dict[str, Any], path: str) -> tuple[str, ...]:
        given = schema.get("type", ())
        types = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given
        if (
            given == []
            or not isinstance(types, tuple)
            or not all(isinstance(each, str) and each in _OF_TYPE for each in types)
        ):
            raise _refuse(f"{path}.type", "is no type of JSON")
        if types and any(name in schema for name in ("$ref", "anyOf", "oneOf", "allOf")):
            raise _refuse(f"{path}.type", "is not enforced beside a reference or a combination")
        return types

    def _keyword(self, schema: dict[str, Any], name: str, value: Any, at: str, types: tuple[str, ...]) -> None:
        if name in _COUNTS and not (_is_of(value, "integer") and value >= 0):
            raise _refuse(at, "is no count")
        if name == "enum" and not (isinstance(value, list) and value):
            raise _refuse(at, "is no list of values")
        if name == "$ref":
            self._reference(value, at)
        elif name == "allOf" and (not isinstance(value, list) or len(value) != 1):
            raise _refuse(at, "is only supported with one schema in it")
        elif name == "oneOf" and not _are_disjoint(value):
            raise _refuse(
                at, "is only supported where its schemas exclude each other by type or by a constant property"
            )
        elif name in ("enum", "const"):
            for each in value if name == "enum" else [value]:
                if _is_infinite(each):
                    raise _refuse(at, "has a number that JSON cannot have")
                if types and not any(_is_of(each, kind) for kind in types):
                    raise _refuse(at, "has a value that is not of the type beside it")
        elif name == "required":
            self._required(schema, value, at)
        elif name == "format" and not (isinstance(value, str) and value in _FORMATS):
            raise _refuse(at, f"is not one of {', '.join(sorted(_FORMATS))}")
        elif name in ("minLength", "maxLength") and ("pattern" in schema or "format" in schema):
            raise _refuse(at, "is not enforced beside pattern or format")
        elif name == "pattern":
            if "format" in schema:
                raise _refuse(at, "is not enforced beside format")
            _check_pattern(value, at)
        elif name in _BOUNDS:
            _check_bound(schema, name, value, at, types)
        elif name == "multipleOf" and ("number" in types or not _is_of(value, "integer") or _BOUNDS & schema.keys()):
            raise _refuse(at, "is only enforced for integers, as a whole number, and without bounds")
        elif name in ("patternProperties", "propertyNames", "minProperties"):
            self._names(schema, name, value, at)

    def _names(self, schema: dict[str, Any], name: str, value: Any, at: str) -> None:
        """What is asked of the names of properties."""
        if name == "minProperties":
            # A name that is free may come twice, which counts as one.
            is_free = schema.get("additionalProperties") is not False or "patternProperties" in schema
            if (is_free or "propertyNames" in schema) and not (isinstance(value, int) and value <= 1):
                raise _refuse(
                    at, "is only enforced where additionalProperties is false and no pattern names a property"
                )
        elif name == "patternProperties":
            for key, _ in _members(value, at):
                _check_pattern(key[len(at) + 1 :], key)
            patterns = list(value)
            if len(patterns) > 1 or "properties" in schema:
                raise _refuse(at, "is only enforced with one pattern, and not beside properties")
            if schema.get("additionalProperties") is not False and not all(map(_is_whole, patterns)):
                raise _refuse(at, "is only enforced for whole names (^…$), or where additionalProperties is false")
        else:
            if _NAMING & schema.keys() or not isinstance(value, dict) or set(value) - {"type"} != {"pattern"}:
                raise _refuse(at, "is only enforced as a pattern, and not beside properties or patternProperties")
            _check_pattern(value["pattern"], f"{at}.pattern")

    def _required(self, schema: dict[str, Any], value: Any, at: str) -> None:
        properties = schema.get("properties", {})
        if not isinstance(value, list) or not isinstance(properties, dict):
            raise _refuse(at, "is no list of names")
        for index, name in enumerate(value):
            if not isinstance(name, str) or name not in properties:
                raise _refuse(f"{at}[{index}]", "is not among the properties")
        if value and "patternProperties" in schema:
            raise _refuse(at, "is not enforced beside patternProperties")

    def _reference(self, value: Any, at: str) -> None:
        target = referred(self._root, value, at)
        self._targets.append((target, f"${value[1:].replace('/', '.')}"))


def referred(root: Any, reference: Any, at: str) -> Any:
    """What a reference within a schema points to. `at`: where it stands. Raises: RequestError."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _refuse(at, "is not within the schema")
    target = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or part not in target:
            raise _refuse(at, "points nowhere")
        if part in _FURTHER and NAMED & target.keys():
            raise _refuse(at, f"points into {part} beside properties: give it a name in $defs")
        target = target[part]
    if reference != "#" and not reference.startswith("#/"):
        raise _refuse(at, "is an anchor")
    return target


def _check_pattern(value: Any, at: str) -> None:
    if not isinstance(value, str):
        raise _refuse(at, "is no pattern")
    if _ESCAPED_IN_JSON.search(value):
        raise _refuse(at, "names characters that JSON has to escape")
    fault = pattern_fault(value)
    if fault is not None or _MODIFIED.search(value):
        raise _refuse(at, fault or "has groups that are more than groups")


def _is_whole(pattern: str) -> bool:
    return pattern.startswith("^") and pattern.endswith("$") and "|" not in pattern


def _check_bound(schema: dict[str, Any], name: str, value: Any, at: str, types: tuple[str, ...]) -> None:
    if not _is_of(value, "number") or (isinstance(value, float) and not math.isfinite(value)):
        raise _refuse(at, "is no number")
    if "number" not in types:
        return
    if round(value, NUM_DECIMALS) != value:
        raise _refuse(at, f"is only enforced up to {NUM_DECIMALS} decimals")
    others = [schema[each] for each in _BOUNDS - {name} if _is_of(schema.get(each), "number")]
    if name.startswith("exclusive") and any(0 < abs(other - value) < 1 for other in others):
        raise _refuse(at, "is not enforced beside a bound less than 1 away")


def _is_infinite(value: Any) -> bool:
    """Whether a number somewhere in it is."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_is_infinite, value))
    return isinstance(value, float) and not math.isfinite(value)


def _members(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise _refuse(path, "is no object")
    for name, each in value.items():
        yield f"{path}.{name}", each


def children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The schemas below this one, with their paths. Raises: RequestError."""
    for name in ("$defs", "definitions", "properties", "patternProperties"):
        yield from _members(schema.get(name, {}), f"{path}.{name}")
    for name in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"):
        if schema.get(name, False) is not False:
            yield f"{path}.{name}", schema[name]
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        listed = schema.get(name, [])
        if not isinstance(listed, list) or (name in schema and not listed):
            raise _refuse(f"{path}.{name}", "is no list of schemas")
        for index, each in enumerate(listed):
            yield f"{path}.{name}[{index}]", each


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (is_whole or (kind == "number" and isinstance(value, float)))
    python = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}[kind]
    return isinstance(value, python)


def _are_disjoint(schemas: Any) -> bool:
    """Whether no value fits two of these, as far as can be seen from types and constant properties."""
    if not isinstance(schemas, list) or not all(isinstance(each, dict) for each in schemas):
        return False
    kinds = [each.get("type") for each in schemas]
    if all(isinstance(kind, str) for kind in kinds):
        merged = ["number" if kind == "integer" else kind for kind in kinds]
        if len(set(merged)) == len(merged):
            return True
    return any(_separates(name, schemas) for name in _constants(schemas[0])) if schemas else False


def _constants(schema: dict[str, Any]) -> list[str]:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return []
    names = [name for name in required if isinstance(name, str)]
    return [name for name in names if isinstance(properties.get(name), dict) and "const" in properties[name]]


def _separates(name: str, schemas: Sequence[dict[str, Any]]) -> bool:
    if not all(name in _constants(each) for each in schemas):
        return False
    values = [each["properties"][name]["const"] for each in schemas]
    # 1 and 1.0 are one number, but neither is true.
    keys = {(isinstance(value, bool), value) for value in values if not isinstance(value, (dict, list))}
    return len(keys) == len(values)
