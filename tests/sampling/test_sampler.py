"""The sampler: greedy and random rows side by side, filters, failures, and draws that no batch-mate can change."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.sampling.sample_needs import SampleNeeds, is_greedy
from slipstream.engine.sampling.sampler import Sampler, SampleRequest
from slipstream.engine.sampling.sampling_table import SamplingTable
from slipstream.engine.scheduler.schedule_batch import RowSampling

CPU = torch.device("cpu")
ODD_VOCAB = 15169  # no multiple of anything that a kernel likes


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def how(temperature=1.0, *, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    return RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def table_of(samplings, first_row=1):
    table = SamplingTable(len(samplings) + first_row, CPU)
    table.write(
        torch.arange(first_row, first_row + len(samplings)),
        temperature=torch.tensor([s.temperature for s in samplings]),
        top_k=torch.tensor([s.top_k for s in samplings], dtype=torch.int32),
        top_p=torch.tensor([s.top_p for s in samplings]),
        min_p=torch.tensor([s.min_p for s in samplings]),
        seed=torch.tensor([s.seed for s in samplings]),
    )
    return table


def sample(logits, samplings, *, lengths=None, row_invariant=False):
    random = [index for index, s in enumerate(samplings) if not is_greedy(s)]
    request = SampleRequest(
        rows=torch.arange(1, len(samplings) + 1, dtype=torch.int32),
        lengths=torch.tensor(lengths or [10] * len(samplings), dtype=torch.int32),
        random=None if len(random) == len(samplings) else torch.tensor(random, dtype=torch.int64),
        needs=SampleNeeds.of(samplings),
    )
    sampler = Sampler(logits.shape[1], CPU, row_invariant=row_invariant)
    return sampler.sample(logits, request, table_of(samplings))


def draws(logits, sampling, count):
    """The ids drawn at lengths 0…count-1 from one row of logits."""
    ids = []
    for start in range(0, count, 512):
        lengths = list(range(start, min(start + 512, count)))
        ids.append(sample(logits.expand(len(lengths), -1), [sampling] * len(lengths), lengths=lengths).ids)
    return torch.cat(ids)


def random_logits(rows, vocab=ODD_VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# ---- greedy


@pytest.mark.parametrize("sampling", [how(0.0), how(1e-7), how(9e-6), how(0.8, top_k=1)])
def test_greedy_takes_the_lowest_id_among_the_largest(sampling):
    logits = random_logits(3)
    logits[0, [77, 5000, 15168]] = 50.0
    logits[1, 15168] = 50.0
    logits[2, 0] = 50.0
    sampled = sample(logits, [sampling] * 3)
    assert sampled.ids.tolist() == [77, 15168, 0]
    assert not sampled.failed.any()


@pytest.mark.parametrize("sampling", [how(1.0, top_p=1e-8), how(1e-4), how(1.0, min_p=1.0)])
def test_filters_that_leave_one_id_take_it(sampling):
    logits = random_logits(4, seed=1)
    assert torch.equal(sample(logits, [sampling] * 4).ids, logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [255, 256, 257, 512, 15169, 49152])
def test_greedy_finds_the_first_maximum_wherever_it_is(vocab, dtype):
    # Few distinct values, so that every row has its maximum in many places.
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (200, vocab), generator=generator).to(dtype)
    for row in range(0, 200, 5):
        logits[row, (row * 97) % vocab] = 9.0
        logits[row, vocab - 1] = 9.0
    ids = sample(logits, [how(0.0)] * 200).ids
    assert torch.equal(ids, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


def test_greedy_works_in_half_precision():
    logits = random_logits(4, seed=2).bfloat16()
    assert torch.equal(sample(logits, [how(0.0)] * 4).ids, torch.max(logits, -1).indices)


def test_greedy_rows_are_not_touched_by_random_ones_beside_them():
    logits = random_logits(5, seed=3)
    mixed = [how(0.0), how(1.0, seed=4), how(0.0), how(0.7, top_k=40, top_p=0.9, seed=9), how(0.0)]
    ids = sample(logits, mixed).ids
    assert ids[[0, 2, 4]].tolist() == logits.argmax(-1)[[0, 2, 4]].tolist()


# ---- failures


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [how(0.0), how(1.0, seed=1), how(0.5, top_k=7, top_p=0.5, min_p=0.1)])
def test_a_row_that_is_not_finite_fails_alone_and_draws_a_valid_id(sampling, bad):
    logits = random_logits(3, seed=4)
    expected = sample(logits, [sampling] * 3).ids
    logits[1, 123] = bad
    sampled = sample(logits, [sampling] * 3)
    assert sampled.failed.tolist() == [False, True, False]
    assert sampled.ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= int(sampled.ids[1]) < ODD_VOCAB


def test_a_row_with_nothing_left_to_draw_fails():
    logits = random_logits(2, vocab=8)
    logits[0] = float("-inf")
    assert sample(logits, [how(1.0)] * 2).failed.tolist() == [True, False]


def test_single_impossible_ids_are_no_failure():
    logits = random_logits(1, vocab=8)
    logits[0, :6] = float("-inf")
    assert not sample(logits, [how(1.0)]).failed.any()
    assert set(draws(logits, how(1.0), 200).tolist()) == {6, 7}


# ---- independence


@pytest.mark.parametrize("row_invariant", [False, True])
def test_a_draw_depends_on_seed_and_length_whatever_shares_the_batch(row_invariant):
    logits = random_logits(1, seed=6)
    sampling = how(0.9, top_k=50, top_p=0.95, min_p=0.01, seed=1234)
    alone = sample(logits, [sampling], lengths=[77], row_invariant=row_invariant).ids
    others = random_logits(6, seed=7)
    mates = [
        how(0.0),
        how(2.0, seed=5),
        how(1.0, top_p=0.3, seed=1234),
        how(1.0, top_k=3),
        how(0.7, min_p=0.2),
        how(0.0),
    ]
    for place in range(7):
        batch = torch.cat((others[:place], logits, others[place:]))
        samplings = [*mates[:place], sampling, *mates[place:]]
        lengths = [3] * place + [77] + [4] * (6 - place)
        assert int(sample(batch, samplings, lengths=lengths, row_invariant=row_invariant).ids[place]) == int(alone)


def test_the_same_seed_draws_the_same_and_another_seed_or_length_draws_anew():
    logits = random_logits(1, seed=8) * 0.1
    base = draws(logits, how(1.0, seed=3), 50).tolist()
    assert draws(logits, how(1.0, seed=3), 50).tolist() == base
    assert len(set(base)) > 40
    other = draws(logits, how(1.0, seed=4), 50).tolist()
    assert sum(a == b for a, b in zip(base, other, strict=True)) < 5


# ---- distributions


def expected_probs(logits, sampling):
    """Temperature, top-k, top-p, min-p one after the other, by sorting: the textbook form, in float64."""
    probs = torch.softmax(logits[0].double() / sampling.temperature, 0)
    order = probs.argsort(descending=True, stable=True)
    kept = torch.ones(len(probs), dtype=torch.bool)
    if sampling.top_k:
        kept[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        left = probs[order] * kept[order]
        before = left.cumsum(0) - left
        kept[order[before >= sampling.top_p * left.sum()]] = False
    kept &= probs >= sampling.min_p * probs.max()
    left = probs * kept
    return left / left.sum()


FILTERS = [
    how(1.0, seed=1),
    how(0.5, seed=2),
    how(2.0, seed=3),
    how(1.0, top_k=5, seed=4),
    how(1.0, top_p=0.7, seed=5),
    how(1.0, min_p=0.2, seed=6),
    how(1.3, top_k=8, top_p=0.8, min_p=0.05, seed=7),
    how(1.0, top_k=1000, top_p=0.999, seed=8),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(sampling):
    """Chi-square over 8,192 draws. The seeds are fixed; for fresh ones each case would fail falsely once in 10,000."""
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(11)) * 1.5
    count = 8192
    expected = expected_probs(logits, sampling) * count
    observed = torch.bincount(draws(logits, sampling, count), minlength=24).double()
    assert bool((observed[expected == 0] == 0).all())
    often = expected >= 5
    terms = ((observed - expected) ** 2 / expected)[often]
    rest = float(expected[~often].sum())
    chi_square, freedom = float(terms.sum()), int(often.sum()) - 1
    if rest >= 5:
        chi_square += (float(observed[~often].sum()) - rest) ** 2 / rest
        freedom += 1
    # Wilson-Hilferty: the cube root of chi-square over its degrees is nearly normal.
    if freedom:
        spread = 2 / (9 * freedom)
        assert ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 3.72


def test_a_flat_distribution_wider_than_the_sorted_head_is_cut_where_it_should_be():
    # 15,169 nearly equal ids: half the mass lies far beyond the part that is sorted first.
    logits = random_logits(1, seed=12) * 1e-3
    sampling = how(1.0, top_p=0.5, seed=1)
    allowed = expected_probs(logits, sampling) > 0
    drawn = draws(logits, sampling, 400)
    # The threshold is found in float32: an id next to the edge may fall on either side.
    near = logits[0] >= logits[0][allowed].min() - 1e-6
    assert bool(near[drawn].all())
    assert int((drawn != drawn[0]).sum()) > 390


def test_top_k_above_the_vocabulary_limits_nothing():
    logits = random_logits(1, vocab=6)
    limited = draws(logits, how(1.0, top_k=1_000_000, seed=2), 300)
    assert torch.equal(limited, draws(logits, how(1.0, seed=2), 300))


def test_equally_probable_ids_at_the_edge_are_kept_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -5.0]])
    assert set(draws(logits, how(1.0, top_k=2, seed=3), 400).tolist()) == {0, 1, 2, 3}


# ---- what the host knows


def test_needs_are_the_union_of_the_rows_that_draw_at_random():
    needs = SampleNeeds.of([how(0.0, top_p=0.1), how(1.0, top_k=1, min_p=0.5), how(1.0, top_k=40), how(1.0, top_k=7)])
    assert needs == SampleNeeds(any_random=True, max_top_k=40)
    assert SampleNeeds.of([how(1.0, top_p=0.9), how(1.0, min_p=0.1)]).any_filter
    assert SampleNeeds.of([how(0.0), how(0.7, top_k=1)]) == SampleNeeds()


def test_a_batch_of_greedy_rows_draws_no_random_numbers(monkeypatch):
    from slipstream.engine.sampling import sampler

    monkeypatch.setattr(sampler, "exponential", lambda *_: pytest.fail("a greedy batch drew random numbers"))
    logits = random_logits(3)
    assert torch.equal(sample(logits, [how(0.0)] * 3).ids, logits.argmax(-1))


@pytest.mark.parametrize("row_invariant", [False, True])
def test_ids_that_only_pad_the_vocabulary_are_never_drawn_and_do_not_matter(row_invariant):
    """Whatever the model says of them, the rows are what they would be without them."""
    samplings = [how(0.0), how(1.0, seed=1), how(2.0, top_k=40, seed=2), how(1.0, top_p=0.5, min_p=0.01, seed=3)]
    logits = random_logits(4, 1000)
    padded = torch.cat([logits, torch.tensor([[60.0], [60.0], [float("nan")], [60.0]]).expand(-1, 37)], 1)
    random = torch.tensor([1, 2, 3])
    request = SampleRequest(
        rows=torch.arange(1, 5, dtype=torch.int32), lengths=torch.full((4,), 10, dtype=torch.int32), random=random,
        needs=SampleNeeds.of(samplings),
    )  # fmt: skip
    drawn = Sampler(1000, CPU, row_invariant=row_invariant).sample(padded, request, table_of(samplings))
    assert drawn.ids.tolist() == sample(logits, samplings, row_invariant=row_invariant).ids.tolist()
    assert not drawn.failed.any()
