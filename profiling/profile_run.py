"""What `slipstream profile` does: run a load on an engine, or find a server under load, and record some steps of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.errors import ConfigError
from ..engine.sampling_params import SamplingParams
from ..engine.scripted_worker import Script, ScriptedWorker
from ..engine.token_stream import TokenStream
from ..engine.worker import WorkerLimits
from .html_page import html_page
from .overlap_report import OverlapReport, overlap_report
from .read_trace import read_trace
from .recorder import Recorder
from .report_text import comparison_text, report_json, report_text
from .results import environment
from .timeline import Timeline
from .write_chrome import write_chrome

RECORD_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Steady decode: `rows` requests at once, each with a prompt of its own, recorded once `warm_steps` have passed."""

    rows: int = 8
    prompt_tokens: int = 128
    steps: int = 50
    warm_steps: int = 20

    @property
    def num_outputs(self) -> int:
        """Of each request: enough for all that is recorded. The first decode while the prompts of the last are computed."""
        return self.warm_steps + self.steps + 20 + self.rows // 2 + self.rows * self.prompt_tokens // 2048

    def max_tokens(self, limits: WorkerLimits) -> int:
        """Outputs of each request. Raises: ConfigError if the model's context is too short for them."""
        wanted = self.num_outputs
        if self.prompt_tokens + wanted > limits.max_model_len:
            raise ConfigError(
                f"{self.prompt_tokens} prompt tokens and {wanted} steps are more than the model's {limits.max_model_len}",
                field="steps",
            )
        return wanted


async def record(
    engine: Engine, load: Load, *, kernels: bool = True, nvtx: bool = False, torch_trace: Path | None = None
) -> Timeline:
    """Run the load on a started engine and record `load.steps` steps of it; the options are the recorder's.

    Raises: ConfigError; what ended a request early.
    """
    choose = random.Random(0)
    limits = engine.limits
    params = SamplingParams(max_tokens=load.max_tokens(limits), temperature=0.0, ignore_eos=True)
    if load.rows > limits.num_rows:
        raise ConfigError(f"{load.rows} are more than the engine's {limits.num_rows}", field="rows")
    recorder = Recorder(engine, kernels=kernels, nvtx=nvtx, torch_trace=torch_trace)
    async with AsyncExitStack() as stack:
        streams = []
        for _ in range(load.rows):
            prompt = [choose.randrange(limits.vocab_size) for _ in range(load.prompt_tokens)]
            streams.append(await stack.enter_async_context(engine.generate(prompt, params)))
        try:
            return await _recorded(streams, recorder, load)
        except BaseExceptionGroup as group:  # the tasks' first failure says what happened
            raise group.exceptions[0] from None
        finally:
            if recorder.is_recording:
                await recorder.collect()


async def _recorded(streams: Sequence[TokenStream], recorder: Recorder, load: Load) -> Timeline:
    """Read all streams, and record once all have begun and the last one's tokens have counted the warm steps."""
    async with asyncio.TaskGroup() as group:
        # A stream is submitted by its first read: all together, so that none ends before the last begins.
        firsts = [group.create_task(_first(stream)) for stream in streams]
        await asyncio.wait(firsts)
        readers = [group.create_task(_drain(stream)) for stream in streams[:-1]]
        for _ in range(load.warm_steps):
            await anext(streams[-1])
        recorder.start(num_steps=load.steps)
        readers.append(group.create_task(_drain(streams[-1])))
        in_time = await recorder.reached(wait_s=RECORD_TIMEOUT_S)
        timeline = await recorder.collect()
        for reader in readers:
            reader.cancel()
    if not in_time:
        raise ConfigError(f"{load.steps} steps took longer than {RECORD_TIMEOUT_S:g} s", field="steps")
    return timeline


async def _first(stream: TokenStream) -> None:
    await anext(stream)


async def _drain(stream: TokenStream) -> None:
    async for _ in stream:
        pass


