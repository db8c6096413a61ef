"""What an operator can tell the HTTP front."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Limits and rhythms of the HTTP front.

    Raises: ConfigError naming the field.
    """

    max_body_bytes: int = 1 << 20  # larger bodies would be parsed on the loop thread: 413
    max_choices: int = 1024  # n × prompts of one request
    body_timeout_s: float = 30.0  # for a body to arrive in full
    ping_interval_s: float = 10.0  # silence on a stream after which a comment is sent
    write_timeout_s: float = 30.0  # for one write to a client that does not read
    stuck_after_s: float = 120.0  # without a step's end while requests run: /health says so
    max_pending_chars: int = 1 << 18  # text kept for a client that reads slower than its tokens come
    log_prompts: bool = False  # the log shows what is asked, not only that something is

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "log_prompts":
                if not isinstance(value, bool):
                    raise ConfigError(f"{name} must be True or False, not {value!r}", field=name)
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{name} must be a positive number, not {value!r}", field=name)
