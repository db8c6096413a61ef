"""Random numbers that depend on seed, length and id alone."""

from __future__ import annotations

import torch

from slipstream.engine.sampling.counter_random import exponential, row_keys

IDS = torch.arange(5000, dtype=torch.int32)


def one(seed, length, ids=IDS):
    return exponential(torch.tensor([seed]), torch.tensor([length], dtype=torch.int32), ids)[0]


def plain_mix(x):
    """MurmurHash3's finaliser in unbounded Python integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def test_the_keys_equal_the_same_arithmetic_on_python_integers():
    for seed, length in ((0, 0), (1, 7), (-1, 100), (2**63 - 1, 131071), (-(2**63), 3), (0x0123456789ABCDEF, 2048)):
        low, high = seed % 2**32, (seed >> 32) % 2**32
        steps = length * 0x9E3779B1 % 2**32
        first = plain_mix((plain_mix((plain_mix(low ^ 0xCC9E2D51) + high) % 2**32) + steps) % 2**32)
        second = plain_mix(plain_mix((plain_mix(high ^ 0x1B873593) + low) % 2**32) ^ steps)
        got = row_keys(torch.tensor([seed]), torch.tensor([length], dtype=torch.int32))
        assert [int(key) % 2**32 for key in got] == [first, second]


def test_a_row_gets_the_same_numbers_whatever_rows_are_beside_it():
    seeds = torch.tensor([5, -9, 2**62, 5])
    lengths = torch.tensor([10, 10, 999, 11], dtype=torch.int32)
    together = exponential(seeds, lengths, IDS)
    for row in range(4):
        assert torch.equal(together[row], one(int(seeds[row]), int(lengths[row])))


def test_an_id_gets_the_same_number_whatever_the_vocabulary_is():
    assert torch.equal(one(3, 4)[100:200], one(3, 4, IDS[100:200]))


def test_neighbouring_seeds_lengths_and_ids_are_not_correlated():
    base = one(42, 100)
    for other in (one(43, 100), one(42, 101), one(42 + 2**32, 100), base.roll(1), one(142, 0)):
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1]
        assert abs(float(correlation)) < 5 / len(IDS) ** 0.5


def test_the_variates_are_exponential_with_mean_one():
    variates = torch.cat([one(seed, 17) for seed in range(40)])
    assert bool((variates > 0).all())
    assert float(variates.max()) <= 30.0
    # Mean and variance are 1; the standard error of the mean of 200,000 is 0.0022.
    assert abs(float(variates.mean()) - 1) < 0.01
    assert abs(float(variates.var()) - 1) < 0.03
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        expected = -torch.log1p(torch.tensor(-quantile))
        share = (variates < expected).float().mean()
        assert abs(float(share) - quantile) < 5 * (quantile * (1 - quantile) / len(variates)) ** 0.5


def test_the_smallest_of_many_variates_are_told_apart():
    # With 24 bits near zero the winners of a race among 150,000 equal ids would tie too often.
    ids = torch.arange(150_000, dtype=torch.int32)
    smallest = one(1, 1, ids).sort().values[:2000]
    assert len(smallest.unique()) > 1990
