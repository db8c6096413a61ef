"""`slipstream serve` as a process of its own, over an engine that answers with the alphabet."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = f"""
import runpy, sys
from slipstream import cli
from slipstream.engine import engine as engine_module
engine_module.Engine = runpy.run_path({str(Path(__file__).with_name("conftest.py"))!r})["alphabet_engine"]
cli.main(["serve", "--port", "0", *sys.argv[1:]])
"""


class Served:
    """The running process, and what it printed until it was ready."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(5)]
        found = re.search(r"is ready on (http://127\.0\.0\.1:\d+) ", self.lines[1])
        assert found, self.lines
        self.url = found[1]

    @property
    def curl_words(self) -> list[str]:
        return shlex.split("".join(self.lines[2:]).replace("\\\n", " "))

    def post(self, path: str, body: str, **headers: str) -> str:
        request = urllib.request.Request(
            self.url + path, body.encode(), {"Content-Type": "application/json", **headers}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=15)


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    server = Served(*getattr(request, "param", ()))
    yield server
    server.process.kill()
    server.process.wait()
    assert server.process.stdout is not None
    server.process.stdout.close()


def test_the_curl_line_it_prints_streams_an_answer(served: Served) -> None:
    words = served.curl_words
    assert words[:2] == ["curl", "-N"]
    path = words[2].removeprefix(served.url)
    body = words[words.index("-d") + 1]
    events = [line[6:] for line in served.post(path, body).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(choice["delta"].get("content") or "" for e in events[:-1] for choice in json.loads(e)["choices"])
    assert text.startswith("abcdefghij")


@pytest.mark.parametrize("served", [("--served-model-name", "letters", "--api-key", "secret")], indirect=True)
def test_names_and_keys_reach_the_front(served: Served) -> None:
    assert "letters is ready" in served.lines[1]
    assert "Authorization: Bearer $SLIPSTREAM_API_KEY" in served.curl_words
    body = json.dumps({"model": "letters", "prompt": "xy", "max_tokens": 3})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        served.post("/v1/completions", body)
    answer = json.loads(served.post("/v1/completions", body, Authorization="Bearer secret"))
    assert (answer["model"], answer["choices"][0]["text"]) == ("letters", "zab")


def test_a_large_body_goes_through_the_process_that_serve_owns(served: Served) -> None:
    body = json.dumps({"prompt": "a" * 1_200_000, "max_tokens": 1})
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/v1/completions", body)
    assert json.loads(caught.value.read())["error"]["code"] == "context_length_exceeded", (
        "read, not refused by its size"
    )
    caught.value.close()


def test_sigterm_ends_it_in_order(served: Served) -> None:
    assert served.stop(signal.SIGTERM) == 0


def test_ctrl_c_ends_it_in_order(served: Served) -> None:
    assert served.stop(signal.SIGINT) == 0


def test_a_port_in_use_is_one_clear_line(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    command = [sys.executable, "-c", PROGRAM, "--port", port]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert result.stderr.startswith(f"slipstream: --port: cannot listen on 127.0.0.1:{port}")
    assert result.stderr.count("\n") == 1
