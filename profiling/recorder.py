"""Records an engine that runs: its loop's phases, its lanes, its requests, and on CUDA every kernel and copy."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from ..engine.engine import Engine
from ..engine.errors import ConfigError, MisuseError
from ..streams.marks import COMMIT, COPY_OUT, LAUNCH, Mark, RingMarks
from .loop_watch import LoopWatch
from .read_chrome import read_chrome
from .request_watch import RequestWatch
from .timeline import LaneKind, StepFacts, Timeline
from .write_chrome import chrome_bytes

_logger = logging.getLogger(__name__)

LOOP_LANE: Final = "event loop"
MAX_STEPS: Final = 2000  # a recording ends by itself: a forgotten one must not fill the memory


class Recorder:
    """One recording at a time, of a started engine, on its loop.

    `kernels`: on CUDA, also record what the device runs, through torch's profiler; otherwise the lanes are timed by events.
    `nvtx`: emit the marks to NVTX, and open the capture range of a tool such as Nsight Systems while recording.
    `torch_trace`: where to leave what torch's profiler writes of the device, gzipped if the name ends in .gz.
    """

    def __init__(
        self, engine: Engine, *, kernels: bool = True, nvtx: bool = False, torch_trace: Path | None = None
    ) -> None:
        self._engine = engine
        self._kernels = kernels
        self._nvtx = nvtx
        self._torch_trace = torch_trace
        self._marks: RingMarks | None = None
        self._device_trace: Any = None
        self._halted = asyncio.Event()
        self._collecting = asyncio.Lock()

    @property
    def is_recording(self) -> bool:
        """From `start` until the recording was collected, also after its steps are over."""
        return self._marks is not None

    def start(self, *, num_steps: int = MAX_STEPS) -> None:
        """Record the next `num_steps` steps. May stop the loop for a moment: the device's profiler has to be set up.

        Raises: MisuseError while a recording is under way; ConfigError if a trace of torch's is wanted and cannot be had.
        """
        if self._marks is not None:
            raise MisuseError("a recording is under way")
        on_cuda = _cuda_is_used()
        takes_device_trace = on_cuda and self._kernels and not self._nvtx
        if self._torch_trace is not None and not takes_device_trace:
            raise ConfigError("only of CUDA, with kernels and without nvtx", field="torch_trace")
        self._halted = asyncio.Event()
        self._last_step = self._engine.num_settled_steps + min(num_steps, MAX_STEPS)
        if takes_device_trace:
            self._device_trace = _start_device_trace()
        self._marks = self._make_marks(on_cuda)
        if self._nvtx and not self._marks.emits_nvtx:
            _logger.warning(
                "nobody listens to NVTX ranges, so a tool's trace has no phases: no tool is attached, the nvtx package is"
                " missing, or the tool does not say that it listens, which nvtx asks from 0.2.13 on (Nsight Systems 2023.4)"
            )
        self._requests = RequestWatch(self._engine, self._look)
        self._loop_watch = LoopWatch()
        self._thread = f"{os.getpid()}/{threading.get_native_id()}"
        self._requests.start()
        self._loop_watch.start()
        if self._nvtx and on_cuda:
            _profiler_range(opens=True)
        self._marks_before = self._engine.marks.marks  # a server's own go on afterwards
        self._engine.marks.marks = self._marks

    async def reached(self, *, wait_s: float) -> bool:
        """Wait until the steps are over; False if they are not after `wait_s`."""
        try:
            await asyncio.wait_for(self._halted.wait(), wait_s)
        except TimeoutError:
            return False
        return True

    async def collect(self) -> Timeline:
        """End the recording, if its steps have not, and return it. Raises: MisuseError if there is none."""
        marks = self._marks
        if marks is None:
            raise MisuseError("nothing is being recorded")
        self._halt()
        try:
            timeline = Timeline(self._source())
            records = marks.records()
            device = None
            if self._device_trace is not None:
                device = await asyncio.to_thread(_exported, self._device_trace, self._torch_trace)
            copy_lane = "copy" if _cuda_is_used() else "compute"
            add_marks(timeline, records, self._thread, with_lanes=device is None, copy_lane=copy_lane)
            self._requests.add_to(timeline, LOOP_LANE, self._thread)
            for held in self._loop_watch.held:
                lane = timeline.lane("loop held", LaneKind.STALLS, thread=self._thread)
                lane.add(held.code, held.start_ns, held.end_ns)
            if device is not None:
                timeline.absorb(device, offset_ns=(device.epoch_ns or 0) - _unix_minus_clock_ns())
        finally:
            self._marks = self._device_trace = None
        return timeline

    async def stop(self, *, wait_s: float) -> bytes:
        """As a gzipped Chrome trace, after the steps are over or `wait_s` have passed.

        Raises: MisuseError if nothing is recorded, or somebody else stopped the recording that this call waited for.
        """
        awaited = self._marks
        if awaited is not None:
            await self.reached(wait_s=wait_s)
        async with self._collecting:
            if self._marks is not awaited:
                raise MisuseError("the recording has been stopped by another call")
            timeline = await self.collect()
        return await asyncio.to_thread(chrome_bytes, timeline)

    def _look(self) -> None:
        if self._engine.num_settled_steps >= self._last_step:
            self._halt()

    def _halt(self) -> None:
        """Nothing is recorded from here on."""
        if self._halted.is_set():
            return
        self._engine.marks.marks = self._marks_before
        self._requests.stop()
        self._loop_watch.stop()
        if self._device_trace is not None:
            self._device_trace.stop()
        if self._nvtx and _cuda_is_used():
            _profiler_range(opens=False)
        self._halted.set()

    def _make_marks(self, on_cuda: bool) -> RingMarks:
        if not on_cuda or self._device_trace is not None:
            return RingMarks(nvtx=self._nvtx)
        import torch

        from ..streams.cuda_marks import CudaMarks

        return CudaMarks(torch.device("cuda", torch.cuda.current_device()), nvtx=self._nvtx)

    def _source(self) -> str:
        depth = int(self._engine.config.overlap)
        return f"slipstream, {self._engine.model_name}, depth {depth}"


def add_marks(
    timeline: Timeline, records: list[Mark], thread: str, *, with_lanes: bool = True, copy_lane: str = "compute"
) -> None:
    """Put marks into lanes: the loop's phases, and, unless the device was recorded itself, what its lanes did.

    `copy_lane`: where results are copied; on the CPU one lane does all.
    """
    loop = timeline.lane(LOOP_LANE, LaneKind.LOOP, thread=thread)
    started: dict[int, Mark] = {}
    for mark in records:
        if mark.is_on_lane:
            if with_lanes:
                name = copy_lane if mark.name == COPY_OUT else "compute"
                timeline.lane(name, LaneKind.DEVICE).add(mark.name, mark.start_ns, mark.end_ns, mark.step)
            continue
        loop.add(mark.name, mark.start_ns, mark.end_ns, mark.step)
        if mark.name == LAUNCH:
            started[mark.step] = mark
        if mark.name == COMMIT and mark.step in started:
            launch = started[mark.step]
            timeline.facts[mark.step] = StepFacts(rows=launch.rows, tokens=launch.tokens, sampled=mark.tokens)


def _cuda_is_used() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _start_device_trace() -> Any:
    from torch.profiler import ProfilerActivity, profile

    trace = profile(activities=[ProfilerActivity.CUDA])
    trace.start()
    return trace


def _exported(trace: Any, kept: Path | None) -> Timeline:
    """What the device did, through the file that the profiler writes."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder) / "device.json" if kept is None else kept
        trace.export_chrome_trace(str(path))
        return read_chrome(path)


def _profiler_range(*, opens: bool) -> None:
    """What `nsys profile --capture-range=cudaProfilerApi` waits for."""
    import torch

    runtime = torch.cuda.cudart()
    code = runtime.cudaProfilerStart() if opens else runtime.cudaProfilerStop()
    if int(code) != 0:
        raise MisuseError(f"the CUDA runtime refused the capture range: {code}")


def _unix_minus_clock_ns() -> int:
    """Between the clock of traces and that of marks: the tightest of some looks at both."""
    looks = []
    for _ in range(16):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        after = time.perf_counter_ns()
        looks.append((after - before, unix - (before + after) // 2))
    return min(looks)[1]
