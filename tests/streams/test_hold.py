from __future__ import annotations

import weakref

from slipstream.streams.hold import Hold, HoldList


class FakeFence:
    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def wait_blocking(self) -> None:
        raise AssertionError("a hold must never block")


class Batch:
    pass


def test_objects_live_until_the_last_fence_has_passed() -> None:
    batch = Batch()
    alive = weakref.ref(batch)
    first, last = FakeFence(), FakeFence()
    hold = Hold(batch)
    hold.until(first)
    hold.until(last)
    del batch
    first.passed = True
    assert not hold.drop()
    assert alive() is not None
    last.passed = True
    assert hold.drop()
    assert alive() is None


def test_a_hold_without_fences_drops_at_once_and_may_be_dropped_again() -> None:
    batch = Batch()
    alive = weakref.ref(batch)
    hold = Hold(batch)
    del batch
    assert hold.drop()
    assert hold.drop()
    assert alive() is None


def test_a_list_keeps_what_is_not_passed_and_sweeps_it_later() -> None:
    batch, fence = Batch(), FakeFence()
    alive = weakref.ref(batch)
    hold = Hold(batch)
    hold.until(fence)
    holds = HoldList()
    holds.add(hold)
    del batch, hold
    holds.sweep()
    assert len(holds) == 1
    assert alive() is not None
    fence.passed = True
    holds.sweep()
    assert len(holds) == 0
    assert alive() is None


def test_a_list_does_not_keep_what_is_passed_already() -> None:
    holds = HoldList()
    holds.add(Hold(Batch()))
    assert len(holds) == 0
