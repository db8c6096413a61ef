from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from slipstream.streams.breakable_graph import BreakableGraph, GraphBreaks
from slipstream.streams.errors import MisuseError
from slipstream.streams.graph import CapturedGraph, GraphPool
from slipstream.streams.tensor_tree import copy_into, map_tensors

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    logits: torch.Tensor
    pairs: list[Pair]
    note: str


def make_output(value: float) -> Output:
    tensor = torch.full((2,), value)
    return Output(logits=tensor, pairs=[Pair(tensor + 1, tensor + 2)], note="kept")


def test_copying_reaches_every_tensor_and_keeps_the_addresses() -> None:
    target = make_output(0.0)
    address = target.pairs[0].right.data_ptr()
    copy_into(target, make_output(5.0))
    assert target.logits.tolist() == [5.0, 5.0]
    assert target.pairs[0].right.tolist() == [7.0, 7.0]
    assert target.pairs[0].right.data_ptr() == address


def test_mapping_rebuilds_the_same_structure() -> None:
    doubled = map_tensors({"out": make_output(1.0), "more": (torch.ones(1), 3)}, lambda tensor: tensor * 2)
    assert doubled["out"].pairs[0].left.tolist() == [4.0, 4.0]
    assert doubled["out"].note == "kept"
    assert doubled["more"][1] == 3


@pytest.mark.parametrize("new", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), None, [torch.zeros(2)] * 2])
def test_an_output_that_changes_its_form_is_misuse(new: object) -> None:
    with pytest.raises(MisuseError, match="changed its form"):
        copy_into(torch.zeros(2), new)


def test_the_twin_of_a_graph_replays_on_static_buffers_into_a_static_output() -> None:
    static = torch.zeros(3)
    pool = GraphPool(CPU)
    graph = CapturedGraph(lambda: {"out": static * 2}, pool)
    address = graph.output["out"].data_ptr()
    static.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert graph.output["out"].tolist() == [0.0, 0.0, 0.0]
    assert graph.replay()["out"].tolist() == [2.0, 4.0, 6.0]
    assert graph.output["out"].data_ptr() == address
    assert pool.growth_bytes == 0


