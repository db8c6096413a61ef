"""The tools of a chat request: checked, shown to the template, and turned into what the answer is constrained to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ..engine.errors import RequestError
from ..engine.grammar_session import GrammarSpec
from .message_parser import CallForm

Mode = Literal["none", "auto", "required", "named"]
MAX_TOOLS = 128
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_MARKERS = (
    ("[TOOL_CALLS]", CallForm.MISTRAL),
    ("<tool_call>", CallForm.HERMES),
    ("<|python_tag|>", CallForm.LLAMA),
    ('"parameters"', CallForm.LLAMA),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What may be called. `functions`: name → parameters, a JSON schema."""

    shown: tuple[Mapping[str, Any], ...]
    functions: Mapping[str, Mapping[str, Any]]
    mode: Mode
    named: str | None
    is_parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.functions if self.named is None else (self.named,))

    @property
    def for_template(self) -> list[Mapping[str, Any]] | None:
        """A model that must not call anything is not told of anything to call."""
        return None if self.mode == "none" else list(self.shown)

    def form(self, template: str | None) -> CallForm | None:
        """How calls are written: as the answer is constrained to, or as the model's chat template shows them.

        Raises: RequestError for a template that does not tell of tools at all.
        """
        if self.mode == "none":
            return None
        if self.mode != "auto":
            return CallForm.ARGUMENTS if self.mode == "named" else CallForm.ARRAY
        if template is None or "tools" not in template:
            message = "this model's chat template knows no tools: use tool_choice required, or name a function"
            raise RequestError(message, param="tools", code="unsupported_parameter")
        return next((form for marker, form in _MARKERS if marker in template), CallForm.HERMES)

    def grammar(self) -> GrammarSpec | None:
        """What the whole text is constrained to, if anything must be called."""
        if self.mode == "named" and self.named is not None:
            return GrammarSpec(kind="json_schema", source=orjson.dumps(self.functions[self.named]).decode())
        if self.mode != "required":
            return None
        places = {name: f"tool{index}" for index, name in enumerate(self.functions)}
        schema = {
            "$defs": {place: _moved(self.functions[name], f"#/$defs/{place}") for name, place in places.items()},
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_TOOLS if self.is_parallel else 1,
            "items": {"anyOf": [_call_schema(name, f"#/$defs/{place}") for name, place in places.items()]},
        }
        return GrammarSpec(kind="json_schema", source=orjson.dumps(schema).decode())


def tools_of(tools: list[Any], choice: object, *, is_parallel: bool) -> Tools | None:
    """None without tools. Raises: RequestError naming the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools to choose from", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools a request", param="tools")
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        name, parameters = _function(tool, f"tools[{index}]")
        if name in functions:
            raise RequestError(f"two tools are called {name}", param=f"tools[{index}].function.name")
        functions[name] = parameters
    mode, named = _choice(choice, functions)
    return Tools(shown=tuple(tools), functions=functions, mode=mode, named=named, is_parallel=is_parallel)


def _function(tool: object, where: str) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise RequestError("a tool has the type function and a function", param=where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or len(name) > 256:
        raise RequestError("a function has a name", param=f"{where}.function.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError("the parameters are a JSON schema", param=f"{where}.function.parameters")
    return name, parameters or _NOTHING


def _choice(choice: object, functions: Mapping[str, object]) -> tuple[Mode, str | None]:
    if choice is None or choice == "auto":
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        return "required", None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice is none, auto, required, or names a function", param="tool_choice")
    if name not in functions:
        raise RequestError(f"tool_choice names {name!r}, which is no tool of this request", param="tool_choice")
    return "named", name


def _call_schema(name: str, reference: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": reference}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """The schema as part of a larger one: its references within itself begin at `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
