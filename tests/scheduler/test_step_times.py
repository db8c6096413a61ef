"""The table of step times, and what a budget leaves."""

from __future__ import annotations

import random

import pytest

from slipstream.engine.request import Request
from slipstream.engine.scheduler.schedule_batch import ScheduleBatch
from slipstream.engine.scheduler.step_times import (
    FIRST_TOKENS,
    MAX_GROWTH,
    Load,
    StepTable,
    StepTimes,
    count_pairs,
)


def batch(decodes: list[int], extends: list[tuple[int, int]] = []) -> ScheduleBatch:  # noqa: B006
    """Decode rows by their context, extend rows by (computed before, new)."""
    priors = (*decodes, *(prior for prior, _ in extends))
    news = (*(1 for _ in decodes), *(new for _, new in extends))
    return ScheduleBatch(
        step=0,
        num_decode=len(decodes),
        rows=tuple(range(1, len(priors) + 1)),
        num_prior=priors,
        num_new=news,
        samples=(True,) * len(priors),
        extend_ids=bytes(4 * sum(new for _, new in extends)),
        table_rows=b"",
        table_columns=b"",
        table_pages=b"",
        starts=(),
    )


def cost(load: Load) -> float:
    return max(4e-3, 2e-5 * load.tokens) + 3e-8 * load.context + 2e-9 * load.pairs


def test_a_load_counts_tokens_positions_and_pairs() -> None:
    assert Load.of(batch([10, 20])) == (2, 30, 0)
    assert Load.of(batch([10], [(0, 3), (100, 2)])) == (6, 10, (1 + 2 + 3) + (101 + 102))


@pytest.mark.parametrize(("prior", "new"), [(0, 1), (0, 7), (5, 1), (13, 40)])
def test_pairs_are_counted_as_one_by_one(prior: int, new: int) -> None:
    assert count_pairs(prior, new) == sum(prior + offset + 1 for offset in range(new))


def test_a_table_that_has_seen_nothing_promises_nothing() -> None:
    assert StepTable().estimate(Load(100, 100, 100)) == 0.0


def test_a_table_that_has_seen_one_size_takes_every_size_for_that() -> None:
    table = StepTable()
    table.observe(Load(64, 0, 0), 5e-3)
    assert table.estimate(Load(1, 0, 0)) == table.estimate(Load(500, 0, 0)) == 5e-3


def test_a_floor_and_the_line_above_it_are_learned_as_they_are() -> None:
    table, draw = StepTable(), random.Random(0)
    for _ in range(800):
        num_tokens, context = draw.choice([8, 64, 150, 220, 300, 500, 900, 1600, 3000]), draw.randrange(100_000)
        load = Load(num_tokens, context, draw.randrange(8_000_000) if num_tokens > 64 else 0)
        table.observe(load, cost(load))
    for num_tokens in (8, 64, 150, 300, 500, 700, 1600, 2500):
        for context, pairs in ((0, 0), (60_000, 0), (90_000, 6_000_000)):
            load = Load(num_tokens, context, pairs)
            assert table.estimate(load) == pytest.approx(cost(load), rel=0.15)


def test_an_estimate_falls_with_nothing() -> None:
    table, draw = StepTable(), random.Random(1)
    for _ in range(200):
        load = Load(draw.randrange(1, 3000), draw.randrange(50_000), draw.randrange(500_000))
        table.observe(load, cost(load) * draw.uniform(0.5, 1.5))
        sizes = [table.estimate(Load(num_tokens, 1000, 1000)) for num_tokens in range(1, 4000, 37)]
        assert sizes == sorted(sizes)
        assert table.estimate(Load(100, 2000, 1000)) >= table.estimate(Load(100, 1000, 1000))
        assert table.estimate(Load(100, 1000, 2000)) >= table.estimate(Load(100, 1000, 1000))


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    table = StepTable()
    for speed in (1.0, 2.0):
        for step in range(40):
            load = Load(64, 1000 + 64 * step, 0)
            table.observe(load, speed * cost(load))
    load = Load(64, 4000, 0)
    assert table.estimate(load) == pytest.approx(2 * cost(load), rel=0.1)


def test_what_two_quantities_share_does_not_run_away() -> None:
    """Context and pairs that always move together cannot be told apart; their sum is right nevertheless."""
    table = StepTable()
    for step in range(200):
        load = Load(512, 100 * step, 1000 * step)
        table.observe(load, 0.01 + 1e-9 * load.pairs)
    load = Load(512, 20_000, 200_000)
    assert table.estimate(load) == pytest.approx(0.01 + 2e-4, rel=0.02)


class TestAllowance:
    """What a budget leaves for prompts beside decode rows."""

    def rows(self, count: int, context: int = 500) -> list[Request]:
        made = []
        for _ in range(count):
            request = Request.__new__(Request)
            request.num_planned = context
            made.append(request)
        return made

    def learned(self, budget_s: float) -> StepTimes:
        times, draw = StepTimes(budget_s), random.Random(2)
        for _ in range(300):
            decodes = [500] * draw.choice([16, 64])
            extends = [(draw.randrange(20_000), draw.choice([16, 100, 400, 800, 1500]))]
            for tried in (batch(decodes), batch(decodes, extends)):
                times.record(tried, cost(Load.of(tried)))
        return times

    def test_before_anything_is_known_a_few_tokens_are_tried(self) -> None:
        allowance = StepTimes(0.02).allowance(self.rows(4))
        assert allowance.tokens(0) == FIRST_TOKENS
        allowance.spend(0, 40)
        assert allowance.tokens(0) == FIRST_TOKENS - 40

    @pytest.mark.parametrize("budget_s", [0.01, 0.02, 0.03])
    @pytest.mark.parametrize("prior", [0, 10_000])
    def test_it_fits_the_budget_and_fills_it(self, budget_s: float, prior: int) -> None:
        num_tokens = self.learned(budget_s).allowance(self.rows(64)).tokens(prior)
        load = Load(64 + num_tokens, 64 * 500, count_pairs(prior, num_tokens))
        assert 0.85 * budget_s <= cost(load) <= 1.1 * budget_s

    def test_it_is_spent_request_by_request(self) -> None:
        times = self.learned(0.02)
        whole = times.allowance(self.rows(64)).tokens(0)
        allowance = times.allowance(self.rows(64))
        allowance.spend(0, whole // 2)
        left = allowance.tokens(0)
        assert whole // 2 <= left <= whole // 2 + 200, "two short prompts attend to less than a long one"
        allowance.spend(0, left)
        assert allowance.tokens(0) == 0

    def test_a_budget_that_the_decode_rows_exceed_leaves_nothing(self) -> None:
        assert self.learned(0.003).allowance(self.rows(64)).tokens(0) == 0

    def test_prompt_parts_grow_by_steps_from_what_was_seen(self) -> None:
        times = StepTimes(10.0)
        times.record(batch([10] * 4, [(500, 100)]), 0.001)
        assert times.allowance(self.rows(4)).tokens(0) == MAX_GROWTH * 100
        most = times.allowance(self.rows(4)).tokens(5000)
        assert count_pairs(5000, most) <= MAX_GROWTH * count_pairs(500, 100) < count_pairs(5000, most + 1)
