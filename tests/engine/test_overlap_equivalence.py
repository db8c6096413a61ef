"""The crown jewel: whatever is thrown at the engine, depth 1 gives token for token what depth 0 gives.

Scripts of arrivals, lengths, shared prefixes, stops, penalties, grammars, log-probabilities, hidden states, priorities,
pauses, aborts, faults, late results and page pressure are generated; the ScriptedWorker reads every history back through
the pages at every step, freed pages are poisoned, and the laws of ownership are proved after each step.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.engine.engine import Engine, RequestHandle
from slipstream.engine.grammar_session import GrammarSpec
from slipstream.engine.logit_rules import mask_of
from slipstream.engine.outputs import Cancelled, End, Failed, Finished, HiddenStates, TokenLogprobs
from slipstream.engine.scheduler import new_token_ratio, prefill_adder
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits

VOCAB = 31
PAGE_SIZES = (1, 2, 4, 16)


@dataclass(frozen=True)
class Arrival:
    """One request of a script. `turn` counts turns of the event loop."""

    turn: int
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    abort_after: int | None  # turns after the arrival
    priority: int
    rules: str


@dataclass(frozen=True)
class Scenario:
    page_size: int
    num_pages: int
    num_rows: int
    chunk_pages: int
    prefix_cache: bool
    policy: str
    preempts: bool
    itl_budget_ms: float | None
    eviction: str
    pauses: tuple[tuple[int, bool], ...]  # (turn, whether the cache is flushed meanwhile)
    arrivals: tuple[Arrival, ...]
    late_every: int
    counts_tokens: bool  # the worker counts for penalties; the host sends no edits for them
    expected_ratio: float  # how much output is reserved for: near 0, requests run into each other and are retracted
    launch_faults: frozenset[int]
    forward_faults: frozenset[int]
    resolve_faults: frozenset[int]
    row_faults: frozenset[tuple[int, int]]


class Recorder:
    """A sink that keeps everything and insists on one end, after the tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.parts: list[HiddenStates] = []
        self.ends: list[End] = []

    def push(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        hidden_states: HiddenStates | None = None,
    ) -> None:
        assert not self.ends, "a token after the end"
        self.token_ids.extend(token_ids)
        self.logprobs.extend((*prompt_logprobs, *logprobs))
        if hidden_states is not None:
            self.parts.append(hidden_states)

    @property
    def hidden_states(self) -> HiddenStates | None:
        return HiddenStates.joined(self.parts)

    def end(self, end: End) -> None:
        self.ends.append(end)


class Countdown:
    """A grammar: 30 tokens at most, each of them of the residue that its place and the token before it give."""

    num_bytes = 1

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def session(self) -> Countdown:
        return Countdown()

    @property
    def is_over(self) -> bool:
        return len(self.accepted) >= 30

    def _allowed(self) -> list[int]:
        last = self.accepted[-1] if self.accepted else 0
        return [token_id for token_id in range(VOCAB) if (token_id + last + len(self.accepted)) % 3 == 0]

    def fill(self) -> bytes:
        assert not self.is_over, "a grammar that is over is asked nothing"
        return mask_of(self._allowed(), VOCAB)

    def accept(self, token_id: int) -> bool:
        assert not self.is_over
        if token_id not in self._allowed():
            return False
        self.accepted.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("never needed: masks are filled from exact history")


SPEC = GrammarSpec(kind="json_object")
RULES: dict[str, dict[str, object]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {3: 0.5}},
    "bans": {"bad_words_ids": ((3,), (5, 6)), "frequency_penalty": -0.5},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.3},
    "last states": {"hidden_states": "last", "logprobs": 0},
    "full states": {"hidden_states": "full", "prompt_logprobs": 0},
    "grammar": {"structured_output": SPEC, "logprobs": 0, "frequency_penalty": 0.3},
}


