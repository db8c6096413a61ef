"""One request from arrival to its terminal event: the scheduler's mutable record of it.

Owned by the scheduler; nothing else writes it. Positions count tokens of prompt and outputs together.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from .cache.radix_node import RadixNode
from .errors import MisuseError
from .logit_rules import LogitRules
from .outputs import HiddenStates, Sink, TokenLogprobs, Usage
from .sampling_params import SamplingParams
from .scheduler.schedule_batch import RowSampling
from .text.text_stream import TextStream


class RequestState(Enum):
    """Where a request stands; the last three are ends, each reached once."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)
TRANSITIONS: dict[RequestState, tuple[RequestState, ...]] = {
    RequestState.WAITING: (RequestState.RUNNING, *_ENDS),  # finished: retracted, and its deadline is over
    RequestState.RUNNING: (RequestState.WAITING, *_ENDS),  # back to waiting: retracted
    RequestState.FINISHED: (),
    RequestState.FAILED: (),
    RequestState.CANCELLED: (),
}


class Request:
    """A request's ids, limits, and what it holds of the device."""

    __slots__ = (
        "arrival",
        "arrival_step",
        "deadline",
        "decoding",
        "fault",
        "first_step",
        "hidden_states",
        "ids",
        "is_counted",
        "is_plain",
        "last_step",
        "max_total_tokens",
        "next_hidden",
        "next_scored",
        "node",
        "node_pages",
        "num_cached_tokens",
        "num_planned",
        "num_prefilled",
        "num_prompt_tokens",
        "num_retractions",
        "num_slots",
        "pages",
        "params",
        "pooled",
        "prefill_committed",
        "priority",
        "prompt_logprobs",
        "request_id",
        "row",
        "rules",
        "salt",
        "sampling",
        "sink",
        "started",
        "state",
        "stop_ids",
        "stop_texts",
        "table_columns",
        "table_pages",
        "text",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sampling: RowSampling,
        stop_ids: frozenset[int],
        stop_texts: Mapping[int, str] = MappingProxyType({}),
        max_total_tokens: int,
        sink: Sink,
        text: TextStream | None = None,
        rules: LogitRules | None = None,
        is_counted: bool = False,
        salt: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.ids = array("i", prompt_ids)
        self.num_prompt_tokens = len(self.ids)
        self.params = params
        self.sampling = sampling
        self.stop_ids = stop_ids  # drawing one of these ends the request
        self.stop_texts = stop_texts  # of those, the ones that a stop string stands for
        self.max_total_tokens = max_total_tokens  # prompt and outputs together, known from the start
        self.sink = sink
        self.text = text
        self.rules = rules
        self.is_counted = is_counted  # it has penalties, and the device counts its tokens for them
        self.is_plain = rules is None and params.logprobs is None and not params.min_tokens  # no sample knows of it
        self.fault: Exception | None = None  # its rules raised: it fails when the step is committed
        # The first prompt position whose log-probability is still to come; None: none is asked for.
        self.next_scored = None if params.prompt_logprobs is None else max(1, params.logprob_start)
        self.prompt_logprobs: list[TokenLogprobs] = []  # as far as computed, until they are delivered
        # The first position whose hidden state is still to come; None: none is asked for.
        self.next_hidden = {"none": None, "last": self.num_prompt_tokens - 1, "full": 0}[params.hidden_states]
        self.hidden_states: list[HiddenStates] = []  # as far as computed, until they are delivered
        self.pooled: tuple[float, ...] | None = None  # hidden states, pooled as far as they are computed
        self.salt = salt
        self.priority = priority  # a higher one goes first, where the policy asks for it
        self.deadline = deadline  # when its time is over, on the step loop's clock
        self.arrival = 0  # order of arrival, set by the scheduler; kept over retractions
        self.arrival_step = 0  # steps planned before it came: its age is counted in steps
        self.state = RequestState.WAITING
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache at first admission
        self.num_retractions = 0
        self.first_step = -1  # the step that it was first admitted to: the end of its time in the queue
        self.row = 0
        self.node: RadixNode | None = None  # the locked node that ends this request's share of the tree
        self.node_pages = 0  # how many of the leading `pages` the tree owns; the others are this request's own
        self.pages: list[int] = []
        self.num_slots = 0  # positions that `pages` have room for
        # Entries that the device's row table does not know yet: the pages of some columns.
        self.table_columns = array("i")
        self.table_pages = array("i")
        self.num_planned = 0  # positions whose KV some launched step computes
        self.num_prefilled = 0  # positions found in the cache or computed by committed extend steps
        self.started = False  # the worker has this row's RowStart
        self.decoding = False  # a step that samples this row was launched: its next id is in the relay
        self.prefill_committed = False  # the sample that ends this admission's prefill is committed
        self.last_step = -1  # the last launched step that names this row

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.state.value} prompt={self.num_prompt_tokens}"
            f" outputs={self.num_outputs} planned={self.num_planned} pages={len(self.pages)}>"
        )

    @property
    def num_outputs(self) -> int:
        """Committed output tokens."""
        return len(self.ids) - self.num_prompt_tokens

    @property
    def num_computed(self) -> int:
        """Positions whose KV a committed step has computed; the newest output's is never among them."""
        return len(self.ids) - 1 if self.prefill_committed else self.num_prefilled

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDS

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            output_tokens=self.num_outputs,
        )

    @property
    def longest_prefix(self) -> int:
        """Leading tokens that may come out of the cache: the last one is always computed, and whatever is scored or shown."""
        if self.params.pooling == "mean":
            return 0
        longest = len(self.ids) - 1
        if self.next_scored is not None and self.next_scored < self.num_prompt_tokens:
            longest = self.next_scored - 1
        return longest if self.next_hidden is None else min(longest, self.next_hidden)

    def add_scores(self, scores: Sequence[TokenLogprobs]) -> None:
        """Take in the log-probabilities of the next prompt tokens."""
        if self.next_scored is not None:
            self.prompt_logprobs.extend(scores)
            self.next_scored += len(scores)

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        """The prompt's log-probabilities, once."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def add_hidden(self, states: HiddenStates) -> None:
        """Take in the hidden states of the next positions."""
        self.hidden_states.append(states)
        self.next_hidden = states.end

    def take_hidden(self) -> HiddenStates | None:
        """The hidden states since the last time, once; None if there are none."""
        if not self.hidden_states:
            return None
        taken, self.hidden_states = HiddenStates.joined(self.hidden_states), []
        return taken

    def add_pooled(self, vector: tuple[float, ...], *, starts: bool) -> None:
        """Take in the pooled hidden states of one step. `starts`: of the prompt's first tokens, also after a retraction."""
        if starts or self.pooled is None:
            self.pooled = vector
        else:
            self.pooled = tuple(map(float.__add__, self.pooled, vector))

    @property
    def embedding(self) -> tuple[float, ...] | None:
        """The pooled hidden state of the whole prompt, once it is computed."""
        if self.pooled is None or self.params.pooling != "mean":
            return self.pooled
        return tuple(value / self.num_prompt_tokens for value in self.pooled)

    def move(self, state: RequestState) -> None:
        """Change state. Raises: MisuseError for a move that the table does not have."""
        if state not in TRANSITIONS[self.state]:
            raise MisuseError(f"request {self.request_id} cannot go from {self.state.value} to {state.value}")
        self.state = state
