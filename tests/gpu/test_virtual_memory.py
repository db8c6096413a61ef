"""Reserved device memory: fixed addresses, backed piece by piece."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


@pytest.mark.usefixtures("device_alone")
def test_a_reserved_range_is_backed_without_moving_and_given_back() -> None:
    from slipstream.streams.virtual_memory import ReservedMemory

    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    memory = ReservedMemory(8 << 30, device)
    memory.back(1 << 20)
    whole = memory.whole()
    address = whole.data_ptr()
    whole[: 1 << 20].fill_(7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole[: 1 << 20].add_(1)
    memory.back(1 << 30)
    assert whole.data_ptr() == address
    whole[1 << 20 : 1 << 30].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert int(whole[0]) == 8
    assert int(whole[(1 << 30) - 1]) == 0
    # Beside the range there are the graph's pool and what the context grew by: 70 MiB were seen.
    assert free - torch.cuda.mem_get_info()[0] < (1 << 30) + (160 << 20)
    del graph, whole, memory
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] < 160 << 20


def test_more_than_the_card_has_raises_and_keeps_what_was_backed() -> None:
    from slipstream.streams.virtual_memory import ReservedMemory

    device = torch.device("cuda", 0)
    total = torch.cuda.mem_get_info()[1]
    memory = ReservedMemory(2 * total, device)
    memory.back(1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        memory.back(2 * total - (1 << 22))
    whole = memory.whole()
    whole[: 1 << 20].fill_(3)
    assert int(whole[5]) == 3
