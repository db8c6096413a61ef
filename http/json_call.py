"""One tool call written as a JSON object, read as it comes: its name, then its arguments as they stand."""

from __future__ import annotations

import json
import re
from enum import Enum
from io import StringIO
from typing import Final

_SPACE: Final = " \t\r\n"
_WITHIN_STRING: Final = re.compile(r'[^"\\]*')


class Progress(Enum):
    """Where the object stands."""

    OPEN = "open"
    DONE = "done"
    NO_CALL = "no call"  # what is there cannot become a call: `raw` is plain text


class JsonCall:
    """Fed text, it gives the name once and the arguments piece by piece, however the text was cut.

    `names`: the functions that there are; None takes any. The arguments of an object are given as the model wrote them;
    those that are a JSON string are unwrapped, none at all are an empty object.
    """

    def __init__(self, names: frozenset[str] | None = None, *, arguments_only: bool = False) -> None:
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._read = StringIO()  # `raw`: text that is appended to takes time that grows with its length
        self._start: int | None = None  # where the current key or value begins in it
        self._is_value = False
        self._streams = False  # the value under way is the arguments', and its text goes out as it comes
        self._arguments: str | None = None  # those that came before the name
        self._given = False  # arguments went out
        self._new: list[str] = []
        self._bare = self.is_bare = arguments_only
        self.name: str | None = None
        self.progress = Progress.OPEN

    @property
    def raw(self) -> str:
        """What was taken, of what is not yet a call."""
        return self._read.getvalue()

    def push(self, text: str) -> tuple[str, str]:
        """Take text up to the object's end. Returns new text of the arguments, and what is left."""
        at = 0
        while at < len(text) and self.progress is Progress.OPEN:
            run = _WITHIN_STRING.match(text, at) if self._in_string and not self._escaped else None
            end = max(at + 1, 0 if run is None else run.end())
            if not self._streams and not self._bare:  # a call by now, whose text is nobody's any more
                self._read.write(text[at:end])
            self._take(text[at:end])
            at = end
        return self._taken(), text[at:]

    def _taken(self) -> str:
        taken, self._new = "".join(self._new), []
        return taken

    def _take(self, char: str) -> None:
        """One character, or within a string several that do not end it."""
        if self._streams or (self._bare and (self._depth or char == "{")):
            self._new.append(char)
        if self._in_string:
            self._in_string_char(char)
        elif char == '"':
            self._in_string = True
            self._begin()
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1 and char == ":" and not self._is_value:
            self._is_value, self._start = True, None
        elif self._depth == 1 and char == ",":
            self._end_value()
        elif char not in _SPACE:
            if not self._depth:
                self.progress = Progress.NO_CALL
            self._begin()

    def _in_string_char(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and not self._is_value and self._start is not None:
                self._key = _loaded(self._from(self._start))
                self._start = None

    def _begin(self) -> None:
        if self._depth == 1 and self._start is None and not self._bare:
            self._start = self._read.tell() - 1

    def _open(self, char: str) -> None:
        if not self._depth and char == "[":
            self.progress = Progress.NO_CALL
            return
        self._begin()
        if self._depth == 1 and self._is_arguments and char == "{" and self.name is not None and not self._bare:
            self._streams = self._given = True
            self._new.append(char)
        self._depth += 1

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth == 1 and self._streams:
            self._streams = False
            self._key = self._start = None
            self._is_value = False
        elif self._depth <= 0:
            self._end_value()
            self._end()

    @property
    def _is_arguments(self) -> bool:
        return self._is_value and self._key in ("arguments", "parameters") and not self._given

    def _from(self, start: int) -> str:
        self._read.seek(start)
        return self._read.read()  # and stands at the end again

    def _end_value(self) -> None:
        if self._is_value and self._start is not None and not self._bare:
            value = self._from(self._start)[:-1].rstrip(_SPACE)
            if self._key == "name" and self.name is None:
                name = _loaded(value)
                if not name or (self._names is not None and name not in self._names):
                    self.progress = Progress.NO_CALL
                    return
                self.name = name
                if self._arguments is not None:
                    self._give(self._arguments)
            elif self._is_arguments:
                text = _loaded(value) if value.startswith('"') else "{}" if value == "null" else value
                self._arguments = "{}" if text is None else text
                if self.name is not None:
                    self._give(self._arguments)
        self._key = self._start = None
        self._is_value = False

    def _give(self, arguments: str) -> None:
        self._given = True
        self._new.append(arguments)

    def _end(self) -> None:
        if self._bare:
            self.progress = Progress.DONE
        elif self.progress is Progress.OPEN:
            self.progress = Progress.NO_CALL if self.name is None else Progress.DONE
            if self.progress is Progress.DONE and not self._given:
                self._give("{}")


def _loaded(text: str) -> str | None:
    """The string that `text` is as JSON, if it is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
