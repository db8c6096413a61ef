"""The rules of who may import whom, read from the source of the package as it is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import slipstream

ROOT = Path(next(iter(slipstream.__path__))).resolve()
ROOMS = ("engine", "streams", "http", "profiling")

# Rooms and parts of rooms, the most special first. A module belongs to the first prefix that fits.
TORCH_FREE_STREAMS = ("streams.ticket", "streams.marks", "streams.host_lane", "streams.errors")
TENSOR_PARTS = tuple(
    f"engine.{name}"
    for name in ["forward", "attention", "sampling", "grammars", "models", "layers", "loader", "kernels"]
)
HOST_PARTS = ("engine.scheduler", "engine.cache", "engine.text")
PUBLIC_ENGINE = tuple(
    f"engine.{name}"
    for name in (
        "engine",
        "config",
        "errors",
        "grammar_session",
        "outputs",
        "sampling_params",
        "text.chat_template",
        "text.tokenization",
    )
)
HOST_LIBRARIES = {"tokenizers", "jinja2", "orjson"}
TENSOR_LIBRARIES = {
    "torch", "triton", "flashinfer", "xgrammar", "llguidance", "numpy", "safetensors", "gguf", "tokenizers", "transformers",
    "huggingface_hub", "cuda",
}  # fmt: skip
HTTP_LIBRARIES = {"starlette", "uvicorn", "httptools", "uvloop", "anyio", "pydantic", "orjson", "prometheus_client"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import of one file. `target` is dotted from the package root, or the top name of another library."""

    module: str
    target: str
    is_ours: bool
    is_deferred: bool  # inside a function: a choice made at run time, such as which backend to load
    line: int

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


def _is_in(name: str, *parts: str) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def _is_host(module: str) -> bool:
    """Whether the module is one of those that must not need torch."""
    return (module.count(".") == 1 and module.startswith("engine.")) or _is_in(module, *HOST_PARTS)