def two_layers(attend: Callable[..., torch.Tensor], static: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x → 2x+1 → attend → residual, twice: the residual crosses a break."""
    hidden = static
    for _ in range(2):
        projected = hidden * 2 + 1
        hidden = projected + attend(projected, scale=scale)
    return hidden


def expected(static: torch.Tensor, scale: float, length: int) -> torch.Tensor:
    hidden = static
    for _ in range(2):
        projected = hidden * 2 + 1
        attended = projected * scale
        attended[length:] = 0
        hidden = projected + attended
    return hidden


@pytest.mark.parametrize("size", [1, 5, 64])
def test_breaks_run_live_at_each_replay_between_the_segments(size: int) -> None:
    breaks = GraphBreaks(CPU)
    live = {"length": size}
    scale = torch.tensor(3.0)

    @breaks.eager_on_graph
    def attend(values: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(values)
        out[: live["length"]] = values[: live["length"]] * scale
        return out

    static = torch.zeros(size)
    graph = BreakableGraph(lambda: two_layers(attend, static, scale), GraphPool(CPU), breaks)
    assert graph.num_breaks == 2
    for step in range(1, 4):
        static.copy_(torch.arange(size) + float(step))
        live["length"] = max(1, size - step)
        assert torch.equal(graph.replay(), expected(static.clone(), 3.0, live["length"]))


def test_a_break_outside_a_capture_is_a_plain_call() -> None:
    breaks = GraphBreaks(CPU)
    seen: list[torch.Tensor] = []
    double = breaks.eager_on_graph(lambda values: seen.append(values) or values * 2)  # type: ignore[func-returns-value]
    values = torch.ones(2)
    assert double(values).tolist() == [2.0, 2.0]
    assert seen[0] is values
    assert breaks.arena.nbytes == 0


def test_what_crosses_a_break_has_the_same_address_at_every_replay_and_graph() -> None:
    breaks = GraphBreaks(CPU)
    seen: list[int] = []

    @breaks.eager_on_graph
    def attend(values: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        seen.append(values.data_ptr())
        return values * scale

    pool, scale = GraphPool(CPU), torch.tensor(1.0)
    large, small = torch.zeros(64), torch.zeros(8)
    first = BreakableGraph(lambda: two_layers(attend, large, scale), pool, breaks, warmups=0)
    nbytes = breaks.arena.nbytes
    second = BreakableGraph(lambda: two_layers(attend, small, scale), pool, breaks, warmups=0)
    first.replay()
    second.replay()
    assert len(set(seen)) == 1
    assert breaks.arena.nbytes == nbytes, "layers and smaller buckets share the arena of the largest"


def test_a_larger_graph_captured_later_does_not_break_an_earlier_one() -> None:
    breaks = GraphBreaks(CPU)
    attend = breaks.eager_on_graph(lambda values, *, scale: values * scale)
    pool, scale = GraphPool(CPU), torch.tensor(1.0)
    small, large = torch.ones(4), torch.ones(4096)
    first = BreakableGraph(lambda: two_layers(attend, small, scale), pool, breaks)
    second = BreakableGraph(lambda: two_layers(attend, large, scale), pool, breaks)
    for graph, static in ((first, small), (second, large), (first, small)):
        static.add_(1)
        assert torch.equal(graph.replay(), expected(static.clone(), 1.0, static.numel()))


def test_inputs_of_a_break_are_held_when_nobody_else_does() -> None:
    breaks = GraphBreaks(CPU)

    @breaks.eager_on_graph
    def attend(values: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return values * scale

    static = torch.ones(4)
    graph = BreakableGraph(lambda: attend(static + 1, scale=torch.full((1,), 3.0)), GraphPool(CPU), breaks)
    churn = [torch.full((1,), 9.0) for _ in range(100)]
    assert graph.replay().tolist() == [6.0] * 4
    del churn


def test_a_result_is_not_overwritten_by_the_next_break() -> None:
    breaks = GraphBreaks(CPU)
    add = breaks.eager_on_graph(lambda values, amount: values + amount)
    static = torch.zeros(2)

    def run() -> torch.Tensor:
        first = add(static, 1)
        second = add(static, 10)
        return first * 100 + second

    graph = BreakableGraph(run, GraphPool(CPU), breaks)
    static.fill_(1)
    assert graph.replay().tolist() == [211.0, 211.0]


def test_breaks_may_return_several_tensors_or_nothing() -> None:
    breaks = GraphBreaks(CPU)
    cache = torch.zeros(3)

    @breaks.eager_on_graph
    def write(values: torch.Tensor) -> None:
        cache.copy_(values)

    @breaks.eager_on_graph
    def split(values: torch.Tensor) -> Pair:
        return Pair(values + 1, (values * 2).to(torch.int64))

    static = torch.zeros(3)

    def run() -> torch.Tensor:
        write(static * 5)
        pair = split(static)
        return pair.left + pair.right

    graph = BreakableGraph(run, GraphPool(CPU), breaks)
    static.fill_(2)
    assert graph.replay().tolist() == [7.0] * 3
    assert cache.tolist() == [10.0] * 3


def test_the_whole_forward_as_one_break_is_the_debug_mode() -> None:
    breaks = GraphBreaks(CPU)
    calls: list[float] = []
    attend = breaks.eager_on_graph(lambda values, *, scale: values * scale)
    static, scale = torch.ones(4), torch.tensor(2.0)

    def forward() -> torch.Tensor:
        calls.append(float(static[0]))
        return two_layers(attend, static, scale)

    graph = BreakableGraph(breaks.eager_on_graph(forward), GraphPool(CPU), breaks)
    assert graph.num_breaks == 1, "a break within a break is part of it"
    static.fill_(3)
    assert torch.equal(graph.replay(), expected(static.clone(), 2.0, 4))
    assert calls[-1] == 3.0


def test_an_error_during_the_capture_comes_through_and_leaves_the_break_points_usable() -> None:
    breaks = GraphBreaks(CPU)

    @breaks.eager_on_graph
    def attend(values: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        if scale.item() < 0:
            raise ValueError("negative scale")
        return values * scale

    static = torch.ones(2)
    with pytest.raises(ValueError, match="negative scale"):
        BreakableGraph(lambda: attend(static, scale=torch.tensor(-1.0)), GraphPool(CPU), breaks, warmups=0)
    graph = BreakableGraph(lambda: attend(static, scale=torch.tensor(2.0)), GraphPool(CPU), breaks)
    assert graph.replay().tolist() == [2.0, 2.0]


def test_a_replay_that_meets_other_breaks_than_its_capture_is_misuse() -> None:
    breaks = GraphBreaks(CPU)
    add = breaks.eager_on_graph(lambda values: values + 1)
    double = breaks.eager_on_graph(lambda values: values * 2)
    static, order = torch.ones(2), [add, double]
    graph = BreakableGraph(lambda: [step(static) for step in order][-1], GraphPool(CPU), breaks)
    order.reverse()
    with pytest.raises(MisuseError, match="other breaks"):
        graph.replay()
    order.pop()
    order[:] = [add]
    with pytest.raises(MisuseError, match="fewer breaks"):
        graph.replay()


def test_a_body_that_changes_the_shape_of_its_result_is_misuse() -> None:
    breaks = GraphBreaks(CPU)
    live = {"length": 4}
    cut = breaks.eager_on_graph(lambda values: values[: live["length"]])
    static = torch.ones(4)
    graph = BreakableGraph(lambda: cut(static), GraphPool(CPU), breaks)
    live["length"] = 2
    with pytest.raises(MisuseError, match="changed its form"):
        graph.replay()


# --- what is captured, with CUDA graphs faked ----------------------------------------------------


class FakeGraph:
    """A captured segment that does nothing but tell what happens to it."""

    def __init__(self, log: list[str], number: int) -> None:
        self.log = log
        self.number = number
        log.append(f"begin {number}")

    def capture_end(self) -> None:
        self.log.append(f"end {self.number}")
        if self.number == 0:
            warnings.warn("The CUDA Graph is empty. This usually means …", UserWarning, stacklevel=1)

    def replay(self) -> None:
        self.log.append(f"replay {self.number}")


class FakePool(GraphPool):
    def __init__(self) -> None:
        super().__init__(CPU)
        self.log: list[str] = []
        self.num_begun = 0

    @property
    def on_cuda(self) -> bool:
        return True

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def begin_segment(self) -> Any:
        self.num_begun += 1
        return FakeGraph(self.log, self.num_begun - 1)


def test_a_capture_alternates_segments_and_bodies_and_drops_an_empty_segment() -> None:
    breaks, pool = GraphBreaks(CPU), FakePool()
    body = breaks.eager_on_graph(lambda values: pool.log.append("body") or values + 1)  # type: ignore[func-returns-value]
    graph = BreakableGraph(lambda: body(body(torch.zeros(2))), pool, breaks, warmups=0)
    captured = ["begin 0", "end 0", "body", "begin 1", "end 1", "replay 1", "body", "begin 2", "end 2", "replay 2"]
    assert pool.log == captured
    assert (graph.num_segments, graph.num_breaks) == (2, 2)
    pool.log.clear()
    graph.replay()
    assert pool.log == ["body", "replay 1", "body", "replay 2"]


def test_an_error_behind_a_break_ends_the_open_segment_and_an_error_in_its_body_has_none_to_end() -> None:
    def fail(values: torch.Tensor) -> torch.Tensor:
        raise ValueError("the cause")

    breaks, pool = GraphBreaks(CPU), FakePool()
    body = breaks.eager_on_graph(lambda values: values + 1)
    with pytest.raises(ValueError, match="the cause"):
        BreakableGraph(lambda: fail(body(torch.zeros(2))), pool, breaks, warmups=0)
    assert pool.log[-2:] == ["begin 1", "end 1"]
    broken = breaks.eager_on_graph(fail)
    pool.log.clear()
    with pytest.raises(ValueError, match="the cause"):
        BreakableGraph(lambda: broken(torch.zeros(2)), pool, breaks, warmups=0)
    assert pool.log == ["begin 2", "end 2", "replay 2"]
