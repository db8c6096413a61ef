"""Free text in which what follows a marker is constrained: how tool calls are held to their schemas where none is required.

While the text is free it costs no mask. What is constrained is JSON, by the library that serves all structured output;
this file only watches for the markers, starts a session behind one, and goes back to free text when it can end.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from .errors import MisuseError, RequestError
from .grammar_probe import probed_blocking
from .grammar_session import MAX_ROLLBACK, CompiledGrammar, GrammarBackend, GrammarSession, GrammarSpec
from .logit_rules import either, mask_of, without

MAX_LEAD = 16  # tokens of white space between a marker and what it announces
MAX_MARKERS = 128
_THINK, _THOUGHT = b"<think>", b"</think>"
_SPACE = b" \t\r\n"
_BETWEEN_CALLS = _SPACE + b";,"


class Triggers(NamedTuple):
    """The source of a `triggered` spec, read."""

    schemas: Mapping[str, Any]  # by marker
    opens: bool  # a text that begins with a brace is constrained like what follows the first marker
    once: bool  # the text ends behind the first constrained part
    reasons: bool  # a text that begins with <think> is free until </think>, markers or not
    is_thinking: bool  # it has begun with that already


_FLAGS = ("opens", "once", "reasons", "is_thinking")


def read_triggers(source: str) -> Triggers:
    """Raises: RequestError naming `structured_output`."""
    try:
        fields = json.loads(source)
        schemas, flags = fields["after"], [fields.get(name, False) for name in _FLAGS]
        fits = isinstance(schemas, dict) and 0 < len(schemas) <= MAX_MARKERS and all(schemas)
        fits = fits and all(isinstance(flag, bool) for flag in flags)
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        fits = False
    if not fits:
        message = f"the source of a triggered text maps up to {MAX_MARKERS} markers to their schemas"
        raise RequestError(message, param="structured_output")
    return Triggers(schemas, *flags)


class TriggeredBackend:
    """A library's grammars, and among them texts that are constrained behind markers.

    `token_bytes`: what each id adds to a text, special tokens spelled out: a marker may be one.
    """

    def __init__(self, backend: GrammarBackend, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self._backend = backend
        self._token_bytes = token_bytes
        self._end_ids = end_ids
        self._vocabulary: _Vocabulary | None = None  # read with the first such text: few servers see one

    def compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises: RequestError."""
        if spec.kind != "triggered":
            return self._library(spec)
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._token_bytes, self._end_ids)
        triggers = read_triggers(spec.source)
        parts = [(marker.encode(), self._library(_as_json(schema))) for marker, schema in triggers.schemas.items()]
        return TriggeredGrammar(self._vocabulary, parts, triggers)

    def _library(self, spec: GrammarSpec) -> CompiledGrammar:
        return probed_blocking(self._backend.compile_blocking(spec), spec)


