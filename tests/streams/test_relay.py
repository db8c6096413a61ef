from __future__ import annotations

import pytest
import torch

from slipstream.streams.relay import Relay


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_row_reads_what_it_was_given_last(dtype: torch.dtype) -> None:
    relay = Relay(5, torch.device("cpu"), dtype=dtype)
    relay.scatter(torch.tensor([3, 1]), torch.tensor([30, 10]))
    relay.scatter(torch.tensor([1]), torch.tensor([11]))
    ids = relay.gather(torch.tensor([1, 3, 2]))
    assert ids.dtype == dtype
    assert ids.tolist() == [11, 30, 0]


def test_padded_rows_write_to_row_0_and_disturb_nobody() -> None:
    relay = Relay(3, torch.device("cpu"))
    relay.scatter(torch.tensor([2, 0, 0]), torch.tensor([9, 7, 8]))
    assert relay.gather(torch.tensor([1, 2])).tolist() == [0, 9]
    assert relay.gather(torch.tensor([0])).item() in {7, 8}


def test_gather_fills_a_static_buffer_from_int32_rows() -> None:
    relay = Relay(4, torch.device("cpu"))
    relay.scatter(torch.tensor([2]), torch.tensor([5]))
    out = torch.full((2,), -1)
    assert relay.gather(torch.tensor([2, 0], dtype=torch.int32), out=out) is out
    assert out.tolist() == [5, 0]
