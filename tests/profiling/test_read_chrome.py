"""Chrome traces of any layout and size are read; what is incomplete is said to be."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.profiling import json_stream
from slipstream.profiling.json_stream import EventStream
from slipstream.profiling.overlap_report import overlap_report
from slipstream.profiling.read_chrome import read_chrome
from slipstream.profiling.read_trace import read_trace
from slipstream.profiling.timeline import LaneKind, Span, StepFacts, Timeline, TraceError
from slipstream.profiling.write_chrome import chrome_bytes, write_chrome

# Text that looks like the place between two events, and objects inside of events.
EVENTS: list[dict[str, Any]] = [
    {"ph": "X", "name": 'a},{"b', "ts": 1.5, "dur": 2, "args": {"list": [{"x": 1}, {"y": "]}"}]}},
    {"ph": "X", "name": 'quote " } , {', "ts": 4, "dur": 0.001},
    {"ph": "i", "name": "]", "ts": 5, "args": {"nested": {"deep": [[{}], [{}, {}]]}}},
    {"ph": "X", "name": "last \\", "ts": 6.25, "dur": 1},
]
LAYOUTS = {
    "object": json.dumps({"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "t"}),
    "pretty": json.dumps({"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "t"}, indent=3),
    "no members behind": json.dumps({"schemaVersion": 1, "traceName": "t", "traceEvents": EVENTS}),
    "list": "\n " + json.dumps(EVENTS),
    "a comma too many": (
        '{"schemaVersion": 1, "traceEvents": [' + ",\n".join(map(json.dumps, EVENTS)) + ',\n ], "traceName": "t", '
        '"more": [1, {"a": [{}, {"b": "]},{"}]}]}'
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk_bytes", [1, 3, 17, 64, 1 << 20])
def test_events_come_whole_whatever_the_layout_and_wherever_a_chunk_ends(
    layout: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "trace.json"
    path.write_text(LAYOUTS[layout])
    stream = EventStream(path)
    assert [event for events in stream for event in events] == EVENTS
    if layout != "list":
        assert stream.extras.items() >= {"schemaVersion": 1, "traceName": "t"}.items()


@pytest.mark.parametrize("bad", ["NaN", '"\\ud800"', "[1 2]", "{}]"])
def test_what_is_no_json_is_refused_where_it_stands_and_no_other_cut_is_tried(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = ['{"ph": "X", "name": "k", "ts": 1, "dur": 1, "args": {"sizes": [[1, 2], [3]]}}'] * 3000
    events[700] = '{"ph": "X", "name": "k", "ts": 1, "dur": ' + bad + "}"
    path = tmp_path / "bad.json"
    path.write_text('{"traceEvents": [' + ", ".join(events) + "]}")
    tries: list[int] = []

    def counted(text: bytes, parse: Any = json_stream._try_list) -> Any:
        tries.append(len(text))
        return parse(text)

    monkeypatch.setattr(json_stream, "_try_list", counted)
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", 20_000)
    with pytest.raises(TraceError, match=r"bad\.json: .*no JSON"):
        read_trace(path)
    assert len(tries) < 30


@pytest.mark.parametrize("layout", ["object", "pretty"])
def test_a_file_cut_anywhere_is_an_error_and_no_shorter_trace(layout: str, tmp_path: Path) -> None:
    whole, path = LAYOUTS[layout].rstrip(), tmp_path / "cut.json"
    for length in range(len(whole)):
        path.write_text(whole[:length])
        with pytest.raises(TraceError, match=r"cut\.json"):
            read_trace(path)


def test_a_cut_gzip_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(LAYOUTS["object"].encode())[:-9])
    with pytest.raises(TraceError, match=r"cut\.json\.gz"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF", "neither"),
        (b'{"hello": 1}', "no traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "ts": "soon", "name": "a"}]}', "not as Chrome"),
        (b'{"traceEvents": [3]}', "not as Chrome"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "name": null}]}', "not as Chrome"),
        (b'{"slipstream": 3, "traceEvents": []}', "beside the events"),
        (b'{"slipstream": {"source": "x", "lanes": {}, "steps": {"1": 2}}, "traceEvents": []}', "beside the events"),
        (
            b'{"slipstream": {"source": "x", "lanes": {}}, "traceEvents": [{"ph": "X", "cat": "slipstream.loop", "ts": 1, '
            b'"name": "a"}]}',
            "beside the events",
        ),
        (b"\x1f\x8b\x08\x00aaaaaaaaaaaaaaaa", "decompressing"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_reason(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    with pytest.raises(TraceError, match="nsys export"):
        path.rename(tmp_path / "x.nsys-rep")
        read_trace(tmp_path / "x.nsys-rep")


def kineto_event(category: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 4, "tid": tid, "ts": ts, "dur": dur, "args": args}


def graph_decode_trace(path: Path, *, steps: int = 5) -> Path:
    """What torch's profiler writes of a decode by CUDA graphs: kernels of a graph share their launch's correlation."""
    at, events = 5144891654537.137, []
    events.append({"ph": "M", "name": "thread_name", "pid": 4, "tid": 1, "args": {"name": "thread 1 (python)"}})
    for step in range(steps):
        forward, draw, copied = 3 * step + 1, 3 * step + 2, 3 * step + 3
        events += [
            kineto_event("cuda_runtime", "cudaGraphLaunch", at, 20.5, correlation=forward),
            kineto_event("cuda_runtime", "cudaGraphLaunch", at + 30, 10, correlation=draw),
            kineto_event("cuda_runtime", "cudaMemcpyAsync", at + 50, 5, correlation=copied),
            kineto_event("gpu_user_annotation", "whole step", at, 1000, tid=7, device=0, stream=7),
            kineto_event("cuda_sync", "Event Sync", at, 900, tid=7, device=0, stream=7),
            {"ph": "s", "id": forward, "pid": 4, "tid": 1, "ts": at, "cat": "ac2g", "name": "ac2g"},
        ]
        for kernel in range(4):
            events.append(
                kineto_event(
                    "kernel", f"k{kernel}", at + 100 + 200 * kernel, 199, tid=7, device=0, stream=7, correlation=forward
                )
            )
        events += [
            kineto_event("kernel", "argmax", at + 900, 10, tid=7, device=0, stream=7, correlation=draw),
            kineto_event("gpu_memcpy", "Memcpy DtoH", at + 910, 2, tid=9, device=0, stream=9, correlation=copied),
        ]
        at += 1000
    document = {"schemaVersion": 1, "deviceProperties": [], "baseTimeNanoseconds": 1790857026000000000}
    path.write_text(json.dumps({**document, "traceEvents": events, "traceName": "t"}, indent=2))
    return path


def test_a_torch_trace_of_graph_decode_gives_steps_idle_and_graph_hits_without_marks(tmp_path: Path) -> None:
    timeline = read_trace(graph_decode_trace(tmp_path / "graph.json"))
    assert {lane.name for lane in timeline.of_kind(LaneKind.DEVICE)} == {"GPU 0 stream 7", "GPU 0 stream 9"}
    report = overlap_report(timeline)
    assert (report.steps_are, report.num_steps, report.host) == ("graph launches", 4, "4/1")
    assert report.window_ns == 4_000_000
    assert report.busy_ns == 4 * (4 * 199_000 + 12_000)
    assert report.idle_between_ns == 4 * 188_000
    assert report.num_graph_steps == 4
    assert report.launch_to_start is not None
    assert (report.launch_to_start.least, report.launch_to_start.most) == (100_000, 870_000)
    assert "torch profiler" in report.source


def test_the_clock_of_a_torch_trace_can_be_laid_over_the_hosts(tmp_path: Path) -> None:
    timeline = read_trace(graph_decode_trace(tmp_path / "graph.json"))
    assert timeline.epoch_ns == 1790857026000000000


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_our_own_trace_comes_back_as_it_was_written(suffix: str, tmp_path: Path) -> None:
    timeline = Timeline("slipstream on a test")
    loop = timeline.lane("loop", LaneKind.LOOP, thread="7/8")
    loop.add("launch", 10**15 + 1, 10**15 + 1234, 5)
    timeline.lane("calls", LaneKind.RUNTIME, thread="7/8").add("cudaGraphLaunch", 10**15 + 7, 10**15 + 9, correlation=3)
    timeline.lane("compute", LaneKind.DEVICE).add("gemm", 10**15 + 40, 10**15 + 50, 5, 3)
    timeline.lane("r0", LaneKind.REQUESTS).add("decode", 10**15, 10**15 + 50)
    timeline.lane("r1", LaneKind.REQUESTS).add("decode", 10**15 + 3, 10**15 + 60)
    timeline.facts[5] = StepFacts(rows=2, tokens=2, sampled=2)
    path = tmp_path / f"own{suffix}"
    write_chrome(timeline, path)
    again = read_trace(path)
    assert (again.source, again.facts) == (timeline.source, timeline.facts)

    def content(each: Timeline) -> dict[tuple[str, str, str], list[Span]]:
        return {
            (lane.name, lane.kind.value, lane.thread): [
                span._replace(start_ns=span.start_ns - start, end_ns=span.end_ns - start) for span in lane.spans()
            ]
            for start in [min(int(lane.columns().starts[0]) for lane in each.lanes)]
            for lane in each.lanes
        }

    assert {key[:2]: spans for key, spans in content(again).items()} == {
        key[:2]: spans for key, spans in content(timeline).items()
    }
    assert {lane.thread for lane in again.of_kind(LaneKind.LOOP, LaneKind.RUNTIME)} == {"7/8"}


def test_flows_lead_from_each_launch_call_to_the_first_work_it_brought(tmp_path: Path) -> None:
    timeline = read_trace(graph_decode_trace(tmp_path / "graph.json", steps=3))
    events = json.loads(gzip.decompress(chrome_bytes(timeline)))["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends) == set(range(1, 10))
    assert all(ends[number]["ts"] > starts[number]["ts"] for number in ends)
    assert ends[1]["ts"] - starts[1]["ts"] == pytest.approx(100)


def test_a_write_that_fails_leaves_no_file_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = read_trace(graph_decode_trace(tmp_path / "graph.json"))

    def disk_full(self: Any, lines: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(gzip.GzipFile, "writelines", disk_full)
    with pytest.raises(OSError, match="no space"):
        write_chrome(timeline, tmp_path / "out.json.gz")
    assert not list(tmp_path.glob("out*"))


def test_a_real_trace_of_torchs_profiler_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    matrix = torch.ones(64, 64)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu]) as profile, torch.profiler.record_function("outer"):
        matrix.mm(matrix)
    profile.export_chrome_trace(str(tmp_path / "cpu.json"))
    timeline = read_chrome(tmp_path / "cpu.json")
    (lane,) = timeline.of_kind(LaneKind.HOST)
    names = [span.name for span in lane.spans()]
    assert names[0] == "outer"
    assert "aten::mm" in names
    assert timeline.epoch_ns is not None
    outer = next(lane.spans())
    assert abs(timeline.epoch_ns + outer.start_ns - time.time_ns()) < 60e9
    with pytest.raises(TraceError, match="nothing ran on a device"):
        overlap_report(timeline)


BIG = """
import re, sys, time
from pathlib import Path
from slipstream.profiling.overlap_report import overlap_report
from slipstream.profiling.read_trace import read_trace
start = time.perf_counter()
timeline = read_trace(sys.argv[1])
report = overlap_report(timeline)
seconds = time.perf_counter() - start
# Not ru_maxrss: that of a child begins at what its parent had when it was forked.
peak = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(seconds, peak, report.num_graph_launches)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_hundred_megabytes_of_two_million_events_are_reported_in_time_and_memory(tmp_path: Path) -> None:
    path, num_events = tmp_path / "big.json", 2_000_000
    with path.open("w") as file:
        file.write('{"schemaVersion":1,"deviceProperties":[],"traceEvents":[\n')
        for number in range(num_events // 2):
            at = 5144891654537.137 + 5 * number
            file.write(
                f'{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":4,"tid":1,"ts":{at:.3f},"dur":1.5,'
                f'"args":{{"correlation":{number + 1}}}}},\n'
                f'{{"ph":"X","cat":"kernel","name":"k{number % 300}","pid":0,"tid":7,"ts":{at + 2:.3f},"dur":3.125,'
                f'"args":{{"device":0,"stream":7,"correlation":{number + 1}}}}},\n'
            )
        file.write('{"ph":"i","name":"end","ts":1,"s":"g"}],"traceName":"x"}')
    assert path.stat().st_size > 200e6
    done = subprocess.run([sys.executable, "-c", BIG, str(path)], capture_output=True, text=True, check=True)
    seconds, mebibytes, _ = map(float, done.stdout.split())
    assert seconds < 20
    assert mebibytes < 1024


def test_times_are_exact_to_the_nanosecond_however_long_ago_the_clock_began(tmp_path: Path) -> None:
    """5 * 10^12 microseconds with three decimals are as many digits as a float has; a sum of two has one too many."""
    begins = [5_170_051_942_912_755 + 1009 * number for number in range(500)]
    events = [
        {**kineto_event("kernel", "k", 0, 0, device=0, stream=7), "ts": begin / 1000, "dur": (1009 - number % 3) / 1000}
        for number, begin in enumerate(begins)
    ]
    path = tmp_path / "exact.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (lane,) = read_trace(path).of_kind(LaneKind.DEVICE)
    ends = [begin + 1009 - number % 3 for number, begin in enumerate(begins)]
    assert [(span.start_ns, span.end_ns) for span in lane.spans()] == list(zip(begins, ends, strict=True))


def test_what_another_program_calls_a_step_is_none_of_the_engines(tmp_path: Path) -> None:
    event = kineto_event("kernel", "k", 1, 2, device=0, stream=7)
    path = tmp_path / "foreign.json"
    path.write_text(
        json.dumps({"traceEvents": [{**event, "args": {**event["args"], "step": step}} for step in (3, "4")]})
    )
    (lane,) = read_trace(path).of_kind(LaneKind.DEVICE)
    assert {span.step for span in lane.spans()} == {-1}


def test_the_profilers_own_work_is_kept_apart_through_every_format(tmp_path: Path) -> None:
    on = {"device": 0, "stream": 7}
    events = [kineto_event("kernel", "k", 100 * number, 10, **on) for number in range(4)]
    events.append(
        {"ph": "X", "cat": "overhead", "name": "Activity Buffer Request", "pid": -1, "tid": 0, "ts": 105, "dur": 40}
    )
    (tmp_path / "in.json").write_text(json.dumps({"traceEvents": events}))
    timeline = read_trace(tmp_path / "in.json")
    write_chrome(timeline, tmp_path / "out.json.gz")
    for each in (timeline, read_trace(tmp_path / "out.json.gz")):
        report = overlap_report(each)
        assert report.host == "none recorded"
        assert (report.idle_ns, report.idle_profiled_ns) == (270_000, 35_000)