def _as_json(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", source=json.dumps(schema))


class _Vocabulary:
    """What is asked of a tokenizer's ids."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self.token_bytes = token_bytes
        self.end_id = min(end_ids)
        size = self.size = len(token_bytes)
        self._by_first: dict[int, list[int]] = {}
        for token_id, text in enumerate(token_bytes):
            if text:
                self._by_first.setdefault(text[0], []).append(token_id)
        self.everything = mask_of(range(size), size)
        self.spaces = mask_of(
            (index for index, text in enumerate(token_bytes) if text and not text.strip(_SPACE)), size
        )
        braces = (index for index, text in enumerate(token_bytes) if text.lstrip(_BETWEEN_CALLS).startswith(b"{"))
        self.no_braces = without(self.everything, braces, size)

    def overshooting(self, marker: bytes) -> list[list[int]]:
        """By how much of the marker is there already: the ids that end it and go on with more than white space."""
        inside = [index for index, text in enumerate(self.token_bytes) if _overshoots(text, marker, text.find(marker))]
        found = [inside]
        for done in range(1, len(marker)):
            rest = marker[done:]
            candidates = self._by_first.get(rest[0], [])
            found.append([index for index in candidates if _overshoots(self.token_bytes[index], rest, 0)])
        return found


def _overshoots(text: bytes, marker: bytes, at: int) -> bool:
    return at >= 0 and text.startswith(marker, at) and bool(text[at + len(marker) :].strip(_SPACE))


class TriggeredGrammar:
    """Compiled. `parts`: each marker and the grammar of what follows it."""

    def __init__(
        self, vocabulary: _Vocabulary, parts: Sequence[tuple[bytes, CompiledGrammar]], triggers: Triggers
    ) -> None:
        self.vocabulary = vocabulary
        self.parts = parts
        self.triggers = triggers
        self.longest = max(len(marker) for marker, _ in parts)
        self._overshooting = [vocabulary.overshooting(marker) for marker, _ in parts]

    @property
    def num_bytes(self) -> int:
        return sum(grammar.num_bytes for _, grammar in self.parts)

    def session(self) -> TriggeredSession:
        return TriggeredSession(self)

    def found(self, text: bytes) -> tuple[CompiledGrammar, bytes] | None:
        """The grammar of the first marker in `text`, and what stands behind the marker."""
        places = [(text.find(marker), marker, grammar) for marker, grammar in self.parts]
        place, marker, grammar = min(
            (each for each in places if each[0] >= 0), default=(-1, b"", None), key=lambda each: each[0]
        )
        return None if grammar is None else (grammar, text[place + len(marker) :])

    def barred(self, tail: bytes) -> Iterable[int]:
        """Ids that must not follow `tail`, for a constrained part would begin in the middle of them."""
        for (marker, _), by_done in zip(self.parts, self._overshooting, strict=True):
            for done, ids in enumerate(by_done):
                if ids and tail.endswith(marker[:done]):
                    yield from ids


class _Place(Enum):
    """Where the text stands."""

    THINKING = "thinking"  # free, whatever comes before the end of it
    FREE = "free"
    START = "start"  # free, but a brace would begin a constrained part
    LEAD = "lead"  # behind a marker: white space, then the constrained part
    INSIDE = "inside"
    OVER = "over"


class _State(NamedTuple):
    place: _Place
    tail: bytes = b""  # the last bytes of free text, in which a marker may have begun
    inner: GrammarSession | None = None
    num_spaces: int = 0
    opening: bytes | None = None  # the text so far, while it may become the begin of thoughts


class _Step(NamedTuple):
    """What one accepted token changed."""

    before: _State
    inner: GrammarSession | None  # took the token
    num_taken: int  # by it, the end included


class TriggeredSession:
    """One request's place in free text and constrained parts."""

    __slots__ = ("_grammar", "_state", "_steps")

    def __init__(self, grammar: TriggeredGrammar) -> None:
        self._grammar = grammar
        self._state = self._start()
        if grammar.triggers.is_thinking:
            self._state = _State(_Place.THINKING)
        elif grammar.triggers.reasons:
            self._state = self._state._replace(opening=b"")
        self._steps: deque[_Step] = deque(maxlen=MAX_ROLLBACK)

    def _start(self) -> _State:
        """At the start of the message, or of what may be another call."""
        if not self._grammar.triggers.opens:
            return _State(_Place.FREE)
        return _State(_Place.START, inner=self._grammar.parts[0][1].session())

    @property
    def is_over(self) -> bool:
        return self._state.place is _Place.OVER

    def fill(self) -> bytes | None:
        state, vocabulary = self._state, self._grammar.vocabulary
        if state.place is _Place.THINKING:
            return None
        if state.inner is None:
            return self._free(vocabulary.everything)
        filled = state.inner.fill() or vocabulary.everything
        if state.place is _Place.START:
            free = self._free(vocabulary.no_braces)
            return either(filled, vocabulary.no_braces if free is None else free)
        if state.place is _Place.LEAD and state.num_spaces < MAX_LEAD:
            return either(filled, vocabulary.spaces)
        return filled

    def _free(self, mask: bytes) -> bytes | None:
        """The mask without what would begin a constrained part in the middle of a token; None if that is nothing."""
        barred = list(self._grammar.barred(self._state.tail))
        return without(mask, barred, self._grammar.vocabulary.size) if barred else None

    def accept(self, token_id: int) -> bool:
        state = self._state
        text = self._grammar.vocabulary.token_bytes[token_id]
        if state.place is _Place.OVER:
            return False
        if state.place is _Place.THINKING:
            return self._accept_thought(state.tail + text)
        is_space = bool(text) and not text.strip(_BETWEEN_CALLS if state.place is _Place.START else _SPACE)
        opens = text.lstrip(_BETWEEN_CALLS).startswith(b"{")
        if state.place is _Place.LEAD and is_space and state.num_spaces < MAX_LEAD:
            return self._moved(state._replace(num_spaces=state.num_spaces + 1))
        if state.place in (_Place.LEAD, _Place.INSIDE) or (state.place is _Place.START and opens):
            return self._accept_inside(state, token_id)
        return self._accept_free(state, text, stays=state.place is _Place.START and is_space)

    def _accept_free(self, state: _State, text: bytes, *, stays: bool) -> bool:
        seen, opening = state.tail + text, state.opening
        if opening is not None:
            opening = (opening + text).lstrip(_SPACE)
            if opening.startswith(_THINK):
                return self._accept_thought(opening[len(_THINK) :])
            opening = opening if _THINK.startswith(opening) else None
        found = self._grammar.found(seen)
        if found is not None:
            grammar, rest = found
            return not rest.strip(_SPACE) and self._moved(_State(_Place.LEAD, inner=grammar.session()))
        tail = seen[-(self._grammar.longest - 1) :] if self._grammar.longest > 1 else b""
        if stays:
            return self._moved(state._replace(tail=tail, opening=opening))
        return self._moved(_State(_Place.FREE, tail, opening=opening))

    def _accept_thought(self, text: bytes) -> bool:
        at = text.find(_THOUGHT)
        if at < 0:
            return self._moved(_State(_Place.THINKING, text[1 - len(_THOUGHT) :]))
        rest = text[at + len(_THOUGHT) :]
        return self._moved(_State(_Place.FREE, rest) if rest.strip(_SPACE) else self._start())

    def _accept_inside(self, state: _State, token_id: int) -> bool:
        inner = state.inner
        if inner is None or not inner.accept(token_id):
            return False
        if inner.is_over or not inner.accept(self._grammar.vocabulary.end_id):
            return self._moved(_State(_Place.INSIDE, inner=inner), inner, 1)
        return self._moved(_State(_Place.OVER) if self._grammar.triggers.once else self._start(), inner, 2)

    def _moved(self, state: _State, inner: GrammarSession | None = None, num_taken: int = 0) -> bool:
        self._steps.append(_Step(self._state, inner, num_taken))
        self._state = state
        return True

    def rollback(self, num_tokens: int) -> None:
        """Raises: MisuseError beyond what is kept."""
        if num_tokens > len(self._steps):
            raise MisuseError(f"only the last {len(self._steps)} tokens can be taken back, not {num_tokens}")
        for _ in range(num_tokens):
            step = self._steps.pop()
            if step.inner is not None:
                step.inner.rollback(step.num_taken)
            self._state = step.before
