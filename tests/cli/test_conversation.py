"""`generate` and `chat` over an engine that answers with the alphabet: what a person at a terminal sees."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.engine.engine import Engine, EngineState

IN_A_TERMINAL = f"""
import functools, runpy
from slipstream import cli
from slipstream.engine import engine as engine_module
made = runpy.run_path({str(Path(__file__).with_name("conftest.py"))!r})
engine_module.Engine = functools.partial(made["alphabet_engine"], step_time_s=0.02)
cli.main(["chat", "--max-tokens", "150"])
"""


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    code = stopped.value.code
    assert isinstance(code, int)
    return code


def _type(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate_prints_what_follows_and_closes_the_engine(
    alphabet_answers: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("generate", "abc", "--max-tokens", "5") == 0
    assert capsys.readouterr().out == "defgh\n"
    assert [engine.state for engine in alphabet_answers] == [EngineState.CLOSED]


def test_generate_reads_a_prompt_from_standard_input(
    alphabet_answers: list[Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _type(monkeypatch, "xyz")
    assert _run("generate", "-", "--stop", "d") == 0
    assert capsys.readouterr().out == "abc\n"


def test_without_max_tokens_an_answer_fills_what_is_left_of_the_context(
    alphabet_answers: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("generate", "a" * 190) == 0
    assert capsys.readouterr().out == "bcdefghijk\n"


def test_a_prompt_that_is_too_long_is_refused_in_one_line(
    alphabet_answers: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("generate", "a" * 500) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slipstream: ")
    assert err.count("\n") == 1


def test_chat_keeps_the_conversation_and_forgets_it_on_reset(
    alphabet_answers: list[Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rendered: list[str] = []
    real = cli.render_chat
    monkeypatch.setattr(
        cli, "render_chat", lambda engine, messages: rendered.append(real(engine, messages)) or rendered[-1]
    )
    _type(monkeypatch, "hi\n\nmore\n/reset\nnew\n/exit\nnever\n")
    assert _run("chat", "--system", "brief", "--max-tokens", "3") == 0
    assert rendered == ["brief|hi|", "brief|hi|abc|more|", "brief|new|"]
    assert capsys.readouterr().out == "abc\nabc\nabc\n"


def test_chat_tells_its_commands_and_sends_none_of_them_to_the_model(
    alphabet_answers: list[Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _type(monkeypatch, "/help\n/quit\n/etc/hosts is what\n/exit\n")
    assert _run("chat", "--max-tokens", "3") == 0
    first, second, answer, *rest = capsys.readouterr().out.splitlines()
    assert first == second
    assert "/reset" in first
    assert (answer, rest) == ("abc", [])


@pytest.mark.parametrize("prompt", ["", "-"])
def test_an_empty_prompt_is_refused_before_the_model_is_loaded(
    alphabet_answers: list[Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    _type(monkeypatch, "")
    assert _run("generate", prompt) == 2
    assert capsys.readouterr().err == "slipstream: the prompt is empty\n"
    assert alphabet_answers == []


def test_chat_survives_a_message_that_does_not_fit(
    alphabet_answers: list[Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _type(monkeypatch, f"{'x' * 500}\nhi\n")
    assert _run("chat", "--max-tokens", "2") == 0
    out, err = capsys.readouterr()
    assert out == "ab\n"
    assert "/reset forgets the conversation" in err


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, program: str) -> None:
        self._main, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(child)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def read_until(self, wanted: str, timeout_s: float = 15.0) -> str:
        """What came since the last call, up to and with `wanted`."""
        deadline_s = time.monotonic() + timeout_s
        while wanted not in self.text:
            ready, _, _ = select.select([self._main], [], [], deadline_s - time.monotonic())
            assert ready, f"no {wanted!r} within {timeout_s} s: {self.text!r}"
            self.text += os.read(self._main, 4096).decode()
        seen, self.text = self.text.split(wanted, 1)
        return seen + wanted

    def exit_code(self) -> int:
        return self.process.wait(timeout=10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def _take_terminal() -> None:
    """Make the child's standard input its controlling terminal, so that Ctrl-C reaches it as a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background was started with it ignored


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal(IN_A_TERMINAL)
    yield opened
    opened.close()


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(terminal: Terminal) -> None:
    terminal.read_until("> ")
    terminal.type("hello\n")
    terminal.read_until("abcdef")  # an answer of 150 tokens would take 3 s
    terminal.type("\x03")
    answer = terminal.read_until("> ")
    assert "[stopped]" in answer
    assert answer.count("xyz") < 5
    terminal.type("again\n")
    terminal.read_until("abc")
    terminal.type("\x03")
    terminal.read_until("> ")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
