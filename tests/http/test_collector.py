"""The cycle collector has nothing to do with requests, and stands still for what was there before them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from slipstream.http.choice import Choice
from slipstream.http.collector import FULL_EVERY, calm_collector
from slipstream.http.sse import SseResponse

BODY: dict[str, Any] = {"prompt": "the stones", "max_tokens": 6, "ignore_eos": True}


def test_what_was_there_is_not_walked_while_it_lasts_and_is_afterwards() -> None:
    before = gc.get_threshold()
    own: list[object] = []
    with calm_collector():
        assert not any(each is own for each in gc.get_objects())
        assert gc.get_threshold() == (*before[:2], FULL_EVERY)
    assert any(each is own for each in gc.get_objects())
    assert gc.get_threshold() == before


def test_the_collector_is_as_it_was_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="served badly"), calm_collector():
        raise ValueError("served badly")
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("ends", ["finished", "hung up"])
@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {}], ids=["one", "three", "whole"])
async def test_a_request_that_is_over_leaves_no_cycles(serving: Any, fields: dict[str, Any], ends: str) -> None:
    async with serving() as served:
        await served.post("/v1/completions", BODY | fields)  # whatever is made once
        gc.collect()
        gc.disable()
        try:
            client = await served.connect()
            await client.send(
                "POST", "/v1/completions", BODY | fields | {"max_tokens": 6 if ends == "finished" else 480}
            )
            if ends == "finished":
                await client.answer()
            else:
                async with asyncio.timeout(3):
                    while not served.engine.stats.num_running:
                        await asyncio.sleep(0)
            client.close()
            await served.idle()
            await served.server.responses_written(1)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    ours = {Choice.__name__, SseResponse.__name__, "Request", "Submission", "ServedConnection", "RequestResponseCycle"}
    assert not left & ours
