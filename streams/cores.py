"""How many cores this process may keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Those of its affinity, or fewer where a container's share of processor time allows no more; at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, int(min([cores, *quotas(_CGROUPS, _own_groups())])))


def quotas(root: Path, groups: list[str]) -> Iterator[float]:
    """Cores' worth of time that each group and those above it are limited to, where they are: control groups of version 2,
    and of version 1, whose quota a container sees at the controller's root.
    """
    for group in groups:
        for folder in (Path(group.lstrip("/")), *Path(group.lstrip("/")).parents):
            yield from _share(_words(root / folder / "cpu.max"))
    quota, period = (_words(root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    yield from _share([*quota, *period])


def _share(words: list[str]) -> Iterator[float]:
    """`words`: microseconds that may be used, and of how many; no number, or a negative one, is no limit."""
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])


def _own_groups() -> list[str]:
    lines = [line.split(":", 2) for line in _lines(Path("/proc/self/cgroup"))]
    return [parts[2] for parts in lines if len(parts) == 3 and parts[0] == "0"] or ["/"]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or no such controller
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
