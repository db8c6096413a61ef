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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Read by torch when it is imported: a second intra-op thread that spins on a busy core costs a factor of forty.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a model hub

ASYNC_TIMEOUT_S = 20
LONG_TIMEOUT_S = 300  # a real model on a core that others use too

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
        if item.get_closest_marker("timeout") is None:
            is_async = inspect.iscoroutinefunction(getattr(item, "function", None))
            if any(item.get_closest_marker(name) for name in ("model", "slow", "gpu")):
                item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
            elif is_async:
                item.add_marker(pytest.mark.timeout(ASYNC_TIMEOUT_S))


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Keep a test that changed the intra-op threads from slowing the next one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def loop_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fail the test in which the loop's own thread sleeps, waits for another thread or for a process.

    The call raises, and is remembered besides: the engine turns what a row's code raises into that row's failure.
    """
    seen: list[str] = []
    _refuse_on_loop(monkeypatch, seen, time, "sleep", lambda seconds, *_: seconds > 0)
    _refuse_on_loop(monkeypatch, seen, concurrent.futures.Future, "result", lambda future, *_: not future.done())
    _refuse_on_loop(monkeypatch, seen, queue.Queue, "get", lambda items, block=True, *_: block and items.empty())
    _refuse_on_loop(monkeypatch, seen, threading.Thread, "join", _join_blocks)
    _refuse_on_loop(monkeypatch, seen, subprocess.Popen, "wait", lambda child, *_: child.poll() is None)
    _refuse_on_loop(monkeypatch, seen, subprocess.Popen, "communicate", lambda child, *_: child.poll() is None)
    yield seen
    assert seen == [], "calls that block were made on the event loop's thread"


def _join_blocks(thread: threading.Thread, *_: object) -> bool:
    # A loop that closes joins the thread that has shut its executor down; that thread is at its end.
    return thread.is_alive() and "(_do_shutdown)" not in thread.name


def _refuse_on_loop(
    monkeypatch: pytest.MonkeyPatch, seen: list[str], owner: Any, name: str, blocks: Callable[..., bool]
) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if asyncio._get_running_loop() is not None and blocks(*args):
            seen.append(f"{owner.__name__}.{name}")
            raise LoopBlocked(f"{owner.__name__}.{name} was called on the event loop's thread")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, guarded)


def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no NVIDIA GPU answers here"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of 2 layers and 300 ids, whose greedy choices are well apart."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() >= 2:
                param.mul_(8.0)
    path = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def byte_level() -> Callable[[], Tokenizer]:
    """Makes tokenizers with a token a byte, to which a test adds its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def make() -> Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(alphabet)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        return made

    return make
