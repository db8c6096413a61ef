"""What goes wrong in the code of one request (its text, its consumer) ends that request and nobody else's."""

from __future__ import annotations

import asyncio

import pytest

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.errors import EngineDead, StepFailed
from slipstream.engine.outputs import Failed, Finished
from slipstream.engine.scripted_worker import Script

DEPTHS = pytest.mark.parametrize("overlap", [False, True])
PARAMS = SamplingParams(max_tokens=12, seed=1)


class BreakingText:
    """A request's text that raises at its third id, or when it ends, as a decoder might on an odd token."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.num_pushed = 0

    def push(self, token_id: int, *, looks_for_stops: bool = True) -> tuple[str, str | None]:
        self.num_pushed += 1
        if self.where == "push" and self.num_pushed == 3:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd byte")
        return "x", None

    def end_at(self, token_id: int) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd byte")

    def flush(self) -> str:
        if self.where == "flush":
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd byte")
        return ""


class BreakingSink:
    """A consumer that raises at its second token, or at its end."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.num_pushed = 0
        self.ends: list[object] = []

    def push(self, token_ids, text: str) -> None:
        self.num_pushed += 1
        if self.where == "push" and self.num_pushed == 2:
            raise ValueError("cannot take it")

    def end(self, end: object) -> None:
        self.ends.append(end)
        if self.where == "end":
            raise ValueError("cannot take the end")


@pytest.fixture
def told() -> list[object]:
    """What the event loop's exception handler hears; set by the test, from inside the loop."""
    heard: list[object] = []
    return heard


def listen(told: list[object]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))


async def witnesses(engine: Engine, recorder, count: int = 7) -> list:
    sinks = [recorder() for _ in range(count)]
    for number, sink in enumerate(sinks):
        engine.submit([number + 1, 2], PARAMS, sink)
    return sinks


def all_home(engine: Engine) -> bool:
    stats = engine.stats
    return stats.num_free_pages + stats.num_cached_pages == stats.num_pages and not stats.num_running


@DEPTHS
@pytest.mark.parametrize("where", ["push", "flush", "end_at"])
async def test_a_text_that_raises_fails_its_own_request(scripted, recorder, overlap: bool, where: str) -> None:
    async with scripted(Script(token_of=lambda seed, history: 9), num_pages=256, overlap=overlap) as engine:
        alone = (await engine.complete([1, 2], PARAMS)).token_ids
        stops = (9,) if where == "end_at" else ()
        unlucky, others = recorder(), await witnesses(engine, recorder)
        params = SamplingParams(max_tokens=12, seed=1, stop_token_ids=stops)
        engine.submit([30, 2], params, unlucky).request.text = BreakingText(where)
        await engine.drain(10)
        assert isinstance(unlucky.ends[0], Failed)
        assert isinstance(unlucky.ends[0].error, StepFailed)
        assert "odd byte" in str(unlucky.ends[0].error)
        assert all(isinstance(sink.ends[0], Finished) and tuple(sink.token_ids) == alone for sink in others)
        assert engine.death is None
        assert all_home(engine)


async def test_a_text_that_raises_when_its_deadline_passes_fails_alone(scripted, recorder, turns) -> None:
    async with scripted() as engine:
        unlucky, fine = recorder(), recorder()
        handle = engine.submit([1], SamplingParams(max_tokens=200), unlucky, deadline_s=1000)
        handle.request.text = BreakingText("flush")
        engine.submit([2], SamplingParams(max_tokens=60, seed=1), fine)
        await turns(8)
        engine._loop.clock = lambda: float("inf")
        await fine.has_end.wait()
        assert isinstance(unlucky.ends[0], Failed)
        assert isinstance(fine.ends[0], Finished)


@DEPTHS
@pytest.mark.parametrize("where", ["push", "end"])
async def test_a_consumer_that_raises_loses_its_own_request_only(
    scripted, recorder, told, overlap: bool, where: str
) -> None:
    async with scripted(num_pages=256, overlap=overlap) as engine:
        listen(told)
        alone = (await engine.complete([3, 2], PARAMS)).token_ids
        broken = BreakingSink(where)
        engine.submit([30, 2], PARAMS, broken)
        others = await witnesses(engine, recorder)
        await engine.drain(10)
        assert [type(error) for error in told] == [ValueError]
        assert len(broken.ends) == 1, "it still hears of its end, once"
        assert isinstance(broken.ends[0], Failed if where == "push" else Finished)
        assert broken.num_pushed == (2 if where == "push" else 12)
        assert all(isinstance(sink.ends[0], Finished) for sink in others)
        assert tuple(others[2].token_ids) == alone
        assert all_home(engine)


@pytest.mark.parametrize("how", ["death", "close", "drain", "abort"])
async def test_a_consumer_that_cannot_take_its_end_keeps_nobody_from_theirs(
    scripted, recorder, told, turns, how: str
) -> None:
    engine = scripted(Script(deadly_steps=frozenset({6}) if how == "death" else frozenset()), num_pages=256)
    await engine.start()
    listen(told)
    long = SamplingParams(max_tokens=200, seed=1)
    broken = [BreakingSink("end"), BreakingSink("end")]
    first = engine.submit([1], long, broken[0], request_id="shared")
    engine.submit([2], long, broken[1], request_id="shared")
    last = recorder()
    engine.submit([3], long, last, request_id="shared")
    await turns(6)
    if how == "drain":
        await engine.drain(0)
    elif how == "abort":
        assert engine.abort("shared") == 3
        first.abort()
    elif how == "death":
        await last.has_end.wait()
        assert isinstance(last.ends[0].error, EngineDead)
    await engine.aclose()
    assert len(last.ends) == 1
    assert [len(sink.ends) for sink in broken] == [1, 1]
    assert len(told) == 2
