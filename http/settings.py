"""What an operator can tell the HTTP front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.errors import ConfigError
from .stream_interval import AUTO

MAX_FIXED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Limits and rhythms of the HTTP front.

    Raises: ConfigError naming the field.
    """

    max_body_bytes: int = 32 << 20  # larger bodies get 413; without a text process, those above 1 MiB do
    max_choices: int = 1024  # n × prompts of one request
    body_timeout_s: float = 30.0  # for a body to arrive in full
    ping_interval_s: float = 10.0  # silence on a stream after which a comment is sent
    write_timeout_s: float = 30.0  # for one write to a client that does not read
    stuck_after_s: float = 120.0  # without a step's end while requests run: /health says so
    max_pending_chars: int = 1 << 18  # text kept for a client that reads slower than its tokens come
    stream_interval: str = AUTO  # tokens a frame: a number, or as few as the loop has time for
    log_prompts: bool = False  # the log shows what is asked, not only that something is

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            wanted, is_good = _CHECKS.get(name, ("a positive number", _is_positive))
            if not is_good(value):
                raise ConfigError(f"{name} must be {wanted}, not {value!r}", field=name)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _is_interval(value: object) -> bool:
    return value == AUTO or (isinstance(value, str) and value.isdecimal() and 0 < int(value) <= MAX_FIXED)


_CHECKS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "stream_interval": (f"{AUTO} or a number from 1 to {MAX_FIXED}", _is_interval),
    "log_prompts": ("True or False", lambda value: isinstance(value, bool)),
}
