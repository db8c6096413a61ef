from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.streams.errors import MisuseError
from slipstream.streams.staging import StagingRing

DTYPES = [torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), min_size=1, max_size=3)), max_size=8))
def test_views_are_aligned_and_do_not_overlap(wanted: list[tuple[torch.dtype, list[int]]]) -> None:
    slot = StagingRing(1 << 16, pinned=False).acquire(0)
    views = [slot.take(shape, dtype) for dtype, shape in wanted]
    for view, (dtype, shape) in zip(views, wanted, strict=True):
        assert view.dtype == dtype
        assert list(view.shape) == shape
        assert view.is_contiguous()
        if view.numel():
            assert view.data_ptr() % 64 == 0
    for number, view in enumerate(views):
        view.view(torch.uint8).fill_(number)
    for number, view in enumerate(views):
        assert (view.view(torch.uint8) == number).all()


def test_a_step_takes_the_slot_released_longest_ago() -> None:
    ring = StagingRing(256, slots=3, pinned=False)
    first = [ring.acquire(step).take((4,), torch.int64).data_ptr() for step in range(3)]
    assert len(set(first)) == 3
    for step in range(3):
        ring.release(step)
    assert [ring.acquire(step).take((4,), torch.int64).data_ptr() for step in range(3, 6)] == first


def test_a_slot_that_is_not_free_is_misuse_and_names_who_has_it() -> None:
    ring = StagingRing(256, slots=2, pinned=False)
    ring.acquire(7)
    ring.acquire(8)
    with pytest.raises(MisuseError, match=r"step 9.*\[7, 8\]"):
        ring.acquire(9)
    ring.release(7)
    ring.acquire(9)


def test_a_step_has_one_slot_and_releases_it_once() -> None:
    ring = StagingRing(256, pinned=False)
    ring.acquire(1)
    with pytest.raises(MisuseError, match="already"):
        ring.acquire(1)
    ring.release(1)
    with pytest.raises(MisuseError, match="no staging slot"):
        ring.release(1)


def test_a_slot_that_is_full_is_misuse_and_names_the_sizes() -> None:
    slot = StagingRing(128, pinned=False).acquire(3)
    slot.take((8,), torch.int64)
    with pytest.raises(MisuseError, match=r"128 bytes, 64 are taken.*72 bytes.*\(9,\) torch.int64"):
        slot.take((9,), torch.int64)
    assert slot.take((8,), torch.int64).numel() == 8


def test_a_released_slot_hands_out_nothing() -> None:
    ring = StagingRing(128, pinned=False)
    slot = ring.acquire(3)
    ring.release(3)
    with pytest.raises(MisuseError, match="step 3"):
        slot.take((1,), torch.int64)


def test_poison_shows_a_view_that_outlives_its_step() -> None:
    ring = StagingRing(128, pinned=False, poison=True)
    view = ring.acquire(0).take((4,), torch.int32)
    view.zero_()
    ring.release(0)
    assert view.tolist() == [int.from_bytes(b"\xa5" * 4, "little", signed=True)] * 4


def test_without_poison_a_release_leaves_the_memory_alone() -> None:
    ring = StagingRing(128, pinned=False)
    view = ring.acquire(0).take((4,), torch.int32)
    view.fill_(6)
    ring.release(0)
    assert view.tolist() == [6] * 4
