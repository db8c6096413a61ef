"""One request's text: drawn ids in, text that may go out now, and the stop string that ended it."""

from __future__ import annotations

from .detokenizer import Detokenizer
from .stop_strings import StopStrings


class TextStream:
    """A detokenizer with the request's stop strings behind it. Knows nothing of ids that end a request by themselves."""

    __slots__ = ("_detokenizer", "_includes_stop", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...] = (), *, includes_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=includes_stop) if stops else None
        self._includes_stop = includes_stop

    def push(self, token_id: int, *, looks_for_stops: bool = True) -> tuple[str, str | None]:
        """Take one drawn id; return what it releases and the stop it completed. Held text comes with a later id."""
        text = self._detokenizer.push_one(token_id)
        if self._stops is None or not looks_for_stops:
            return text, None
        return self._stops.push(text)

    def end_at(self, token_id: int) -> str:
        """The request ended by drawing the stop id `token_id`: return what is held, the id's own text only if asked for."""
        text = self._detokenizer.push((token_id,)) if self._includes_stop else ""
        return self._released(text + self._detokenizer.flush())

    def flush(self) -> str:
        """The request ended otherwise: return what is held, an incomplete character as U+FFFD."""
        return self._released(self._detokenizer.flush())

    def _released(self, text: str) -> str:
        if self._stops is None:
            return text
        released, stop = self._stops.push(text)
        return released if stop is not None else released + self._stops.flush()
