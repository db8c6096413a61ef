"""Trace files larger than memory should hold: the events of a Chrome trace, some thousands at a time."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import orjson

from .timeline import TraceError

CHUNK_BYTES: Final = 2 << 20
MAX_HEAD_BYTES: Final = 64 << 20
_HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")  # two events, or two objects inside of one: parsing tells
_LIST_END = re.compile(r",\s*\]")  # with a comma too many, as some programs write it
_GZIP_MAGIC: Final = b"\x1f\x8b"


class EventStream:
    """Iterate once for the events, in pieces. Afterwards `extras` holds the other members of the file's object.

    A file is cut wherever `},{` might stand between two events. What lies between two cuts parses as a list of values
    exactly if both cuts were between events: anywhere else a bracket or a quote is left open.
    Raises: TraceError if the file is not a Chrome trace, is no JSON, or ends in the middle.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.extras: dict[str, Any] = {}
        self._is_list = False

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        try:
            with _opened(self.path) as file:
                yield from self._pieces(file)
        except (OSError, EOFError, zlib.error, ValueError) as error:  # a gzip file cut off or damaged; no JSON
            raise TraceError(f"{self.path}: {error}") from error

    def _pieces(self, file: IO[bytes]) -> Iterator[list[dict[str, Any]]]:
        buffer = self._skip_head(file)
        while chunk := file.read(CHUNK_BYTES):
            buffer += chunk
            events, taken = _parse_whole(buffer)
            if events:
                yield events
                buffer = buffer[taken:]
        yield self._parse_rest(buffer)

    def _skip_head(self, file: IO[bytes]) -> bytes:
        """Read up to the first event; keep the members before it."""
        buffer = b""
        while (found := _HEAD.search(buffer)) is None:
            if buffer[:1] == b"[":  # the list alone is a trace, too
                self._is_list = True
                return buffer[1:]
            chunk = file.read(CHUNK_BYTES)
            if not chunk or len(buffer) > MAX_HEAD_BYTES:
                raise TraceError(f"{self.path}: no traceEvents: not a Chrome or torch-profiler trace, or incomplete")
            buffer = (buffer + chunk).lstrip()
        head = buffer[: found.start()].rstrip().rstrip(b",")
        self.extras.update(self._loads(head + b"}"))
        return buffer[found.end() :]

    def _parse_rest(self, rest: bytes) -> list[dict[str, Any]]:
        """The last events, and the members behind them."""
        end = rest.rfind(b"]")
        events, over = _try_list(rest[: max(end, 0)])
        if events is None and over is not None:  # the bracket was one of the members behind
            end = rest.rfind(b"]", 0, over)
            events, _ = _try_list(rest[:end])
        if events is None or end == -1:
            raise TraceError(f"{self.path}: ends in the middle of an event: the file is incomplete")
        tail = rest[end + 1 :].strip().lstrip(b",").strip()
        if not self._is_list or tail:
            self.extras.update(self._loads(b"{" + tail))
        return events

    def _loads(self, text: bytes) -> dict[str, Any]:
        try:
            loaded = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{self.path}: {error}: the file is incomplete or no JSON") from error
        return loaded if isinstance(loaded, dict) else {}


def _parse_whole(buffer: bytes) -> tuple[list[dict[str, Any]], int]:
    """As many whole events as the buffer surely holds, and how many bytes they take with the comma behind them."""
    end = len(buffer)
    while (start := buffer.rfind(b"}", 0, end)) != -1:
        end = start
        between = _BETWEEN.match(buffer, start)
        if between is None:
            continue
        events, over = _try_list(buffer[: start + 1])
        if events is not None:
            return events, between.end() - 1
        if over is not None:
            end = over
    return [], 0


def _try_list(text: bytes) -> tuple[list[dict[str, Any]] | None, int | None]:
    """The events of a text that was cut behind one of them. None if it was cut elsewhere: inside of an event, or behind
    the end of the list; then also where that is, at most.

    Raises: ValueError if no cut can help: it is no JSON. Looking for one would take minutes.
    """
    try:
        return orjson.loads(b"[" + text.rstrip().rstrip(b",") + b"]"), None
    except orjson.JSONDecodeError as error:
        before, behind = error.doc[: error.pos], error.doc[error.pos :]
        if before and len(behind) <= 1:  # all was well up to the cut
            return None, None
        comma = _LIST_END.match(behind)
        if comma is not None or before.rstrip().endswith("]"):
            return None, len(before.encode()) - 1 + (comma.end() if comma is not None else 0)
        raise ValueError(f"no JSON: {error.msg} behind {before[-60:]!r}") from error


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    return gzip.open(path, "rb") if is_gzip else path.open("rb")  # type: ignore[return-value]
