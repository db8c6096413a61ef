"""Engines over scripts, and sinks that remember."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from slipstream.engine.engine import Engine
from slipstream.engine.outputs import End
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits


class Recorder:
    """A sink that keeps everything and insists on one end, after the tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.ends: list[End] = []
        self.has_token = asyncio.Event()
        self.has_end = asyncio.Event()

    def push(self, token_ids: Sequence[int], text: str) -> None:
        assert not self.ends, "a token after the end"
        self.token_ids.extend(token_ids)
        self.text += text
        self.has_token.set()

    def end(self, end: End) -> None:
        assert not self.ends, "a second end"
        self.ends.append(end)
        self.has_end.set()


@pytest.fixture
def recorder() -> Callable[[], Recorder]:
    return Recorder


@pytest.fixture
def scripted() -> Callable[..., Engine]:
    """A factory of engines over a script that prove the laws of ownership after every step."""

    def make(
        script: Script | None = None,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        num_rows: int = 8,
        max_model_len: int | None = None,
        vocab_size: int = 31,
        **settings: object,
    ) -> Engine:
        limits = WorkerLimits(
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            max_model_len=max_model_len or num_pages * page_size,
            vocab_size=vocab_size,
        )
        settings.setdefault("page_size", page_size)
        engine = Engine.on(ScriptedWorker(limits, script), **settings)  # type: ignore[arg-type]
        engine.proves_laws = True
        return engine

    return make


@pytest.fixture
def turns() -> Callable[[int], object]:
    async def pass_turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    return pass_turns
