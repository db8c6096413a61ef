"""Indices handed out, taken back, and held while a launched step names them: the common half of pages and rows."""

from collections.abc import Callable, Iterable, Sequence

from ..errors import MisuseError

# Where an index is. One byte an index keeps a double release O(1) to catch.
_NOBODY, _FREE, _TAKEN, _HELD = 0, 1, 2, 3
_PLACES = ("nobody's", "free", "taken", "held")
_LEAST_RUN = 8  # shorter ones are faster one by one


class IndexPool:
    """Indices 1..size, each exactly one of free, taken, or held by one launched step. Index 0 is padding, nobody's.

    The hold law: whoever gives an index back names the last launched step that reads or writes it. If that step is
    committed, or there is none, the index is free at once; otherwise it joins that step's hold list, which `commit`
    empties. Steps are numbered from 0 upwards in launch order; `committed_step` is -1 before the first commit.

    Every call checks all of its indices before it changes anything. O(1) an index.
    """

    def __init__(self, size: int, noun: str, on_home: Callable[[Sequence[int]], None] | None = None) -> None:
        if size < 1:
            raise MisuseError(f"a pool needs at least one {noun}, not {size}")
        self._noun = noun
        self._on_home = on_home
        # A stack whose top is 1: fresh indices come out as one ascending run.
        self._free = list(range(size, 0, -1))
        self._places = bytearray([_NOBODY]) + bytearray([_FREE]) * size
        self._held: dict[int, list[int]] = {}
        self._committed_step = -1

    @property
    def size(self) -> int:
        """How many indices there are, 0 not counted."""
        return len(self._places) - 1

    @property
    def num_free(self) -> int:
        """How many can be taken now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many wait for a launched step to be committed."""
        return sum(map(len, self._held.values()))

    @property
    def committed_step(self) -> int:
        """The last committed step, -1 before the first."""
        return self._committed_step

    def release(self, indices: Sequence[int], last_step: int | None) -> None:
        """Give taken indices back under the hold law; `last_step` is the last launched step that names them.

        Raises: MisuseError if one of them is not taken (free, held, named twice, 0, unknown); nothing has changed then.
        """
        if last_step is None or last_step <= self._committed_step:
            self._move(indices, _TAKEN, _FREE)
            self._home(indices)
        elif indices:
            self._move(indices, _TAKEN, _HELD)
            self._held.setdefault(last_step, []).extend(indices)

    def commit(self, step: int) -> None:
        """Note that `step` is committed, failed or not, and free what it and earlier steps held.

        Raises: MisuseError if `step` is not later than the last committed one.
        """
        if step <= self._committed_step:
            raise MisuseError(f"step {step} committed after step {self._committed_step}")
        self._committed_step = step
        for held_by in sorted(held for held in self._held if held <= step):
            indices = self._held.pop(held_by)
            self._move(indices, _HELD, _FREE)
            self._home(indices)

    def check(self, taken: Iterable[int]) -> None:
        """Prove that every index is in exactly one place and that `taken` names each taken one exactly once. O(size).

        Raises: MisuseError naming the first indices for which that is false.
        """
        found = bytearray(len(self._places))
        listed = [(_FREE, self._free), (_TAKEN, taken), *((_HELD, held) for held in self._held.values())]
        for place, indices in listed:
            for index in indices:
                if not 0 < index < len(found) or found[index]:
                    raise MisuseError(f"{self._noun} {index} is {_PLACES[place]} and also named elsewhere, or unknown")
                found[index] = place
        if found != self._places:
            wrong = [index for index, place in enumerate(found) if place != self._places[index]]
            told = ", ".join(
                f"{index} is {_PLACES[self._places[index]]}, found {_PLACES[found[index]]}" for index in wrong[:8]
            )
            raise MisuseError(f"{len(wrong)} {self._noun}s misplaced: {told}")
        if any(step <= self._committed_step for step in self._held):
            raise MisuseError(f"{self._noun}s held by a committed step: {sorted(self._held)}")

    def take(self, count: int) -> list[int]:
        """Take `count` free indices, in ascending runs where possible. Raises: MisuseError if fewer are free."""
        if not 0 <= count <= len(self._free):
            raise MisuseError(f"{count} {self._noun}s asked for, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        self._move(taken, _FREE, _TAKEN)
        del self._free[-count:]
        return taken

    def _home(self, indices: Sequence[int]) -> None:
        # Reversed, so that a run which comes home in order goes out again in order.
        self._free.extend(reversed(indices))
        if self._on_home is not None and indices:
            self._on_home(indices)

    def _move(self, indices: Sequence[int], source: int, target: int) -> None:
        places = self._places
        size = len(places)
        count = len(indices)
        if count > _LEAST_RUN:
            # Pages of a long prompt mostly come and go as one ascending run: two slices instead of a loop.
            first = indices[0]
            if 0 < first <= size - count and indices == list(range(first, first + count)):
                run = slice(first, first + count)
                if places[run] == bytes((source,)) * count:
                    places[run] = bytes((target,)) * count
                    return
        for position, index in enumerate(indices):
            if not 0 < index < size or places[index] != source:
                # Read before the roll-back: an index named twice is reported as what the first naming made of it.
                place = _PLACES[places[index]] if 0 <= index < size else "unknown"
                for moved in indices[:position]:
                    places[moved] = source
                raise MisuseError(f"{self._noun} {index} is {place}, not {_PLACES[source]}")
            places[index] = target
