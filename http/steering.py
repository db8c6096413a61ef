"""The fields that steer what may be drawn: penalties, biases, bans, and structured output by all the names it goes by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from ..engine.errors import RequestError
from ..engine.grammar_session import GrammarKind, GrammarSpec

_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
}


class SteeringFields(BaseModel):
    """Of every body that generates. The `guided_…` names, `regex` and `ebnf` are those of vLLM and SGLang."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    bad_words: list[str] = Field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def steering(self) -> dict[str, Any]:
        """As arguments of SamplingParams. Raises: RequestError naming the field."""
        grammar = self.grammar()
        return {
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": _biases(self.logit_bias),
            "bad_words": tuple(self.bad_words),
            "allowed_token_ids": self.allowed_token_ids,
            "structured_output": None if grammar is None else grammar[1],
        }

    def grammar(self) -> tuple[str, GrammarSpec] | None:
        """The structured output asked for, and the field that asks. Raises: RequestError."""
        asked = list(self._grammars())
        if len(asked) > 1:
            raise RequestError(f"{asked[1][0]} cannot go with {asked[0][0]}", param=asked[1][0])
        return asked[0] if asked else None

    def _grammars(self) -> Iterator[tuple[str, GrammarSpec]]:
        if self.response_format is not None:
            spec = spec_of_format(self.response_format)
            if spec is not None:
                yield "response_format", spec
        for name, value in (self.structured_outputs or {}).items():
            kind = _KINDS.get(name)
            if kind is None:
                raise RequestError(f"structured_outputs.{name} is not supported", param=f"structured_outputs.{name}")
            if value is not None and value is not False:
                yield f"structured_outputs.{name}", _spec(kind, value, f"structured_outputs.{name}")
        for name, key in (
            ("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar"),
            ("regex", "regex"), ("ebnf", "grammar"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                yield name, _spec(_KINDS[key], value, name)


def spec_of_format(value: dict[str, Any]) -> GrammarSpec | None:
    """What `response_format` asks for; None for plain text. Raises: RequestError naming the place in it."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec(kind="json_object")
    if kind != "json_schema":
        raise RequestError("its type must be text, json_object or json_schema", param="response_format.type")
    wrapped = value.get("json_schema")
    if not isinstance(wrapped, dict) or "schema" not in wrapped:
        raise RequestError("a json_schema has a name and a schema", param="response_format.json_schema")
    return _spec("json_schema", wrapped["schema"], "response_format.json_schema.schema")


def _spec(kind: GrammarKind, value: object, param: str) -> GrammarSpec:
    if kind == "json_object":
        return GrammarSpec(kind=kind)
    if kind in ("regex", "ebnf") and not isinstance(value, str):
        raise RequestError(f"{param} must be a string", param=param)
    try:
        return GrammarSpec(kind=kind, source=value if isinstance(value, str) else orjson.dumps(value).decode())
    except RequestError as error:
        raise RequestError(str(error), param=param) from error


def _biases(fields: dict[str, float]) -> dict[int, float]:
    biases = {}
    for name, bias in fields.items():
        if not name.removeprefix("-").isascii() or not name.removeprefix("-").isdecimal():
            raise RequestError(f"the keys of logit_bias are token ids, not {name!r}", param="logit_bias")
        biases[int(name[:20])] = bias
    return biases
