"""Logits equal transformers' on tiny random models, whatever way the tokens are cut into steps, pages and batches."""

from __future__ import annotations

import pytest
import torch

KINDS = (
    "llama-gqa",
    "llama-mha",
    "llama-group-of-3",
    "llama-tied",
    "llama-bias",
    "llama3-rope",
    "llama-linear-rope",
    "llama-yarn-rope",
    "mistral",
    "mistral-idle-window",
    "qwen2",
    "qwen3",
)
TOLERANCE = 1e-4


def sequence(length, seed):
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(got, expected):
    assert torch.isfinite(got).all()
    assert (got - expected).abs().max().item() < TOLERANCE


def test_every_kind_of_the_fixture_is_tested(kinds):
    assert set(kinds) == set(KINDS)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_prefill_then_decode_agrees_with_transformers(kind, page_size, checkpoint, reference_logits, stepper):
    folder = checkpoint(kind)
    ids = sequence(120, seed=3)
    expected = reference_logits(folder, ids)
    driver = stepper(folder, page_size=page_size, chunked_prefill_size=16)
    done = 0
    for chunk in (16, 7, 1, 70):
        logits = driver.step(extend={5: ids[done : done + chunk]})
        done += chunk
        assert_close(logits[0], expected[done - 1])
    for position in range(done, len(ids)):
        logits = driver.step(decode={5: ids[position]}, extend={})
        assert_close(logits[0], expected[position])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3"])
def test_rows_of_one_mixed_batch_do_not_disturb_each_other(kind, page_size, checkpoint, reference_logits, stepper):
    folder = checkpoint(kind)
    lengths = {1: 150, 2: 20, 3: 33, 4: 90, 7: 20}
    ids = {row: sequence(length + 12, seed=row) for row, length in lengths.items()}
    expected = {row: reference_logits(folder, ids[row]) for row in lengths}
    driver = stepper(folder, page_size=page_size, chunked_prefill_size=16)
    # Rows 2 and 7 have equal shapes and neighbour each other: one call of the attention serves both.
    logits = driver.step(extend={2: ids[2][:20], 7: ids[7][:20], 1: ids[1][:150]})
    for got, (row, at) in zip(logits, ((2, 19), (7, 19), (1, 149)), strict=True):
        assert_close(got, expected[row][at])
    # Decode rows of lengths 151 and 21 (two groups) beside a fresh prompt and a chunk.
    done = {1: 150, 2: 20, 7: 20, 3: 0, 4: 0}
    for chunk in (5, 28):
        logits = driver.step(
            decode={row: ids[row][done[row]] for row in (2, 1, 7)},
            extend={3: ids[3][done[3] : done[3] + chunk], 4: ids[4][done[4] : done[4] + 45]},
        )
        for row in (1, 2, 7):
            done[row] += 1
        done[3] += chunk
        done[4] += 45
        for got, row in zip(logits, (2, 1, 7, 3, 4), strict=True):
            assert_close(got, expected[row][done[row] - 1])
    for _ in range(8):
        order = (4, 1, 3, 2, 7)
        logits = driver.step(decode={row: ids[row][done[row]] for row in order}, extend={})
        for got, row in zip(logits, order, strict=True):
            assert_close(got, expected[row][done[row]])
            done[row] += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama-gqa", "llama-tied", "qwen3"])
def test_in_row_invariant_mode_batch_mates_and_chunks_change_no_bit(kind, dtype, checkpoint, stepper):
    folder = checkpoint(kind)
    ids = {row: sequence(40, seed=10 + row) for row in range(1, 6)}
    settings = {"row_invariant": True, "dtype": dtype, "page_size": 16, "chunked_prefill_size": 16}
    alone = []
    driver = stepper(folder, **settings)
    alone.append(driver.step(extend={1: ids[1][:30]})[0])
    alone += [driver.step(decode={1: ids[1][position]}, extend={})[0] for position in range(30, 36)]

    crowded = []
    driver = stepper(folder, **settings)
    driver.step(extend={2: ids[2][:21], 3: ids[3][:3]})
    driver.step(decode={3: ids[3][3]}, extend={1: ids[1][:13]})
    crowded.append(driver.step(decode={3: ids[3][4], 2: ids[2][21]}, extend={1: ids[1][13:30], 4: ids[4][:9]})[-2])
    for step, position in enumerate(range(30, 35)):
        others = {2: ids[2][22 + step], 3: ids[3][5 + step]}
        crowded.append(driver.step(decode={**others, 1: ids[1][position]}, extend={5: ids[5][:7]})[2])
        assert crowded[-1].shape == alone[0].shape
    # A resumed row brings what it had decoded as a prompt: the same arithmetic again.
    resumed = stepper(folder, **settings).step(extend={6: ids[1][:36]})[0]
    for got, expected in zip((*crowded, resumed), alone, strict=True):
        assert torch.equal(got, expected)


def test_logits_of_a_half_precision_model_stay_near_those_of_full_precision(checkpoint, reference_logits, stepper):
    folder = checkpoint("llama-gqa")
    ids = sequence(60, seed=5)
    expected = reference_logits(folder, ids)
    driver = stepper(folder, dtype="bfloat16")
    logits = driver.step(extend={1: ids[:50]})
    assert logits.dtype == torch.bfloat16
    scale = expected.abs().max()
    assert (logits[0].float() - expected[49]).abs().max() < 0.05 * scale
    for position in range(50, 60):
        logits = driver.step(decode={1: ids[position]}, extend={})
        assert (logits[0].float() - expected[position]).abs().max() < 0.05 * scale
