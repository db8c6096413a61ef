"""Penalties counted on the card: the tokens of the host's edits, at any depth, for nothing where nobody asks."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from slipstream import Engine, SamplingParams
from slipstream.engine.forward import device_build
from slipstream.engine.logit_rules import LogitRules
from slipstream.engine.sampling.logit_changes import LogitChanges
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scheduler.schedule_batch import RowPenalties
from slipstream.engine.worker import SampleInputs, WorkerLimits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

VOCAB = 5003
HOW: tuple[dict[str, object], ...] = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.2, "presence_penalty": 0.7, "bad_words_ids": ((3,),)},
    {},
)
PROMPTS = [[7 * at % VOCAB for at in range(start, start + 20 + 29 * start)] for start in range(1, 9)]


@pytest.fixture(scope="module")
def folder(qwen3_folder: Callable[..., Path]) -> Path:
    return qwen3_folder(vocab_size=VOCAB, tie_word_embeddings=False)


def engine_of(folder: Path, **more: object) -> Engine:
    settings: dict[str, object] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer": True,
        "max_model_len": 2048,
        "max_total_tokens": 65_536,
        "max_running_requests": 32,
        "chunked_prefill_size": 128,
    }
    return Engine(**{**settings, **more})


def params_of(number: int, max_tokens: int = 64) -> SamplingParams:
    # With `ignore_eos` a request reserves room for all its tokens, and nobody is ever sent back.
    ignore_eos = max_tokens > 64
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, **HOW[number % len(HOW)])  # type: ignore[arg-type]


async def drawn(folder: Path, numbers: Sequence[int] = range(8), **more: object) -> tuple[list[tuple[int, ...]], int]:
    """The tokens of these requests, and how often one of them was sent back."""
    async with engine_of(folder, **more) as engine:
        answers = await asyncio.gather(*(engine.complete(PROMPTS[at], params_of(at)) for at in numbers))
        return [answer.token_ids for answer in answers], engine.stats.num_retractions


@contextmanager
def edits_by_the_host() -> Iterator[None]:
    """Engines that start meanwhile are sent penalties as the CPU's are."""
    limits_of = device_build._limits

    def limits(*args: object, counts_tokens: bool, **more: object) -> WorkerLimits:
        assert counts_tokens
        return limits_of(*args, **more)  # type: ignore[arg-type]

    with patch.object(device_build, "_limits", limits):
        yield


def test_counted_tokens_are_those_of_the_hosts_edits_at_any_depth_after_retraction_and_alone(folder: Path) -> None:
    """Row-invariant, so that the logits are the same too."""
    with edits_by_the_host():
        by_edits, _ = asyncio.run(drawn(folder, row_invariant=True))
    assert len(set(by_edits)) == len(by_edits)
    assert asyncio.run(drawn(folder, row_invariant=True))[0] == by_edits
    assert asyncio.run(drawn(folder, row_invariant=True, overlap=False))[0] == by_edits
    with patch.object(new_token_ratio, "INITIAL", 0.0), patch.object(new_token_ratio, "LOWEST", 0.0):
        pressed, num_retractions = asyncio.run(
            drawn(folder, row_invariant=True, max_total_tokens=1024, max_model_len=1024)
        )
    assert num_retractions > 0
    assert pressed == by_edits
    assert asyncio.run(drawn(folder, [5], row_invariant=True))[0] == [by_edits[5]]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_request_through_the_shipping_graphs_draws_what_edits_draw(folder: Path, number: int) -> None:
    counted = asyncio.run(drawn(folder, [number]))[0]
    with edits_by_the_host():
        assert asyncio.run(drawn(folder, [number]))[0] == counted
    assert asyncio.run(drawn(folder, [number], overlap=False))[0] == counted


async def settled(engine: Engine, num_steps: int) -> None:
    first = engine.num_settled_steps
    while engine.num_settled_steps < first + num_steps:
        await asyncio.sleep(0)


