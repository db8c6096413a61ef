"""Stop strings against a plain search of the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.errors import RequestError
from slipstream.engine.text.stop_strings import StopStrings

letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def in_chunks(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The match that ends first, the longest of those; by brute force."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(deadline=None, max_examples=300)
@given(letters, stop_lists, st.lists(st.integers(0, 30)), st.booleans())
def test_any_cutting_into_deltas_gives_what_a_search_of_the_whole_text_gives(text, stops, cuts, include):
    watch = StopStrings(stops, include=include)
    released, found = "", None
    for delta in in_chunks(text, cuts):
        result = watch.push(delta)
        released += result.text
        found = found or result.stop
    released += watch.flush()
    match = first_match(text, stops)
    if match is None:
        assert (released, found) == (text, None)
    else:
        end, stop = match
        assert (released, found) == (text[: end if include else end - len(stop)], stop)


@settings(deadline=None, max_examples=300)
@given(letters, stop_lists)
def test_text_is_held_only_while_its_end_begins_a_stop(text, stops):
    watch, released = StopStrings(stops), ""
    for index, char in enumerate(text):
        result = watch.push(char)
        if result.stop is not None:
            return
        released += result.text
        seen = text[: index + 1]
        longest = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert released == seen[: len(seen) - longest]


def test_text_that_cannot_become_a_stop_goes_out_with_its_own_delta():
    watch = StopStrings(("END",))
    assert [watch.push(delta) for delta in ("Hello", " EN", "D-less", "x")] == [
        ("Hello", None),
        (" ", None),
        ("", "END"),
        ("", "END"),
    ]


def test_a_stop_inside_one_delta_cuts_the_text_right_before_it():
    assert StopStrings(("gam",)).push(" gamma") == (" ", "gam")


def test_the_stop_that_matched_is_reported_and_kept_on_request():
    watch = StopStrings(("A1", "B2"), include=True)
    assert watch.push("xA") == ("x", None)
    assert watch.push("B2 and more") == ("AB2", "B2")


def test_a_match_does_not_wait_for_a_longer_stop_that_began_earlier():
    assert StopStrings(("abcde", "cd")).push("abcd") == ("ab", "cd")
    assert StopStrings(("abcde", "cd")).push("abcde") == ("ab", "cd")


def test_of_stops_that_end_together_the_longest_is_cut_off():
    assert StopStrings(("b", "ab")).push("cab") == ("c", "ab")


def test_nothing_is_released_after_a_match():
    watch = StopStrings(("!",))
    watch.push("done!")
    assert watch.push("more") == ("", "!")
    assert watch.flush() == ""


def test_a_flush_gives_the_held_text_once():
    watch = StopStrings(("END",))
    watch.push("the EN")
    assert (watch.flush(), watch.flush()) == ("EN", "")


def test_a_stop_may_hold_any_characters():
    watch = StopStrings(("👨‍👩‍👧", "終"))
    assert watch.push("a👨‍") == ("a", None)
    assert watch.push("👩b終") == ("👨‍👩b", "終")


def test_an_empty_stop_is_the_callers_error():
    with pytest.raises(RequestError) as caught:
        StopStrings(("a", ""))
    assert caught.value.param == "stop"


def test_a_long_almost_matching_text_takes_linear_time():
    # Quadratic work would be 10^10 steps here and end in the suite's timeout.
    watch = StopStrings(("a" * 100_000 + "b",))
    for _ in range(20):
        assert watch.push("a" * 10_000).stop is None
    assert watch.push("b").stop is not None
