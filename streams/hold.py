"""Keeps objects referenced until the lanes that read or write them are past their last use."""

from __future__ import annotations

from collections import deque

from .fence import Fence


class Hold:
    """Strong references to `objects`, until every fence named by `until` has passed.

    Lifetime: a hold protects its objects only while the hold itself is referenced. Hand it to `Lane.ticket(hold=…)`,
    which keeps it until `drop` succeeds, or keep it with the step and call `drop` when the step is committed.
    """

    __slots__ = ("_fences", "_objects")

    def __init__(self, *objects: object) -> None:
        self._objects: tuple[object, ...] = objects
        self._fences: list[Fence] = []

    def until(self, fence: Fence) -> None:
        """The objects are in use up to `fence`, too."""
        self._fences.append(fence)

    def drop(self) -> bool:
        """Release the objects if every fence has passed; says whether they are. From any thread, as often as you like."""
        fences = self._fences
        while fences:
            if not fences[-1].done():
                return False
            try:
                fences.pop()
            except IndexError:  # another thread took the last one between the look and the pop
                break
        self._objects = ()
        return True


class HoldList:
    """Holds whose owner has gone on, swept whenever their lane completes a ticket."""

    __slots__ = ("_holds",)

    def __init__(self) -> None:
        # A deque, as its ends are popped and pushed atomically: tickets complete on more than one thread.
        self._holds: deque[Hold] = deque()

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, hold: Hold) -> None:
        """Drop `hold` now, or at the first sweep that finds its fences passed."""
        if not hold.drop():
            self._holds.append(hold)

    def sweep(self) -> None:
        """Drop what can be dropped by now."""
        for _ in range(len(self._holds)):
            try:
                hold = self._holds.popleft()
            except IndexError:
                return
            if not hold.drop():
                self._holds.append(hold)