def test_steady_penalised_decode_neither_waits_nor_compiles_nor_allocates(folder: Path) -> None:
    knobs = pytest.importorskip("triton.knobs", reason="this triton has no compile hook")
    compiled: list[str] = []

    async def run() -> None:
        async with engine_of(folder) as engine:
            jobs = [asyncio.create_task(engine.complete(PROMPTS[at], params_of(at, 900))) for at in range(8)]
            with patch.object(knobs.runtime, "jit_post_compile_hook", lambda **more: compiled.append(more["repr"])):
                await settled(engine, 60)
                reserved = torch.cuda.memory_reserved()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    await settled(engine, 100)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert torch.cuda.memory_reserved() == reserved
                # A row that starts beside them, in a mixed step, with a history that its step has to bring.
                await engine.complete(PROMPTS[0][:40], params_of(0, 4))
            assert engine.death is None
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(run())
    assert [name for name in compiled if "penalise" in name or "count" in name] == []


def test_rows_without_penalties_launch_nothing_and_a_departed_row_takes_its_cost_with_it(folder: Path) -> None:
    def kernels(profile: torch.profiler.profile) -> int:
        return sum("_penalise_kernel" in event.name for event in profile.events() or [])

    async def run() -> list[int]:
        found = []
        async with engine_of(folder) as engine:
            plain = asyncio.create_task(engine.complete(PROMPTS[3], params_of(3, 1500)))
            await settled(engine, 20)
            for penalised in (False, True, False):
                other = asyncio.create_task(engine.complete(PROMPTS[0], params_of(0, 400))) if penalised else None
                await settled(engine, 20)
                with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
                    await settled(engine, 30)
                found.append(kernels(profile))
                if other is not None:
                    other.cancel()
                    await asyncio.gather(other, return_exceptions=True)
            plain.cancel()
            await asyncio.gather(plain, return_exceptions=True)
        return found

    before, beside, after = asyncio.run(run())
    assert before == after == 0
    assert beside >= 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiled_kernel_rounds_as_the_hosts_edits_do(dtype: torch.dtype) -> None:
    from slipstream.engine.sampling.token_counts import CountStarts, TokenCounts

    torch.manual_seed(0)
    device, vocab, num_rows = torch.device("cuda", 0), 151_936, 16
    relay = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    counts = TokenCounts(num_rows=num_rows, vocab_size=vocab, next_ids=relay, device=device)
    params = [
        SamplingParams(
            repetition_penalty=0.7 + 0.1 * row, frequency_penalty=0.13 * row - 1, presence_penalty=1.7 - 0.2 * row
        )
        for row in range(num_rows)
    ]
    histories = [torch.randint(60 + 400 * row, (2 + 300 * row,)).tolist() for row in range(num_rows)]
    logits = (torch.randn(num_rows, vocab, device=device) * 6).to(dtype)
    edits, starts = [], []
    for place, (how, history) in enumerate(zip(params, histories, strict=True)):
        num_prompt = max(1, len(history) // 3)
        rules = LogitRules(how, num_prompt_tokens=num_prompt, vocab_size=vocab)
        edits.append(rules.edit(place, array("i", history)))
        known = history[:-1]  # the last one is in the relay
        starts.append((
            num_rows - place,
            RowPenalties(
                how.repetition_penalty,
                how.frequency_penalty,
                how.presence_penalty,
                num_tokens=len(known),
                num_prompt=num_prompt,
                history=array("i", known).tobytes(),
            ),
        ))  # fmt: skip
        relay[num_rows - place] = history[-1]

    def block(packed: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(packed), dtype=torch.int32).to(device)

    changes = LogitChanges.packed(SampleInputs(edits=tuple(edits)), range(num_rows), vocab_size=vocab)  # type: ignore[arg-type]
    assert changes is not None
    by_host = logits.clone()
    changes.edit_(by_host, block(changes.block))
    made = CountStarts.packed(starts)
    counts.start(made, block(made.block))
    columns = ([*range(num_rows)], [row for row, _ in starts], [len(history) for history in histories])
    counts.penalise(logits, *(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
    assert torch.equal(logits, by_host)
