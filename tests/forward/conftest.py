"""A tiny random checkpoint for the worker, made by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tiny_llama: Path) -> Path:
    return tiny_llama


@pytest.fixture(scope="session")
def greedy(folder: Path):
    """Greedy continuation by transformers: `greedy(prompt, count) -> ids`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return out[0, len(prompt) :].tolist()

    return generate


@pytest.fixture
def engine(folder: Path):
    """Makes engines on the tiny Llama, with small chunks and pages: `engine(**settings)`."""

    def make(**settings: object) -> Engine:
        return Engine(
            EngineConfig(
                **{
                    "model": str(folder),
                    "device": "cpu",
                    "dtype": "float32",
                    "cpu_threads": 1,
                    "max_running_requests": 8,
                    "max_total_tokens": 1024,
                    "skip_tokenizer": True,
                    "chunked_prefill_size": 16,
                    "page_size": 4,
                    **settings,
                }
            )
        )

    return make
