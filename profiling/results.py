"""One form for every benchmark's result: what was measured, on what, at which commit."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from ..engine.errors import ConfigError

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "uvloop", "starlette", "uvicorn")


def environment() -> dict[str, object]:
    """Hardware, versions, commit and date of this run."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "python": platform.python_version(),
        "processor": _processor(),
        "device": _device(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def write_json(path: str | Path, benchmark: str, results: Mapping[str, object], *, at_top: bool = False) -> None:
    """Write `results` with the environment beside them; `at_top`: not under a name of their own. Raises: ConfigError if
    that cannot be.
    """
    content = {"benchmark": benchmark, "environment": environment(), **(results if at_top else {"results": results})}
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", field="json") from error


def require_cuda() -> None:
    """Raises: ConfigError if no device answers that a benchmark of the device alone could measure."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("this measures CUDA, and no NVIDIA GPU answers here", field="device")


def _commit() -> str:
    root = Path(__file__).parent.parent
    try:
        # Not of the commit alone, if anything was changed since: its name then ends in -dirty.
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else "unknown"


def _device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
