"""Captured graphs, full and breakable, on the card."""

from __future__ import annotations

import threading

import pytest
import torch

from slipstream.streams.breakable_graph import BreakableGraph, GraphBreaks
from slipstream.streams.cuda_lane import CudaLane
from slipstream.streams.graph import CapturedGraph, GraphPool
from slipstream.streams.stream_ring import distinct_streams

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CYCLES_10_MS = 20_000_000  # at about 2 GHz; tests need "long", not "exactly"


def sleep_10_ms() -> None:
    torch.cuda._sleep(CYCLES_10_MS)


# --- full graphs ---------------------------------------------------------------------------------


def test_graphs_of_one_pool_replay_in_any_order_on_their_static_inputs() -> None:
    pool = GraphPool(CUDA)
    weight = torch.randn(64, 64, device=CUDA, dtype=torch.float64)
    statics = [torch.zeros(rows, 64, device=CUDA, dtype=torch.float64) for rows in (128, 32, 8)]
    graphs = [CapturedGraph(lambda static=static: (static @ weight).relu() @ weight, pool) for static in statics]
    for number in (0, 2, 1, 1, 0):
        statics[number].normal_()
        expected = (statics[number] @ weight).relu() @ weight
        torch.testing.assert_close(graphs[number].replay(), expected)
    assert len(pool.costs) == 3
    assert pool.growth_bytes >= 0
    assert all(cost.seconds > 0 for cost in pool.costs)


def test_a_graph_is_computed_once_it_is_captured() -> None:
    static = torch.full((4,), 3.0, device=CUDA)
    graph = CapturedGraph(lambda: static * 2, GraphPool(CUDA))
    assert graph.output.tolist() == [6.0] * 4


