"""What README.md says can be done can be done."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer.main

import slipstream
from slipstream import cli
from slipstream.engine import errors

pytestmark = pytest.mark.checkout

ROOT = Path(next(iter(slipstream.__path__))).resolve()
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_LINE = typer.main.get_command(cli.app)


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def _shell_lines(start: str) -> list[list[str]]:
    lines = [line for block in _blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] == start]


SLIPSTREAM_COMMANDS = _shell_lines("slipstream")


@pytest.mark.parametrize("words", SLIPSTREAM_COMMANDS, ids=" ".join)
def test_a_slipstream_command_of_the_readme_parses(words: list[str]) -> None:
    command = COMMAND_LINE.commands[words[1]]  # type: ignore[attr-defined]
    context = command.make_context(words[1], words[2:])
    assert context.info_name == words[1]


def test_the_readme_shows_every_command() -> None:
    assert {words[1] for words in SLIPSTREAM_COMMANDS} == set(COMMAND_LINE.commands)  # type: ignore[attr-defined]


def test_every_make_target_of_the_readme_exists() -> None:
    targets = {target for words in _shell_lines("make") for target in words[1:] if "=" not in target}
    assert targets >= {"run", "test"}
    for target in targets:
        result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_make_refuses_an_unknown_build_in_one_line() -> None:
    result = subprocess.run(["make", "-n", "run", "TORCH=rocm"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "TORCH must be cpu or cuda, not 'rocm'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_python_of_the_readme_compiles_and_uses_public_names() -> None:
    for block in _blocks("python"):
        imported = [
            alias.name
            for node in ast.walk(ast.parse(block))
            if isinstance(node, ast.ImportFrom) and node.module == "slipstream"
            for alias in node.names
        ]
        assert imported
        assert set(imported) <= set(slipstream.__all__)


def test_the_error_table_names_every_error() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    public = [(name, getattr(errors, name)) for name in errors.__all__]
    raised = {name for name, each in public if isinstance(each, type) and issubclass(each, Exception)}
    assert named == raised - {"SlipstreamError"}


@pytest.mark.parametrize(
    "room",
    ["streams", "engine", "engine/attention", "engine/cache", "engine/forward", "engine/grammars", "engine/kernels",
     "engine/loader", "engine/models", "engine/sampling", "engine/scheduler", "engine/text", "http", "profiling"],
)  # fmt: skip
def test_a_rooms_page_names_every_file_of_the_room(room: str) -> None:
    page = (ROOT / room / "README.md").read_text(encoding="utf-8")
    kinds = (".py", ".sh", ".html", ".cu", ".cuh")
    files = {path.stem for path in (ROOT / room).iterdir() if path.suffix in kinds} - {"__init__"}
    assert not {name for name in files if not re.search(rf"\b{name}\b", page)}
