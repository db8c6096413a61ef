"""The cycle collector of a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FULL_EVERY = 1000  # collections of the middle generation to a full one; Python's own is 10


@contextmanager
def calm_collector() -> Iterator[None]:
    """While this lasts, what is there at the start is not walked again, and full collections are rare.

    With torch loaded a full collection stops the loop for 0.2 s, and every few hundred requests start one. Requests leave
    nothing for it: what they are made of has no cycles once they are over. Process-wide; not for use within another.
    """
    young, middle, full = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, FULL_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
        gc.unfreeze()
