"""`slipstream profile` and `slipstream overlap-report`, on a scripted device and on a server under load."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from slipstream.engine.engine import Engine
from slipstream.engine.errors import ConfigError
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits
from slipstream.http.app import create_app
from slipstream.http.server import HttpServer
from slipstream.profiling import profile_run
from slipstream.profiling.overlap_report import overlap_report
from slipstream.profiling.profile_run import record_server_blocking
from slipstream.profiling.recorder import Recorder
from slipstream.profiling.timeline import LaneKind

LIMITS = WorkerLimits(num_pages=512, page_size=4, num_rows=8, max_model_len=400, vocab_size=256)
SCRIPTED = ("profile", "--scripted", "--rows", "2", "--steps", "12", "--step-ms", "2", "--launch-ms", "0.5")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    code = stopped.value.code
    assert isinstance(code, int)
    return code


def test_both_depths_are_reported_beside_each_other_and_written_three_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SCRIPTED, "--both-depths", "--out", str(tmp_path / "deep" / "p")) == 0
    printed = capsys.readouterr().out
    assert "scripted device, depth 1" in printed
    assert "scripted device, depth 0" in printed
    for wanted in ("device idle", "launch to start", "tokens", "exposed", "stall", "step, median"):
        assert wanted in printed
    files = sorted(path.name for path in (tmp_path / "deep").iterdir())
    assert files == ["p.0.trace.json.gz", "p.1.trace.json.gz", "p.html", "p.json"]
    result = json.loads((tmp_path / "deep" / "p.json").read_text())
    assert set(result) == {"benchmark", "environment", "results"}
    by_depth = {name[-1]: numbers for name, numbers in result["results"].items()}
    assert by_depth["0"]["idle_share"] > by_depth["1"]["idle_share"]
    trace = json.loads(gzip.decompress((tmp_path / "deep" / "p.0.trace.json.gz").read_bytes()))
    launches = [event["args"] for event in trace["traceEvents"] if event["name"] == "launch" and event["ph"] == "X"]
    assert launches[3].items() >= {"rows": 2, "tokens": 2, "sampled": 2}.items()
    groups = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert groups == {"host", "device", "requests"}


TINY_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def test_a_shape_with_dummy_weights_is_profiled_without_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(TINY_SHAPE))
    settings = ("--load-format", "dummy", "--cpu-threads", "1", "--max-total-tokens", "2048")
    load = ("--rows", "2", "--steps", "8", "--prompt-tokens", "16", "--out", str(tmp_path / "p"))
    assert run("profile", "--model", str(shape), *settings, *load) == 0
    assert "slipstream, shape, depth 1" in capsys.readouterr().out
    (numbers,) = json.loads((tmp_path / "p.json").read_text())["results"].values()
    assert (numbers["steps_are"], numbers["num_tokens"]) == ("steps", 2 * numbers["num_steps"])


def test_a_written_trace_gives_the_same_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SCRIPTED, "--out", str(tmp_path / "p")) == 0
    first = capsys.readouterr().out
    assert run("overlap-report", str(tmp_path / "p.trace.json.gz"), "--out", str(tmp_path / "again")) == 0
    again = capsys.readouterr().out
    assert again.strip() in first
    assert (tmp_path / "again.html").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"traceEvents": [{"ph": "X"', "incomplete"), (b'{"traceEvents": []}', "nothing ran on a device")],
)
def test_a_trace_that_gives_no_report_is_one_line_and_a_failure(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert run("overlap-report", str(path)) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_recordings_of_one_engine_are_told_apart_by_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("before", "after"):
        assert run(*SCRIPTED, "--out", str(tmp_path / name)) == 0
    files = [str(tmp_path / f"{name}.trace.json.gz") for name in ("before", "after")]
    capsys.readouterr()
    assert run("overlap-report", *files, "--out", str(tmp_path / "both")) == 0
    sources = [f"slipstream, scripted device, depth 1, {file}" for file in files]
    assert list(json.loads((tmp_path / "both.json").read_text())["results"]) == sources
    printed = capsys.readouterr().out
    assert all(f"{source}\n" in printed for source in sources)


@pytest.mark.parametrize(("pattern", "message"), [("(", "is no pattern"), ("^nothing$", "no range")])
def test_steps_that_are_not_in_the_trace_are_no_report_of_others(
    pattern: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SCRIPTED, "--out", str(tmp_path / "p")) == 0
    assert run("overlap-report", str(tmp_path / "p.trace.json.gz"), "--step-range", pattern) == 1
    assert message in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "p")
    assert run("profile", "--model", "no such model", "--out", out) == 2
    assert "--out: cannot write" in capsys.readouterr().err


async def served(body: Any, **app_settings: Any) -> Any:
    """Run `body(url, engine)` against a server under load."""
    async with Engine.on(ScriptedWorker(LIMITS, Script(step_time_s=0.002)), page_size=4) as engine:
        app = create_app(engine, served_model_name="tiny", **{"recorder": Recorder(engine), **app_settings})
        async with HttpServer(app, port=0) as server:
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            load = [asyncio.ensure_future(engine.complete([n, 2, 3], params)) for n in range(3)]
            await asyncio.sleep(0.01)
            try:
                return await body(f"http://127.0.0.1:{server.port}", engine)
            finally:
                for job in load:
                    job.cancel()
                await asyncio.gather(*load, return_exceptions=True)


async def test_a_running_server_records_its_next_steps_and_goes_on(tmp_path: Path) -> None:
    async def attach(url: str, engine: Engine) -> None:
        for name in ("first", "second"):
            into = tmp_path / f"{name}.trace.json.gz"
            timeline = await asyncio.to_thread(record_server_blocking, url, "root", steps=20, wait_s=10, into=into)
            report = overlap_report(timeline)
            assert report.steps_are == "steps"
            assert 15 <= report.num_steps <= 20
            assert len(timeline.of_kind(LaneKind.REQUESTS)) == 3
        assert engine.state.is_ready

    await served(attach, admin_key="root")


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"admin_key": "root"}, "user", "401"),
        ({"admin_key": None}, None, "40[14]"),
        ({"admin_key": "root", "recorder": None}, "root", "404.*without a recorder"),
    ],
)
async def test_recording_wants_the_admin_key_and_a_recorder(
    settings: dict[str, Any], key: str | None, message: str, tmp_path: Path
) -> None:
    async def attach(url: str, engine: Engine) -> None:
        with pytest.raises(ConfigError, match=message):
            await asyncio.to_thread(record_server_blocking, url, key, steps=5, wait_s=1, into=tmp_path / "x")
        assert not engine.marks.marks.records()

    await served(attach, **settings)


async def post(url: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nhost: t\r\nauthorization: Bearer root\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    status, _, content = answer.partition(b"\r\n\r\n")
    return int(status.split()[1]), content


async def test_a_second_recording_and_a_stop_without_one_are_conflicts_and_bodies_may_be_left_out() -> None:
    async def ask(url: str, engine: Engine) -> None:
        assert (await post(url, "/stop_profile"))[0] == 409
        assert (await post(url, "/start_profile"))[0] == 200
        assert (await post(url, "/start_profile"))[0] == 409
        assert (await post(url, "/start_profile", b'{"steps": 3}'))[0] == 400
        assert (await post(url, "/start_profile", b'{"num_steps": 0}'))[0] == 400
        status, trace = await post(url, "/stop_profile")
        assert (status, json.loads(gzip.decompress(trace))["slipstream"]["source"][:10]) == (200, "slipstream")

    await served(ask, admin_key="root")


async def test_a_recording_that_two_calls_stop_is_given_to_one_of_them() -> None:
    async def ask(url: str, engine: Engine) -> None:
        assert (await post(url, "/start_profile", b'{"num_steps": 30}'))[0] == 200
        stops = [asyncio.ensure_future(post(url, "/stop_profile", b'{"wait_s": 10}')) for _ in range(2)]
        assert sorted([(await stop)[0] for stop in stops]) == [200, 409]

    await served(ask, admin_key="root")


def test_who_gives_up_waiting_ends_the_servers_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[tuple[str, dict[str, object]]] = []

    def post_once(url: str, path: str, key: str | None, body: dict[str, object], *, timeout_s: float) -> bytes:
        posted.append((path, body))
        if body.get("wait_s"):
            raise KeyboardInterrupt
        return b""

    monkeypatch.setattr(profile_run, "_post", post_once)
    with pytest.raises(KeyboardInterrupt):
        record_server_blocking("http://x", None, steps=5, wait_s=9, into=tmp_path / "x")
    assert posted == [("/start_profile", {"num_steps": 5}), ("/stop_profile", {"wait_s": 9}), ("/stop_profile", {})]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere", "http://[::1"])
def test_a_server_that_is_not_there_is_said_in_one_line(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("profile", "--url", url, "--out", str(tmp_path / "x")) == 2
    assert "does not answer" in capsys.readouterr().err
