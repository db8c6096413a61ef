"""What no tracked file may hold, and how large one may be."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import slipstream

pytestmark = pytest.mark.checkout

ROOT = Path(next(iter(slipstream.__path__))).resolve()
MAX_FILE_LINES = 400
MAX_COLUMNS = 128  # of CUDA C++; ruff says it of Python
MAX_FUNCTION_LINES = 70
MAX_KERNEL_LINES = 110  # of a Triton kernel: one scope of values in registers, of which a dozen lines are its signature
ROOT_FILES = {
    ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "__init__.py", "__main__.py", "cli.py", "cli_settings.py",
    "constraints.txt", "pyproject.toml",
}  # fmt: skip
ROOT_FOLDERS = {".ci", "engine", "streams", "http", "profiling", "examples", "tests"}
VAGUE_NAMES = {"manager", "utils", "util", "helper", "helpers", "process", "data", "misc", "common"}
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|root|opt/pypi|opt/wheels)/")
REGISTRY_HOSTS = re.compile(
    "|".join(re.escape(".".join(host)) for host in (
        ("pypi", "org"), ("files", "pythonhosted", "org"), ("download", "pytorch", "org"), ("deb", "debian", "org"),
        ("registry", "npmjs", "org"), ("huggingface", "co"),
    ))
)  # fmt: skip


def _tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        return [path for path in ROOT.rglob("*") if path.is_file() and not _is_made(path)]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _is_made(path: Path) -> bool:
    made = ("__pycache__", "build", "dist")
    return any(
        part in made or part.startswith(".") or part.endswith(".egg-info") for part in path.relative_to(ROOT).parts
    )


def _texts() -> list[tuple[Path, str]]:
    found = []
    for path in _tracked():
        content = path.read_bytes()
        if b"\0" not in content:
            found.append((path.relative_to(ROOT), content.decode("utf-8")))
    return found


TEXTS = _texts()
SOURCES = [(path, text) for path, text in TEXTS if path.suffix == ".py"]
CUDA_SOURCES = [(path, text) for path, text in TEXTS if path.suffix in (".cu", ".cuh", ".hpp")]


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()[:80]}"
        for path, text in TEXTS
        if path.name != "LICENSE"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_the_tree_is_read_at_all() -> None:
    assert Path("engine/config.py") in dict(SOURCES)


def test_the_root_holds_only_what_belongs_there() -> None:
    top = {path.parts[0] for path, _ in TEXTS}
    assert top <= ROOT_FILES | ROOT_FOLDERS, top - ROOT_FILES - ROOT_FOLDERS


def test_no_file_is_longer_than_its_duty_needs() -> None:
    lengths = {str(path): text.count("\n") for path, text in SOURCES + CUDA_SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_of_cuda_is_longer_than_a_screen_or_wider() -> None:
    assert CUDA_SOURCES
    for path, text in CUDA_SOURCES:
        lines = text.splitlines()
        assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS] == [], path
        # The formatter closes a function at the column that it begins in.
        begins = [
            number for number, line in enumerate(lines) if re.match(r"[a-z_\"].*\($|[a-z_\"].*\) (const )?{$", line)
        ]
        ends = [next(end for end in range(begin, len(lines)) if lines[end] == "}") for begin in begins]
        long = [begin + 1 for begin, end in zip(begins, ends, strict=True) if end - begin >= MAX_FUNCTION_LINES]
        assert long == [], path


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _allowed_lines(function: Function) -> int:
    is_kernel = any(ast.unparse(decorator).startswith("triton.") for decorator in function.decorator_list)
    return MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{path}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path, text in SOURCES
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function) and node.end_lineno is not None
        if node.end_lineno - node.lineno + 1 > _allowed_lines(node)
    }
    assert long == {}


def test_no_file_has_a_vague_name() -> None:
    assert [str(path) for path, _ in SOURCES if path.stem in VAGUE_NAMES] == []


def test_no_file_is_named_like_the_library_it_wraps() -> None:
    libraries = {
        "torch",
        "triton",
        "flashinfer",
        "xgrammar",
        "tokenizers",
        "safetensors",
        "gguf",
        "starlette",
        "uvicorn",
        "pydantic",
    }
    assert [str(path) for path, _ in SOURCES if path.stem in libraries] == []


def test_nothing_is_left_unfinished() -> None:
    assert _lines_with(UNFINISHED) == []


def test_no_machine_s_own_paths_are_written_down() -> None:
    assert _lines_with(MACHINE_PATHS) == []


def test_no_registry_is_written_down() -> None:
    assert _lines_with(REGISTRY_HOSTS) == []


def test_test_folders_are_not_packages() -> None:
    assert [str(path) for path, _ in SOURCES if path.parts[0] == "tests" and path.name == "__init__.py"] == []
