from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.forward.bucket_times import MARGIN, worthwhile


def test_a_size_that_a_larger_one_beats_is_left_out() -> None:
    times = {384: 9.8, 416: 10.2, 448: 14.1, 480: 11.5, 512: 11.4, 640: 13.2}
    assert worthwhile(times) == (384, 416, 480, 512, 640)


def test_a_little_more_is_noise() -> None:
    assert worthwhile({1: 1.0, 2: 0.95, 4: 2.0}) == (1, 2, 4)


@given(st.dictionaries(st.integers(1, 5000), st.floats(0.01, 100), min_size=1))
def test_what_is_left_serves_every_number_of_tokens_no_worse(times: dict[int, float]) -> None:
    kept = worthwhile(times)
    assert list(kept) == sorted(kept)
    assert max(times) in kept
    for size in times:
        served_by = next(each for each in kept if each >= size)
        best = min(times[each] for each in times if each >= size)
        assert times[served_by] * (1 - MARGIN) <= best
