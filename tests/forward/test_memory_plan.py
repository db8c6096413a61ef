"""How big the pool becomes and how long sequences may be."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.errors import ConfigError
from slipstream.engine.forward.kv_pool import KVPool, KVShape
from slipstream.engine.forward.memory_plan import DeviceMemory, MemoryPlan, device_memory, longest_sequence
from slipstream.engine.forward.placement import Placement, has_fast_half
from slipstream.engine.loader.model_config import ModelConfig

MIB = 1 << 20
MODEL = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "torch_dtype": "bfloat16",
    }
)


def plan(*, free_mib=1000, used_mib=0, limit_mib=None, bytes_per_token=1024, **settings):
    config = EngineConfig(model="m", **settings)
    limit = None if limit_mib is None else limit_mib * MIB
    memory = DeviceMemory(total_bytes=free_mib * MIB, used_bytes=used_mib * MIB, limit_bytes=limit)
    return MemoryPlan.make(config, MODEL, bytes_per_token=bytes_per_token, memory=memory)


def test_the_pool_takes_the_fraction_of_what_is_free():
    made = plan(free_mib=100, kv_memory_fraction=0.5, page_size=16)
    assert made.pool_bytes <= 50 * MIB < made.pool_bytes + 2 * 16 * 1024
    assert made.max_model_len == 1024
    assert made.max_pages_per_row == 64


def test_the_pool_is_never_larger_than_all_rows_at_their_longest():
    made = plan(free_mib=100_000, max_running_requests=3, max_model_len=100, page_size=16)
    assert made.num_pages == 3 * 7


def test_a_limit_on_what_is_taken_unasked_holds_for_the_fraction_only():
    assert plan(limit_mib=10).pool_bytes <= 10 * MIB
    assert plan(limit_mib=10, max_total_tokens=50_000).num_pages == 50_000 // 16


def test_a_small_pool_shortens_the_sequences_unless_their_length_was_asked_for():
    assert plan(max_total_tokens=300).max_model_len == 18 * 16
    with pytest.raises(ConfigError, match="does not fit the KV pool") as caught:
        plan(max_total_tokens=300, max_model_len=400)
    assert caught.value.field == "max_model_len"


def test_a_pool_without_a_page_is_refused_by_the_setting_that_made_it_so():
    with pytest.raises(ConfigError, match="less than a page") as caught:
        plan(max_total_tokens=15)
    assert caught.value.field == "max_total_tokens"
    with pytest.raises(ConfigError, match="no room for a KV page") as caught:
        plan(free_mib=0)
    assert caught.value.field == "kv_memory_fraction"


def test_sequences_longer_than_the_model_was_made_for_are_refused():
    assert longest_sequence(EngineConfig(model="m"), MODEL) == 1024
    with pytest.raises(ConfigError, match="above the model's 1024") as caught:
        longest_sequence(EngineConfig(model="m", max_model_len=1025), MODEL)
    assert caught.value.field == "max_model_len"


def test_what_is_used_already_counts_against_the_fraction_and_the_refusal_says_what_would_do():
    made = plan(free_mib=100, used_mib=30, kv_memory_fraction=0.5, page_size=16)
    assert made.pool_bytes <= 20 * MIB < made.pool_bytes + 2 * 16 * 1024
    with pytest.raises(ConfigError, match=r"60 of 100 MiB are used.*0\.60 would do"):
        plan(free_mib=100, used_mib=60, kv_memory_fraction=0.5, page_size=16)


def test_the_cpu_has_memory_and_a_limit():
    memory = device_memory(torch.device("cpu"))
    assert memory.total_bytes > 0
    assert memory.used_bytes == 0
    assert memory.limit_bytes is not None


def test_the_pool_holds_zeros_by_page_and_by_slot():
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    assert shape.bytes_per_token == 2 * 2 * 3 * 8 * 2
    pool = KVPool(shape, num_pages=5, page_size=4, device=torch.device("cpu"))
    assert pool.num_bytes == 6 * 4 * shape.bytes_per_token
    assert pool.num_bytes == sum(layer.nbytes for layer in (*pool.keys, *pool.values))
    pool.key_slots[1][3 * 4 + 2] = 7.0
    assert float(pool.keys[1][3, 2].sum()) == 7.0 * 3 * 8
    keys, values = pool.gather(1, torch.tensor([3, 0, 1, 2]), 2)
    assert keys.shape == (2, 8, 3, 8)
    assert float(keys[0, 2].sum()) == 7.0 * 3 * 8
    assert float(values.abs().sum()) == 0.0


def test_dtype_auto_is_the_checkpoints_where_the_cpu_is_fast_with_it():
    placed = Placement.resolve(EngineConfig(model="m", device="cpu", cpu_threads=2), MODEL)
    assert placed.device.type == "cpu"
    assert placed.dtype == (torch.bfloat16 if has_fast_half(torch.bfloat16) else torch.float32)
    assert placed.num_threads == 2
    asked = Placement.resolve(EngineConfig(model="m", device="cpu", dtype="float16"), MODEL)
    assert asked.dtype == torch.float16
    assert asked.num_threads >= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_asking_for_cuda_where_there_is_none_is_refused():
    with pytest.raises(ConfigError, match="finds no CUDA device") as caught:
        Placement.resolve(EngineConfig(model="m", device="cuda"), MODEL)
    assert caught.value.field == "device"
