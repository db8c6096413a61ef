"""The page translation of a step is made once, and what the step writes lies in its window, in every layer."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.forward.kv_loc_plan import KVLocPlan
from slipstream.engine.forward.model_runner import ModelRunner
from slipstream.engine.sampling_params import SamplingParams


@pytest.fixture
def config(folder) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        skip_tokenizer=True,
        page_size=4,
        max_total_tokens=256,
        max_running_requests=4,
        chunked_prefill_size=8,
    )


async def test_a_step_is_translated_once_and_writes_its_window_and_nothing_else(config, monkeypatch) -> None:
    translations: list[int] = []
    steps: list[bool] = []
    translate, real = KVLocPlan.make, ModelRunner.forward

    def counted(*args, **kwargs):
        translations.append(1)
        return translate(*args, **kwargs)

    def watched(self, batch, staged):
        pool = self.kv_pool
        before = [layer.clone() for layer in (*pool.key_slots, *pool.value_slots)]
        translations.clear()
        result = real(self, batch, staged)
        plan = result[0].kv_loc
        window = set(plan.slots.tolist())
        # The torch backend zeroes what it begins to fill; page 0 is padding.
        begun = {slot // 4 for slot in window}
        for old, new in zip(before, (*pool.key_slots, *pool.value_slots), strict=True):
            changed = {int(slot) for slot in (old != new).any(dim=2).any(dim=1).nonzero().flatten()}
            assert all(new[slot].any() for slot in window)
            assert all(slot in window or slot // 4 in begun or not new[slot].any() for slot in changed)
        steps.append(len(translations) == 1 and len(plan.slots) == len(window) == batch.num_tokens)
        return result

    monkeypatch.setattr(KVLocPlan, "make", counted)
    monkeypatch.setattr(ModelRunner, "forward", watched)
    async with Engine(config) as engine:
        await engine.complete(list(range(5, 26)), SamplingParams(max_tokens=6, temperature=0.0))
    assert len(steps) > 8
    assert all(steps)


def test_a_window_is_the_pages_of_its_positions() -> None:
    table = torch.tensor([[0, 0, 0], [7, 3, 9]], dtype=torch.int32)
    plan = KVLocPlan.make(
        table,
        4,
        token_rows=torch.tensor([1, 1, 1], dtype=torch.int32),
        positions=torch.tensor([3, 4, 9], dtype=torch.int32),
    )
    assert plan.slots.tolist() == [7 * 4 + 3, 3 * 4, 9 * 4 + 1]
