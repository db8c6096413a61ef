"""Where an engine stands."""

from enum import Enum


class EngineState(Enum):
    """From the making of an engine to its end; it starts once."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"
    CLOSED = "closed"

    @property
    def is_alive(self) -> bool:
        return self not in (EngineState.DEAD, EngineState.CLOSED)

    @property
    def is_ready(self) -> bool:
        return self is EngineState.READY
