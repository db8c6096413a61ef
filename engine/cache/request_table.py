"""Which rows of the request table are free, taken, or held by a launched step."""

from collections.abc import Iterable

from .index_pool import IndexPool


class RequestTable:
    """Rows 1..num_rows, one for each running request; row 0 is padding. Rows obey the hold law of `IndexPool`."""

    def __init__(self, num_rows: int) -> None:
        self._rows = IndexPool(num_rows, "row")

    @property
    def num_rows(self) -> int:
        """How many rows there are, row 0 not counted."""
        return self._rows.size

    @property
    def num_free(self) -> int:
        """How many rows can be taken now."""
        return self._rows.num_free

    @property
    def num_held(self) -> int:
        """How many rows wait for a launched step to be committed."""
        return self._rows.num_held

    def allocate(self) -> int:
        """Take a row. Raises: MisuseError if none is free; ask `num_free` first."""
        return self._rows.take(1)[0]

    def release(self, row: int, last_step: int | None) -> None:
        """Give a row back; `last_step` is the last launched step that names it.

        Raises: MisuseError if the row is not taken.
        """
        self._rows.release((row,), last_step)

    def commit(self, step: int) -> None:
        """Note that `step` is committed, failed or not, and free the rows it held."""
        self._rows.commit(step)

    def check(self, taken: Iterable[int]) -> None:
        """Prove that every row is in exactly one place, `taken` being the rows of the requests. Raises: MisuseError."""
        self._rows.check(taken)