def scripted_engine(load: Load, *, step_ms: float, launch_ms: float, overlap: bool) -> Engine:
    """An engine over a device that only keeps time: what remains is what the host costs."""
    longest = load.prompt_tokens + load.num_outputs + 16
    limits = WorkerLimits(
        num_pages=load.rows * (longest // 16 + 2),
        page_size=16,
        num_rows=load.rows,
        max_model_len=longest,
        vocab_size=32_000,
    )
    script = Script(step_time_s=step_ms / 1e3, launch_cost_s=launch_ms / 1e3, verifies=False)
    engine = Engine.on(ScriptedWorker(limits, script), overlap=overlap, page_size=16)
    engine.model_name = "scripted device"
    return engine


def engine_maker(
    settings: Mapping[str, object], load: Load, *, scripted: bool, step_ms: float, launch_ms: float
) -> Callable[[bool], Engine]:
    """Makes the engine to record, overlapped or not. Raises: ConfigError, before anything is loaded."""
    if scripted:
        return lambda overlap: scripted_engine(load, step_ms=step_ms, launch_ms=launch_ms, overlap=overlap)
    config = EngineConfig.from_settings(settings)
    if _lacks_tokenizer(config.model):  # the load is made of ids
        config = replace(config, skip_tokenizer=True)
    return lambda overlap: Engine(replace(config, overlap=overlap))


def _lacks_tokenizer(model: str) -> bool:
    """Whether the model is a folder without one, such as a shape made for dummy weights."""
    folder = Path(model).expanduser()
    return (folder / "config.json").is_file() and not (folder / "tokenizer.json").is_file()


async def record_each(
    make: Callable[[bool], Engine],
    depths: Sequence[int],
    load: Load,
    *,
    kernels: bool,
    nvtx: bool,
    torch_traces: Path | None = None,
) -> list[Timeline]:
    """One recording a depth, one after the other, each with an engine of its own.

    `torch_traces`: leave torch's own traces beside what `write_all` writes for this stem.
    """
    timelines = []
    for number, depth in enumerate(depths):
        trace = None if torch_traces is None else _beside(torch_traces, number, len(depths), "torch.json.gz")
        async with make(bool(depth)) as engine:
            timelines.append(await record(engine, load, kernels=kernels, nvtx=nvtx, torch_trace=trace))
    return timelines


def _beside(stem: Path, number: int, count: int, ending: str) -> Path:
    """The name of one of `count` files of a kind."""
    part = f".{number}" if count > 1 else ""
    return stem.with_name(f"{stem.name}{part}.{ending}")


def record_server_blocking(url: str, admin_key: str | None, *, steps: int, wait_s: float, into: Path) -> Timeline:
    """Let a running server record its next steps, and fetch them. The load is whatever its clients send.

    Raises: ConfigError if the server does not answer as it should.
    """
    _post(url, "/start_profile", admin_key, {"num_steps": steps}, timeout_s=30)
    try:
        content = _post(url, "/stop_profile", admin_key, {"wait_s": wait_s}, timeout_s=wait_s + 60)
    except KeyboardInterrupt:  # the server would go on recording, and refuse the next one
        _post(url, "/stop_profile", admin_key, {}, timeout_s=30)
        raise
    try:
        into.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {into}: {error}", field="out") from error
    return read_trace(into)


def _post(url: str, path: str, key: str | None, body: dict[str, object], *, timeout_s: float) -> bytes:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    url = url.rstrip("/")
    try:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        said = error.read()[:500].decode(errors="replace")
        raise ConfigError(f"{url}{path} answered {error.code}: {said}", field="url") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: it is no URL
        raise ConfigError(f"{url} does not answer: {error}", field="url") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What the report may be told; as in `overlap_report`."""

    step_range: str | None = None
    burst_gap_us: float = 20.0
    stall_ms: float | None = None

    @property
    def burst_gap_ns(self) -> int:
        return int(self.burst_gap_us * 1e3)


def reports_of(timelines: Sequence[Timeline], options: ReportOptions) -> list[OverlapReport]:
    """A report each. Raises: TraceError."""
    return [
        overlap_report(
            timeline,
            stall_ns=None if options.stall_ms is None else int(options.stall_ms * 1e6),
            step_range=options.step_range,
            burst_gap_ns=options.burst_gap_ns,
        )
        for timeline in timelines
    ]


def write_all(timelines: Sequence[Timeline], stem: Path, options: ReportOptions | None = None) -> list[OverlapReport]:
    """Write a trace each, one page and one JSON file for all; return the reports. Raises: TraceError, ConfigError."""
    options = options if options is not None else ReportOptions()
    reports = reports_of(timelines, options)
    page = html_page(timelines, reports, step_range=options.step_range, burst_gap_ns=options.burst_gap_ns)
    make_folder(stem)
    try:
        for number, timeline in enumerate(timelines):
            write_chrome(timeline, _beside(stem, number, len(timelines), "trace.json.gz"))
        stem.with_name(f"{stem.name}.html").write_text(page, encoding="utf-8")
        write_reports(reports, stem.with_name(f"{stem.name}.json"))
    except OSError as error:
        raise ConfigError(f"cannot write {stem}: {error}", field="out") from error
    return reports


def make_folder(stem: Path) -> None:
    """Make the folder that `stem` stands in, before anything is measured for it. Raises: ConfigError."""
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {stem}: {error}", field="out") from error


def write_reports(reports: Sequence[OverlapReport], path: Path) -> None:
    """The reports as JSON, with the environment beside them."""
    content = {
        "benchmark": "overlap",
        "environment": environment(),
        "results": {report.source: report_json(report) for report in reports},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def reports_text(reports: Sequence[OverlapReport]) -> str:
    """The reports one after the other, and beside each other if there are several."""
    text = "\n".join(report_text(report) for report in reports)
    return text + "\n" + comparison_text(reports) if len(reports) > 1 else text
