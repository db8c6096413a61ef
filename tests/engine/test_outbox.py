"""The outbox: nothing waits for a slow consumer, and nothing is lost to it."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.engine.errors import MisuseError, RequestCancelled, StepFailed
from slipstream.engine.outbox import Outbox
from slipstream.engine.outputs import Cancelled, Failed, Finished, Usage

USAGE = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=2)
FINISHED = Finished(reason="length", stop_reason=None, usage=USAGE)


async def test_what_a_consumer_is_late_for_comes_as_one_delta() -> None:
    outbox = Outbox()
    outbox.push([1], "a")
    outbox.push([2, 3], "")
    outbox.push([4], "bc")
    assert (await outbox.take())[:3] == ((1, 2, 3, 4), "abc", None)
    outbox.push([5], "d")
    outbox.end(FINISHED)
    assert outbox.has_ended
    assert (await outbox.take())[:3] == ((5,), "d", FINISHED)


async def test_a_waiting_consumer_is_woken_by_the_first_token() -> None:
    outbox = Outbox()
    waiting = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.push([7], "")
    assert (await waiting)[:3] == ((7,), "", None)


async def test_an_end_without_tokens_is_a_delta_of_its_own() -> None:
    outbox = Outbox()
    waiting = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.end(FINISHED)
    assert (await waiting)[:3] == ((), "", FINISHED)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (Failed(error=StepFailed("broken"), usage=USAGE), StepFailed),
        (Cancelled(usage=USAGE), RequestCancelled),
    ],
)
async def test_tokens_come_before_the_error_that_followed_them(end, kind: type[Exception]) -> None:
    outbox = Outbox()
    outbox.push([1, 2], "ab")
    outbox.end(end)
    assert (await outbox.take())[:3] == ((1, 2), "ab", None)
    with pytest.raises(kind):
        await outbox.take()


async def test_a_cancelled_wait_loses_nothing() -> None:
    outbox = Outbox()
    waiting = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.push([1], "a")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    outbox.push([2], "b")
    assert (await outbox.take())[:3] == ((1, 2), "ab", None)


async def test_a_second_consumer_is_refused_and_the_first_goes_on() -> None:
    outbox = Outbox()
    first = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    with pytest.raises(MisuseError, match="two tasks"):
        await outbox.take()
    outbox.push([1], "")
    assert (await first).token_ids == (1,)


async def test_one_error_that_ends_two_requests_is_raised_as_two_objects() -> None:
    error = StepFailed("step 3 failed", step=3)
    raised = []
    for _ in range(2):
        outbox = Outbox()
        outbox.end(Failed(error=error, usage=USAGE))
        with pytest.raises(StepFailed, match="step 3 failed") as caught:
            await outbox.take()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert raised[0].step == raised[1].step == 3
    assert error.__traceback__ is None
