"""The command line: its settings are those of the engine, and a wrong one is one clear line before anything is loaded."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import typer.main

from slipstream import cli
from slipstream.cli_settings import DEMO_MODEL, ENGINE_FLAGS, FRONT_FLAGS, SAMPLING_FLAGS, with_flag
from slipstream.engine.config import EngineConfig
from slipstream.engine.errors import ConfigError, EngineDead, Overloaded
from slipstream.engine.sampling_params import SamplingParams
from slipstream.http.settings import FrontSettings

COMMANDS: Mapping[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    code = stopped.value.code
    assert isinstance(code, int)
    return code


def _options(command: str) -> dict[str, tuple[str, ...]]:
    return {each.name: tuple(each.opts) for each in COMMANDS[command].params if each.name}


def _parse(command: str, *arguments: str) -> dict[str, object]:
    return COMMANDS[command].make_context(command, list(arguments)).params


def _field_names(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def test_every_setting_of_the_engine_and_the_front_is_an_option() -> None:
    assert set(ENGINE_FLAGS) == _field_names(EngineConfig)
    assert set(FRONT_FLAGS) == _field_names(FrontSettings)
    assert set(SAMPLING_FLAGS) <= _field_names(SamplingParams)
    assert set(_options("serve")) > set(ENGINE_FLAGS) | set(FRONT_FLAGS)
    for command in ("generate", "chat"):
        assert set(_options(command)) > set(ENGINE_FLAGS) | set(SAMPLING_FLAGS)


def test_defaults_are_those_of_the_records() -> None:
    given = _parse("generate", "hi")
    config = EngineConfig(model=DEMO_MODEL)
    assert {name: given[name] for name in ENGINE_FLAGS} == dataclasses.asdict(config)
    params = SamplingParams(**{name: given[name] for name in SAMPLING_FLAGS})  # type: ignore[arg-type]
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("known_as", "value", "field"),
    [
        ("--max-model-len", "128", "max_model_len"),
        ("--context-length", "128", "max_model_len"),
        ("--gpu-memory-utilization", "0.5", "kv_memory_fraction"),
        ("--mem-fraction-static", "0.5", "kv_memory_fraction"),
        ("--max-num-seqs", "4", "max_running_requests"),
        ("--max-running-requests", "4", "max_running_requests"),
        ("--chunked-prefill-size", "64", "chunked_prefill_size"),
        ("--page-size", "1", "page_size"),
        ("--block-size", "32", "page_size"),
        ("--model-path", "folder", "model"),
        ("--dtype", "bfloat16", "dtype"),
        ("--device", "cpu", "device"),
        ("--chat-template", "file.jinja", "chat_template"),
    ],
)
def test_settings_have_the_names_that_users_of_other_engines_know(known_as: str, value: str, field: str) -> None:
    assert str(_parse("serve", known_as, value)[field]) == value


def test_a_switch_can_be_turned_off_and_a_list_given_piecewise() -> None:
    given = _parse("generate", "hi", "--no-overlap", "--stop", "a", "--stop", "b", "--stop-token-ids", "7")
    assert (given["overlap"], list(given["stop"]), list(given["stop_token_ids"])) == (False, ["a", "b"], [7])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("serve", "--page-size", "24"), "--page-size must be a power of two, not 24"),
        (("serve", "--kv-memory-fraction", "3"), "--kv-memory-fraction must be above 0 and at most 1, not 3.0"),
        (("generate", "hi", "--top-p", "7"), "--top-p must be above 0 and at most 1, not 7"),
        (("generate", "hi", "--model", ""), "--model must be a name, a folder or a .gguf file"),
        (("chat", "--skip-tokenizer"), "--skip-tokenizer: text needs a tokenizer"),
        (("serve", "--ping-interval-s", "0"), "--ping-interval-s must be a positive number, not 0.0"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"slipstream: {line}")
    assert err.count("\n") == 1


def test_a_wrong_setting_is_found_before_anything_heavy_is_imported() -> None:
    program = """
import sys
from slipstream import cli
from slipstream.cli_settings import DEMO_MODEL, ENGINE_FLAGS, FRONT_FLAGS, SAMPLING_FLAGS, with_flag
try:
    cli.main(["generate", "hi", "--page-size", "3"])
except SystemExit as stopped:
    print(stopped.code, [name for name in ("torch", "transformers", "starlette", "uvicorn") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert result.stdout == "2 []\n"
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_help_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(command, "--help") == 0
    text = capsys.readouterr().out
    for spellings in _options(command).values():
        assert all(each in text for each in spellings if each.startswith("--"))


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command}" in text for command in ("serve", "generate", "chat", "bench"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no", field=None), 2),
        (EngineDead("gone"), 70),
        (Overloaded("later"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_says_whose_fault_it_was(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert _run("serve") == code
    assert capsys.readouterr().err == ("" if code == 130 else f"slipstream: {error}\n")


def test_bench_lists_its_suites_by_what_they_say_of_themselves(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench_tea.py").write_text('"""How fast tea is made.\n\nMore."""\n')
    (tmp_path / "timeline.py").write_text('"""No suite."""\n')
    monkeypatch.setattr(cli, "BENCH_ROOM", tmp_path)
    assert _run("bench") == 0
    assert (
        capsys.readouterr().out
        == "Usage: slipstream bench SUITE [OPTIONS]\n\nSuites:\n  tea       How fast tea is made.\n"
    )
    assert _run("bench", "coffee") == 2
    assert "tea" in capsys.readouterr().err


@pytest.mark.parametrize("suite", cli._bench_suites())
def test_a_bench_suite_explains_itself_or_says_what_it_lacks(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = _run("bench", suite, "--help")
    out, err = capsys.readouterr()
    assert (code == 0 and "usage:" in out.lower()) or (code == 2 and err.endswith(", which is not installed\n"))


@pytest.mark.parametrize(
    ("message", "field", "shown"),
    [
        (
            "device 'cuda' was asked for, but torch finds no CUDA device",
            "device",
            "--device 'cuda' was asked for, but torch finds no CUDA device",
        ),
        ("page_size must divide 2 * page_size", "page_size", "--page-size must divide 2 * --page-size"),
        ("the pool is too small", "max_total_tokens", "--max-total-tokens: the pool is too small"),
        ("something else", None, "something else"),
    ],
)
def test_an_error_spells_the_setting_as_a_flag_but_leaves_the_same_word_elsewhere_alone(
    message: str, field: str | None, shown: str
) -> None:
    assert with_flag(message, field) == shown