@st.composite
def scenarios(draw: st.DrawFn, *, faults: bool, aborts: bool) -> Scenario:
    page_size = draw(st.sampled_from(PAGE_SIZES))
    # Pools that a few requests overfill: most scripts must drain and retract.
    num_pages = draw(st.integers(48 // page_size, 112 // page_size))
    longest = num_pages * page_size
    prefix = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=12)))
    arrivals = []
    for _ in range(draw(st.integers(1, 10))):
        tail = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)))
        prompt = (prefix + tail if draw(st.booleans()) else tail)[: longest - 1]
        max_tokens = draw(st.integers(0, 3) | st.integers(20, 40).map(lambda n, p=prompt: min(n, longest - len(p))))
        arrivals.append(
            Arrival(
                turn=draw(st.integers(0, 8) | st.integers(0, 60)),
                prompt=prompt,
                max_tokens=max_tokens,
                min_tokens=draw(st.integers(0, min(max_tokens, 4))),
                stop_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
                seed=draw(st.integers(0, 3)),
                abort_after=draw(st.none() | st.integers(0, 40)) if aborts else None,
                priority=draw(st.integers(-1, 1)),
                rules=draw(st.sampled_from(("plain", *RULES))),
            )
        )
    steps = st.integers(0, 40)
    policy = draw(st.sampled_from(("fcfs", "lpm", "shortest-prefill", "priority", "priority")))
    none: st.SearchStrategy[frozenset[int]] = st.just(frozenset())
    return Scenario(
        page_size=page_size,
        num_pages=num_pages,
        num_rows=draw(st.integers(1, 8) | st.just(8)),
        chunk_pages=draw(st.integers(1, 4)),
        prefix_cache=draw(st.booleans()),
        policy=policy,
        preempts=policy == "priority" and draw(st.booleans()),
        itl_budget_ms=draw(st.sampled_from((None, None, 0.02))),
        eviction=draw(st.sampled_from(("lru", "lfu", "fifo", "priority"))),
        pauses=tuple(draw(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=2))),
        arrivals=tuple(arrivals),
        late_every=draw(st.integers(1, 5)),
        counts_tokens=draw(st.booleans()),
        expected_ratio=draw(st.sampled_from((0.0, 0.0, 0.7))),
        launch_faults=draw(st.frozensets(steps, max_size=2) if faults else none),
        forward_faults=draw(st.frozensets(steps, max_size=2) if faults else none),
        resolve_faults=draw(st.frozensets(steps, max_size=1) if faults else none),
        row_faults=draw(
            st.frozensets(st.tuples(steps, st.integers(0, 7)), max_size=3) if faults else st.just(frozenset())
        ),
    )


async def play(scenario: Scenario, *, overlap: bool) -> tuple[list[Recorder], Engine]:
    script = Script(
        late_turns=lambda step: step % scenario.late_every,
        launch_faults=scenario.launch_faults,
        forward_faults=scenario.forward_faults,
        resolve_faults=scenario.resolve_faults,
        row_faults=scenario.row_faults,
    )
    limits = WorkerLimits(
        num_pages=scenario.num_pages,
        page_size=scenario.page_size,
        num_rows=scenario.num_rows,
        max_model_len=scenario.num_pages * scenario.page_size,
        vocab_size=VOCAB,
        counts_tokens=scenario.counts_tokens,
    )
    engine = Engine.on(
        ScriptedWorker(limits, script),
        overlap=overlap,
        page_size=scenario.page_size,
        chunked_prefill_size=max(scenario.chunk_pages * scenario.page_size, 8),
        prefix_cache=scenario.prefix_cache,
        schedule_policy=scenario.policy,
        priority_preemption=scenario.preempts,
        itl_budget_ms=scenario.itl_budget_ms,
        eviction_policy=scenario.eviction,
        debug_canary=True,
    )
    engine.proves_laws = True
    recorders = [Recorder() for _ in scenario.arrivals]
    ratio = scenario.expected_ratio
    with (
        patch.object(new_token_ratio, "INITIAL", ratio),
        patch.object(new_token_ratio, "LOWEST", min(ratio, new_token_ratio.LOWEST)),
        patch.object(prefill_adder, "SHARED_TOKENS", 4),  # prompts are short here, and still wait for each other
    ):
        await submit_all(engine, scenario, recorders)
    assert engine.death is None
    for recorder in recorders:
        assert len(recorder.ends) == 1
    return recorders, engine


