"""The JSON Schema Test Suite: whatever schema passes our check, no text that it forbids passes the grammar.

The suite travels in the source package of `jsonschema`: `pip download --no-deps --no-binary :all: jsonschema`, and
JSON_SCHEMA_SUITE names its folder json/tests/draft2020-12.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from slipstream.engine.errors import RequestError
from slipstream.engine.grammar_session import GrammarSpec
from slipstream.engine.schema_check import check_schema

SUITE = os.environ.get("JSON_SCHEMA_SUITE")
pytestmark = [
    pytest.mark.skipif(SUITE is None, reason="JSON_SCHEMA_SUITE names no folder"),
    pytest.mark.timeout(300),
]
END = 256
VOCABULARY = [*(bytes((byte,)) for byte in range(256)), b""]


@pytest.fixture(params=["xgrammar", "llguidance", "automaton"])
def backend(request, backend_of):
    return backend_of(request.param, VOCABULARY, [END])


def takes(grammar, instance):
    session = grammar.session()
    text = json.dumps(instance, ensure_ascii=False)
    try:
        return all(session.accept(byte) for byte in text.encode()) and session.accept(END)
    except UnicodeEncodeError:
        return False


KEYWORDS = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}
# Formats promise a shape: no grammar knows the calendar, and the lengths of host names.
BEYOND_SHAPE = re.compile("leap|days in|month-day|invalid day|component too long|label length|octals")
PYTHON = {"object": dict, "array": list, "string": str, "number": (int, float)}


def typed(group):
    """Most schemas of the suite say nothing of the type, which is refused: with the type that their keywords are about,
    the cases of that type stay what they are.
    """
    schema = group["schema"]
    if not isinstance(schema, dict) or "type" in schema:
        return group
    kinds = [kind for kind, names in KEYWORDS.items() if names & set(schema)]
    if len(kinds) != 1:
        return group
    cases = [
        case
        for case in group["tests"]
        if isinstance(case["data"], PYTHON[kinds[0]]) and not isinstance(case["data"], bool)
    ]
    return {**group, "schema": {**schema, "type": kinds[0]}, "tests": cases}


def groups():
    for path in sorted(Path(SUITE or "").glob("*.json")) + sorted(Path(SUITE or "").glob("optional/format/*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield path.stem, typed(group)


def test_no_instance_that_a_schema_forbids_passes_its_grammar(backend):
    counts = dict.fromkeys(("schemas", "refused", "forbidden", "allowed", "allowed and taken"), 0)
    wrong = []
    for name, group in groups():
        counts["schemas"] += 1
        try:
            check_schema(group["schema"])
            grammar = backend.compile_blocking(GrammarSpec(kind="json_schema", source=json.dumps(group["schema"])))
        except RequestError:
            counts["refused"] += 1
            continue
        for case in group["tests"]:
            taken = takes(grammar, case["data"])
            if case["valid"]:
                counts["allowed"] += 1
                counts["allowed and taken"] += taken
            else:
                counts["forbidden"] += 1
                if taken and not BEYOND_SHAPE.search(case["description"]):
                    wrong.append(f"{name}: {group['description']}: {case['description']}: {json.dumps(case['data'])}")
    print(counts)
    assert wrong == [], "\n".join(wrong)
    assert counts["forbidden"] > 250
    assert counts["allowed and taken"] > 0.5 * counts["allowed"]
