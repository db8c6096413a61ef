from __future__ import annotations

from slipstream.profiling.stream_client import quantile, summary


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(64, 0, -1)]
    assert quantile(values, 0.5) == 32, "half of them are no greater"
    assert quantile(values, 0.99) == 64
    assert quantile(values, 0.0) == 1
    assert quantile(values, 1.0) == 64
    assert quantile([7.0], 0.5) == 7
    assert quantile([], 0.5) == 0


def test_tokens_that_come_in_one_event_have_no_time_between_them() -> None:
    numbers = summary([[0.0, 0.010, 0.010, 0.030], [0.0, 0.005, 0.010, 0.015]], 0.05, num_tokens=4)
    assert round(numbers["itl_ms_p50"], 6) == 5
    assert round(numbers["itl_ms_max"], 6) == 20
    assert numbers["events"] == 8
    assert round(numbers["events_per_s"]) == 160
    assert round(numbers["steady_tokens_per_s"]) == 300
