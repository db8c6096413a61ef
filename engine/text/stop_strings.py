"""Stop strings, found in text that arrives in deltas."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..errors import RequestError


class StopResult(NamedTuple):
    """Text that may go out now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None


class StopStrings:
    """Watches one choice's text for any of `stops`.

    The match that is complete first wins, so the result is the same however the text is cut into deltas and no match
    ever waits for a rival; of matches that are complete at the same character the longest one wins. Text is held only
    while it can still become a stop. After a match nothing more is released. With `include` the stop itself is.

    Time is linear in the text (Aho–Corasick: the state is the longest end of the text that begins some stop, which is
    exactly what has to be held).

    Raises: RequestError for an empty stop string.
    """

    __slots__ = ("_depth", "_fail", "_goto", "_held", "_include", "_matched", "_node", "_out")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        if "" in stops:
            raise RequestError("a stop string must not be empty", param="stop")
        self._include = include
        self._held = ""
        self._node = 0
        self._matched: str | None = None
        # One row per node of the trie; node 0 is the root.
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._out: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def push(self, delta: str) -> StopResult:
        """Take more text; give what can no longer become a stop, cut at the first match."""
        if self._matched is not None:
            return StopResult("", self._matched)
        goto, fail, out, node = self._goto, self._fail, self._out, self._node
        for index, char in enumerate(delta):
            while node and char not in goto[node]:
                node = fail[node]
            node = goto[node].get(char, 0)
            stop = out[node]
            if stop is not None:
                text = self._held + delta[: index + 1]
                self._held, self._matched = "", stop
                return StopResult(text if self._include else text[: -len(stop)], stop)
        self._node = node
        text = self._held + delta
        released = len(text) - self._depth[node]
        self._held = text[released:]
        return StopResult(text[:released], None)

    def flush(self) -> str:
        """The text still held, when no more will come."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            following = self._goto[node].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[node][char] = following
                self._goto.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._out.append(None)
            node = following
        self._out[node] = stop

    def _link(self) -> None:
        """Point each node at its longest proper suffix in the trie, breadth first."""
        queue = deque(self._goto[0].values())
        while queue:
            node = queue.popleft()
            for char, following in self._goto[node].items():
                fallback = self._fail[node]
                while fallback and char not in self._goto[fallback]:
                    fallback = self._fail[fallback]
                self._fail[following] = self._goto[fallback].get(char, 0)
                if self._out[following] is None:
                    self._out[following] = self._out[self._fail[following]]
                queue.append(following)
