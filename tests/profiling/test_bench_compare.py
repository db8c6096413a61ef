"""Two results beside each other, and the guard that keeps the host's cost."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from slipstream.engine.errors import ConfigError
from slipstream.profiling import bench_h200, host_guard, results
from slipstream.profiling.bench_compare import compare, comparison, load
from slipstream.profiling.overlap_report import overlap_report
from slipstream.profiling.report_text import report_json
from slipstream.profiling.results import write_json
from slipstream.profiling.timeline import LaneKind, Timeline

BEFORE: dict[str, Any] = {
    "benchmark": "engine",
    "environment": {"commit": "a", "processor": "p", "date": "1", "packages": {"torch": "2.11"}},
    "results": {"step_ms": {"1": 2.0, "8": 2.1}, "set_tok_s": 1000, "rows": 8, "idle_pct": 1.0, "name": "x", "gone": 3},
}
AFTER: dict[str, Any] = {
    "benchmark": "engine",
    "environment": {"commit": "b", "processor": "p", "date": "2", "packages": {"torch": "2.13"}},
    "results": {"step_ms": {"1": 1.0, "8": 2.11}, "set_tok_s": 900, "rows": 16, "idle_pct": 2.0, "new": 1},
}


def test_numbers_of_both_are_paired_and_judged_by_what_their_names_say() -> None:
    rows = {row.name: row for row in compare(BEFORE, AFTER)}
    assert list(rows) == ["step_ms.1", "step_ms.8", "set_tok_s", "rows", "idle_pct"]
    verdicts = {name: row.verdict for name, row in rows.items()}
    assert verdicts == {"step_ms.1": "better", "step_ms.8": "", "set_tok_s": "worse", "rows": "", "idle_pct": "worse"}
    assert rows["step_ms.1"].ratio == 0.5


def test_the_table_names_what_the_runs_differ_in_and_hides_what_is_alike() -> None:
    text = comparison(BEFORE, AFTER, shows_all=False)
    assert "commit: a | b" in text
    assert "torch: 2.11 | 2.13" in text
    assert "processor" not in text
    assert "step_ms.8" not in text
    assert "step_ms.8" in comparison(BEFORE, AFTER, shows_all=True)


def test_two_reports_on_one_thing_each_are_compared_whatever_the_things_are_called() -> None:
    a, b = (
        {"benchmark": "overlap", "results": {name: {"step": {"median": at}}}} for name, at in (("old", 9), ("new", 3))
    )
    assert [(row.name, row.verdict) for row in compare(a, b)] == [("step.median", "better")]
    assert "of: old | new" in comparison(a, b, shows_all=False)
    assert "benchmark: overlap | host" in comparison(a, {**b, "benchmark": "host"}, shows_all=False)


def test_reports_on_recordings_of_different_lengths_are_compared_by_the_step() -> None:
    results = []
    for num_steps in (4, 9):
        timeline = Timeline("t")
        loop, lane = timeline.lane("loop", LaneKind.LOOP), timeline.lane("lane", LaneKind.DEVICE)
        for step in range(num_steps):
            loop.add("commit", 1000 * step + 600, 1000 * step + 700, step)
            lane.add("forward", 1000 * step, 1000 * step + 600, step)
        results.append({"results": {"t": report_json(overlap_report(timeline))}})
    rows = compare(results[0], results[1])
    assert not [row for row in rows if row.verdict]
    by_step = {row.name.removeprefix("t.per_step_ns."): row.before for row in rows if "per_step_ns" in row.name}
    assert by_step == {"idle": 400, "exposed": 100, "hidden": 0, "exposed by.commit": 100, "exposed by.outside": 300}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("ids only, 64 rows, us.plan", "worse"),
        ("plan, 10,000 waiting, lpm, us.pages", "worse"),
        ("wake 256 us", "worse"),
        ("5 ms lane, 2 ms host, depth 1, ms", "worse"),
        ("8 streams, 5 ms.ttft_ms_p99", "worse"),
        ("8 streams, 5 ms.events", ""),
        ("0.6b.step_ms.256", "worse"),
        ("0.6b.set_tok_s", "better"),
        ("0.6b.ready_s", "worse"),
        ("depth 1, 16 constrained.tokens_per_s", "better"),
        ("qwen, step_ms.8", "worse"),
        ("slipstream, depth 1.start_ns", ""),
        ("slipstream, depth 1.exposed_ns", ""),
        ("slipstream, depth 1.hidden_ns", ""),
        ("slipstream, depth 1.idle_between_ns", ""),
        ("slipstream, depth 1.step.median", "worse"),
        ("slipstream, depth 1.step.count", ""),
        ("slipstream, depth 1.per_step_ns.exposed", "worse"),
        ("slipstream, depth 1.per_step_ns.exposed by.commit", "worse"),
        ("slipstream, depth 1.per_step_ns.hidden", ""),
    ],
)
def test_the_numbers_of_the_suites_have_a_direction(name: str, verdict: str) -> None:
    (row,) = compare({"results": {name: 1.0}}, {"results": {name: 2.0}})
    assert row.verdict == verdict


SUITES = sorted(set(cli._bench_suites()) - {"compare"})


def need_packages(suite: str) -> None:
    """Skip where the suite has a package missing, of which it says nothing but that."""
    pytest.importorskip("torch")
    if suite in ("decode", "kernels", "prefill"):
        pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_writes_its_result_as_json_if_asked(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    need_packages(suite)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", suite, "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert "--json" in said
    assert said.startswith((f"usage: bench_{suite} ", f"usage: bench {suite} "))


@pytest.mark.parametrize("arguments", [["decode", "x"], ["prefill", "x"], ["kernels"], ["wake"]])
def test_a_suite_of_the_card_says_in_a_line_that_there_is_none(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_packages(arguments[0])
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    assert stopped.value.code == 2
    assert "no NVIDIA GPU answers" in capsys.readouterr().err


def test_results_at_the_top_are_read_like_those_under_a_name(tmp_path: Path) -> None:
    results = {"0.6b": {"step_ms": {"1": 0.7}}, "8b": {"step_ms": {"1": 4.0}}}
    write_json(tmp_path / "a.json", "h200", results, at_top=True)
    write_json(tmp_path / "b.json", "h200", results)
    assert json.loads((tmp_path / "a.json").read_text())["0.6b"] == results["0.6b"]
    assert load(tmp_path / "a.json")["results"] == load(tmp_path / "b.json")["results"] == results


def test_a_result_that_cannot_be_written_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*x\.json"):
        write_json(tmp_path / "file" / "x.json", "host", {})


def test_what_is_alike_is_counted_also_where_all_is_shown() -> None:
    text = comparison(BEFORE, AFTER, shows_all=True)
    assert text.splitlines()[-1] == "5 numbers in both, 1 of them alike within 3%"


def test_bench_compare_reads_what_the_benchmarks_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        write_json(tmp_path / f"{name}.json", "host", {"plan us": value})
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert stopped.value.code == 0
    assert "2.000  worse" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", '{"results": 3}'])
def test_a_file_that_is_no_result_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=r"x\.json"):
        load(tmp_path / "x.json")


def test_the_guard_judges_by_ratio_and_names_what_grew() -> None:
    assert host_guard.judge({"marks": 0.14, "step": 0.9}, {"marks": 0.1, "step": 1.0}) == []
    (line,) = host_guard.judge({"marks": 0.16, "step": 0.9}, {"marks": 0.1, "step": 1.0})
    assert line.startswith("marks")
    assert "1.60 times" in line


def test_the_guard_fails_on_a_slower_host_and_passes_on_a_slower_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = {"machine": 1.0, "host": 1.0, "marks": 1.0}
    monkeypatch.setattr(host_guard, "calibration_us", lambda: 1000 * speed["machine"])
    monkeypatch.setattr(
        host_guard, "host_step_us", lambda rows, tokenizer: {"total": (10 + rows) * speed["machine"] * speed["host"]}
    )
    monkeypatch.setattr(host_guard, "marks_us", lambda: 4 * speed["machine"] * speed["marks"])
    baseline = str(tmp_path / "host.json")
    host_guard.main(["--write", "--baseline", baseline])
    speed["machine"] = 3.0
    host_guard.main(["--baseline", baseline])
    assert "baseline 0.266" in capsys.readouterr().out
    speed["host"] = 1.6
    with pytest.raises(SystemExit, match="step of 64 rows"):
        host_guard.main(["--baseline", baseline])
    speed.update(host=1.0, marks=1.6)
    with pytest.raises(SystemExit, match="marks of a step"):
        host_guard.main(["--baseline", baseline])


@pytest.mark.checkout
def test_the_baseline_holds_every_number_that_the_guard_measures() -> None:
    known = json.loads(host_guard.BASELINE.read_text())["results"]["ratio"]
    assert set(known) == {f"step of {rows} rows" for rows in host_guard.ROWS} | {"marks of a step"}


def test_the_calibration_takes_a_measurable_time() -> None:
    assert 100 < host_guard.calibration_us() < 1e6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["0.6b"], "a shape is NAME=FOLDER, not '0.6b'"),
        (["=x"], "not '=x'"),
        (["a=b", "--set", "overlap"], "not 'overlap'"),
    ],
)
def test_the_benchmark_of_the_card_says_what_a_shape_and_a_setting_look_like(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_h200.main(arguments)
    assert named in capsys.readouterr().err


def test_a_result_of_changed_code_does_not_pass_for_one_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    (tmp_path / "profiling").mkdir()
    source = tmp_path / "profiling" / "results.py"
    source.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "c")
    git("tag", "v1")
    monkeypatch.setattr(results, "__file__", str(source))
    clean = results.environment()["commit"]
    assert re.fullmatch("[0-9a-f]{7,}", str(clean))
    source.write_text("2")
    assert results.environment()["commit"] == f"{clean}-dirty"
