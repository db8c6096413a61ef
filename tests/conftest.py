"""Settings of every test: one torch thread, a guard against code that blocks the event loop, short time limits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

# Read by torch when it is imported: a second intra-op thread that spins on a busy core costs a factor of forty.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a model hub

ASYNC_TIMEOUT_S = 20

settings.register_profile("slipstream", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("slipstream")


class LoopBlocked(AssertionError):
    """A call that can stop the thread was made while that thread was running an event loop."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and give every async test a short limit of its own."""
    if any(item.get_closest_marker("gpu") for item in items):
        reason = _why_no_gpu()
        for item in items:
            if reason and item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        is_async = inspect.iscoroutinefunction(getattr(item, "function", None))
        if is_async and not any(item.get_closest_marker(name) for name in ("timeout", "model", "slow", "gpu")):
            item.add_marker(pytest.mark.timeout(ASYNC_TIMEOUT_S))


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Keep a test that changed the intra-op threads from slowing the next one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_loop_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test in which the loop's own thread sleeps, waits for another thread or for a process."""
    _refuse_on_loop(monkeypatch, time, "sleep", lambda seconds, *_: seconds > 0)
    _refuse_on_loop(monkeypatch, concurrent.futures.Future, "result", lambda future, *_: not future.done())
    _refuse_on_loop(monkeypatch, queue.Queue, "get", lambda waiting, block=True, *_: block and waiting.empty())
    _refuse_on_loop(monkeypatch, threading.Thread, "join", lambda thread, *_: thread.is_alive())
    _refuse_on_loop(monkeypatch, subprocess.Popen, "wait", lambda process, *_: process.poll() is None)
    _refuse_on_loop(monkeypatch, subprocess.Popen, "communicate", lambda process, *_: process.poll() is None)


@pytest.fixture
def blocking_is_fine(the_loop_never_blocks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test that blocks the loop on purpose, to show what then happens."""
    monkeypatch.undo()
    yield


def _refuse_on_loop(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, blocks: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if asyncio._get_running_loop() is not None and blocks(*args):
            raise LoopBlocked(f"{owner.__name__}.{name} was called on the event loop's thread")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, guarded)


def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no NVIDIA GPU answers here"
