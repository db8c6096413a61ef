"""Any trace that there is a reader for, told apart by what the file begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .read_chrome import read_chrome
from .read_nsys import read_nsys
from .timeline import Timeline, TraceError


def read_traces(paths: Sequence[str | Path]) -> list[Timeline]:
    """Several traces, each with a source that is its own: recordings of one engine are told apart by their files.

    Raises: TraceError naming file and reason.
    """
    timelines = [read_trace(path) for path in paths]
    count = Counter(timeline.source for timeline in timelines)
    for path, timeline in zip(paths, timelines, strict=True):
        if count[timeline.source] > 1:
            timeline.source += f", {path}"
    return timelines


def read_trace(path: str | Path) -> Timeline:
    """Read a Chrome or torch-profiler trace (plain or gzipped), our own, or an Nsight Systems SQLite export.

    Raises: TraceError naming file and reason.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            begin = file.read(64)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path}: export it first: nsys export --type sqlite {path.name}")
    if begin.startswith(b"SQLite format 3\0"):
        return read_nsys(path)
    if begin.startswith(b"\x1f\x8b") or begin.lstrip()[:1] in (b"{", b"["):
        return read_chrome(path)
    raise TraceError(f"{path}: neither a Chrome trace nor an Nsight Systems SQLite export")
