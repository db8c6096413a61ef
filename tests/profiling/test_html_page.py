"""The page is one file that needs nothing else, and draws what the timeline holds."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream.profiling.html_page import html_page
from slipstream.profiling.overlap_report import overlap_report
from slipstream.profiling.timeline import LaneKind, StepFacts, Timeline
from slipstream.streams import marks

STEP_NS = 1_000_000


def planted(num_steps: int = 100, *, source: str = "planted", kernels: int = 1) -> Timeline:
    timeline = Timeline(source)
    loop, device = timeline.lane("event loop", LaneKind.LOOP), timeline.lane("compute", LaneKind.DEVICE)
    for step in range(num_steps):
        at = 10**12 + step * STEP_NS
        loop.add(marks.LAUNCH, at, at + 200_000, step)
        loop.add(marks.STAGE, at + 50_000, at + 100_000, step)
        loop.add(marks.AWAIT, at + 200_000, at + 990_000, step)
        for kernel in range(kernels):
            wide = 700_000 // kernels
            device.add("forward", at + 300_000 + kernel * wide, at + 300_000 + (kernel + 1) * wide, step)
        timeline.facts[step] = StepFacts(rows=2, tokens=2, sampled=2)
    for number in range(20):
        timeline.lane(f"r{number}", LaneKind.REQUESTS).add("answered", 10**12, 10**12 + num_steps * STEP_NS)
    return timeline


def panels_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script id="panels" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: list[dict[str, Any]] = json.loads(found[1])
    return content


def page_of(*timelines: Timeline) -> str:
    return html_page(timelines, [overlap_report(timeline) for timeline in timelines])


def test_the_page_fetches_nothing() -> None:
    page = page_of(planted())
    assert not re.findall(r"""https?://|\bsrc=|\bhref=|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b""", page)


def test_consecutive_steps_from_the_middle_are_drawn_with_their_idle_times_and_launches() -> None:
    (panel,) = panels_of(page_of(planted(100)))
    assert (panel["stepsAre"], panel["duration"]) == ("steps", 60 * STEP_NS)
    numbers = [number for number, _, _ in panel["steps"]]
    assert numbers == list(range(numbers[0], numbers[0] + 60))
    assert 15 < numbers[0] < 25
    assert all(begin - launch == 300_000 for _, begin, launch in panel["steps"])
    assert panel["idle"][1::2] == [300_000] * 60
    lanes = {lane["name"]: lane for lane in panel["lanes"]}
    assert lanes["event loop"]["depth"] == 2
    assert len(lanes["compute"]["spans"]) == 60 * 5
    assert panel["facts"][str(numbers[0])] == [2, 2, 2]
    assert panel["hiddenRequests"] == 4


def test_kernels_of_one_stream_that_overlap_take_turns_in_two_rows() -> None:
    timeline = Timeline("overlapping")
    stream = timeline.lane("stream", LaneKind.DEVICE)
    for kernel in range(200):
        stream.add("k", 10 * kernel, 10 * kernel + 12, kernel // 50)
    (panel,) = panels_of(page_of(timeline))
    (lane,) = panel["lanes"]
    assert lane["depth"] == 2
    assert lane["spans"][4::5][:6] == [0, 1, 0, 1, 0, 1]


def test_requests_are_drawn_that_were_there_at_the_time_that_is_drawn() -> None:
    timeline = planted(100)
    timeline.lanes = [lane for lane in timeline.lanes if lane.kind is not LaneKind.REQUESTS]
    for number in range(100):
        at = 10**12 + number * STEP_NS
        timeline.lane(f"short {number}", LaneKind.REQUESTS).add("answered", at, at + STEP_NS)
    (panel,) = panels_of(page_of(timeline))
    drawn = [lane for lane in panel["lanes"] if lane["kind"] == "requests"]
    assert len(drawn) == 16
    assert panel["hiddenRequests"] == 61 - 16  # steps begin in the middle of a request


def test_work_that_takes_no_time_changes_no_step() -> None:
    timeline = Timeline("bursts")
    stream = timeline.lane("stream", LaneKind.DEVICE)
    stream.add("nothing", 0, 0)
    for burst in range(5):
        stream.add("k", 10**6 * (burst + 1), 10**6 * (burst + 1) + 500)
    (panel,) = panels_of(page_of(timeline))
    assert [number for number, _, _ in panel["steps"]] == [0, 1, 2, 3]
    assert panel["duration"] == panel["report"]["window_ns"]


def test_the_page_has_the_steps_that_the_report_was_told_to_find() -> None:
    timeline = planted(30)
    pairs = timeline.lane("worker", LaneKind.HOST, thread="1/2")
    for pair in range(15):
        pairs.add("pair", 10**12 + 2 * pair * STEP_NS, 10**12 + 2 * (pair + 1) * STEP_NS)
    report = overlap_report(timeline, step_range="^pair$")
    assert (report.steps_are, report.num_steps, report.num_tokens, report.launch_to_start) == ("ranges", 14, 0, None)
    (panel,) = panels_of(html_page([timeline], [report], step_range="^pair$"))
    begins = [begin for _, begin, _ in panel["steps"]]
    assert {after - before for before, after in itertools.pairwise(begins)} == {2 * STEP_NS}
    assert len(begins) > 10
    assert panel["facts"] == {}
    assert all(begin == launch for _, begin, launch in panel["steps"])


def test_a_dense_trace_is_cut_to_what_can_be_drawn() -> None:
    (panel,) = panels_of(page_of(planted(60, kernels=7000)))
    assert 2 <= len(panel["steps"]) <= 9


def test_a_name_cannot_end_the_script_it_stands_in() -> None:
    timeline = planted(5, source="</script><script>alert(1)</script>")
    page = page_of(timeline)
    assert page.count("<script") == page_of(planted(5)).count("<script")
    assert panels_of(page)[0]["title"] == timeline.source


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium here")
def test_chromium_draws_the_page_without_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    probe = (
        "<script>const c = [...document.querySelectorAll('canvas')].map(each => new Set(each.getContext('2d')"
        ".getImageData(0, 0, each.width, each.height).data).size); document.title = 'colours ' + c.join(' ');</script></html>"
    )
    page.write_text(page_of(planted(), planted(30, source="other")).replace("</html>", probe))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=1000", "--enable-logging=stderr"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=50)
    assert "Uncaught" not in done.stderr
    title = re.search(r"<title>colours (\d+) (\d+)</title>", done.stdout)
    assert title is not None
    assert all(int(count) > 20 for count in title.groups())
    assert done.stdout.count('class="bar"') >= 4
