"""The tools of a chat request: checked, shown to the template, and turned into what the answer is constrained to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from ..engine.errors import RequestError
from ..engine.grammar_session import GrammarSpec
from .failures import Failure
from .message_parser import MARKERS, CallForm

Mode = Literal["none", "auto", "required", "named"]
MAX_TOOLS = 128
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY: Mapping[str, Any] = {"type": "object"}
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_PLACE = re.compile(r"\$\.\$defs\.tool(\d+)(?=[. ])")
_MARKERS = (
    ("[TOOL_CALLS]", CallForm.MISTRAL),
    ("<tool_call>", CallForm.HERMES),
    ("<|python_tag|>", CallForm.LLAMA),
    ('"parameters"', CallForm.LLAMA),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What may be called. `functions`: name → parameters, a JSON schema. `strict`: where each function stands whose calls
    must keep to it even where the model decides by itself what to call.
    """

    shown: tuple[Mapping[str, Any], ...]
    functions: Mapping[str, Mapping[str, Any]]
    strict: Mapping[str, str]
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

    def grammar(
        self, form: CallForm | None, template: str | None, *, reasons: bool = False, is_thinking: bool = False
    ) -> GrammarSpec | None:
        """What the text is constrained to: the whole of it if anything must be called; the calls in it if one of the
        functions is strict, or if there may be only one.
        """
        if self.mode == "auto" and form is not None and (self.strict or not self.is_parallel):
            after = self._announced(form, template or "")
            flags = {"opens": form is CallForm.LLAMA, "once": not self.is_parallel}
            source = {"after": after, **flags, "reasons": reasons, "is_thinking": is_thinking}
            return GrammarSpec(kind="triggered", source=orjson.dumps(source).decode())
        if self.mode == "named" and self.named is not None:
            return GrammarSpec(kind="json_schema", source=orjson.dumps(self.functions[self.named]).decode())
        if self.mode != "required":
            return None
        return GrammarSpec(kind="json_schema", source=orjson.dumps(self._array(self.functions)).decode())

    @property
    def must_call(self) -> bool:
        return self.mode in ("required", "named")

    def check_beside_format(self) -> None:
        """Raises: RequestError where a format of the whole answer would leave no room for what these tools ask."""
        if self.must_call:
            raise RequestError("a call that is required leaves no room for a format", param="tool_choice")
        if self.mode == "auto" and self.strict:
            place = next(iter(self.strict.values()))
            raise RequestError("a format leaves no room for strict calls", param=place, code="unsupported_parameter")

    def _announced(self, form: CallForm, template: str) -> dict[str, Any]:
        """By marker, the schema of what follows: calls with what a function's schema allows if it is strict."""
        held = {name: schema if name in self.strict else _ANY for name, schema in self.functions.items()}
        marker = MARKERS[form]
        if form is not CallForm.MISTRAL:
            key = "parameters" if form is CallForm.LLAMA else "arguments"
            return {marker: {"$defs": _places(held), **_call(held, key)}}
        if "[ARGS]" in template:
            return {f"{marker}{name}[ARGS]": schema for name, schema in held.items()}
        return {marker: self._array(held)}

    def _array(self, functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "$defs": _places(functions),
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_TOOLS if self.is_parallel else 1,
            "items": _call(functions, "arguments"),
        }


def tools_of(tools: list[Any], choice: object, *, is_parallel: bool) -> Tools | None:
    """None without tools. Raises: RequestError naming the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools to choose from", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools a request", param="tools")
    functions: dict[str, Mapping[str, Any]] = {}
    strict: dict[str, str] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        name, parameters, is_strict = _function(tool, where)
        if name in functions:
            raise RequestError(f"two tools are called {name}", param=f"{where}.function.name")
        functions[name] = parameters
        if is_strict:
            strict[name] = f"{where}.function.strict"
    mode, named = _choice(choice, functions)
    return Tools(
        shown=tuple(tools), functions=functions, strict=strict, mode=mode, named=named, is_parallel=is_parallel
    )


def _function(tool: object, where: str) -> tuple[str, Mapping[str, Any], bool]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise RequestError("a tool has the type function and a function", param=where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or len(name) > 256:
        raise RequestError("a function has a name", param=f"{where}.function.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError("the parameters are a JSON schema", param=f"{where}.function.parameters")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError("strict is true or false", param=f"{where}.function.strict")
    return name, parameters or _NOTHING, bool(strict)


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


def told_of_its_tool(failure: Failure) -> Failure:
    """A keyword that cannot be enforced in the parameters of one of several tools, by that tool and its path there."""
    found = _PLACE.search(failure.message) if failure.param == "tools" else None
    if found is None:
        return failure
    return replace(failure, param=f"tools[{found[1]}]", message=failure.message.replace(found[0], "$"))


def _places(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each function's parameters where `_call` refers to them."""
    return {f"tool{index}": _moved(each, f"#/$defs/tool{index}") for index, each in enumerate(functions.values())}


def _call(functions: Mapping[str, Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """A call of one of the functions, what it is called with under the name `arguments`."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, name in enumerate(functions)
    ]
    return {"anyOf": calls}


def _moved(schema: Any, root: str, *, is_names: bool = False) -> Any:
    """The schema as part of a larger one: its references within itself begin at `root`. `is_names`: no schema, but those
    of names; what looks like a reference there is a name, and a part of the value in a constant.
    """
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if is_names:
        return {name: _moved(each, root) for name, each in schema.items()}
    moved = {
        name: value if name in ("const", "enum") else _moved(value, root, is_names=name in _OF_NAMES)
        for name, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
