"""Exports of Nsight Systems, built to the documented schemas of several versions, and one that it wrote itself."""

from __future__ import annotations

import gzip
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slipstream.profiling.overlap_report import overlap_report
from slipstream.profiling.read_trace import read_trace
from slipstream.profiling.report_text import report_text
from slipstream.profiling.timeline import LaneKind, TraceError

FIXTURES = Path(__file__).parent / "fixtures"
GLOBAL_TID = (0x10 << 48) | (4242 << 24) | 4243  # hardware, process and thread, packed

# 2020: every column is NOT NULL; no text ids in NVTX, no graphs, no driver calls.
SCHEMA_2020 = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, globalTid INT NOT NULL,
  correlationId INT NOT NULL, nameId INT NOT NULL, returnValue INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
  contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT NOT NULL, demangledName INT NOT NULL,
  shortName INT NOT NULL, gridX INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
  contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT NOT NULL, bytes INT NOT NULL, copyKind INT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, category INT, color INT,
  text TEXT, globalTid INT, endGlobalTid INT, domainId INT);
"""
# 2023 and later: graph node ids, whole graphs, text ids, payloads, labels of enumerations in tables.
SCHEMA_2023 = """
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, bytes INTEGER NOT NULL,
  copyKind INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, value INTEGER, bytes INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
  correlationId INTEGER, globalPid INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
  category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
  uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER);
