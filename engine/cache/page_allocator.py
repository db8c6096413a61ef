"""Which KV pages are free, taken, or held by a launched step."""

from collections.abc import Callable, Sequence

from .index_pool import IndexPool


class PageAllocator(IndexPool):
    """Pages 1..num_pages of `page_size` tokens each; page 0 is the dummy that padding writes to.

    "Taken" covers both owners outside this room's free and hold lists: the radix tree and the requests.
    `on_home` is called with the pages each time some become free (the debug canary poisons them there).
    """

    def __init__(
        self, num_pages: int, page_size: int, *, on_home: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        super().__init__(num_pages, "page", on_home)
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        """How many pages there are, the dummy page not counted."""
        return self.size

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages, in ascending runs where the pool allows.

        Raises: MisuseError if fewer than `num_pages` are free; ask `num_free` first.
        """
        return self.take(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        """Give back pages that no launched step names. Raises: MisuseError as `release`."""
        self.release(pages, None)

    def free_pages(self) -> frozenset[int]:
        """The free pages, as a copy."""
        return frozenset(self._free)

    def held_pages(self) -> dict[int, tuple[int, ...]]:
        """The held pages by the step that holds them, as a copy."""
        return {step: tuple(pages) for step, pages in self._held.items()}
