"""The one error this room raises by itself."""

from __future__ import annotations


class MisuseError(RuntimeError):
    """A contract of the code was broken by other code of the program: a bug, never the fault of a request."""
