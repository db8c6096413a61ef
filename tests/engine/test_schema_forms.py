"""A schema in the form that is enforced asks for no less than the schema."""

from __future__ import annotations

import itertools
import re

import pytest

from slipstream.engine.errors import RequestError
from slipstream.engine.schema_check import check_schema
from slipstream.engine.schema_forms import MAX_PREFIX, enforceable, names_except

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def extra(names=("a",)):
    return {names_except(names): WHOLE}


@pytest.mark.parametrize(
    "names", [["a"], [""], ["ab", "abc", "b"], ["a-b", "]", "^", "."], ["é", "日a"], ['a"b', "a\\"]]
)
def test_further_names_are_all_others_that_need_no_escape(names):
    pattern = re.compile(names_except(names))
    for length in range(4):
        for name in map("".join, itertools.product('ab-]^."\\é日', repeat=length)):
            assert bool(pattern.search(name)) == (name not in names and not set(name) & {'"', "\\"}), name


def test_further_names_do_not_begin_like_a_long_one():
    name = "n" * (MAX_PREFIX + 4)
    pattern = re.compile(names_except([name]))
    assert pattern.search(name[: MAX_PREFIX - 1])
    assert not pattern.search(name[:MAX_PREFIX] + "x")
    assert not pattern.search(name)


@pytest.mark.parametrize(
    ("schema", "form"),
    [
        ({"type": "object"}, {"type": "object"}),
        ({"type": "object", "additionalProperties": WHOLE}, {"type": "object", "additionalProperties": WHOLE}),
        ({"properties": {"a": TEXT}}, {"properties": {"a": TEXT}, "additionalProperties": False}),
        (
            {"properties": {"a": TEXT}, "additionalProperties": WHOLE},
            {"properties": {"a": TEXT}, "additionalProperties": False, "patternProperties": extra()},
        ),
        (
            {"properties": {"a": TEXT}, "unevaluatedProperties": WHOLE},
            {"properties": {"a": TEXT}, "additionalProperties": False, "patternProperties": extra()},
        ),
        (
            {"patternProperties": {"^x$": WHOLE}, "additionalProperties": True},
            {"patternProperties": {"^x$": WHOLE}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^x"}, "additionalProperties": WHOLE},
            {"patternProperties": {"^x": WHOLE}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^x"}},
            {"patternProperties": {"^x": True}, "additionalProperties": False},
        ),
    ],
)
def test_no_object_stays_open_beside_what_it_says_of_names(schema, form):
    assert enforceable(schema) == form


@pytest.mark.parametrize(
    ("further", "pattern"),
    [(True, names_except(())), ({}, names_except(())), (WHOLE, names_except(["a"]))],
)
def test_names_that_a_library_tells_apart_itself_are_in_the_pattern_only_where_it_would_mix_their_schemas(
    further, pattern
):
    schema = {"properties": {"a": TEXT}, "additionalProperties": further}
    assert enforceable(schema, knows_declared=True)["patternProperties"] == {pattern: further}


def test_names_of_which_none_is_left_out_are_a_plain_repetition():
    """Which is the only form that llguidance knows to take whole words at the start of."""
    assert names_except(()) == r'^[^"\\\x00-\x1f]*$'


def test_objects_are_found_wherever_a_schema_may_stand():
    def inner():
        return {"type": "object", "properties": {"a": TEXT}, "additionalProperties": WHOLE}

    places = enforceable(
        {
            "$defs": {"d": inner()},
            "anyOf": [
                inner(),
                {"type": "array", "items": inner(), "prefixItems": [inner()]},
                {"type": "object", "additionalProperties": inner()},
                {"type": "object", "properties": {"p": inner()}, "additionalProperties": inner()},
                {"$ref": "#/x-kept"},
                {"const": inner()},
            ],
            "x-kept": inner(),
        }
    )
    assert repr(places).count("'additionalProperties': {'type': 'integer'}") == 1  # the constant


@pytest.mark.parametrize("name", ["properties", "patternProperties", "propertyNames"])
def test_what_moves_cannot_be_referred_to(name):
    named = {"pattern": "^a$"} if name == "propertyNames" else {"^a$": WHOLE}
    schema = {"type": "object", name: named, "additionalProperties": {"type": "object", "additionalProperties": WHOLE}}
    check_schema({"$ref": "#/x-kept/additionalProperties", "x-kept": {"type": "object", "additionalProperties": WHOLE}})
    with pytest.raises(RequestError, match=r"\$\.\$ref points into additionalProperties"):
        check_schema({"$ref": "#/x-kept/additionalProperties", "x-kept": schema})
