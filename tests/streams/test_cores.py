from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.streams import cores
from slipstream.streams.cores import quotas, usable_cores


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_the_tightest_limit_of_a_group_and_of_those_above_it_counts(tmp_path: Path) -> None:
    write(tmp_path, "cpu.max", "max 100000\n")
    write(tmp_path, "pod/cpu.max", "250000 100000\n")
    write(tmp_path, "pod/app/cpu.max", "400000 100000\n")
    assert sorted(quotas(tmp_path, ["/pod/app"])) == [2.5, 4.0]
    assert list(quotas(tmp_path, ["/"])) == []


def test_a_quota_of_the_first_version_counts_unless_it_is_negative(tmp_path: Path) -> None:
    write(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "cpu/cpu.cfs_quota_us", "150000\n")
    assert list(quotas(tmp_path, ["/"])) == [1.5]
    write(tmp_path, "cpu/cpu.cfs_quota_us", "-1\n")
    assert list(quotas(tmp_path, ["/"])) == []


@pytest.mark.parametrize("text", ["", "max", "100000", "a b", "1 0", "100000 100000 7"])
def test_what_is_no_limit_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, "cpu.max", text)
    assert list(quotas(tmp_path, ["/"])) == []


@pytest.mark.parametrize(("limit", "usable"), [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1)])
def test_no_more_cores_are_usable_than_affinity_and_quota_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "_own_groups", lambda: ["/"])
    write(tmp_path, "cpu.max", limit)
    assert usable_cores() == usable
