"""Who is in the next step: decode rows first, then prompts within the budgets; who is sent back when pages run out."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import MisuseError
from ..request import Request, RequestState
from .lineup import Lineup
from .new_token_ratio import NewTokenRatio
from .preemption import victims_for
from .prefill_adder import Admission, PrefillAdder
from .request_memory import RequestMemory
from .running_set import RunningSet
from .step_times import StepTimes
from .waiting_queue import WaitingQueue

MAX_DEFERRED = 16  # requests that wait for another's prefix and are passed in one plan
MAX_REFUSED = 8  # requests that lack memory and are passed by smaller ones in one plan
MAX_AGE_DRAINS = 2  # so many times the drain time of those that run: nobody passes a request that is older


class StepPlanner:
    """Moves requests between the queue and the running set, and lines up one step after another.

    Rows are sent back only with nothing in flight: before that it is not known what they have.
    """

    def __init__(
        self,
        memory: RequestMemory,
        waiting: WaitingQueue,
        running: RunningSet,
        *,
        chunk_tokens: int,
        input_tokens: int,
        preempts: bool,
        step_times: StepTimes | None,
    ) -> None:
        self._memory = memory
        self._waiting = waiting
        self._running = running
        self._chunk_tokens = chunk_tokens
        self._input_tokens = input_tokens
        self._preempts = preempts
        self.step_times = step_times
        self.ratio = NewTokenRatio()
        # In the last plan somebody was refused for want of memory or of time: more would not fit.
        self._lacks_room = False
        self.num_drains = 0  # times a plan had to wait for the step in flight
        self.num_retractions = 0
        self.num_prompt_tokens = 0  # admitted, cached or not
        self.num_cached_tokens = 0  # of those, found in the prefix cache

    @property
    def can_fill_step(self) -> bool:
        """As the scheduler's: whether more requests could not join the next step anyway."""
        if self._lacks_room or not self._memory.rows.num_free:
            return True
        cut = self._running.prefilling
        num_left = 0 if cut is None else len(cut.ids) - cut.num_planned
        room = min(self._chunk_tokens, self._input_tokens - len(self._running.decoding))
        return num_left + self._waiting.num_tokens >= room

    def line_up(self, step: int, *, is_in_flight: bool) -> Lineup | None:
        """The rows of `step`, none if nothing can run now. None: commit the step in flight, then ask again."""
        lineup, self._lacks_room = Lineup(), False
        may_retract = not is_in_flight
        if not self._preempt(may_retract=may_retract) or not self._line_up_decodes(lineup, may_retract=may_retract):
            self.num_drains += 1
            return None
        self._line_up_prefills(lineup, step)
        return lineup

    def _preempt(self, *, may_retract: bool) -> bool:
        """Make room for the first of the queue at the cost of lower priorities. False as `_line_up_decodes`."""
        if not self._preempts or not self._waiting:
            return True
        (head,) = self._waiting.first(1)
        victims = victims_for(head, self._running, self._memory, ratio=self.ratio.value)
        if victims and not may_retract:
            return False
        for victim in victims:
            self._send_back(victim)
        return True

    def _line_up_decodes(self, lineup: Lineup, *, may_retract: bool) -> bool:
        """Give every decode row its slot. False if that takes what only the commit of the step in flight can tell."""
        while True:
            lineup.decodes.clear()
            needy = []
            for request in self._running.decoding:
                planned = request.num_planned
                if planned >= request.max_total_tokens - 1:
                    continue  # its last token is in flight: an end known beforehand is not planned again
                if planned >= request.num_slots:
                    needy.append(request)
                lineup.decodes.append(request)
            if not needy or self._memory.secure(len(needy)):
                for request in needy:
                    self._memory.grow(request, request.num_planned + 1)
                lineup.shows_decodes = bool(self._running.showing)
                if lineup.decodes:
                    self.ratio.record_decode_step()
                return True
            if not may_retract:
                return False
            self._retract_for(len(needy))

    def _line_up_prefills(self, lineup: Lineup, step: int) -> None:
        memory, prefilling = self._memory, self._running.prefilling
        if prefilling is None and (not self._waiting or not memory.rows.num_free):
            return
        times = self.step_times if lineup.decodes else None  # nobody waits for the next token of a step without
        adder = PrefillAdder(
            memory,
            lineup,
            running=self._running,
            ratio=self.ratio.value,
            chunk_tokens=self._chunk_tokens,
            input_tokens=self._input_tokens,
            latency=None if times is None else times.allowance(lineup.decodes),
        )
        if prefilling is not None:
            adder.continue_chunk(prefilling)
            if not lineup.extends or not _ends_prefill(prefilling, lineup.extends[-1][1]):
                return
        num_refused = 0
        for request in self._waiting.first(memory.rows.num_free + MAX_DEFERRED + MAX_REFUSED):
            if not memory.rows.num_free:
                break
            is_alone = lineup.is_empty and not self._running.decoding
            admission = adder.admit(request, may_exceed=is_alone)
            if admission is Admission.NO_MEMORY or (admission is Admission.NO_BUDGET and times is not None):
                self._lacks_room = True
            if admission is Admission.PREFIX_COMING:
                continue
            if admission is Admission.NO_MEMORY:
                num_refused += 1
                is_overdue = step - request.arrival_step > MAX_AGE_DRAINS * adder.drain_steps
                if is_overdue or num_refused > MAX_REFUSED or not adder.has_memory:
                    break
                continue
            if admission is not Admission.ADMITTED:
                break
            self._start(request, step)
            if not lineup.extends or lineup.extends[-1][0] is not request:
                self._running.prefilling = request  # seated, but its pages are still on their way home
                break
            if not _ends_prefill(request, lineup.extends[-1][1]):
                break

    def _start(self, request: Request, step: int) -> None:
        self._waiting.admit(request)
        request.move(RequestState.RUNNING)
        if request.num_retractions == 0:
            request.first_step = step
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens

    def _retract_for(self, num_needed_pages: int) -> None:
        """With nothing in flight, send requests back to the queue until the others can go on; one stays."""
        victims = _cheapest_first(self._running)
        while len(victims) > 1 and self._memory.num_available_pages < num_needed_pages:
            victim = victims.pop(0)
            needs_page = victim.decoding and victim.num_planned >= victim.num_slots
            self._send_back(victim)
            num_needed_pages -= needs_page
        if self._memory.num_available_pages < num_needed_pages:
            raise MisuseError(f"{victims[0]!r} alone does not fit in {self._memory.pages.num_pages} pages")
        self.ratio.record_retraction(
            num_outputs=sum(request.num_outputs for request in victims),
            num_allowed=sum(request.max_total_tokens - request.num_prompt_tokens for request in victims),
            num_requests=len(victims),
        )

    def send_all_back(self) -> None:
        """With nothing in flight, empty the running set into the queue."""
        for request in list(self._running):
            self._send_back(request)

    def _send_back(self, request: Request) -> None:
        """From the running set to its old place in the queue. What it has computed stays in the tree, evictable."""
        self._running.remove(request)
        request.move(RequestState.WAITING)
        request.num_retractions += 1
        self._memory.release(request, keep=True)
        self._waiting.add(request)
        self.num_retractions += 1


def _cheapest_first(requests: Iterable[Request]) -> list[Request]:
    """In which order they are sent back: lowest priority, fewest outputs, longest prompt."""
    return sorted(requests, key=lambda request: (request.priority, request.num_outputs, -request.num_prompt_tokens))


def _ends_prefill(request: Request, num_new: int) -> bool:
    return request.num_planned + num_new == len(request.ids)
