"""A worker without tensors: it runs the waist's contract in pure Python, on a script.

For tests of everything above the waist and for benchmarks of the host. A token depends on the request's seed and history
only. The history is read back through the row table and the pages, position by position, so a page that was freed, given
away or clobbered too early shows as a wrong token or an error. What it does not show: arithmetic, memory, time on a device.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..streams.host_lane import HostLane
from ..streams.marks import DRAW, FORWARD, Marks, MarkSwitch
from ..streams.ticket import Ticket
from .errors import EngineDead, MisuseError
from .outputs import HiddenStates
from .scheduler.schedule_batch import ScheduleBatch
from .scripted_draw import ScriptedCounts, ScriptedDraw, scripted_pooled, scripted_prompt_logprobs
from .scripted_lanes import TimerLane, TurnLane
from .worker import Launched, SampleInputs, StepOutcome, WorkerLimits

TokenOf = Callable[[int, Sequence[int]], int]
_MASK = (1 << 61) - 1


@dataclass(kw_only=True)
class Script:
    """What happens, and when. Times are in seconds, steps are numbers as in ScheduleBatch.

    With `step_time_s` None the lane runs on turns of the event loop: forward N+1 is still pending when N is committed, and
    a test without a clock sees the same order every time. Otherwise a lane thread sleeps that long for each forward. With
    `cost_s` a forward takes what that says, on the event loop's clock and without a thread.
    """

    step_time_s: float | None = None
    cost_s: Callable[[ScheduleBatch], float] | None = None
    token_of: TokenOf | None = None  # (seed, history) → id; by default a hash of both, but never 0, a usual end of text
    launch_cost_s: float = 0.0  # the loop thread is busy that long in each launch
    late_turns: Callable[[int], int] = lambda step: 0  # turns of the loop by which a step's results come late
    launch_faults: frozenset[int] = frozenset()  # these launches raise
    forward_faults: frozenset[int] = frozenset()  # these forwards raise
    resolve_faults: frozenset[int] = frozenset()  # resolving these raises
    deadly_steps: frozenset[int] = frozenset()  # these forwards take the device with them
    stuck_steps: frozenset[int] = frozenset()  # these never come back
    row_faults: frozenset[tuple[int, int]] = frozenset()  # (step, position in rows): that row alone fails
    mask_faults: frozenset[tuple[int, int]] = frozenset()  # (step, position in rows): that row draws against its mask
    verifies: bool = True  # read every position of every history at every step
    launched: list[ScheduleBatch] = field(default_factory=list)  # what was launched, in order, if `records`
    records: bool = False


class _Cell(NamedTuple):
    """KV of one position: the token there, and a hash of the history up to it."""

    position: int
    token_id: int
    chain: int


class ScriptedWorker:
    """A Worker that follows a Script."""

    def __init__(self, limits: WorkerLimits, script: Script | None = None) -> None:
        self.limits = limits
        self.script = script if script is not None else Script()
        self.last_committed = -1
        self.marks = MarkSwitch()
        self._lane: TurnLane | TimerLane | HostLane | None = None
        self._table = [
            array("i", [0]) * (limits.max_model_len // limits.page_size + 1) for _ in range(limits.num_rows + 1)
        ]
        self._cells: list[_Cell | None] = [None] * ((limits.num_pages + 1) * limits.page_size)
        self._seeds = [0] * (limits.num_rows + 1)
        self._relay = [0] * (limits.num_rows + 1)
        self._counts = ScriptedCounts()

    async def start(self) -> WorkerLimits:
        if self.script.cost_s is not None:
            self._lane = TimerLane()
        else:
            self._lane = TurnLane() if self.script.step_time_s is None else HostLane("scripted")
        return self.limits

    async def aclose(self) -> None:
        if self._lane is not None:
            self._lane.close()

    def committed(self, step: int) -> None:
        self.last_committed = step

    def launch(self, batch: ScheduleBatch) -> Launched:
        script, lane = self.script, self._lane
        if lane is None:
            raise MisuseError("launch before start")
        if batch.step in script.launch_faults:
            raise RuntimeError(f"scripted: launch of step {batch.step} fails")
        if script.records:
            script.launched.append(batch)
        _busy(script.launch_cost_s)
        outcome: Ticket[StepOutcome] = Ticket()
        chains: dict[int, int | Exception] = {}
        marks = self.marks.marks
        forward = _marked(marks, FORWARD, batch.step, lambda: self._forward(batch, chains))
        if isinstance(lane, TimerLane):
            lane.submit(forward, script.cost_s(batch) if script.cost_s is not None else 0.0)
        else:
            lane.submit(forward)

        def resolve(inputs: SampleInputs) -> None:
            if batch.step in script.resolve_faults:
                raise RuntimeError(f"scripted: resolving step {batch.step} fails")
            if batch.step in script.stuck_steps:
                return
            results: list[StepOutcome | Exception] = []
            draw = _marked(marks, DRAW, batch.step, lambda: results.append(self._sample(batch, chains, inputs)))
            lane.submit(draw)
            for _ in range(script.late_turns(batch.step)):
                lane.submit(lambda: None)
            lane.submit(lambda: _complete(outcome, results[0]))

        return Launched(batch, outcome, resolve)

    def poison(self, pages: Sequence[int]) -> None:
        if self._lane is not None:
            spoiled = tuple(pages)
            self._lane.submit(lambda: self._spoil(spoiled))

    # ---- on the lane

    def _spoil(self, pages: Sequence[int]) -> None:
        size = self.limits.page_size
        for page in pages:
            self._cells[page * size : (page + 1) * size] = [None] * size

    def _forward(self, batch: ScheduleBatch, chains: dict[int, int | Exception]) -> None:
        """Apply the table writes, write the new positions, and leave each row's history hash in `chains`."""
        if self.script.step_time_s:
            time.sleep(self.script.step_time_s)
        for row, column, page in zip(
            _ints(batch.table_rows), _ints(batch.table_columns), _ints(batch.table_pages), strict=True
        ):
            self._table[row][column] = page
        for start in batch.starts:
            self._seeds[start.row] = start.sampling.seed
        self._counts.start(batch.starts)
        if batch.step in self.script.forward_faults:
            chains.update(dict.fromkeys(range(batch.num_rows), RuntimeError(f"scripted: step {batch.step} fails")))
            return
        ids, taken = _ints(batch.extend_ids), 0
        for index, row in enumerate(batch.rows):
            if index < batch.num_decode:
                new_ids: Sequence[int] = (self._relay[row],)
            else:
                new_ids = ids[taken : taken + batch.num_new[index]]
                taken += batch.num_new[index]
            try:
                chains[index] = self._write(row, batch.num_prior[index], new_ids)
            except MisuseError as error:
                chains[index] = error

    def _write(self, row: int, num_prior: int, new_ids: Sequence[int]) -> int:
        chain = self._history_hash(row, num_prior)
        for position, token_id in enumerate(new_ids, num_prior):
            chain = _link(chain, token_id)
            self._cells[self._slot(row, position)] = _Cell(position, token_id, chain)
        return chain

    def _history_hash(self, row: int, length: int) -> int:
        """The hash of the first `length` positions, read back through the pages."""
        chain = 0
        if length and not self.script.verifies:
            cell = self._cells[self._slot(row, length - 1)]
            return cell.chain if cell is not None else 0
        for position in range(length):
            cell = self._cells[self._slot(row, position)]
            if cell is None or cell.position != position or _link(chain, cell.token_id) != cell.chain:
                raise MisuseError(f"row {row} reads {cell} at position {position}")
            chain = cell.chain
        return chain

    def _sample(
        self, batch: ScheduleBatch, chains: dict[int, int | Exception], inputs: SampleInputs
    ) -> StepOutcome | Exception:
        if batch.step in self.script.deadly_steps:
            return EngineDead(f"scripted: step {batch.step} kills the device")
        draws = ScriptedDraw(inputs, self.limits.vocab_size)
        token_ids, row_errors, logprobs = [], {}, {}
        for index, row in enumerate(batch.rows):
            chain = chains[index]
            if isinstance(chain, Exception) and index not in inputs.dead:
                return chain
            if (batch.step, index) in self.script.row_faults:
                row_errors[index] = f"scripted: row {index} of step {batch.step} fails"
            if not batch.samples[index]:
                continue
            if index in inputs.dead or isinstance(chain, Exception):
                token_ids.append(0)
                continue
            length = batch.num_prior[index] + batch.num_new[index]
            wished = token_id = self._draw(row, length, chain)
            penalise = self._counts.penalise(row, length, self._relay[row])
            obeys_mask = (batch.step, index) not in self.script.mask_faults
            try:
                token_id = draws.draw(index, wished, obeys_mask=obeys_mask, penalise=penalise)
            except Exception as error:
                row_errors[index] = f"scripted: {error}"
            asked = draws.logprobs(index, wished, token_id)
            if asked is not None:
                logprobs[index] = asked
            self._relay[row] = token_id
            token_ids.append(token_id)
        return StepOutcome(
            token_ids=tuple(token_ids),
            logprobs=logprobs,
            prompt_logprobs=scripted_prompt_logprobs(batch),
            pooled=scripted_pooled(batch),
            hidden_states=self._shown(batch, inputs.dead),
            row_errors=row_errors,
        )

    def _shown(self, batch: ScheduleBatch, dead: frozenset[int]) -> dict[int, HiddenStates]:
        """Three numbers a position: the token there, the position, and some of the hash of the history up to it."""
        found = {}
        for place, first in batch.shown:
            if place in dead:
                continue
            start, end = batch.num_prior[place] + first, batch.num_prior[place] + batch.num_new[place]
            cells = [self._cells[self._slot(batch.rows[place], position)] for position in range(start, end)]
            values = [(cell.token_id, cell.position, cell.chain & 0xFFFF) for cell in cells if cell is not None]
            found[place] = HiddenStates(start, 3, array("f", [each for state in values for each in state]).tobytes())
        return found

    def _draw(self, row: int, length: int, chain: int) -> int:
        if self.script.token_of is None:
            return 1 + _link(chain, self._seeds[row]) % (self.limits.vocab_size - 1)
        cells = [self._cells[self._slot(row, position)] for position in range(length)]
        return self.script.token_of(self._seeds[row], [cell.token_id for cell in cells if cell is not None])

    def _slot(self, row: int, position: int) -> int:
        page_size = self.limits.page_size
        return self._table[row][position // page_size] * page_size + position % page_size


def _link(chain: int, token_id: int) -> int:
    return (chain * 6364136223846793005 + token_id * 1442695040888963407 + 1013904223) & _MASK


def _ints(packed: bytes) -> array[int]:
    ints = array("i")
    ints.frombytes(packed)
    return ints


def _marked(marks: Marks, name: str, step: int, job: Callable[[], None]) -> Callable[[], None]:
    """The job with a mark around it, or as it is while marks are off."""
    if not marks.is_on:
        return job

    def marked() -> None:
        mark = marks.lane_start(name, step)
        job()
        marks.lane_end(mark)

    return marked


def _busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while seconds and time.perf_counter() < until:
        pass


def _complete(outcome: Ticket[StepOutcome], result: StepOutcome | Exception) -> None:
    if isinstance(result, Exception):
        outcome.set_error(result)
    else:
        outcome.set_result(result)
