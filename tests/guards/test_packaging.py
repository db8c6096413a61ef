"""The package is the repository root: what that needs to keep working, installed or not."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import slipstream

ROOT = Path(next(iter(slipstream.__path__))).resolve()
ROOMS = ("engine", "streams", "http", "profiling")
PUBLIC_NAMES = ["Completion", "Delta", "Engine", "EngineConfig", "SamplingParams", "__version__"]
IMPORT_NAMES = {
    "cuda-bindings": "cuda",
    "flashinfer-python": "flashinfer",
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
}


def _metadata() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _python(*arguments: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_public_names_are_pinned_and_each_resolves() -> None:
    assert sorted(slipstream.__all__) == PUBLIC_NAMES
    assert all(getattr(slipstream, name) is not None for name in PUBLIC_NAMES)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = slipstream.Motor


def test_importing_the_package_loads_neither_torch_nor_the_http_front(tmp_path: Path) -> None:
    program = "import slipstream, sys; print([m for m in ('torch', 'transformers', 'starlette', 'typer') if m in sys.modules])"
    assert _python("-c", program, cwd=tmp_path) == "[]\n"


def test_every_package_folder_that_is_listed_can_be_imported_from_anywhere(tmp_path: Path) -> None:
    names = [name for name in _installed_packages() if name != "slipstream.profiling"]
    program = f"import importlib; [importlib.import_module(name) for name in {names!r}]; import slipstream.profiling"
    assert _python("-c", program, cwd=tmp_path) == ""


def _installed_packages() -> list[str]:
    folders = {path.parent for path in ROOT.glob("*/**/*.py") if path.relative_to(ROOT).parts[0] in ROOMS}
    return [
        "slipstream",
        *sorted(f"slipstream.{folder.relative_to(ROOT).as_posix().replace('/', '.')}" for folder in folders),
    ]


@pytest.mark.checkout
def test_every_package_folder_stands_in_the_list_that_the_wheel_is_made_of() -> None:
    assert sorted(_metadata()["tool"]["setuptools"]["packages"]) == _installed_packages()


@pytest.mark.checkout
def test_every_library_that_the_package_imports_is_declared() -> None:
    project = _metadata()["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    known = {IMPORT_NAMES.get(name, name) for line in declared if (name := re.match(r"[\w-]+", line)[0])}  # type: ignore[index]
    used = {name: place for name, place in _imported_libraries() if name not in sys.stdlib_module_names}
    assert {name: place for name, place in used.items() if name not in known} == {}


def _sources() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]


def _imported_libraries() -> list[tuple[str, str]]:
    found = []
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [(alias.name.split(".")[0], str(path)) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.append(((node.module or "").split(".")[0], str(path)))
    return found


@pytest.mark.checkout
def test_the_standard_library_is_not_shadowed_from_the_root() -> None:
    program = "import http, http.client, cProfile; print('slipstream' in http.__file__ + cProfile.__file__, http.HTTPStatus.OK)"
    assert _python("-c", program, cwd=ROOT) == "False 200\n"


@pytest.mark.checkout
def test_pytest_starts_as_a_module_from_the_root() -> None:
    listed = _python(
        "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "tests/guards/test_settings.py", cwd=ROOT
    )
    assert "test_sleeping_without_a_loop_is_allowed" in listed


@pytest.mark.checkout
def test_a_link_with_the_package_s_name_is_an_installation(tmp_path: Path) -> None:
    (tmp_path / "slipstream").symlink_to(ROOT)
    program = "import slipstream, slipstream.engine.config, slipstream.http; print(slipstream.__file__)"
    assert _python("-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path)) == f"{tmp_path}/slipstream/__init__.py\n"


def test_the_command_runs_as_a_module_from_anywhere(tmp_path: Path) -> None:
    assert _python("-m", "slipstream", "--version", cwd=tmp_path) == f"slipstream {slipstream.__version__}\n"


def test_the_installed_metadata_tells_the_version_of_the_source() -> None:
    try:
        installed = importlib.metadata.version("slipstream-llm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed: the package is imported by a link to its checkout")
    assert installed == slipstream.__version__
