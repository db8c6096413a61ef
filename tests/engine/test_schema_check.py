"""Schemas are refused by the path of the first keyword that would not be enforced, and only then."""

from __future__ import annotations

import pytest

from slipstream.engine.errors import RequestError
from slipstream.engine.schema_check import check_schema

TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9, "multipleOf": 2, "title": "n", "x-note": 1},
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