async def submit_all(engine: Engine, scenario: Scenario, recorders: list[Recorder]) -> None:
    """Run the engine through the script until everything has ended."""
    async with engine:
        handles: dict[int, RequestHandle] = {}
        for turn in range(102):
            for number, arrival in enumerate(scenario.arrivals):
                if arrival.turn == turn:
                    params = SamplingParams(
                        max_tokens=arrival.max_tokens,
                        min_tokens=arrival.min_tokens,
                        stop_token_ids=arrival.stop_ids,
                        seed=arrival.seed,
                        **RULES[arrival.rules],  # type: ignore[arg-type]
                    )
                    handles[number] = engine.submit(
                        arrival.prompt,
                        params,
                        recorders[number],
                        priority=arrival.priority,
                        grammar=Countdown() if arrival.rules == "grammar" else None,
                    )
                if arrival.abort_after is not None and arrival.turn + arrival.abort_after == turn:
                    handles[number].abort()
                    assert recorders[number].ends, "an abort ends its request at once"
            for at, flushes in scenario.pauses:
                if at == turn:
                    await engine.pause()
                    if flushes:
                        engine.flush_cache()
                    engine.resume()
            await asyncio.sleep(0)
        await engine.drain(20.0)
        stats = engine.stats
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        assert stats.num_running == stats.num_waiting == 0


EXAMPLES = int(os.environ.get("SLIPSTREAM_EXAMPLES", "120"))
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(scenarios(faults=False, aborts=False))
def test_depth_1_gives_token_for_token_what_depth_0_gives(scenario: Scenario) -> None:
    """And both what a pool gives in which nobody is ever sent back, and the host counts."""
    at_0, _ = asyncio.run(play(scenario, overlap=False))
    at_1, _ = asyncio.run(play(scenario, overlap=True))
    roomy = replace(scenario, num_pages=800 // scenario.page_size + 16, num_rows=10, preempts=False, pauses=())
    roomy = replace(roomy, counts_tokens=False)
    undisturbed, engine = asyncio.run(play(roomy, overlap=True))
    assert engine.stats.num_retractions == 0
    for one, other, whole in zip(at_0, at_1, undisturbed, strict=True):
        assert one.token_ids == whole.token_ids
        assert one.logprobs == whole.logprobs
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.hidden_states == other.hidden_states == whole.hidden_states
        assert isinstance(one.ends[0], Finished)
        assert isinstance(other.ends[0], Finished)
        assert one.ends[0].reason == other.ends[0].reason
        assert one.ends[0].stop_reason == other.ends[0].stop_reason


@SETTINGS
@given(scenarios(faults=True, aborts=True), st.booleans())
def test_aborts_and_faults_end_each_request_once_and_bring_everything_home(scenario: Scenario, overlap: bool) -> None:
    recorders, _ = asyncio.run(play(scenario, overlap=overlap))
    undisturbed, _ = asyncio.run(
        play(
            Scenario(
                **{
                    **scenario.__dict__,
                    "launch_faults": frozenset(),
                    "forward_faults": frozenset(),
                    "resolve_faults": frozenset(),
                    "row_faults": frozenset(),
                    "arrivals": tuple(Arrival(**{**a.__dict__, "abort_after": None}) for a in scenario.arrivals),
                }
            ),
            overlap=False,
        )
    )
    for recorder, whole in zip(recorders, undisturbed, strict=True):
        assert whole.token_ids[: len(recorder.token_ids)] == recorder.token_ids
        assert isinstance(recorder.ends[0], Finished | Failed | Cancelled)
        if isinstance(recorder.ends[0], Finished):
            assert recorder.token_ids == whole.token_ids
            assert recorder.hidden_states == whole.hidden_states
