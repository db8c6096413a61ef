"""Whether the engine still gets anywhere: a step that never ends looks fine from outside."""

from __future__ import annotations

from ..engine.engine import Engine


class Progress:
    """Compares what has been settled from one look to the next; the probes that ask are the clock."""

    __slots__ = ("_num_settled", "_since", "_stuck_after_s")

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._num_settled = -1
        self._since = 0.0

    def is_stuck(self, engine: Engine, now: float) -> bool:
        """Whether requests have been running since an earlier look, `stuck_after_s` ago or more, without a step's end."""
        is_idle = engine.is_paused or not engine.stats.num_running
        if is_idle or engine.num_settled_steps != self._num_settled:
            self._num_settled = engine.num_settled_steps
            self._since = now
        return now - self._since >= self._stuck_after_s
