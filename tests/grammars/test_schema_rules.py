"""JSON schemas as rules: every text fits its schema, and texts in the declared order are taken."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.errors import RequestError
from slipstream.engine.grammar_session import CompiledGrammar, GrammarSpec
from slipstream.engine.grammars.automaton_backend import AutomatonBackend
from slipstream.engine.grammars.schema_rules import MAX_COUNTED
from slipstream.engine.schema_check import check_schema

END = 256
BYTES = [*(bytes((byte,)) for byte in range(256)), b""]


class Refuses:
    """A library that is not asked."""

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        raise RequestError(f"the library was asked for the {spec.kind}", param="structured_output")


BACKEND = AutomatonBackend(BYTES, [END], Refuses())


def compiled(schema: Any) -> CompiledGrammar:
    check_schema(schema)
    return BACKEND.compile_blocking(GrammarSpec(kind="json_schema", source=json.dumps(schema)))


def takes(schema: Any, text: str) -> bool:
    session = compiled(schema).session()
    return all(session.accept(byte) for byte in text.encode()) and session.accept(END)


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": closed(of={"type": "integer"}, kids={"type": "array", "items": {"$ref": "#/$defs/tree"}})},
}
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer"}, ["0", "-12", "340"], ["01", "1.0", "-", "", "1e3", "+1"]),
    ({"type": "number"}, ["0", "-1.5", "2E+10", "-0.0"], [".5", "1.", "1e", "00", "NaN"]),
    ({"type": ["boolean", "null"]}, ["true", "false", "null"], ["True", "0"]),
    ({"type": "string"}, ['"a\\n\\u00e9é/\\/"', '"\\ud83d\\ude00"'], ['"\\ud83d"', '"\\ude00\\ud83d"', '"\n"', '"\\x"', "'a'"]),
    ({"type": "string", "minLength": 1, "maxLength": 2},
     ['"ab"', '"\\n😀"', '"\\ud83d\\ude00b"'], ['""', '"abc"', '"\\ud83d\\ude00bc"']),
    ({"const": {"a": [1, "é"], "b": None}},
     ['{"a": [1, "é"], "b": null}', '{"a":[1,"é"],"b":null}'], ['{"b": null, "a": [1, "é"]}']),
    ({"enum": ["x", 2, []]}, ['"x"', "2", "[]"], ['"y"', "2.0", "[2]"]),
    ({"type": "array"}, ["[]", '[1, [{"a": 2}], "x"]', "[\n  1,\n  2\n]"], ["[1,]", "[1 2]", "1"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
     ["[1, 2]", "[1,2,3]"], ["[]", "[1]", "[1,2,3,4]", '[1,"2"]']),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
     ["[]", "[1]", '[1, "a"]', '[1, "a", null]'], ['["a"]', "[1, 2]"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 1},
     ["[1]", "[1, null]"], ["[]", "[1, null, 2]"]),
    ({"type": "array", "maxItems": 0}, ["[]", "[ ]"], ["[1]"]),
    (closed(a={"type": "integer"}, b={"type": "null"}), ["{}", '{"a": 1}', '{"b": null}', '{ "a" : 1 , "b" : null }'],
     ['{"b": null, "a": 1}', '{"a": 1, "a": 1}', '{"c": 1}', '{"a": 1,}', '{, "a": 1}', '{"\\u0061": 1}']),
    (closed(a={}, b={}, c={}) | {"required": ["b"]},
     ['{"b": 1}', '{"a": [], "b": {}, "c": "x"}', '{"b": 1, "c": 2}'], ["{}", '{"a": 1}', '{"a": 1, "c": 2}']),
    ({"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
     ['{"ab": 1, "a": "x", "abc": "y"}', '{"x": ""}', '{"ab": 1}', "{}"],
     ['{"ab": "x"}', '{"a": 1}', '{"x": "", "ab": 1}', '{"a\\u0062": "x"}']),
    ({"type": "object", "patternProperties": {"^[a-c]+$": {"type": "integer"}}, "additionalProperties": False},
     ["{}", '{"abc": 1, "a": 2}'], ['{"d": 1}', '{"a": null}']),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"x1": 1, "x": {}}', "{}"], ['{"a": 1}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"a\\n": 1}', "{}"], ['{"a": "1"}']),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a": 1}']),
    ({"anyOf": [{"type": "integer"}, closed(a={"type": "string"})]}, ["1", '{"a": "x"}'], ["null"]),
    ({"allOf": [{"type": "null"}]}, ["null"], ["1"]),
    (TREE, ['{"of": 1, "kids": [{"kids": [{}]}, {"of": 2}]}'], ['{"kids": [1]}', '{"kids": [{"of": "x"}]}']),
    ({"type": "string", "pattern": "^a.c$"}, ['"abc"', '"a\\"c"', '"aéc"'], ['"abcd"', '"a\\nc"', '"a"c"']),
    ({"type": "string", "pattern": "b+"}, ['"abba"', '"b"', '"\\nb"'], ['"a"', '""']),
    ({"type": "string", "pattern": "^a|c$"}, ['"axyz"', '"xc"', '"a"'], ['"xa"', '"cx"']),
    ({"type": "string", "pattern": r"^\d\w\s$"}, ['"1a "', '"0_ "'], ['"٣a "', '"1é "']),
    ({"type": "string", "pattern": r"^[^\d]\D$"}, ['"xé"'], ['"1x"', '"٣x"', '"x٣"']),
    ({"type": "string", "pattern": r"^\S[^\s]$"}, ['"é1"'], ['"\ufeff1"', '"1\ufeff"', '" 1"']),
    ({"type": "string", "pattern": r"^[\w\da-z]$"}, ['"a"', '"1"'], ['"-"']),
    ({"type": "string", "format": "date-time"},
     ['"2024-02-29T23:59:59.5+01:00"', '"0001-01-01T00:00:00Z"'], ['"2024-13-01T00:00:00Z"', '"2024-01-01"']),
    ({"type": "string", "format": "email"}, ['"a.b+c@ex-ample.org"'], ['"a@b@c"', '"@b.c"', '"a.@b"', '"a@-b"']),
    ({"type": "string", "format": "ipv4"}, ['"255.0.10.199"'], ['"256.0.0.1"', '"01.2.3.4"', '"1.2.3"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12D3-a456-426614174000"'], ['"123e4567e89b12d3a456426614174000"']),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "good", "bad"), SCHEMAS, ids=lambda each: json.dumps(each)[:50] if isinstance(each, dict) else ""
)
def test_a_schema_takes_what_fits_it_and_nothing_else(schema, good, bad):
    for text in good:
        assert takes(schema, text), text
    for text in bad:
        assert not takes(schema, text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 0}, {"type": "integer", "multipleOf": 3}, {"type": "string", "format": "uri"},
        {"type": "string", "maxLength": MAX_COUNTED + 1}, closed(a={}) | {"minProperties": 1},
        closed(a={}) | {"maxProperties": 1}, closed(a={}) | {"required": ["a", "a"], "minProperties": 2},
        {"type": "string", "pattern": "^a{,3}$"}, {"type": "integer", "maximum": 1e308},
        {"type": "integer", "exclusiveMinimum": 10**4300 - 1},
        {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "items": False, "minItems": 1}, {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "array", "items": {"type": "integer"}, "unevaluatedItems": False}, {"$ref": "#"},
        {"type": "string", "pattern": "^(a$|b)c"}, {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    ],
)  # fmt: skip
def test_what_is_not_here_is_left_to_the_library(schema):
    try:
        check_schema(schema)
    except RequestError:
        return
    with pytest.raises(RequestError, match="the library was asked for the json_schema"):
        compiled(schema)


def test_bounds_of_integers_are_exact():
    @settings(max_examples=120, deadline=None)
    @given(st.none() | st.integers(-1200, 1200), st.none() | st.integers(0, 1500), st.booleans())
    def holds(low: int | None, width: int | None, is_exclusive: bool) -> None:
        high = None if width is None else (low or 0) + width
        schema: dict[str, Any] = {"type": "integer"}
        if low is not None:
            schema["exclusiveMinimum" if is_exclusive else "minimum"] = low - is_exclusive
        if high is not None:
            schema["exclusiveMaximum" if is_exclusive else "maximum"] = high + is_exclusive
        grammar = compiled(schema)
        edges = {each + step for each in (low or 0, high or 0) for step in (-1, 0, 1)}
        for value in {*edges, 0, 9, 10, 99, 100, -1, -9, -10, -100, 999, 1000, -1001, 12345, -98765}:
            session = grammar.session()
            taken = all(session.accept(byte) for byte in str(value).encode()) and session.accept(END)
            assert taken == ((low is None or value >= low) and (high is None or value <= high)), (schema, value)

    holds()


def test_bounds_that_are_no_integers_are_rounded_inwards():
    schema = {"type": "integer", "minimum": 0.5, "maximum": 2.5}
    assert [value for value in range(-1, 5) if takes(schema, str(value))] == [1, 2]
    schema = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}
    assert [value for value in range(-1, 5) if takes(schema, str(value))] == [1, 2]


NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
        "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["name", "count"],
    "additionalProperties": {"type": "boolean"},
}


def fits(value: Any) -> bool:
    known = {
        "name": lambda each: isinstance(each, str) and len(each) <= 5,
        "tags": lambda each: isinstance(each, list) and len(each) <= 3 and set(each) <= {"a", "b"},
        "code": lambda each: isinstance(each, str) and re.fullmatch("[A-Z]{2}-[0-9]+", each) is not None,
        "child": lambda each: each is None or fits(each),
        "count": lambda each: type(each) is int and 1 <= each <= 12,
    }
    return (
        isinstance(value, dict)
        and {"name", "count"} <= value.keys()
        and all(known.get(name, lambda each: isinstance(each, bool))(each) for name, each in value.items())
    )


def test_random_texts_of_a_nested_schema_fit_it():
    grammar = compiled(NESTED)
    chance = random.Random(0)
    finished = 0
    for _ in range(60):
        session, text = grammar.session(), b""
        for position in range(250):
            mask = session.fill()
            assert mask is not None
            ids = [token_id for token_id in range(END + 1) if mask[token_id >> 3] >> (token_id & 7) & 1]
            assert ids
            closing = [token_id for token_id in ids if token_id == END or token_id in b'"}],:']
            token_id = (
                chance.choice(closing) if closing and chance.random() < 0.2 + position / 150 else chance.choice(ids)
            )
            assert session.accept(token_id)
            if token_id == END:
                assert fits(json.loads(text.decode())), text
                finished += 1
                break
            text += BYTES[token_id]
    assert finished > 20


def test_documents_in_the_declared_order_are_taken_however_they_are_set():
    document = {
        "name": "é\n",
        "tags": ["a"],
        "code": "AB-1",
        "child": {"name": "", "count": 12},
        "count": 3,
        "more": True,
    }
    for how in ({}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}):
        assert takes(NESTED, json.dumps(document, **how))
    assert not takes(NESTED, json.dumps({"count": 3, "name": ""}))


def test_deep_schemas_and_large_ones():
    deep: Any = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    assert takes(deep, "[" * 60 + "1" + "]" * 60)
    large = closed(**{f"field_{index}": {"type": "integer"} for index in range(200)})
    assert takes(large, json.dumps({f"field_{index}": index for index in range(0, 200, 3)}))
    assert not takes(large, json.dumps({"field_3": 1, "field_2": 1}))
