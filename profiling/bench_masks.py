"""What structured output costs the event loop: one step's masks, by library and by what is asked for.

    python -m slipstream.profiling.bench_masks [--model NAME] [--rows 64] [--libraries auto,xgrammar,llguidance] [--json FILE]

Each row writes the same text, from another place in it, and begins anew behind its end: every step has all kinds of places.
Timed is what the loop does for a step's masks, and for taking in its tokens; the first step has all rows at the start. Before
that one row writes the text alone, to whom all masks are new.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..engine.grammar_session import CompiledGrammar, GrammarSpec
from ..engine.grammars.backends import make_grammar_backend
from ..engine.grammars.schema_rules import JSON
from ..engine.loader.model_source import resolve_model
from ..engine.logit_rules import LogitRules
from ..engine.sampling_params import SamplingParams
from ..engine.schema_check import check_schema
from ..engine.text.tokenization import TextTokenizer
from .results import write_json

_FIELDS = {
    "name": {"type": "string"}, "age": {"type": "integer"}, "email": {"type": "string"},
    "tags": {"type": "array", "items": {"type": "string"}}, "ok": {"type": "boolean"},
}  # fmt: skip
_TEXT = (
    '{"name": "Ada Lovelace of London", "age": 36, "email": "ada@example.org", "tags": ["maths", "engines"], "ok": true'
)
_MORE = ', "remark": "she wrote the first program", "born": "London"}'


def _object(further: object, *, required: bool = True, **fields: object) -> str:
    return json.dumps(
        {"type": "object", "properties": fields or _FIELDS, "additionalProperties": further}
        | ({"required": list(fields or _FIELDS)} if required else {})
    )


CASES: Mapping[str, tuple[str, str, str]] = {  # kind, source, text
    "closed object": ("json_schema", _object(False), _TEXT + "}"),
    "open object": ("json_schema", _object(True), _TEXT + _MORE),
    "open, none required": ("json_schema", _object(True, required=False), _TEXT + _MORE),
    "open to strings": ("json_schema", _object({"type": "string"}, required=False), _TEXT + _MORE),
    "bounded strings": (
        "json_schema",
        _object(False, a={"type": "string", "maxLength": 50}, b={"type": "string", "minLength": 3, "maxLength": 20}),
        '{"a": "the quick brown fox jumps", "b": "over the dog"}',
    ),
    "formats": (
        "json_schema",
        _object(False, at={"type": "string", "format": "date-time"}, of={"type": "string", "format": "email"}),
        '{"at": "2024-01-02T03:04:05Z", "of": "ada@example.org"}',
    ),
    "patterns": (
        "json_schema",
        _object(
            False,
            id={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            of={"type": "string", "pattern": "^[a-z ]+$"},
        ),
        '{"id": "ABC-1234", "of": "over the dog"}',
    ),
    "json_object": ("json_object", "", _TEXT + _MORE),
    "choice": ("choice", json.dumps(["positive", "negative", "neutral", "very positive"]), "very positive"),
    "regex: date": ("regex", r"\d{4}-\d{2}-\d{2}", "2024-01-02"),
    "regex: address": ("regex", r"[a-z0-9._]+@[a-z0-9.]+\.(com|org)", "ada.lovelace@mail.example.org"),
    "regex: words": ("regex", r"[A-Z][a-z]+( [a-z]+)*\.", "The quick brown fox jumps over the lazy dog."),
    "regex: 20 words": ("regex", r"[A-Z][a-z]+( [a-z]+){0,20}\.", "The quick brown fox jumps over the lazy dog."),
    "grammar: sums": (
        "ebnf",
        'root ::= term (" "? [-+*/] " "? term)*\nterm ::= [0-9]+ | "(" root ")" | [a-z]+\n',
        "(12 + foo) * 3 - (7 / bar)",
    ),
    "grammar: JSON": ("ebnf", f"root ::= object\n{JSON}", _TEXT + _MORE),
}


class Measured(NamedTuple):
    """Milliseconds of the loop, for all rows together."""

    new: float  # of one row: all masks of the text, just after compilation
    first: float
    masks: float  # in the median of the steps
    most: float
    tokens: float  # taken in, in the median


def measure(grammar: CompiledGrammar, ids: Sequence[int], *, rows: int, vocab_size: int) -> Measured:
    """Write the text once in each row."""

    def begun() -> LogitRules:
        return LogitRules(SamplingParams(), num_prompt_tokens=0, vocab_size=vocab_size, grammar=grammar.session())

    alone = begun()
    new = 0.0
    for token_id in ids:
        new += _timed_masks([alone])
        alone.accept(token_id)
    rules = [begun() for _ in range(rows)]
    first = _timed_masks(rules)
    places = [row * len(ids) // rows for row in range(rows)]
    for row, place in zip(rules, places, strict=True):
        for token_id in ids[:place]:
            row.accept(token_id)
    masks: list[float] = []
    tokens: list[float] = []
    for _ in range(len(ids)):
        masks.append(_timed_masks(rules))
        started = time.perf_counter()
        for number, place in enumerate(places):
            if place < len(ids):
                rules[number].accept(ids[place])
            else:
                rules[number] = begun()
            places[number] = place + 1 if place < len(ids) else 0
        tokens.append(1e3 * (time.perf_counter() - started))
    return Measured(new, first, statistics.median(masks), max(masks), statistics.median(tokens))


def _timed_masks(rules: Sequence[LogitRules]) -> float:
    started = time.perf_counter()
    for row in rules:
        row.mask()
    return 1e3 * (time.perf_counter() - started)


def run(model: str, *, rows: int, libraries: Sequence[str]) -> dict[str, dict[str, float]]:
    """All cases by all libraries; prints a table."""
    tokenizer = TextTokenizer.load(resolve_model(model).path)
    vocab_size = tokenizer.count_ids()
    results = {}
    print(
        f"{'library':<12}{'asked for':<22}{'new':>8}{'first':>8}{'masks':>8}{'most':>8}{'tokens':>8}  ms, {rows} rows"
    )
    for library in libraries:
        backend = make_grammar_backend(library, tokenizer, vocab_size)  # type: ignore[arg-type]
        for name, (kind, source, text) in CASES.items():
            spec = GrammarSpec(kind=kind, source=source)  # type: ignore[arg-type]
            if kind == "json_schema":
                check_schema(json.loads(source))
            grammar = backend.compile_blocking(spec)
            try:
                measured = measure(grammar, tokenizer.encode(text), rows=rows, vocab_size=vocab_size)
            except ValueError as error:
                print(f"{library:<12}{name:<22}  {error}", flush=True)
                continue
            results[f"{library} {name}"] = measured._asdict()
            print(f"{library:<12}{name:<22}" + "".join(f"{value:>8.2f}" for value in measured), flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench_masks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--libraries", default="auto,xgrammar,llguidance")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args(arguments)
    results = run(args.model, rows=args.rows, libraries=args.libraries.split(","))
    if args.json:
        write_json(args.json, "masks", results)


if __name__ == "__main__":
    main()
