"""Streams that are lent: distinct, and the same ones again for whoever comes after."""

import gc
import itertools
import threading

import pytest

from slipstream.streams.errors import MisuseError
from slipstream.streams.stream_ring import StreamRing

SIZE = 4


class Stream:
    __slots__ = ("__dict__", "cuda_stream")  # no weak references: torch's own dangle

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def make_ring() -> StreamRing[Stream]:
    handles = itertools.cycle(range(100, 100 + SIZE))
    return StreamRing(lambda: Stream(next(handles)), lambda stream: Stream(stream.cuda_stream))


def handles(streams: list[Stream]) -> list[int]:
    return [stream.cuda_stream for stream in streams]


def test_streams_are_distinct_within_a_call_and_between_borrowers() -> None:
    ring = make_ring()
    first, second = ring.take(2), ring.take(2)
    assert sorted(handles(first) + handles(second)) == [100, 101, 102, 103]


def test_whoever_comes_after_gets_the_same_streams() -> None:
    ring = make_ring()
    used = set()
    for _ in range(20):
        lanes, capture = ring.take(2), ring.take(1)
        used |= {*handles(lanes), *handles(capture)}
        del lanes, capture
        gc.collect()
    assert len(used) == 3


def test_threads_that_take_streams_at_once_never_get_the_same() -> None:
    for _ in range(30):
        ring = make_ring()
        start, taken = threading.Barrier(4), []

        def borrow(
            ring: StreamRing[Stream] = ring, start: threading.Barrier = start, taken: list[Stream] = taken
        ) -> None:
            start.wait()
            taken.extend(ring.take(1))

        threads = [threading.Thread(target=borrow) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(handles(taken)) == [100, 101, 102, 103]


def test_a_stream_that_somebody_still_has_is_lent_last() -> None:
    ring = make_ring()
    kept = ring.take(1)
    others = [ring.take(1) for _ in range(3)]
    assert handles(kept)[0] not in {handles(each)[0] for each in others}
    del others[1]
    gc.collect()
    back = ring.take(1)
    assert handles(back) == [102], "the one that came back"
    shared = ring.take(1)
    assert handles(shared) == [100], "all are lent: better a shared one than none"
    del shared, others
    gc.collect()
    assert handles(ring.take(2)) == [101, 103], "its first borrower has it still"


def test_what_is_avoided_is_never_lent() -> None:
    ring = make_ring()
    assert handles(ring.take(2, avoided=[100, 102])) == [101, 103]
    with pytest.raises(MisuseError, match="no 1 distinct streams left"):
        ring.take(1, avoided=[100, 101, 102, 103])
    with pytest.raises(MisuseError, match="no 5 distinct streams left"):
        make_ring().take(5)
