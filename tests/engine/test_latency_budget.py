"""A latency budget is kept, and used: 64 rows decode while a prompt of 32,768 tokens is computed beside them.

Virtual time: a step takes what the stated cost model says, nothing sleeps, and every run is the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import End
from slipstream.engine.scheduler.schedule_batch import ScheduleBatch
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits
from slipstream.profiling.virtual_time import run_in_virtual_time

NUM_ROWS = 64
PROMPT_TOKENS = 32_768


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: weights are read once or multiplied with every token, whichever takes longer; decode rows read
    their context, prompts attend in pairs. `noise`: each step takes up to that share more or less.
    """

    floor_s: float = 6e-3
    token_s: float = 20e-6
    context_s: float = 30e-9
    pair_s: float = 1.2e-9
    noise: float = 0.0
    is_additive: bool = False

    def seconds(self, batch: ScheduleBatch) -> float:
        priors, news = batch.num_prior, batch.num_new
        decode = sum(priors[: batch.num_decode])
        pairs = sum(new * (prior + new / 2) for prior, new in zip(priors, news, strict=True)) - decode
        tokens_s = self.token_s * batch.num_tokens
        base = self.floor_s + tokens_s if self.is_additive else max(self.floor_s, tokens_s)
        seconds = base + self.context_s * decode + self.pair_s * max(pairs, 0.0)
        return seconds * (1 + self.noise * (2 * random.Random(batch.step).random() - 1))

    def most_tokens(self, batch: ScheduleBatch, budget_s: float) -> int:
        """Prompt tokens that the budget would have allowed beside the decode rows of `batch`, whose last row is a prompt."""
        low, high = 0, PROMPT_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            tried = ScheduleBatch(
                **{
                    **{name: getattr(batch, name) for name in batch.__dataclass_fields__},
                    "num_new": (*batch.num_new[:-1], middle),
                    "extend_ids": bytes(4 * middle),
                }
            )
            if CostModel.seconds(self._quiet(), tried) <= budget_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _quiet(self) -> CostModel:
        return CostModel(**{**self.__dict__, "noise": 0.0})


@dataclass
class Gaps:
    """A sink that keeps when its tokens came."""

    times: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, token_ids: Sequence[int], text: str, *rest: object) -> None:
        self.times.append(asyncio.get_running_loop().time())

    def end(self, end: End) -> None:
        self.done.set()


def serve(cost: CostModel, budget_s: float, *, overlap: bool, prompt_tokens: int = PROMPT_TOKENS):
    """Run 64 short prompts to decoding, then the long one beside them; the gaps while it was computed, and its steps."""

    async def main() -> tuple[list[float], list[ScheduleBatch]]:
        script = Script(cost_s=cost.seconds, verifies=False, records=True)
        limits = WorkerLimits(num_pages=8192, page_size=16, num_rows=128, max_model_len=65_536, vocab_size=100)
        settings = {"chunked_prefill_size": 8192, "itl_budget_ms": budget_s * 1e3, "overlap": overlap}
        async with Engine.on(ScriptedWorker(limits, script), **settings) as engine:
            engine._loop.clock = asyncio.get_running_loop().time
            rows = [Gaps() for _ in range(NUM_ROWS)]
            for number, sink in enumerate(rows):
                engine.submit([number] * 200, SamplingParams(max_tokens=1000, ignore_eos=True), sink)
            while len(rows[-1].times) < 30:
                await asyncio.sleep(0.01)
            long = Gaps()
            start, first_step = asyncio.get_running_loop().time(), engine.stats.num_steps
            engine.submit([99] * prompt_tokens, SamplingParams(max_tokens=1), long)
            await long.done.wait()
            end = asyncio.get_running_loop().time()
            gaps = [
                after - before
                for sink in rows
                for before, after in zip(sink.times, sink.times[1:], strict=False)
                if start < after <= end
            ]
            steps = [batch for batch in script.launched[first_step:] if batch.num_decode < batch.num_rows]
            return gaps, steps

    return run_in_virtual_time(main())


MODELS: dict[str, CostModel] = {
    "a floor, then a line": CostModel(),
    "a sum": CostModel(is_additive=True),
    "dear attention": CostModel(pair_s=4e-9),
    "noise of 4%": CostModel(noise=0.04),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget_ms", [15, 40])
@pytest.mark.parametrize("model", MODELS)
def test_the_gaps_stay_within_the_budget_and_the_prompt_gets_what_it_allows(
    model: str, budget_ms: int, overlap: bool
) -> None:
    cost, budget_s = MODELS[model], budget_ms / 1e3
    gaps, steps = serve(cost, budget_s, overlap=overlap)
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] <= 1.1 * budget_s
    computed = sum(batch.num_new[-1] for batch in steps)
    assert computed == PROMPT_TOKENS
    # The step that ends the prompt has no more to take.
    allowed = sum(min(cost.most_tokens(batch, budget_s), PROMPT_TOKENS - batch.num_prior[-1]) for batch in steps)
    assert computed >= 0.8 * allowed


def test_without_a_budget_the_chunk_alone_decides() -> None:
    gaps, steps = serve(MODELS["a sum"], 1e3, overlap=True)
    assert max(gaps) > 0.1
    assert max(batch.num_new[-1] for batch in steps) > 8000


def test_a_budget_that_leaves_no_room_still_moves_the_prompt_by_a_page() -> None:
    _, steps = serve(MODELS["a sum"], 1e-3, overlap=True, prompt_tokens=800)
    assert {batch.num_new[-1] for batch in steps[:-1]} == {16}
