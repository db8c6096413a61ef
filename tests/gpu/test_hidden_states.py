"""Hidden states on the card: out of decode and prefill graphs and of eager steps, against transformers and each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from slipstream import Completion, Engine, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

WIDTH, VOCAB = 256, 500
PROMPTS = [[(7 * place + start) % 490 + 5 for place in range(length)] for start, length in ((0, 300), (3, 1), (9, 33))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers, of a shape that the fused decoder serves."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def settings(folder: Path, **more: object) -> dict[str, object]:
    return {
        "model": str(folder),
        "skip_tokenizer": True,
        "max_total_tokens": 8192,
        "max_running_requests": 16,
        "chunked_prefill_size": 128,
        **more,
    }


def asking(mode: str, **more: object) -> SamplingParams:
    params = {"hidden_states": mode, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **more}
    return SamplingParams(**params)  # type: ignore[arg-type]


def tensor_of(answer: Completion) -> torch.Tensor:
    states = answer.hidden_states
    assert states is not None
    return torch.frombuffer(bytearray(states.values), dtype=torch.float32).view(-1, states.size)


def answers(how: dict[str, object], mode: str) -> tuple[list[Completion], dict[str, int]]:
    """Of every prompt, twice at the same time beside requests that ask for none; and what computed it."""

    async def run() -> tuple[list[Completion], dict[str, int]]:
        async with Engine(**how) as engine:
            jobs = [engine.complete(prompt, asking(each)) for prompt in PROMPTS for each in (mode, "none")]
            found = await asyncio.gather(*jobs)
            return found[::2], {**engine.num_forwards, "above": engine.stats.num_eager_for_hidden}

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["last", "full"])
@pytest.mark.parametrize(
    "variant",
    [{"hidden_states": "full"}, {"hidden_states": "last"}, {}, {"hidden_states": "full", "decode_graph": "breakable"},
     {"hidden_states": "full", "debug_cuda_graph": True},
     {"hidden_states": "full", "overlap": False}],
    ids=str,
)  # fmt: skip
def test_states_are_those_of_the_reference_in_fp32(folder: Path, mode: str, variant: dict[str, object]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    found, _ = answers(settings(folder, **variant), mode)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert len(answer.token_ids) == 24
        ids = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
        with torch.inference_mode():
            expected = model(ids, output_hidden_states=True).hidden_states[-1][0].cpu()
        first = 0 if mode == "full" else len(prompt) - 1
        got = tensor_of(answer)
        assert got.shape == (len(prompt) + 23 - first, WIDTH)
        near = torch.cosine_similarity(got, expected[first : first + len(got)])
        assert near.min() > 0.999, near.min()


@pytest.mark.parametrize("mode", ["last", "full"])
def test_graphs_eager_steps_and_both_depths_give_the_same_bits_in_row_invariant_mode(folder: Path, mode: str) -> None:
    variants: list[dict[str, object]] = [
        {"hidden_states": "full"},
        {"hidden_states": "full", "overlap": False},
        {"hidden_states": "none"},
        {"hidden_states": "full", "decode_graph": "off"},
    ]
    runs = [answers(settings(folder, row_invariant=True, **variant), mode)[0] for variant in variants]
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            assert one.token_ids == other.token_ids
            assert one.hidden_states == other.hidden_states


def test_a_step_above_the_setting_runs_without_graphs_and_is_counted(folder: Path) -> None:
    _, at_setting = answers(settings(folder, hidden_states="full"), "full")
    _, above = answers(settings(folder, hidden_states="none"), "full")
    _, in_prompts = answers(settings(folder, hidden_states="last"), "full")
    assert at_setting["above"] == 0
    assert at_setting["DecodeGraphRunner"] >= 20
    assert at_setting["PrefillGraphRunner"] >= 1
    assert above["above"] >= 24
    assert above["EagerRunner"] >= above["above"]
    assert 1 <= in_prompts["above"] < 10
    assert in_prompts["DecodeGraphRunner"] >= 20


def test_steady_decode_with_hidden_states_never_synchronises(folder: Path) -> None:
    async def settle(engine: Engine, num_steps: int) -> None:
        first = engine.num_settled_steps
        while engine.num_settled_steps < first + num_steps:
            await asyncio.sleep(0)

    async def run() -> list[Completion]:
        async with Engine(**settings(folder, hidden_states="last")) as engine:
            params = asking("last", max_tokens=300)
            jobs = [asyncio.create_task(engine.complete([at + 5] * 20, params)) for at in range(8)]
            await settle(engine, 40)
            torch.cuda.set_sync_debug_mode("error")
            try:
                await settle(engine, 100)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert engine.death is None
            return await asyncio.gather(*jobs)

    for answer in asyncio.run(run()):
        assert tensor_of(answer).shape == (300, WIDTH)
