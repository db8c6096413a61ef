"""Tiny random checkpoints by transformers, and a driver that runs steps on a ModelRunner without scheduler or lanes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.engine.config import EngineConfig
from slipstream.engine.forward.model_runner import ModelRunner
from slipstream.engine.forward.placement import Placement
from slipstream.engine.forward.staged_step import StagedStep, pack
from slipstream.engine.loader.model_config import ModelConfig
from slipstream.engine.scheduler.schedule_batch import RowSampling, RowStart, ScheduleBatch

SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-group-of-3": ("Llama", {"num_attention_heads": 6, "hidden_size": 96, "head_dim": 16}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-idle-window": ("Mistral", {"sliding_window": 256}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model of a kind, made on first use. Biases and norms are random too."""
    folders: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in folders:
            family, changes = KINDS[kind]
            config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for name, param in model.named_parameters():
                    if name.endswith("bias"):
                        param.normal_(0.0, 0.3)
                    elif param.dim() == 1:
                        param.uniform_(0.5, 1.5)
                    else:
                        param.mul_(4.0)  # the default init gives nearly flat logits
            folders[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folders[kind])
        return folders[kind]

    return make


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Path, Sequence[int]], torch.Tensor]:
    """What transformers computes for a whole sequence. Shapes: [T, vocab] fp32."""
    models: dict[Path, Any] = {}

    def logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
        if folder not in models:
            models[folder] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            return models[folder](torch.tensor([ids])).logits[0]

    return logits


class Stepper:
    """Runs steps by hand: keeps each row's length and pages, and hands pages out in a scattered order."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = EngineConfig(
            model=str(folder), device="cpu", cpu_threads=1, max_running_requests=8, max_total_tokens=2048, **settings
        )
        model_config = ModelConfig.from_folder(folder)
        placement = Placement.resolve(config, model_config)
        self.runner = ModelRunner.build_blocking(config, model_config, folder, placement)
        self.page_size = config.page_size
        order = torch.randperm(self.runner.memory.num_pages, generator=torch.Generator().manual_seed(1)) + 1
        self._free = order.tolist()
        self._lengths: dict[int, int] = {}
        self._num_pages: dict[int, int] = {}
        self._step = 0

    def step(self, *, decode: Mapping[int, int] | None = None, extend: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """One step: `decode` maps rows to the id each is fed through the relay, `extend` rows to new ids. Every row
        samples. Shapes: → logits [rows, vocab], decode rows first.
        """
        decode = decode or {}
        rows = (*decode, *extend)
        num_new = tuple([1] * len(decode) + [len(ids) for ids in extend.values()])
        num_prior = tuple(self._lengths.get(row, 0) for row in rows)
        writes: list[tuple[int, int, int]] = []
        for row, prior, new in zip(rows, num_prior, num_new, strict=True):
            self._lengths[row] = prior + new
            while self._num_pages.get(row, 0) * self.page_size < prior + new:
                column = self._num_pages.get(row, 0)
                writes.append((row, column, self._free.pop()))
                self._num_pages[row] = column + 1
        self._step += 1
        batch = ScheduleBatch(
            step=self._step,
            num_decode=len(decode),
            rows=rows,
            num_prior=num_prior,
            num_new=num_new,
            samples=(True,) * len(rows),
            extend_ids=_ints([token for ids in extend.values() for token in ids]),
            table_rows=_ints([write[0] for write in writes]),
            table_columns=_ints([write[1] for write in writes]),
            table_pages=_ints([write[2] for write in writes]),
            starts=tuple(RowStart(row=row, sampling=GREEDY) for row in extend),
        )
        packed, widths = pack(batch)
        staged = StagedStep.of(torch.frombuffer(packed, dtype=torch.int32).clone(), widths)
        with torch.inference_mode():
            if decode:
                relay = self.runner.row_state.relay
                relay.scatter(torch.tensor(list(decode)), torch.tensor(list(decode.values())))
            return self.runner.forward(batch, staged)[1].logits.clone()


def _ints(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


@pytest.fixture
def stepper() -> Callable[..., Stepper]:
    """Makes a Stepper: `stepper(folder, **settings)`."""
    return Stepper


@pytest.fixture(scope="session")
def kinds() -> Sequence[str]:
    return tuple(KINDS)
