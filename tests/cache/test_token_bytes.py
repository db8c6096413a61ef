"""Ids as bytes, and the bisecting comparison."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.cache.page_allocator import PageAllocator
from slipstream.engine.cache.radix_cache import RadixCache
from slipstream.engine.cache.token_bytes import TOKEN_BYTES, common_prefix_units, decode_token_ids, encode_token_ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_survive_the_way_to_bytes_and_back(ids: list[int]) -> None:
    assert decode_token_ids(encode_token_ids(ids)) == ids
    assert len(encode_token_ids(ids)) == 4 * len(ids)


def test_an_id_outside_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        encode_token_ids([2**31])


@given(
    key=st.binary(max_size=40),
    tail=st.binary(max_size=20),
    start=st.integers(0, 7),
    unit_bytes=st.sampled_from([1, 4, 16]),
    cut=st.integers(0, 40),
)
def test_the_bisection_agrees_with_a_count_unit_by_unit(
    key: bytes, tail: bytes, start: int, unit_bytes: int, cut: int
) -> None:
    other = b"x" * start + key[:cut] + tail
    expected = 0
    while (expected + 1) * unit_bytes <= min(len(key), len(other) - start) and (
        key[: (expected + 1) * unit_bytes] == other[start : start + (expected + 1) * unit_bytes]
    ):
        expected += 1
    assert common_prefix_units(key, other, start, unit_bytes) == expected


@pytest.mark.parametrize("num_requests", [1, 200])
def test_a_match_of_100_000_tokens_takes_two_milliseconds_at_most(num_requests: int) -> None:
    """The best of many: the machine may be busy. With 200 others the path has as many nodes."""
    pages = PageAllocator(200_000, 16)
    tree = RadixCache(pages, 16)
    ids = encode_token_ids(range(100_000))
    whole = pages.allocate(100_000 // 16)
    tree.insert(ids, whole)
    for number in range(1, num_requests):
        cut = number * (100_000 // num_requests) // 16 * 16 * TOKEN_BYTES
        other = ids[:cut] + encode_token_ids([7] * 16)
        tree.insert(other, [*whole[: cut // 64], *pages.allocate(1)])
    times = []
    for _ in range(30):
        began = time.perf_counter()
        match = tree.match(ids)
        times.append(time.perf_counter() - began)
    assert match.num_tokens == 100_000
    assert min(times) <= 2e-3