def _modules() -> list[tuple[str, Path]]:
    found = [(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."), path) for room in ROOMS
             for path in sorted((ROOT / room).rglob("*.py"))]  # fmt: skip
    return [(name.removesuffix(".__init__"), path) for name, path in found]


def _targets(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> list[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        return [(alias.name, False) for alias in node.names]
    if node.level == 0:
        return [(node.module or "", False)]
    package = module.split(".") if is_package else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    base = [*base, node.module] if node.module else base
    named = {alias.name: ".".join([*base, alias.name]) for alias in node.names}
    return [(full if not node.module or full in NAMES else ".".join(base), True) for full in named.values()]


NAMES = {name for name, _ in _modules()}


def _imports() -> list[Import]:
    found = []
    for module, path in _modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        deferred = {id(inner) for function in functions for inner in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target, is_ours in _targets(node, module, path.name == "__init__.py"):
                    found.append(
                        Import(
                            module=module,
                            target=target,
                            is_ours=is_ours,
                            is_deferred=id(node) in deferred,
                            line=node.lineno,
                        )
                    )
    return found


IMPORTS = _imports()


def _ours(*rooms: str) -> list[Import]:
    return [each for each in IMPORTS if each.is_ours and _is_in(each.module, *rooms)]


def _libraries(imports: list[Import]) -> list[tuple[Import, str]]:
    tops = [(each, each.target.split(".")[0]) for each in imports if not each.is_ours]
    return [(each, top) for each, top in tops if top not in sys.stdlib_module_names]


def _report(wrong: list[Import]) -> str:
    return "\n".join(str(each) for each in wrong)


def test_the_tree_is_read_at_all() -> None:
    assert {each.module.split(".")[0] for each in IMPORTS} >= {"engine", "streams"}
    assert any(each.target == "streams.errors" and each.module == "engine.errors" for each in IMPORTS)


def test_imports_inside_the_rooms_are_relative() -> None:
    wrong = [
        each
        for each in IMPORTS
        if not each.is_ours and _is_in(each.target, "slipstream", "engine", "streams", "profiling")
    ]
    assert not wrong, _report(wrong)


def test_nothing_in_the_rooms_imports_the_command_line_or_the_examples() -> None:
    wrong = [each for each in IMPORTS if each.is_ours and _is_in(each.target, "cli", "examples", "tests", "__main__")]
    assert not wrong, _report(wrong)


def test_nothing_imports_profiling() -> None:
    wrong = [each for each in _ours("engine", "streams", "http") if _is_in(each.target, "profiling")]
    assert not wrong, _report(wrong)


def test_streams_imports_no_other_room() -> None:
    wrong = [each for each in _ours("streams") if not _is_in(each.target, "streams")]
    assert not wrong, _report(wrong)
    strange = [each for each, top in _libraries([e for e in IMPORTS if _is_in(e.module, "streams")]) if top != "torch"]
    assert not strange, _report(strange)


def test_the_engine_imports_only_itself_and_streams() -> None:
    wrong = [each for each in _ours("engine") if not _is_in(each.target, "engine", "streams")]
    assert not wrong, _report(wrong)


def test_the_host_half_of_the_engine_reaches_tensors_only_by_deferred_imports_of_the_engine_itself() -> None:
    imports = [each for each in _ours("engine") if _is_host(each.module)]
    to_tensors = [
        each
        for each in imports
        if _is_in(each.target, *TENSOR_PARTS)
        or (_is_in(each.target, "streams") and not _is_in(each.target, *TORCH_FREE_STREAMS))
    ]
    wrong = [each for each in to_tensors if not (each.is_deferred and each.module == "engine.opening")]
    assert not wrong, _report(wrong)


def test_the_host_half_of_the_engine_uses_few_libraries() -> None:
    host = [each for each in IMPORTS if _is_host(each.module)]
    wrong = [each for each, top in _libraries(host) if top not in HOST_LIBRARIES]
    assert not wrong, _report(wrong)


def test_the_tensor_half_of_the_engine_uses_only_tensor_libraries() -> None:
    tensor = [each for each in IMPORTS if _is_in(each.module, *TENSOR_PARTS)]
    wrong = [each for each, top in _libraries(tensor) if top not in TENSOR_LIBRARIES]
    assert not wrong, _report(wrong)


def test_http_uses_only_the_public_names_of_the_engine() -> None:
    wrong = [each for each in _ours("http") if each.target and not _is_in(each.target, "http", *PUBLIC_ENGINE)]
    wrong = [each for each in wrong if each.target not in slipstream.__all__]
    assert not wrong, _report(wrong)
    strange = [
        each for each, top in _libraries([e for e in IMPORTS if _is_in(e.module, "http")]) if top not in HTTP_LIBRARIES
    ]
    assert not strange, _report(strange)


def _torch_free_modules() -> list[str]:
    return ["", *(name for name, _ in _modules() if _is_host(name) or name in TORCH_FREE_STREAMS)]


def _import_without(blocked: str, names: list[str]) -> subprocess.CompletedProcess[str]:
    program = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {blocked!r}:
            raise ImportError(f"{{name}} is blocked here")
sys.meta_path.insert(0, Block())
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)


def test_the_host_half_imports_with_torch_blocked() -> None:
    names = [f"slipstream.{name}".rstrip(".") for name in _torch_free_modules()]
    assert len(names) > 10
    result = _import_without("torch", names)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_blocking_torch_is_noticed_by_a_room_that_needs_it() -> None:
    result = _import_without("torch", ["slipstream.engine.loader.safetensors_loader"])
    assert "torch is blocked here" in result.stdout


@pytest.mark.parametrize("room", ["http", "profiling"])
def test_a_room_named_like_the_library_has_no_init_file(room: str) -> None:
    assert (ROOT / room).is_dir()
    assert not list((ROOT / room).glob("__init__.py*"))


@pytest.mark.parametrize("room", ["engine", "streams"])
def test_every_other_package_folder_has_an_init_file(room: str) -> None:
    folders = {path.parent for path in (ROOT / room).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
