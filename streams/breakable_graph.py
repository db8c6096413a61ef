"""CUDA graphs with gaps: a function marked as a break runs eagerly between two captured segments, at every replay.

    segment 0 ──▶ arena.inputs ──▶ eager body ──▶ arena.outputs ──▶ segment 1 ──▶ …
    (captured)     (fixed addresses)                (fixed addresses)  (captured)

What crosses a break lies at fixed addresses in one arena that all graphs of a runner share and that is never freed
before them. A segment's own memory is not enough for that: a graph pool stays alive with its graphs, but its *blocks*
are handed out again, to later segments and captures, as soon as Python drops the tensors in them; an eager body that
still reads them there reads somebody else's values. So the segment before a break copies the body's tensor arguments
into the arena as its last act, and the segment after it copies the result out as its first. The arena is as large as
the largest break, whatever the number of layers and buckets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch

from .errors import MisuseError
from .graph import GraphPool, abandon_segment, end_segment
from .tensor_tree import copy_into, map_tensors, tensors_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_ALIGN_BYTES = 256  # what a fresh CUDA allocation guarantees, and kernels may count on


class _Region:
    """Memory that each break uses from its beginning. Grows by a new buffer; captured segments know the old ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def views_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous tensors of the shapes and dtypes of `tensors`, side by side."""
        starts: list[int] = []
        end = 0
        for tensor in tensors:
            starts.append(end)
            end += math.ceil(tensor.numel() * tensor.element_size() / _ALIGN_BYTES) * _ALIGN_BYTES
        if not self._buffers or self._buffers[-1].numel() < end:
            self._buffers.append(torch.empty(end, dtype=torch.uint8, device=self._device))
        buffer = self._buffers[-1]
        return [
            buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]


class BreakArena:
    """Fixed addresses for what goes into and comes out of breaks. One break at a time uses it, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self.inputs = _Region(device)
        self.outputs = _Region(device)

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.outputs.nbytes


class _Break:
    """One break of one graph: strong references to all it needs, and how to run it again."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.boundary: Any = None

    def run_first(self, arena: BreakArena) -> None:
        result = self.fn(*self.args, **self.kwargs)
        views = iter(arena.outputs.views_like(tensors_of(result)))
        self.boundary = map_tensors(result, lambda _: next(views))
        copy_into(self.boundary, result)

    def run(self) -> None:
        copy_into(self.boundary, self.fn(*self.args, **self.kwargs))

    def take_result(self) -> Any:
        """Copies, with the ordinary lifetime of the segment's intermediates: the next break may overwrite the arena."""
        return map_tensors(self.boundary, torch.clone)


