"""What the tests on the card have in common: shapes to run, and that a mode left behind fails no other test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_OF_NO_CONCERN = (
    # torch says that the mode which forbids waiting does not see every wait; it is asked for here.
    "ignore:Synchronization debug mode",
    "ignore:Warning. Profiler clears events",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            for warning in _OF_NO_CONCERN:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def waiting_is_allowed_again() -> Iterator[None]:
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def device_alone() -> None:
    """For tests that count what is free of the whole device: other processes would be counted with them."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("counts what is free of the whole device: run it without -n")


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes folders with a small Qwen3 shape for dummy weights, head_dim 128, q and k norms: `qwen3_folder(**changes)`."""

    def make(**changes: object) -> Path:
        folder = tmp_path_factory.mktemp("qwen3")
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 5003,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
