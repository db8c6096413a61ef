"""From what a user writes after `--model` to a Hugging Face folder on this machine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from .cache_folder import cache_root, make_once_blocking
from .demo_model import DEMO_MODEL_NAME, fetch_demo_model_blocking, say_on_stderr

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "LICENSE*", "NOTICE*")
_ACCEPTED: Final = (
    f"accepted are the demo model's name {DEMO_MODEL_NAME!r}, a folder with config.json and "
    "safetensors, a .gguf file, or a hub id such as 'org/name'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model found. `path` is its Hugging Face folder; `name` is what to serve it as."""

    path: Path
    name: str


def resolve_model(name: str, *, say: Callable[[str], None] = say_on_stderr, needs_weights: bool = True) -> ModelFolder:
    """Find, fetch or convert the model called `name`. Stops the caller while it does.

    `needs_weights=False` also accepts a folder with a config.json alone (dummy weights). A network
    is touched only for the demo model's first use and for hub ids. Raises ConfigError (field
    "model") that lists what is accepted, or says what failed.
    """
    if name == DEMO_MODEL_NAME:
        return ModelFolder(path=fetch_demo_model_blocking(say=say), name=name)
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if name and path.is_dir():
        _check_folder(path, needs_weights=needs_weights)
        resolved = path.resolve()
        return ModelFolder(path=resolved, name=resolved.name)
    if path.suffix == ".gguf":
        return _from_gguf(path, say)
    if path.is_file():
        raise ConfigError(f"model {name!r} is a file but no .gguf; {_ACCEPTED}", field="model")
    if _HUB_ID.fullmatch(name):
        return ModelFolder(path=_from_hub(name, say), name=name)
    raise ConfigError(f"model {name!r} was not found; {_ACCEPTED}", field="model")


def _check_folder(folder: Path, *, needs_weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no config.json; {_ACCEPTED}", field="model")
    if needs_weights and not any(folder.glob("*.safetensors")):
        others = sorted(file.name for kind in ("*.bin", "*.pth") for file in folder.glob(kind))
        found = f" (found {', '.join(others[:3])}: pickles are not read)" if others else ""
        raise ConfigError(f"{folder} holds no safetensors files{found}; {_ACCEPTED}", field="model")


def _from_gguf(path: Path, say: Callable[[str], None]) -> ModelFolder:
    """Convert once, keyed by place, size and time of change: hashing gigabytes takes longer."""
    # gguf and numpy are needed on this path alone.
    from .gguf_loader import CONVERSION_VERSION, convert_gguf

    try:
        source = path.resolve(strict=True)
        facts = source.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="model") from error
    stamp = f"{source} {facts.st_size} {facts.st_mtime_ns} conversion {CONVERSION_VERSION} bfloat16\n"
    key = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
    folder = cache_root() / "models" / f"gguf-{source.stem}-{key}"

    def make(fresh: Path) -> None:
        say(f"converting {source.name} to safetensors, once")
        convert_gguf(source, fresh, dtype="bfloat16")

    try:
        make_once_blocking(folder, stamp, make, say=say)
    except OSError as error:
        raise ConfigError(f"cannot convert {path} into {folder}: {error}", field="model") from error
    return ModelFolder(path=folder, name=source.stem)


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    """Let huggingface_hub fetch a snapshot; it honours HF_HUB_OFFLINE and its own cache."""
    from huggingface_hub import snapshot_download

    say(f"looking up {name} on the Hugging Face hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
    # The hub's own errors, its HTTP client's and the system's share no base but this one.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model {name!r} is no local folder, and the hub did not give it: {reason}; {_ACCEPTED}",
            field="model",
        ) from error
    _check_folder(folder, needs_weights=True)
    return folder
