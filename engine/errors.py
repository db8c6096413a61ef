"""Errors by whose fault they are.

    SlipstreamError
      ├─ RequestError       the caller's: bad parameter, prompt too long (names the field)
      ├─ Overloaded         the load's: queue full, draining (try again later)
      ├─ RequestCancelled   nobody's: the request was aborted while its consumer waited
      ├─ StepFailed         one step's: its rows fail, the engine goes on
      ├─ EngineDead         everyone's: the engine cannot go on (stored for late comers)
      └─ ConfigError        the operator's: found before the device is touched
    MisuseError             ours: a bug in Slipstream or in code that drives it

Nothing here knows of HTTP.
"""

from __future__ import annotations

from ..streams.errors import MisuseError

__all__ = [
    "ConfigError",
    "EngineDead",
    "MisuseError",
    "Overloaded",
    "RequestCancelled",
    "RequestError",
    "SlipstreamError",
    "StepFailed",
    "shown",
]

LONGEST_SHOWN = 80


class SlipstreamError(Exception):
    """Base of every error that is not a bug in this code."""


class RequestError(SlipstreamError):
    """A request that cannot be served as it stands. `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(SlipstreamError):
    """The engine takes no more work now. `draining` says that it never will again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, draining: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.draining = draining


class RequestCancelled(SlipstreamError):
    """The request was aborted by somebody else than the consumer that waits for it."""


class StepFailed(SlipstreamError):
    """One step, or one row of it, failed; requests outside it are not concerned."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class EngineDead(SlipstreamError):
    """The engine has stopped for good; the first cause is its `__cause__`."""


class ConfigError(SlipstreamError):
    """A setting that cannot work. `field` names it as the user wrote it."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def shown(value: object) -> str:
    """A refused value for an error message: short, and never an error itself whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # an int of 5,000 digits, or a class of the caller's that cannot show itself
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"
