"""Structured output without tensors: what is asked for, what a compiler makes of it, and where one request stands in it.

What compiles and what fills masks lives behind these protocols, in `grammars/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from .errors import RequestError, shown

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "triggered"]
MAX_SOURCE_CHARS = 64 << 10
MAX_ROLLBACK = 64  # tokens: as far back every session goes


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What the text of a request must be. `source`: a JSON schema as JSON, a regular expression that the whole text
    matches, a grammar in GBNF (`root ::= …`), or a JSON list of the texts to choose from; for `json_object` nothing.
    For `triggered`, free text in which each marker must be followed by JSON of its schema, the `Triggers` of
    grammar_triggers.py: `{"after": {marker: schema, …}, "opens": …, "once": …, "reasons": …, "is_thinking": …}`.

    Raises: RequestError naming `structured_output`.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise RequestError(f"its kind must be one of {kinds}, not {shown(self.kind)}", param="structured_output")
        if not isinstance(self.source, str) or bool(self.source) == (self.kind == "json_object"):
            raise RequestError(f"the source of a {self.kind} does not fit", param="structured_output")
        if len(self.source) > MAX_SOURCE_CHARS:
            raise RequestError(
                f"a {self.kind} may have {MAX_SOURCE_CHARS} characters, not {len(self.source)}",
                param="structured_output",
            )


class GrammarSession(Protocol):
    """One request's place in its grammar. Not shared, and never called after it is over."""

    @property
    def is_over(self) -> bool:
        """Nothing can follow any more."""
        ...

    def fill(self) -> bytes | None:
        """The ids that may come next, packed as `SampleInputs.masks` has them; None where all may."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False if it may not come here; then nothing has changed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back, up to MAX_ROLLBACK."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for use by any number of requests at once. Immutable."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...

    def session(self) -> GrammarSession:
        """A new session at the start."""
        ...


class GrammarBackend(Protocol):
    """A grammar library bound to one tokenizer."""

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        """Called off the loop, by one thread at a time. Raises: RequestError for what cannot be enforced."""
        ...
