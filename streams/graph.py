"""CUDA graphs of whole functions in one shared memory pool, and their CPU twin."""

from __future__ import annotations

import dataclasses
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from .errors import MisuseError
from .stream_ring import distinct_streams
from .tensor_tree import copy_into

T = TypeVar("T")

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCost:
    """What one capture took: device memory (of the whole device, so including the executable graph itself) and time."""

    growth_bytes: int
    seconds: float


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add `note` to an exception out of the body: which capture failed, and what does without."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


class GraphPool:
    """The device memory that graphs share, and the side stream they are captured on.

    Graphs of one pool are never replayed at the same time, so their intermediates may overlap; capture the largest
    first. Outputs of one graph are overwritten by the replay of another only if they are no longer referenced: a
    `CapturedGraph` keeps its output.

    `stream`: to capture on, not the default stream; best one that no lane uses (see `distinct_streams`).
    `capture_error_mode`: "thread_local" by default, since other threads go on asking events while the loop's thread
    captures.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: CaptureErrorMode = "thread_local",
    ) -> None:
        self.device = device
        self.capture_error_mode: CaptureErrorMode = capture_error_mode
        self.costs: list[CaptureCost] = []
        self._stream: torch.cuda.Stream | None = None
        self._handle: Any = None
        if device.type == "cuda":
            self._stream = stream or distinct_streams(1, device)[0]
            self._handle = torch.cuda.graph_pool_handle()
            self._anchor = self._capture_nothing(self._stream)

    def _capture_nothing(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """An empty graph that keeps the pool alive: torch refuses to use a pool again once its last graph has gone."""
        with torch.cuda.stream(stream):
            graph = self.begin_segment()
            end_segment(graph)
        return graph

    @property
    def on_cuda(self) -> bool:
        return self._stream is not None

    @property
    def growth_bytes(self) -> int:
        """Device memory that all captures into this pool took."""
        return sum(cost.growth_bytes for cost in self.costs)

    def begin_segment(self) -> torch.cuda.CUDAGraph:
        """Start to capture on the current stream, which is the pool's (see `capturing`)."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._handle, capture_error_mode=self.capture_error_mode)
        return graph

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Make the pool's stream current, in order with the caller's, and measure what is captured within."""
        stream = self._stream
        if stream is None:
            raise MisuseError("a graph pool on the CPU captures nothing: its graphs are twins")
        torch.cuda.synchronize(self.device)
        gc.collect()  # a CUDA object that the collector finalises in the middle of a capture may break it
        free_before = torch.cuda.mem_get_info(self.device)[0]
        started = time.perf_counter()
        caller = torch.cuda.current_stream(self.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            yield
        caller.wait_stream(stream)
        torch.cuda.synchronize(self.device)
        growth_bytes = free_before - torch.cuda.mem_get_info(self.device)[0]
        self.costs.append(CaptureCost(growth_bytes=growth_bytes, seconds=time.perf_counter() - started))

    def warm_up(self, fn: Callable[[], object], times: int) -> None:
        """Run `fn` on the capture stream: kernels are to be compiled and workspaces made before the capture."""
        if self._stream is None:
            for _ in range(times):
                fn()
            return
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                fn()
        caller.wait_stream(self._stream)


def end_segment(graph: torch.cuda.CUDAGraph) -> bool:
    """End a capture; says whether anything was captured (two breaks in a row leave nothing between them)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    empty = False
    for warning in caught:
        if "CUDA Graph is empty" in str(warning.message):
            empty = True
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return not empty


def abandon_segment(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed, so that the stream is usable again. The caller raises what failed, not what fails here."""
    try:
        end_segment(graph)
    except RuntimeError:
        return


class Graph(Protocol[T]):
    """Something captured: replays on the current stream, reads the static inputs of its capture, writes `output`."""

    output: T

    def replay(self) -> T:
        """Run once more. Lifetime: the output is a view, valid until the next replay of any graph of the pool."""
        ...


class CapturedGraph(Generic[T]):
    """`fn` as one CUDA graph. On the CPU its twin: `fn` called again, its result copied into the first one's tensors.

    `fn` reads and writes static tensors only, and asks nothing of the device. It runs `warmups` times, is captured,
    and is replayed once, so that `output` is computed and the first real replay costs no upload.
    """

    def __init__(self, fn: Callable[[], T], pool: GraphPool, *, warmups: int = 1) -> None:
        self._fn = fn  # on CUDA, too: it may own the static inputs
        self._pool = pool  # and its stream, whose workspace of cuBLAS the graph uses
        self._graph: torch.cuda.CUDAGraph | None = None
        pool.warm_up(fn, warmups)
        if not pool.on_cuda:
            self.output = fn()
            return
        with pool.capturing():
            graph = pool.begin_segment()
            try:
                self.output = fn()
            except BaseException:
                abandon_segment(graph)
                raise
            end_segment(graph)
            graph.replay()
        self._graph = graph

    def replay(self) -> T:
        """Run once more; the output is valid until the next replay of any graph of the pool."""
        if self._graph is not None:
            self._graph.replay()
        else:
            copy_into(self.output, self._fn())
        return self.output
