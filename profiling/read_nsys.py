"""Nsight Systems: what `nsys export --type sqlite` writes.

Tables are made only if there is something to put in, and columns come and go by version. So the database is asked what it
has, and only tables and columns that are there are read.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from ..streams.marks import LANE_PHASES, NVTX_DOMAIN
from .timeline import NO_CORRELATION, NO_STEP, Lane, LaneKind, Timeline, TraceError

PUSH_POP_RANGE: Final = 59
START_END_RANGE: Final = 60
DOMAIN_CREATE: Final = 75
COPY_KINDS: Final = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_API_VERSION = re.compile(r"_(ptsz_|ptds_)?v\d+$")  # cudaLaunchKernel_v7000
_BITS: Final = 0xFFFFFF


def read_nsys(path: str | Path) -> Timeline:
    """Read an export of any version. Raises: TraceError if it is none, or holds neither device work nor NVTX."""
    try:
        with closing(sqlite3.connect(f"file:{Path(path).absolute()}?mode=ro", uri=True)) as database:
            export = _Export(database)
            if not export.has_any():
                raise TraceError(f"{path}: an SQLite file, but no Nsight Systems export with CUDA or NVTX events")
            return export.timeline(f"{Path(path).name} (Nsight Systems)")
    except sqlite3.Error as error:
        raise TraceError(f"{path}: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:  # SQLite holds any type in any column
        raise TraceError(f"{path}: a row is not as Nsight Systems has it: {error!r}") from error


class _Export:
    """One open export."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        tables = [
            name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        ]
        self._columns = {
            table: {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')} for table in tables
        }
        self._processes: dict[int, int] = {}
        self._strings: dict[int, str] = dict(self._rows("StringIds", "id", "value"))

    def has_any(self) -> bool:
        return any(table == "NVTX_EVENTS" or table.startswith("CUPTI_ACTIVITY_KIND_") for table in self._columns)

    def timeline(self, source: str) -> Timeline:
        timeline = Timeline(source)
        self._read_device(timeline)
        threads = {
            global_tid: self._string(name) for global_tid, name in self._rows("ThreadNames", "globalTid", "nameId")
        }
        self._read_calls(timeline, threads)
        self._read_nvtx(timeline, threads)
        for start, end, name in self._rows("PROFILER_OVERHEAD", "start", "end", "nameId"):
            timeline.lane("profiler", LaneKind.PROFILER).add(self._string(name), start, end)
        return timeline

    def _rows(self, table: str, *columns: str, where: str = "") -> Iterator[tuple[Any, ...]]:
        """Rows of a table, None for the columns that this version does not have; nothing if there is no such table."""
        present = self._columns.get(table)
        if present is None:
            return
        wanted = ", ".join(f'"{column}"' if column in present else "NULL" for column in columns)
        yield from self._database.execute(f'SELECT {wanted} FROM "{table}" {where}')

    def _string(self, number: int | None) -> str:
        return self._strings.get(number, "?") if number is not None else "?"

    def _read_device(self, timeline: Timeline) -> None:
        common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        for *rest, short, demangled in self._rows("CUPTI_ACTIVITY_KIND_KERNEL", *common, "shortName", "demangledName"):
            self._add(timeline, self._string(short if short is not None else demangled), *rest)
        kinds = dict(self._rows("ENUM_CUDA_MEMCPY_OPER", "id", "label"))
        for *rest, kind in self._rows("CUPTI_ACTIVITY_KIND_MEMCPY", *common, "copyKind"):
            self._add(timeline, f"memcpy {kinds.get(kind) or COPY_KINDS.get(kind, kind)}", *rest)
        for row in self._rows("CUPTI_ACTIVITY_KIND_MEMSET", *common):
            self._add(timeline, "memset", *row)
        # Whole graphs, where their nodes were not traced one by one.
        for *rest, graph in self._rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", *common, "graphId"):
            self._add(timeline, f"graph {graph}", *rest)

    def _add(
        self,
        timeline: Timeline,
        name: str,
        start: int,
        end: int,
        device: int,
        stream: int,
        correlation: int | None,
        global_pid: int | None,
    ) -> None:
        of = f" of process {_pid(global_pid)}" if global_pid is not None and self._process(global_pid) else ""
        lane = timeline.lane(f"GPU {device} stream {stream}{of}", LaneKind.DEVICE)
        lane.add(name, start, end, correlation=self._correlation(correlation, global_pid))

    def _process(self, global_id: int | None) -> int:
        """Which process of the recording, from 0 on. Each has its own numbers for devices, streams, calls, and domains."""
        return self._processes.setdefault(_pid(global_id), len(self._processes)) if global_id is not None else 0

    def _correlation(self, number: int | None, global_id: int | None) -> int:
        return number + (self._process(global_id) << 32) if number else NO_CORRELATION

    def _read_calls(self, timeline: Timeline, threads: dict[int, str]) -> None:
        lanes: dict[int | None, Lane] = {}
        names: dict[int, str] = {}
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER"):
            for start, end, global_tid, correlation, name in self._rows(table, *columns):
                if global_tid not in lanes:
                    lanes[global_tid] = _thread_lane(timeline, LaneKind.RUNTIME, global_tid, threads)
                if name not in names:
                    names[name] = _API_VERSION.sub("", self._string(name))
                lanes[global_tid].add(names[name], start, end, correlation=self._correlation(correlation, global_tid))

    def _read_nvtx(self, timeline: Timeline, threads: dict[int, str]) -> None:
        domains = {
            (self._process(global_tid), domain): text if text is not None else self._string(text_id)
            for domain, text, text_id, global_tid in self._rows(
                "NVTX_EVENTS", "domainId", "text", "textId", "globalTid", where=f"WHERE eventType = {DOMAIN_CREATE}"
            )
        }
        our_domains = {key for key, name in domains.items() if name == NVTX_DOMAIN}
        columns = ("start", "end", "globalTid", "text", "textId", "domainId", "int64Value", "uint64Value", "int32Value")
        where = f'WHERE eventType IN ({PUSH_POP_RANGE}, {START_END_RANGE}) AND "end" IS NOT NULL'
        for start, end, global_tid, text, text_id, domain, *payload in self._rows("NVTX_EVENTS", *columns, where=where):
            name = text if text is not None else self._string(text_id)
            is_ours = (self._process(global_tid), domain) in our_domains
            step = next((value for value in payload if value is not None), NO_STEP) if is_ours else NO_STEP
            if not is_ours:
                kind = LaneKind.HOST
            elif name in LANE_PHASES:  # on the CPU a lane is a thread, and its ranges are what it computes
                kind = LaneKind.DEVICE
            else:
                kind = LaneKind.LOOP
            _thread_lane(timeline, kind, global_tid, threads).add(name, start, end, step)


def _thread_lane(timeline: Timeline, kind: LaneKind, global_tid: int | None, threads: dict[int, str]) -> Lane:
    """`global_tid` packs process and thread, where it is known."""
    global_tid = global_tid or 0
    thread = f"{_pid(global_tid)}/{global_tid & _BITS}"
    return timeline.lane(threads.get(global_tid, f"thread {thread}"), kind, thread=thread)


def _pid(global_id: int) -> int:
    return global_id >> 24 & _BITS
