"""Schemas are refused by the path of the first keyword that would not be enforced, and only then."""

from __future__ import annotations

import math

import pytest

from slipstream.engine.errors import RequestError
from slipstream.engine.schema_check import check_schema

TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}


def _tagged(tag: object) -> dict[str, object]:
    return {"type": "object", "properties": {"k": {"const": tag}}, "required": ["k"]}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9, "title": "n", "x-note": 1},
        {"type": "integer", "multipleOf": 2},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "object", "patternProperties": {"^x-": {}}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^[a-z]+$": {"type": "integer"}}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "minProperties": 1},
        {"type": ["string", "null"], "minLength": 2, "description": "d"},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
        {
            "type": "object",
            "properties": {"a": {"const": 3}},
            "required": ["a"],
            "additionalProperties": {"type": "null"},
        },
        {"$defs": {"t": TREE}, "$ref": "#/$defs/t"},
        TREE,
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}, "x": {}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
            ]
        },
        {"allOf": [{"type": "integer"}]},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": r"^\d{3}(?:-x)?$"},
        {"type": "string", "pattern": r"^[$^a-f]\$\^$|^b"},
        {"x-kept": {"type": "string"}, "$ref": "#/x-kept"},
        {"$defs": {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{(n + 1) % 90}"}} for n in range(90)}},
    ],
)
def test_what_is_enforced_passes(schema):
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (False, "$"),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "$.properties.a.not"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "$.uniqueItems"),
        *(
            ({"type": "array", "items": {"type": "string", "minLength": count}}, "$.items.minLength")
            for count in ("x", None, True, -1, 1.5, [], math.nan, math.inf)
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "type": []}, "$.type"),
        ({"oneOf": [{"properties": {"a": {"const": 1}}, "required": [["a"]]}]}, "$.oneOf"),
        *(({"enum": each}, "$.enum") for each in ("abc", {"a": 1}, 5, None, [])),
        ({"type": "array", "contains": {"type": "integer"}}, "$.contains"),
        ({"anyOf": [{"type": "string"}, {"if": True, "then": True}]}, "$.anyOf[1].if"),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "$.allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "$.minimum"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 3}, "$.minimum"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "type": "string"}, "$.type"),
        ({"$ref": "http://elsewhere/schema"}, "$.$ref"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "$.$ref"),
        ({"$defs": {"a": {"not": {}}}}, "$.$defs.a.not"),
        ({"minLength": 3}, "$.minLength"),
        ({"type": "string", "minLenght": 3}, "$.minLenght"),
        ({"type": "string", "minLength": 3, "pattern": "a"}, "$.minLength"),
        ({"type": "string", "maxLength": 3, "format": "date"}, "$.maxLength"),
        ({"type": "string", "format": "idn-email"}, "$.format"),
        ({"type": "string", "pattern": "(?=a)b"}, "$.pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, "$.pattern"),
        ({"type": "number", "multipleOf": 0.5}, "$.multipleOf"),
        ({"type": "integer", "multipleOf": 2.5}, "$.multipleOf"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "$.multipleOf"),
        ({"type": "integer", "minimum": "3"}, "$.minimum"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "$.exclusiveMinimum"),
        ({"type": "number", "maximum": 2e-9}, "$.maximum"),
        ({"type": "number", "maximum": 1.001, "exclusiveMinimum": 1}, "$.exclusiveMinimum"),
        ({"x-kept": {"not": {}}, "$ref": "#/x-kept"}, "$.x-kept.not"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties"}}}, "$.properties.a"),
        ({"type": "string", "pattern": "(a$)b"}, "$.pattern"),
        ({"type": "string", "pattern": "a^b"}, "$.pattern"),
        ({"type": "string", "pattern": r"\Aab\z"}, "$.pattern"),
        ({"type": "string", "pattern": "[[:alpha:]]"}, "$.pattern"),
        ({"type": "object", "patternProperties": {"(?=a)": {}}}, "$.patternProperties.(?=a)"),
        ({"type": "object", "patternProperties": {"^a": {}, "^ab": {}}}, "$.patternProperties"),
        ({"type": "object", "patternProperties": {"^a$": {}}, "properties": {"a": {}}}, "$.patternProperties"),
        ({"type": "object", "patternProperties": {"a": {}}}, "$.patternProperties"),
        ({"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "$.propertyNames"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "$.minProperties"),
        ({"const": [float("inf")]}, "$.const"),
        ({"type": "object", "properties": {}, "required": [[]]}, "$.required[0]"),
        ({"type": ["string", {}]}, "$.type"),
        ({"type": "string", "format": []}, "$.format"),
        ({"oneOf": [_tagged(1), _tagged(1.0)]}, "$.oneOf"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "z"]}, "$.required[1]"),
        ({"type": "integer", "enum": [1, "x"]}, "$.enum"),
        ({"type": "string", "const": 3}, "$.const"),
        ({"type": "strin"}, "$.type"),
        ({"type": "object", "properties": {"a": False}}, "$.properties.a"),
        ({"type": "array", "items": [{"type": "integer"}]}, "$.items"),
        ({"dependentRequired": {"a": ["b"]}}, "$.dependentRequired"),
        ({"anyOf": []}, "$.anyOf"),
        ([], "$"),
    ],
)
def test_what_is_not_enforced_is_refused_by_its_path(schema, path):
    with pytest.raises(RequestError) as caught:
        check_schema(schema)
    assert f": {path} " in str(caught.value)
    assert caught.value.param == "structured_output"
    assert caught.value.code == "unsupported_schema"


def test_a_schema_without_end_is_refused():
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="nested deeper"):
        check_schema(deep)
