"""The one error that streams can raise on their own account."""

from __future__ import annotations


class MisuseError(RuntimeError):
    """A law of ownership or order was broken: a bug in the calling code."""
