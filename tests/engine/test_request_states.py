"""The state table of a request."""

from __future__ import annotations

import itertools

import pytest

from slipstream import SamplingParams
from slipstream.engine.errors import MisuseError
from slipstream.engine.request import TRANSITIONS, Request, RequestState
from slipstream.engine.scheduler.schedule_batch import RowSampling

ALLOWED = {
    ("waiting", "running"),
    ("waiting", "finished"),
    ("waiting", "failed"),
    ("waiting", "cancelled"),
    ("running", "waiting"),
    ("running", "finished"),
    ("running", "failed"),
    ("running", "cancelled"),
}


def request_in(state: RequestState) -> Request:
    request = Request(
        request_id="r",
        prompt_ids=[1, 2, 3],
        params=SamplingParams(),
        sampling=RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        stop_ids=frozenset(),
        max_total_tokens=8,
        sink=None,  # type: ignore[arg-type]
    )
    request.state = state
    return request


@pytest.mark.parametrize(("source", "target"), list(itertools.product(RequestState, RequestState)))
def test_only_the_moves_of_the_table_are_made(source: RequestState, target: RequestState) -> None:
    request = request_in(source)
    if (source.value, target.value) in ALLOWED:
        request.move(target)
        assert request.state is target
    else:
        with pytest.raises(MisuseError, match="cannot go from"):
            request.move(target)
        assert request.state is source


def test_an_end_is_final() -> None:
    ends = {state for state in RequestState if request_in(state).has_ended}
    assert ends == {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}
    assert all(not TRANSITIONS[state] for state in ends)


def test_the_newest_output_is_never_counted_as_computed() -> None:
    request = request_in(RequestState.RUNNING)
    request.num_prefilled = 2
    assert request.num_computed == 2
    request.num_prefilled, request.prefill_committed = 3, True
    request.ids.extend([7, 8])
    assert (request.num_computed, request.num_outputs) == (4, 2)
    assert "outputs=2" in repr(request)
