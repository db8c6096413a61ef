"""The simulator of policies: a trace of conversations in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time

import pytest

from slipstream.profiling import simulate_policies
from slipstream.profiling.simulate_policies import Machine, Trace, simulate
from slipstream.profiling.virtual_time import run_in_virtual_time

SMALL = Trace(num_conversations=12, rate=20.0, system_tokens=200, mean_user_tokens=40, mean_output_tokens=20)


def test_virtual_time_passes_without_waiting() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        for delay in (3600.0, 0.0, 1.5):
            await asyncio.sleep(delay)
            times.append(loop.time())
        async with asyncio.timeout(10) as limit:
            await asyncio.sleep(9)
        assert not limit.expired()
        return times

    began = time.perf_counter()
    assert run_in_virtual_time(main()) == [3600.0, 3600.0, 3601.5]
    assert time.perf_counter() - began < 5


def test_where_nothing_can_happen_any_more_virtual_time_says_so() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="no timer"):
        run_in_virtual_time(main())


def test_the_same_trace_gives_the_same_outcome() -> None:
    assert simulate(SMALL, Machine()) == simulate(SMALL, Machine())
    assert simulate(dataclasses.replace(SMALL, seed=1), Machine()) != simulate(SMALL, Machine())


def test_what_is_measured_follows_what_the_engine_does() -> None:
    roomy = simulate(SMALL, Machine())
    assert 0.5 < roomy.hit_rate < 1.0, "later turns and system prompts are found again"
    assert 0.004 <= roomy.ttft_p50_s <= roomy.ttft_p99_s < 1.0
    assert roomy.itl_p99_s >= 0.004, "no step is shorter than the floor"
    tight = simulate(SMALL, Machine(num_pages=80, num_rows=4))
    assert tight.hit_rate < roomy.hit_rate
    assert tight.ttft_p99_s > roomy.ttft_p99_s


def test_a_latency_budget_lowers_the_gaps_between_tokens() -> None:
    trace = dataclasses.replace(SMALL, mean_user_tokens=2000, mean_output_tokens=60)
    free = simulate(trace, Machine())
    held = simulate(trace, Machine(itl_budget_s=0.012))
    assert held.itl_p99_s <= 1.1 * 0.012 < 0.7 * free.itl_p99_s


def test_urgent_requests_are_first_under_the_priority_policy() -> None:
    trace = dataclasses.replace(SMALL, num_conversations=60, rate=200.0, urgent_share=0.15)
    fcfs, priority = (simulate(trace, Machine(policy=policy, num_rows=4)) for policy in ("fcfs", "priority"))
    assert priority.urgent_ttft_p99_s < 0.8 * fcfs.urgent_ttft_p99_s


def test_the_command_prints_a_line_for_each_policy_and_writes_them(capsys, tmp_path) -> None:
    target = tmp_path / "policies.json"
    simulate_policies.main(["--conversations", "4", "--pages", "2000", "--json", str(target)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "fcfs", "lpm", "shortest-prefill", "priority", "priority, preempting",
    ]  # fmt: skip
    written = json.loads(target.read_text())
    assert written["benchmark"] == "policies"
    assert set(written["results"]["outcomes"]["lpm"]) == {
        field.name for field in dataclasses.fields(simulate_policies.Outcome)
    }
