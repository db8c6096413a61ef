"""Folders in the user's cache that appear whole or not at all, and are made once.

Several processes may ask for the same folder at once: one makes it, the others wait for it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_STAMP_NAME: Final = "slipstream-stamp"


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's converted models live.

    SLIPSTREAM_CACHE, else $XDG_CACHE_HOME/slipstream, else ~/.cache/slipstream. A relative
    XDG_CACHE_HOME is ignored, as its specification demands.
    """
    own = environ.get("SLIPSTREAM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "slipstream"


def is_current(folder: Path, stamp: str) -> bool:
    """Whether `folder` was made whole by `make_once_blocking` with this `stamp`."""
    try:
        return (folder / _STAMP_NAME).read_text(encoding="utf-8") == stamp
    except OSError:
        return False


def make_once_blocking(folder: Path, stamp: str, make: Callable[[Path], None], *, say: Callable[[str], None]) -> None:
    """Make sure that `folder` exists and carries `stamp`, by `make(empty_folder)` if need be.

    Stops the caller for as long as `make` takes here or in another process. If `make` raises,
    nothing is left behind and the exception passes through. A folder with another stamp is
    replaced; readers that have its files mapped keep the old ones.
    """
    if is_current(folder, stamp):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked_blocking(folder.with_name(f".{folder.name}.lock"), say):
        if is_current(folder, stamp):
            return
        with _scratch(folder) as scratch:
            fresh = scratch / "fresh"
            fresh.mkdir()
            make(fresh)
            (fresh / _STAMP_NAME).write_text(stamp, encoding="utf-8")
            if folder.exists():
                folder.rename(scratch / "replaced")
            fresh.rename(folder)


@contextmanager
def _locked_blocking(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    # The kernel drops the lock with its process, however that dies. The file stays: removing it
    # would let a waiter and a newcomer hold locks on different files of the same name.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {path.name[1:].removesuffix('.lock')}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A private folder beside `folder` (a rename must not cross file systems), removed at the end.

    What an earlier process left by dying is removed first; the caller holds the folder's lock.
    """
    prefix = f".{folder.name}.tmp-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
