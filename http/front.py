"""What all endpoints share: the engine, the names it is served under, limits, counters and the requests alive."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..engine.engine import Engine, EngineState
from ..engine.errors import EngineDead, Overloaded
from .failures import model_not_found, not_ready
from .fan_out import FanOut
from .metrics import FrontMetrics
from .progress import Progress
from .request_log import RequestLog
from .settings import FrontSettings
from .step_times import StepTimes

if TYPE_CHECKING:
    from .text_process import TextProcess
    from .tracing import RequestSpans


class Recorder(Protocol):
    """Records the engine's steps. What does it is handed in: this room knows nothing of traces."""

    @property
    def is_recording(self) -> bool:
        """From `start` to the end of `stop`."""
        ...

    def start(self, *, num_steps: int) -> None: ...

    async def stop(self, *, wait_s: float) -> bytes:
        """A gzipped Chrome trace of what was recorded, after its steps are over or `wait_s` have passed."""
        ...


class Abortable(Protocol):
    def abort(self) -> None:
        """End what still runs; its sinks get their ends at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """One served engine. `model_names` holds the name it goes by first, then its aliases."""

    engine: Engine
    model_names: tuple[str, ...]
    settings: FrontSettings
    metrics: FrontMetrics
    fan_out: FanOut
    progress: Progress
    log: RequestLog
    text_process: TextProcess | None = None
    spans: RequestSpans | None = None
    step_times: StepTimes
    recorder: Recorder | None = None
    live: dict[str, list[Abortable]] = field(default_factory=dict)  # request id → what runs under it
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def has_numbers(self) -> bool:
        """Whether the engine has started, so that it has limits and stats."""
        return self.engine.state not in (EngineState.NEW, EngineState.STARTING)

    def model(self, asked: str | None) -> str:
        """The name that the reply carries. Leaving the model out means the one that is served.

        Raises: Refused (404) for any other name.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            raise model_not_found(asked)
        return asked

    def check_open(self) -> None:
        """Raise what a new request is answered with while the engine does not take it."""
        engine = self.engine
        if engine.state in (EngineState.NEW, EngineState.STARTING):
            raise not_ready()
        if engine.state is EngineState.DRAINING:
            raise Overloaded("the server is shutting down and takes no new requests", draining=True)
        if not engine.state.is_ready:
            raise EngineDead("the engine has stopped")

    def abort(self, request_ids: Collection[str]) -> int:
        """Abort the named requests; their clients get an error ending. Returns how many were alive."""
        found = [alive for name in request_ids for alive in self.live.get(name, ())]
        for alive in found:
            alive.abort()
        return len(found)