"""


class Export:
    """A database to fill by column name."""

    def __init__(self, path: Path, schema: str) -> None:
        self.database = sqlite3.connect(path)
        self.database.executescript(schema)
        self.texts: dict[str, int] = {}

    def text(self, value: str) -> int:
        if value not in self.texts:
            self.texts[value] = len(self.texts) + 1
            self.add("StringIds", id=self.texts[value], value=value)
        return self.texts[value]

    def add(self, table: str, **values: Any) -> None:
        columns = ", ".join(f'"{name}"' for name in values)
        marks = ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))

    def call(self, name: str, start: int, end: int, correlation: int, **more: Any) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, globalTid=GLOBAL_TID, correlationId=correlation,
            nameId=self.text(name), returnValue=0, **more,
        )  # fmt: skip

    def done(self) -> None:
        self.database.commit()
        self.database.close()


def export_2020(path: Path) -> Path:
    export = Export(path, SCHEMA_2020)
    export.add("ThreadNames", nameId=export.text("python3"), priority=1, globalTid=GLOBAL_TID)
    for number, at in enumerate((1000, 101_000, 201_000)):
        on = {"deviceId": 0, "contextId": 1}
        export.call("cudaLaunchKernel_v7000", at, at + 500, 2 * number + 1)
        export.call("cudaMemcpyAsync_v3020", at + 600, at + 700, 2 * number + 2)
        export.add(
            "CUPTI_ACTIVITY_KIND_KERNEL", start=at + 2000, end=at + 42_000, streamId=7, correlationId=2 * number + 1,
            demangledName=export.text("void gemm<float>(float*)"), shortName=export.text("gemm"), gridX=1, **on,
        )  # fmt: skip
        export.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY", start=at + 42_500, end=at + 43_000, streamId=9, correlationId=2 * number + 2,
            bytes=64, copyKind=2, **on,
        )  # fmt: skip
        export.add(
            "NVTX_EVENTS",
            start=at,
            end=at + 90_000,
            eventType=59,
            text=f"step {number}",
            globalTid=GLOBAL_TID,
            domainId=0,
        )
    export.add("NVTX_EVENTS", start=5, end=None, eventType=34, text="a mark", globalTid=GLOBAL_TID, domainId=0)
    export.done()
    return path


def export_2023(path: Path, *, nodes: bool) -> Path:
    """Our engine under nsys: NVTX ranges of the domain with steps as payload, graphs traced by node or as a whole."""
    export = Export(path, SCHEMA_2023)
    export.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.11.0")
    export.add("ENUM_CUDA_MEMCPY_OPER", id=2, name="CUDA_MEMCPY_KIND_DTOH", label="Device-to-Host")
    export.add(
        "NVTX_EVENTS",
        start=0,
        end=None,
        eventType=75,
        textId=export.text("slipstream"),
        domainId=3,
        globalTid=GLOBAL_TID,
    )
    for number, at in enumerate((1_000_000, 2_000_000, 3_000_000)):
        on = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": 10 + number}
        nvtx = {"eventType": 60, "domainId": 3, "globalTid": GLOBAL_TID, "int64Value": 40 + number}
        export.add("NVTX_EVENTS", start=at, end=at + 200_000, textId=export.text("schedule"), **nvtx)
        export.add("NVTX_EVENTS", start=at + 200_000, end=at + 300_000, textId=export.text("launch"), **nvtx)
        export.add("NVTX_EVENTS", start=at + 310_000, end=None, textId=export.text("await"), **nvtx)
        export.call("cudaGraphLaunch_v10000", at + 210_000, at + 250_000, 10 + number, eventClass=0)
        if nodes:
            for node, name in enumerate(("norm", "gemm")):
                start = at + 400_000 + node * 200_000
                export.add(
                    "CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=start + 190_000, demangledName=export.text(f"void {name}()"),
                    shortName=export.text(name), graphNodeId=100 + node, globalPid=GLOBAL_TID & ~0xFFFFFF, **on,
                )  # fmt: skip
        else:
            graph = {"start": at + 400_000, "end": at + 790_000, "graphId": 5, "graphExecId": 6}
            export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **graph, **on)
        copied = {**on, "streamId": 9, "correlationId": 0}
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=at + 800_000, end=at + 801_000, bytes=8, copyKind=2, **copied)
        export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=at + 801_000, end=at + 802_000, bytes=8, value=0, **copied)
    export.done()
    return path


def test_an_export_of_2020_gives_idle_between_bursts_charged_to_the_thread(tmp_path: Path) -> None:
    timeline = read_trace(export_2020(tmp_path / "old.sqlite"))
    assert {(lane.name, lane.kind.value) for lane in timeline.lanes} == {
        ("GPU 0 stream 7", "device"), ("GPU 0 stream 9", "device"), ("python3", "runtime"), ("python3", "host"),
    }  # fmt: skip
    report = overlap_report(timeline)
    assert (report.steps_are, report.num_steps, report.host) == ("bursts", 2, "4242/4243")
    assert (report.idle_between_ns, report.idle_within_ns) == (2 * 59_000, 2 * 500)
    exposed = {phase.name: phase.exposed_ns for phase in report.phases}
    assert exposed["cudaLaunchKernel"] == 2 * 500
    assert report.launch_to_start is not None
    assert report.launch_to_start.least == 2000


def test_nvtx_ranges_of_an_export_are_steps_if_asked_for(tmp_path: Path) -> None:
    report = overlap_report(read_trace(export_2020(tmp_path / "old.sqlite")), step_range=r"^step \d+$")
    assert (report.steps_are, report.num_steps) == ("ranges", 2)


@pytest.mark.parametrize("nodes", [True, False], ids=["graph nodes", "whole graphs"])
def test_an_export_of_2023_brings_our_marks_with_their_steps_and_graphs(nodes: bool, tmp_path: Path) -> None:
    timeline = read_trace(export_2023(tmp_path / "new.sqlite", nodes=nodes))
    (loop,) = timeline.of_kind(LaneKind.LOOP)
    assert [span.step for span in loop.spans() if span.name == "launch"] == [40, 41, 42]
    report = overlap_report(timeline)
    assert (report.steps_are, report.num_steps, report.num_graph_steps) == ("steps", 2, 2)
    assert report.window_ns == 2_000_000
    phases = {phase.name: (phase.exposed_ns, phase.between_ns) for phase in report.phases}
    assert phases["schedule"] == (2 * 200_000, 2 * 200_000)
    assert phases["launch"] == (2 * 100_000, 2 * 100_000)
    assert "? to 41" in report_text(report)  # a copy without a correlation lies before it
    names = {span.name for lane in timeline.of_kind(LaneKind.DEVICE) for span in lane.spans()}
    assert {"memcpy Device-to-Host", "memset"} < names
    assert ("norm" in names, "graph 5" in names) == (nodes, not nodes)


def test_a_lane_that_is_a_thread_is_a_device_by_its_own_ranges(tmp_path: Path) -> None:
    """What an engine on the CPU leaves: no CUDA at all, and the lane's forwards as ranges beside the loop's phases."""
    export = Export(tmp_path / "cpu.sqlite", SCHEMA_2023)
    tids = {"loop": GLOBAL_TID, "lane": GLOBAL_TID + 1}
    for name, tid in tids.items():
        export.add("ThreadNames", nameId=export.text(name), priority=1, globalTid=tid)
        export.add("NVTX_EVENTS", start=0, eventType=75, textId=export.text("slipstream"), domainId=3, globalTid=tid)
    for number, at in enumerate((1_000_000, 2_000_000, 3_000_000)):
        for name, tid, start, end in (("launch", "loop", 0, 100_000), ("forward", "lane", 100_000, 900_000)):
            export.add(
                "NVTX_EVENTS", start=at + start, end=at + end, textId=export.text(name), eventType=60, domainId=3,
                globalTid=tids[tid], int64Value=40 + number,
            )  # fmt: skip
    export.done()
    timeline = read_trace(tmp_path / "cpu.sqlite")
    assert {(lane.name, lane.kind.value) for lane in timeline.lanes} == {("loop", "loop"), ("lane", "device")}
    report = overlap_report(timeline)
    assert (report.steps_are, report.num_steps, report.busy_ns) == ("steps", 2, 2 * 800_000)
    assert {phase.name: phase.exposed_ns for phase in report.phases}["launch"] == 2 * 100_000


def test_ten_steps_of_a_card_as_nsight_systems_2023_4_exported_them(tmp_path: Path) -> None:
    """Recorded by profiling/nsys.sh on an H200 (0.6B shape, 8 rows), then cut to ten steps and to the tables that are read."""
    path = tmp_path / "card.sqlite"
    path.write_bytes(gzip.decompress((FIXTURES / "decode-h200.nsys.sqlite.gz").read_bytes()))
    timeline = read_trace(path)
    (loop,) = timeline.of_kind(LaneKind.LOOP)
    steps = Counter(span.step for span in loop.spans() if span.name == "launch")
    assert steps == dict.fromkeys(range(30, 41), 1)
    kernels = Counter(span.name for lane in timeline.of_kind(LaneKind.DEVICE) for span in lane.spans())
    assert kernels["_decode_kernel"] == pytest.approx(28 * 10, abs=28), (
        "a layer each, of ten steps and the ends of their neighbours"
    )
    report = overlap_report(timeline)
    assert (report.steps_are, report.num_steps, report.num_graph_steps) == ("steps", 10, 10)
    assert report.busy_ns + report.idle_between_ns + report.idle_within_ns == report.window_ns
    assert {"schedule", "stage", "launch", "sample", "commit", "send"} <= {phase.name for phase in report.phases}


def test_a_database_that_is_no_export_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE people (name TEXT)")
    database.commit()
    database.close()
    with pytest.raises(TraceError, match="no Nsight Systems export"):
        read_trace(path)


def test_an_export_without_device_work_says_so(tmp_path: Path) -> None:
    Export(tmp_path / "empty.sqlite", SCHEMA_2020).done()
    with pytest.raises(TraceError, match="nothing ran on a device"):
        overlap_report(read_trace(tmp_path / "empty.sqlite"))


def test_a_call_or_range_whose_thread_is_not_known_is_read_all_the_same(tmp_path: Path) -> None:
    path = export_2023(tmp_path / "new.sqlite", nodes=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = NULL")
        database.execute("UPDATE NVTX_EVENTS SET globalTid = NULL")
        database.commit()
    report = overlap_report(read_trace(path))
    assert (report.steps_are, report.num_steps, report.num_graph_steps) == ("steps", 2, 2)


@pytest.mark.parametrize("wrong", ["start = 'soon'", "end = 1e300", "deviceId = x'00', start = NULL"])
def test_a_row_of_other_types_is_an_error_that_names_the_file(wrong: str, tmp_path: Path) -> None:
    path = export_2020(tmp_path / "odd.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE loose AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        database.execute("ALTER TABLE loose RENAME TO CUPTI_ACTIVITY_KIND_KERNEL")
        database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {wrong}")
        database.commit()
    with pytest.raises(TraceError, match=r"odd\.sqlite"):
        read_trace(path)


def test_a_damaged_export_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = export_2020(tmp_path / "cut.sqlite")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(TraceError, match=r"cut\.sqlite"):
        read_trace(path)


def test_processes_of_one_recording_keep_their_calls_streams_and_domains_apart(tmp_path: Path) -> None:
    """Two ranks: each counts devices, streams, calls and domains from one on."""
    export = Export(tmp_path / "ranks.sqlite", SCHEMA_2023)
    for rank, process in enumerate((4242, 5151)):
        tid, on = (process << 24) | process, {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": process << 24}
        name = ("slipstream", "other")[rank]
        export.add("NVTX_EVENTS", start=0, eventType=75, text=name, globalTid=tid, domainId=3)
        for number in range(4):
            at = 100_000 * number + 7000 * rank
            export.add("NVTX_EVENTS", start=at, end=at + 900, eventType=60, text="launch", globalTid=tid, domainId=3,
                       int64Value=number)  # fmt: skip
            export.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=at, end=at + 500, eventClass=0, globalTid=tid,
                       correlationId=number + 1, nameId=export.text("cudaLaunchKernel_v7000"), returnValue=0)  # fmt: skip
            export.add("CUPTI_ACTIVITY_KIND_KERNEL", start=at + 5000, end=at + 45_000, correlationId=number + 1,
                       demangledName=export.text("k"), shortName=export.text("k"), **on)  # fmt: skip
    export.done()
    timeline = read_trace(tmp_path / "ranks.sqlite")
    assert [lane.name for lane in timeline.of_kind(LaneKind.DEVICE)] == [
        "GPU 0 stream 7",
        "GPU 0 stream 7 of process 5151",
    ]
    assert [lane.thread for lane in timeline.of_kind(LaneKind.LOOP)] == ["4242/4242"]
    report = overlap_report(timeline)
    assert report.launch_to_start is not None
    assert (report.launch_to_start.least, report.launch_to_start.most, report.launch_to_start.count) == (5000, 5000, 6)


def test_the_profilers_own_work_is_said_where_an_export_has_it(tmp_path: Path) -> None:
    path = export_2020(tmp_path / "old.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE PROFILER_OVERHEAD (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER)"
        )
        database.execute("INSERT INTO PROFILER_OVERHEAD VALUES (50000, 60000, 1, 1)")
        database.commit()
    assert overlap_report(read_trace(path)).idle_profiled_ns == 10_000