def test_a_capture_that_fails_raises_its_cause_and_the_next_one_works() -> None:
    pool = GraphPool(CUDA)
    static = torch.ones(4, device=CUDA)

    def fail() -> torch.Tensor:
        torch.mul(static, 2)
        raise ValueError("bucket 4 does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        CapturedGraph(fail, pool, warmups=0)
    assert CapturedGraph(lambda: static + 1, pool).replay().tolist() == [2.0] * 4


def test_a_capture_does_not_mind_a_thread_that_waits_for_events_meanwhile() -> None:
    (stream,) = distinct_streams(1, CUDA)
    static = torch.ones(4, device=CUDA)
    seen: list[bool] = []

    def wait_elsewhere() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        event.synchronize()
        seen.append(event.query())

    def run() -> torch.Tensor:
        thread = threading.Thread(target=wait_elsewhere)
        thread.start()
        thread.join()
        return static + 1

    graph = CapturedGraph(run, GraphPool(CUDA), warmups=0)
    assert seen == [True]
    assert graph.replay().tolist() == [2.0] * 4


# --- breakable graphs ----------------------------------------------------------------------------


class TwoLayers:
    """x → matmul → eager attend (live length, padded tail zeroed) → residual, twice."""

    def __init__(self, breaks: GraphBreaks) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(32, 32, device=CUDA, dtype=torch.float64) / 6
        self.scale = torch.tensor(2.0, device=CUDA, dtype=torch.float64)
        self.length = 0
        self.addresses: set[int] = set()
        self.attend = breaks.eager_on_graph(self._attend)

    def _attend(self, values: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        self.addresses.add(values.data_ptr())
        out = torch.zeros_like(values)
        out[: self.length] = torch.cumsum(values[: self.length], dim=0) * scale
        return out

    def __call__(self, static: torch.Tensor) -> torch.Tensor:
        hidden = static
        for _ in range(2):
            projected = (hidden @ self.weight).tanh()
            hidden = hidden + projected + self.attend(projected * 1.0, scale=self.scale)
        return hidden


def check_replay(graph: BreakableGraph[torch.Tensor], model: TwoLayers, static: torch.Tensor, length: int) -> None:
    static.normal_()
    model.length = length
    torch.testing.assert_close(graph.replay().clone(), model(static))


def test_breakable_graphs_of_many_buckets_equal_eager_in_any_order() -> None:
    breaks = GraphBreaks(CUDA)
    model, pool = TwoLayers(breaks), GraphPool(CUDA)
    statics = [torch.zeros(rows, 32, device=CUDA, dtype=torch.float64) for rows in (256, 64, 16)]
    graphs = []
    for static in statics:
        model.length = static.shape[0]
        graphs.append(BreakableGraph(lambda static=static: model(static), pool, breaks))
        churn = [torch.full((rows, 32), float("nan"), device=CUDA) for rows in (256, 64, 16, 256, 64)]
        del churn  # dirty blocks for whoever reads memory that is not his
    assert [graph.num_breaks for graph in graphs] == [2, 2, 2]
    assert [graph.num_segments for graph in graphs] == [3, 3, 3]
    for number, length in ((0, 256), (2, 16), (1, 40), (0, 7), (2, 1), (1, 64), (0, 200)):
        check_replay(graphs[number], model, statics[number], length)
    assert len(pool.costs) == 3


def test_a_later_capture_does_not_take_the_memory_of_a_break() -> None:
    breaks = GraphBreaks(CUDA)
    model, pool = TwoLayers(breaks), GraphPool(CUDA)
    static = torch.zeros(64, 32, device=CUDA, dtype=torch.float64)
    model.length = 64
    first = BreakableGraph(lambda: model(static), pool, breaks)
    others = [
        CapturedGraph(lambda value=value: torch.full((64, 32), float(value), device=CUDA), pool) for value in range(8)
    ]
    check_replay(first, model, static, 50)
    for value, other in enumerate(others):
        assert (other.replay() == value).all()
        check_replay(first, model, static, 50)


def test_what_crosses_a_break_keeps_its_address() -> None:
    breaks = GraphBreaks(CUDA)
    model, pool = TwoLayers(breaks), GraphPool(CUDA)
    static = torch.zeros(64, 32, device=CUDA, dtype=torch.float64)
    model.length = 64
    graph = BreakableGraph(lambda: model(static), pool, breaks, warmups=1)
    model.addresses.clear()
    graph.replay()
    graph.replay()
    assert len(model.addresses) == 1, "both layers share one place of the arena"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_breakable_graph_replays_on_the_lane_that_calls_it_without_synchronising() -> None:
    lane = CudaLane("compute", CUDA)
    breaks = GraphBreaks(CUDA)
    model, pool = TwoLayers(breaks), GraphPool(CUDA)
    static = torch.zeros(64, 32, device=CUDA, dtype=torch.float64)
    model.length = 64
    graph = BreakableGraph(lambda: model(static), pool, breaks)
    static.normal_()
    expected = model(static)

    def replay() -> None:
        graph.replay()

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lane.submit(sleep_10_ms)
        lane.submit(replay)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not lane.fence().done()
    lane.synchronize_blocking()
    torch.testing.assert_close(graph.output, expected)
    lane.close()


def test_the_whole_forward_as_one_break_equals_eager() -> None:
    breaks = GraphBreaks(CUDA)
    model, pool = TwoLayers(breaks), GraphPool(CUDA)
    static = torch.zeros(16, 32, device=CUDA, dtype=torch.float64)
    model.length = 16
    graph = BreakableGraph(breaks.eager_on_graph(lambda: model(static)), pool, breaks)
    assert graph.num_breaks == 1
    assert graph.num_segments == 1, "only the copy of the result out of the arena is captured"
    check_replay(graph, model, static, 9)


def test_an_error_in_a_break_or_behind_it_comes_through_and_the_next_capture_works() -> None:
    breaks = GraphBreaks(CUDA)
    pool = GraphPool(CUDA)
    static = torch.ones(4, device=CUDA)

    @breaks.eager_on_graph
    def attend(values: torch.Tensor, factor: float) -> torch.Tensor:
        if factor < 0:
            raise ValueError("negative factor")
        return values * factor

    def fail_behind() -> torch.Tensor:
        result = attend(static + 1, 2.0)
        raise ValueError(f"behind the break of {tuple(result.shape)}")

    with pytest.raises(ValueError, match="negative factor"):
        BreakableGraph(lambda: attend(static + 1, -1.0), pool, breaks, warmups=0)
    with pytest.raises(ValueError, match="behind the break"):
        BreakableGraph(fail_behind, pool, breaks, warmups=0)
    graph = BreakableGraph(lambda: attend(static + 1, 3.0) + 1, pool, breaks)
    assert graph.replay().tolist() == [7.0] * 4