def _tensors_among(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among positional arguments themselves; not those nested in them, which are held as they are."""
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


class _Player(Protocol):
    """What a break point does while a graph is captured, or a twin replayed."""

    def meet(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class GraphBreaks:
    """The break points of one runner and the arena they share.

    `eager_on_graph` marks a function. Called while no graph is captured it is just the function. Called during a
    capture it ends the segment, runs the function eagerly, and starts the next segment; at each replay the function
    runs again in the same place.

    The function may read whatever it closes over, live, at each replay. Its arguments are bound at capture:
    positional tensors come from the segment before and reach it through the arena, as contiguous copies that it must
    not keep; keyword arguments and all else are held as they are, so a keyword tensor must be static (a weight, a
    pool). It returns tensors of the same shapes every time, padded rows included, and joins any side stream it used.
    A break within a break is part of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.arena = BreakArena(device)
        self._player: _Player | None = None

    def eager_on_graph(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Mark `fn` as a break of the graphs that are captured with this object."""

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            player = self._player
            if player is None:
                return fn(*args, **kwargs)
            with self.played_by(None):
                result: R = player.meet(fn, args, kwargs)
            return result

        return call

    @contextmanager
    def played_by(self, player: _Player | None) -> Iterator[None]:
        """Let `player` meet the breaks within."""
        previous, self._player = self._player, player
        try:
            yield
        finally:
            self._player = previous


class _Recorder:
    """Captures segments and runs breaks; on the CPU it only runs the breaks.

    Each segment is replayed as soon as it is captured, so that the body behind it sees real values.
    """

    def __init__(self, pool: GraphPool, arena: BreakArena) -> None:
        self._pool = pool
        self._arena = arena
        self._segment: torch.cuda.CUDAGraph | None = None
        self.steps: list[Callable[[], None]] = []
        self.breaks: list[_Break] = []
        self.segments: list[torch.cuda.CUDAGraph] = []

    def begin(self) -> None:
        if self._pool.on_cuda:
            self._segment = self._pool.begin_segment()

    def end(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None and end_segment(segment):
            segment.replay()
            self.segments.append(segment)
            self.steps.append(segment.replay)

    def abandon(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            abandon_segment(segment)

    def meet(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors_among(args)
        views = self._arena.inputs.views_like(tensors)
        copy_into(views, tensors)  # captured: the last act of the segment
        left = iter(views)
        bound = tuple(next(left) if isinstance(arg, torch.Tensor) else arg for arg in args)
        self.end()
        met = _Break(fn, bound, kwargs)
        met.run_first(self._arena)
        self.breaks.append(met)
        self.steps.append(met.run)
        self.begin()
        return met.take_result()


class _TwinPlayer:
    """Replays the breaks of a twin: what a CUDA replay would do in the same place."""

    def __init__(self, breaks: list[_Break]) -> None:
        self._breaks = iter(breaks)

    def meet(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        met = next(self._breaks, None)
        if met is None or met.fn is not fn:
            raise MisuseError("a replay met other breaks than its capture: `fn` depends on more than its static inputs")
        copy_into(_tensors_among(met.args), _tensors_among(args))
        met.run()
        return met.take_result()

    def check_finished(self) -> None:
        if next(self._breaks, None) is not None:
            raise MisuseError("a replay met fewer breaks than its capture")


class BreakableGraph(Generic[T]):
    """`fn` as captured segments with eager breaks between them. On the CPU its twin: `fn` is called again, with the same arena.

    `fn` reads and writes static tensors, except inside its breaks. It runs `warmups` times, then once more as it is
    captured, segment by segment, which computes `output`. `BreakableGraph(breaks.eager_on_graph(fn), pool, breaks)`
    is all break and no graph: the debug mode that keeps the buffers and the replay path of a runner and captures no
    kernel.
    """

    def __init__(self, fn: Callable[[], T], pool: GraphPool, breaks: GraphBreaks, *, warmups: int = 1) -> None:
        self._fn = fn  # on CUDA, too: it may own the static inputs
        self._breaks = breaks
        self._pool = pool  # and its stream, whose workspace of cuBLAS the segments use
        pool.warm_up(fn, warmups)
        recorder = _Recorder(pool, breaks.arena)
        if pool.on_cuda:
            with pool.capturing():
                self.output = self._record(recorder)
        else:
            self.output = self._record(recorder)
        self._steps = recorder.steps
        self._met = recorder.breaks
        self.num_segments = len(recorder.segments)

    @property
    def num_breaks(self) -> int:
        return len(self._met)

    def replay(self) -> T:
        """Run once more on the current stream; the output is valid until the next replay of any graph of the pool."""
        if self._pool.on_cuda:
            for step in self._steps:
                step()
            return self.output
        player = _TwinPlayer(self._met)
        with self._breaks.played_by(player):
            result = self._fn()
        player.check_finished()
        copy_into(self.output, result)
        return self.output

    def _record(self, recorder: _Recorder) -> T:
        recorder.begin()
        try:
            with self._breaks.played_by(recorder):
                output = self._fn()
            recorder.end()
        except BaseException:
            recorder.abandon()
            raise
        return output
