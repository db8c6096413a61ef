"""Generated text to the parts of a chat message: reasoning, content and tool calls, as the text comes.

What comes out depends on the text alone and not on how it was cut: the deltas of a stream, joined, are the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from .json_call import JsonCall, Progress

_SPACE: Final = " \t\r\n"
_NAME: Final = re.compile(r"([^\s\[\]{}<>\"',:]+)\s*(?:\[ARGS\])?\s*")


class CallForm(Enum):
    """How a model writes its calls."""

    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": …}</tool_call>; Qwen too
    LLAMA = "llama"  # {"name": …, "parameters": …} as the whole message, or behind <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS][{…}, …], or [TOOL_CALLS]name{…}; some leave the brackets of one call out
    ARRAY = "array"  # the whole text is a JSON array of calls: what `tool_choice: required` is constrained to
    ARGUMENTS = "arguments"  # the whole text is the arguments of one call, whose name is known


MARKERS: Final[Mapping[CallForm, str]] = {
    CallForm.HERMES: "<tool_call>",
    CallForm.LLAMA: "<|python_tag|>",
    CallForm.MISTRAL: "[TOOL_CALLS]",
}
"""What announces a call in text that is free otherwise."""


class Piece(NamedTuple):
    """Something new in the message. `kind`: content, reasoning, call (its name, a new call), or arguments (of the last)."""

    kind: str
    text: str


class MessageParser:
    """One choice's text. `form` None: no calls. `reasons`: <think> … </think> at the start is reasoning; `is_thinking`: the
    prompt has opened it already. `names`: the functions that there are. `args_mark`: Mistral calls are held to schemas
    behind a name and [ARGS], and read in no other form.
    """

    def __init__(
        self,
        form: CallForm | None,
        *,
        names: frozenset[str] = frozenset(),
        reasons: bool = False,
        is_thinking: bool = False,
        args_mark: bool = False,
    ) -> None:
        self._names = names
        self._args_mark = args_mark
        self._form = form
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._space = ""  # white space that is content only if content follows
        self._skips_space = False
        self._call: JsonCall | None = None
        self._is_told = False  # the call under way has its name out
        self._prefix = ""  # what stood before the call under way, should it be none
        self._step: Callable[[], bool] = self._start
        if is_thinking:
            self._step, self._skips_space = self._think, True
        elif reasons:
            self._step = self._before_thinking
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Take text; return what it adds."""
        self._buffer += text
        return self._run()

    def finish(self) -> list[Piece]:
        """The text is over: what was held back for a marker or a call that did not come is content after all."""
        self._run()
        rest, self._buffer = self._buffer, ""
        if self._call is not None and not self._is_told and self._form is not CallForm.ARGUMENTS:
            rest = self._prefix + self._call.raw + rest
            self._call = None
        if self._step == self._mistral:
            rest = MARKERS[CallForm.MISTRAL] + rest
        if self._step == self._think:
            self._add("reasoning", rest)
        elif self._call is None and self._step != self._after:
            self._content(rest)
        if not self.num_calls:
            self._add("content", self._space)
        self._space = ""
        return self._taken()

    def _run(self) -> list[Piece]:
        while self._buffer and self._step():
            pass
        return self._taken()

    def _taken(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken

    def _add(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._pieces and kind != "call" and self._pieces[-1].kind == kind:
            self._pieces[-1] = Piece(kind, self._pieces[-1].text + text)
        else:
            self._pieces.append(Piece(kind, text))

    def _content(self, text: str) -> None:
        """Content; white space at its end waits for what follows."""
        shown = text.rstrip(_SPACE)
        if shown:
            self._add("content", self._space + shown)
            self._space = ""
        self._space += text[len(shown) :]

    # ---- steps: each takes from the buffer, and returns whether another one may follow

    def _before_thinking(self) -> bool:
        text = self._buffer.lstrip(_SPACE)
        if text.startswith("<think>"):
            self._buffer = text.removeprefix("<think>")
            self._step, self._skips_space = self._think, True
            return True
        if "<think>".startswith(text):
            return False
        self._step = self._start
        return True

    def _think(self) -> bool:
        if self._skips_space:
            self._buffer = self._buffer.lstrip(_SPACE)
            self._skips_space = not self._buffer
        before, found = self._cut("</think>")
        self._add("reasoning", before)
        if found:
            self._step = self._start
            self._skips_space = True
        return found

    def _start(self) -> bool:
        """The first of the message proper."""
        if self._skips_space or self._form in (CallForm.ARRAY, CallForm.ARGUMENTS):
            self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        if self._form is CallForm.ARGUMENTS:
            self._open("", arguments_only=True)
            self._tell(next(iter(self._names)))
        elif self._form is CallForm.ARRAY:
            self._step = self._in_array if self._buffer[0] == "[" else self._plain
            self._buffer = self._buffer[self._buffer[0] == "[" :]
        elif self._form is CallForm.LLAMA:
            return self._start_of_llama()
        else:
            self._step = self._plain
        return True

    def _start_of_llama(self) -> bool:
        text = self._buffer.lstrip(_SPACE)
        if not text or ("<|python_tag|>".startswith(text) and text != "<|python_tag|>"):
            return False
        if text[0] == "{":
            self._open(self._buffer[: len(self._buffer) - len(text)])
            self._buffer = text
        else:
            self._step = self._plain
        return True

    def _plain(self) -> bool:
        marker = None if self._form is None else MARKERS.get(self._form)
        if marker is None:
            self._content(self._buffer)
            self._buffer = ""
            return False
        before, found = self._cut(marker)
        self._content(before)
        if found and self._form is CallForm.MISTRAL:
            self._step = self._mistral
        elif found:
            self._open(marker)
        return found

    def _mistral(self) -> bool:
        text = self._buffer.lstrip(_SPACE)
        if not text:
            return False
        if text[0] == "[" and not self._args_mark:
            self._buffer = text[1:]
            self._step = self._in_array
            return True
        brace = self._buffer.find("{")
        if brace < 0:
            return False
        lead = self._buffer[:brace]
        if not lead.strip(_SPACE) and not self._args_mark:
            self._buffer = text
            self._open(MARKERS[CallForm.MISTRAL] + lead)
            return True
        name = self._named(lead)
        if name is None:
            self._content(MARKERS[CallForm.MISTRAL])
            self._step = self._plain
            return True
        self._buffer = self._buffer[brace:]
        self._open("", arguments_only=True)
        self._tell(name)
        return True

    def _named(self, lead: str) -> str | None:
        """The function that stands between a Mistral marker and its arguments."""
        if self._args_mark:
            name = lead.rstrip(_SPACE).removesuffix("[ARGS]")
            return name if name in self._names and len(name) < len(lead.rstrip(_SPACE)) else None
        match = _NAME.fullmatch(lead.lstrip(_SPACE))
        return None if match is None else match[1]

    def _in_array(self) -> bool:
        self._buffer = self._buffer.lstrip(_SPACE + ",")
        if not self._buffer:
            return False
        if self._buffer[0] == "]":
            self._buffer = self._buffer[1:]
            self._step = self._plain if self._form is CallForm.MISTRAL else self._after
        else:
            self._open("")
        return True

    def _open(self, prefix: str, *, arguments_only: bool = False) -> None:
        strict = self._form is CallForm.LLAMA
        self._call = JsonCall(self._names if strict else None, arguments_only=arguments_only)
        self._prefix, self._is_told = prefix, False
        self._step = self._in_call

    def _tell(self, name: str) -> None:
        self._is_told = True
        self._space = ""
        self.num_calls += 1
        self._add("call", name)

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        arguments, self._buffer = call.push(self._buffer)
        if call.name is not None and not self._is_told:
            self._tell(call.name)
        self._add("arguments", arguments)
        if call.progress is Progress.OPEN:
            return False
        self._call = None
        if call.progress is Progress.NO_CALL and not self._is_told:
            self._content(self._prefix + call.raw)
            self._step = self._plain
        elif self._form is CallForm.HERMES:
            self._step = self._to_end_of_hermes
        elif self._form is CallForm.LLAMA:
            self._step = self._next_of_llama
        elif self._form is CallForm.ARGUMENTS:
            self._step = self._after
        else:
            self._step = self._plain if call.is_bare or self._prefix else self._in_array
        return True

    def _to_end_of_hermes(self) -> bool:
        _, found = self._cut("</tool_call>")
        if found:
            self._step = self._plain
        return found

    def _next_of_llama(self) -> bool:
        self._buffer = self._buffer.lstrip(_SPACE + ";,")
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._open("")
        else:
            self._step = self._plain
        return True

    def _after(self) -> bool:
        """Nothing that follows means anything."""
        self._buffer = ""
        return False

    def _cut(self, marker: str) -> tuple[str, bool]:
        """What stands before the marker, and whether it is there; what may be its beginning stays in the buffer."""
        at = self._buffer.find(marker)
        if at >= 0:
            before, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            return before, True
        held = next(
            (n for n in range(min(len(marker) - 1, len(self._buffer)), 0, -1) if marker.startswith(self._buffer[-n:])),
            0,
        )
        before = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(before) :]
        return before, False
