"""CUDA streams that differ from one another, used again once nobody has them any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Final, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch

from .errors import MisuseError

_SIZE: Final = 32
"""torch hands streams out of a ring of this size per device and priority."""


class HasHandle(Protocol):
    """A stream, as far as the ring looks at it."""

    @property
    def cuda_stream(self) -> int:
        """The raw handle."""
        ...


S = TypeVar("S", bound=HasHandle)


class _Loan:
    """An attribute of a stream that is lent, and gone with it: a weak reference to a CUDA stream itself dangles once the stream
    is gone (pytorch/pytorch#183403).
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle


class StreamRing(Generic[S]):
    """Lends the streams of one device. A stream is lent for as long as the object lives that `take` returned.

    cuBLAS keeps 64 MiB for every stream that it ever ran on: engines that start and stop in one process shall run on the same
    few. `draw` makes the next stream of torch's ring, which may be one that is known already; `again` a second object for one.
    """

    def __init__(self, draw: Callable[[], S], again: Callable[[S], S]) -> None:
        self._draw = draw
        self._again = again
        self._lock = Lock()  # engines are built on threads
        self._known: dict[int, S] = {}
        self._loans: WeakSet[_Loan] = WeakSet()

    def take(self, count: int, *, avoided: Iterable[int] = ()) -> list[S]:
        """`count` streams whose handles differ from each other and from `avoided`: free ones that were used before, else new
        ones, else some that are lent already. Raises MisuseError if the ring has not enough.
        """
        gone = set(avoided)
        streams: list[S] = []
        with self._lock:
            for handle in self._candidates():
                if len(streams) == count:
                    break
                if handle not in gone:
                    gone.add(handle)
                    streams.append(self._again(self._known[handle]))
            if len(streams) < count:
                raise MisuseError(f"torch has no {count} distinct streams left (it has {_SIZE} a device)")
            for stream in streams:
                loan = vars(stream)["_loan"] = _Loan(stream.cuda_stream)
                self._loans.add(loan)
        return streams

    def _candidates(self) -> Iterable[int]:
        """Handles, the best first."""
        lent = {loan.handle for loan in self._loans}
        yield from [handle for handle in self._known if handle not in lent]
        for _ in range(2 * _SIZE):
            stream = self._draw()
            if stream.cuda_stream not in self._known:
                self._known[stream.cuda_stream] = stream
                yield stream.cuda_stream
        yield from [handle for handle in self._known if handle in lent]


def distinct_streams(
    count: int, device: torch.device, *, taken: Iterable[torch.cuda.Stream] = ()
) -> list[torch.cuda.Stream]:
    """`count` streams of `device` whose raw handles differ from each other, from `taken` and the default stream.

    torch's ring of streams wraps, so two new `Stream` objects may be one stream. Raises MisuseError if the ring has
    not enough.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    default = torch.cuda.default_stream(device).cuda_stream
    return _rings.setdefault(index, _ring_of(index)).take(
        count, avoided=[default, *(stream.cuda_stream for stream in taken)]
    )


_rings: dict[int, StreamRing[torch.cuda.Stream]] = {}  # by device


def _ring_of(index: int) -> StreamRing[torch.cuda.Stream]:
    def again(stream: torch.cuda.Stream) -> torch.cuda.Stream:
        return torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    return StreamRing(lambda: torch.cuda.Stream(torch.device("cuda", index)), again)
