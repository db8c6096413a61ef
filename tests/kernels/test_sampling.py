"""The sampler against its definition in torch, and its random numbers against their distribution."""

import math

import pytest
import torch

from slipstream.engine.kernels.counter_random import exponential_noise, random_words
from slipstream.engine.kernels.sampling import SamplingTable, make_sampler_workspace, sample

VOCAB = 5000
MAX_ROWS = 8


def make_table(num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def column(value, dtype):
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor([9, *values], dtype=dtype)  # row 0 is padding: with these values it would show

    return SamplingTable(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seeds=torch.tensor([0] + [12345678901234567 * (i + 1) for i in range(num_rows)]),
    )


def run(logits, table, workspace=None, num_live=None, dead=(), **options):
    """Samples rows 1.. of the table; returns ids, flags and the relay, which starts at -7 everywhere."""
    num_rows = logits.shape[0]
    workspace = workspace or make_sampler_workspace(max_rows=MAX_ROWS, vocab_size=logits.shape[1], device="cpu")
    rows = torch.arange(1, num_rows + 1, dtype=torch.int32)
    live = torch.tensor([num_rows if num_live is None else num_live], dtype=torch.int32)
    is_dead = torch.tensor([row in dead for row in range(num_rows)], dtype=torch.uint8)
    ids, bad = torch.full((num_rows,), -5), torch.full((num_rows,), -5, dtype=torch.int32)
    relay = torch.full((num_rows + 1,), -7)
    positions = torch.arange(num_rows, dtype=torch.int32) * 3 + 5
    sample(logits, rows, live, positions, is_dead, table, relay, workspace, ids=ids, bad=bad, **options)
    assert not workspace.arrivals.any()
    return ids.tolist(), bad.tolist(), relay.tolist()


def reference(logits, table, num_rows):
    positions = torch.arange(num_rows, dtype=torch.int32) * 3 + 5
    noise = exponential_noise(table.seeds[1:], positions, logits.shape[1])
    chosen = []
    for b in range(num_rows):
        x, temperature = logits[b].double(), table.temperature[b + 1].item()
        k, p, floor = table.top_k[b + 1].item(), table.top_p[b + 1].item(), table.min_p[b + 1].item()
        if temperature <= 1e-5:
            chosen.append(int(x.argmax()))
            continue
        allowed = torch.ones_like(x, dtype=torch.bool)
        if 0 < k < x.shape[0]:
            allowed &= x >= x.topk(k).values[-1]
        mass = (x / temperature).masked_fill(~allowed, float("-inf")).softmax(-1)
        order = x.argsort(descending=True)
        above = torch.zeros_like(mass)
        above[order] = mass[order].cumsum(-1) - mass[order]
        allowed &= (above < p) | (x == x.max())
        if floor > 0:
            allowed &= x >= x.max() + temperature * math.log(floor)
        chosen.append(int((x / temperature - noise[b].double().log()).masked_fill(~allowed, float("-inf")).argmax()))
    return chosen


def test_greedy_takes_the_lowest_id_of_the_largest_logit():
    logits = torch.randn(3, VOCAB)
    logits[0, [4999, 4097, 4100]] = 50.0
    logits[1, [17, 4500]] = 50.0
    expected = [4097, 17, int(logits[2].argmax())]
    for options in ({"greedy": True}, {"greedy": False}):
        ids, bad, relay = run(logits, make_table(3, temperature=0.0), **options)
        assert ids == expected
        assert bad == [0, 0, 0]
        assert relay == [-7, *expected]


def test_a_draw_at_temperature_equals_its_definition():
    logits = torch.randn(4, VOCAB) * 2
    table = make_table(4, temperature=[0.6, 1.0, 1.7, 0.0])
    assert run(logits, table, filters=False)[0] == reference(logits, table, 4)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": [1, 3, 50, 6000]},
        {"top_p": [1e-8, 0.3, 0.9, 0.999]},
        {"min_p": [1.0, 0.5, 0.1, 1e-3]},
        {"top_k": [40, 2, 300, 0], "top_p": [0.5, 0.9, 0.95, 1.0]},
        {"top_k": [40, 0, 300, 7], "top_p": [0.8, 0.9, 1.0, 0.7], "min_p": [0.05, 0.2, 0.3, 0.0]},
    ],
)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_filtered_draw_equals_the_draw_from_the_sorted_and_cut_distribution(filters, spread):
    logits = torch.randn(4, VOCAB) * spread
    table = make_table(4, temperature=[0.7, 1.0, 1.3, 2.0], **filters)
    ids, bad, relay = run(logits, table)
    assert ids == reference(logits, table, 4)
    assert relay[1:] == ids
    assert bad == [0] * 4


def test_top_k_counts_equals_of_the_last_as_in():
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, [10, 20, 30, 40]] = torch.tensor([3.0, 2.0, 2.0, 1.9])
    workspace = make_sampler_workspace(max_rows=MAX_ROWS, vocab_size=VOCAB, device="cpu")
    seen = set()
    for seed in range(40):
        table = make_table(1, top_k=2)
        table.seeds[1] = seed
        seen.add(run(logits, table, workspace)[0][0])
    assert seen == {10, 20, 30}


def test_a_draw_depends_on_seed_and_position_but_not_on_batch_mates():
    logits = torch.zeros(4, VOCAB)
    table = make_table(4)
    together = run(logits, table, filters=False)[0]
    alone = run(logits[:1], make_table(1), filters=False)[0]
    assert alone == together[:1]
    assert len(set(together)) == 4


def test_padded_rows_are_left_alone_and_dead_rows_write_no_relay():
    ids, bad, relay = run(torch.randn(4, VOCAB), make_table(4), num_live=3, dead={1})
    assert ids[3] == bad[3] == -5
    assert relay == [-7, ids[0], -7, ids[2], -7]


@pytest.mark.parametrize("options", [{"greedy": True}, {"filters": False}, {"filters": True}])
def test_rows_without_a_sane_choice_are_flagged_and_their_neighbours_are_not(options):
    logits = torch.randn(5, VOCAB)
    logits[0, 4999] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    logits[3, 100:] = float("-inf")
    ids, bad, _ = run(logits, make_table(5, top_k=5), **options)
    assert bad == [1, 1, 1, 0, 0]
    assert ids[:3] == [0, 0, 0]
    assert 0 <= ids[3] < 100


def test_a_workspace_for_another_vocabulary_is_refused():
    workspace = make_sampler_workspace(max_rows=1, vocab_size=VOCAB, device="cpu")
    with pytest.raises(ValueError, match="another vocabulary than 100"):
        run(torch.zeros(1, 100), make_table(1), workspace)


def test_the_noise_is_exponential_and_unrelated_between_positions_seeds_and_ids():
    seeds, positions = torch.arange(40), torch.arange(40).repeat(1)
    noise = exponential_noise(seeds, positions, 5000).double()
    assert noise.min() > 0
    assert noise.mean().item() == pytest.approx(1.0, abs=0.01)
    assert noise.var().item() == pytest.approx(1.0, abs=0.03)
    assert (noise < math.log(2)).double().mean().item() == pytest.approx(0.5, abs=0.005)
    bits = torch.stack([(random_words(seeds, positions, 5000) >> bit) & 1 for bit in range(32)]).double()
    assert bits.mean((1, 2)).sub(0.5).abs().max() < 0.006
    centred = noise - noise.mean(1, keepdim=True)
    correlation = centred @ centred.T / 5000
    assert (correlation - torch.diag(correlation.diag())).abs().max() < 0.08
    shifted = (centred[:, 1:] * centred[:, :-1]).mean()
    assert abs(shifted) < 0.01
    high = exponential_noise(torch.tensor([5, 5 + 2**40]), torch.tensor([3, 3]), 100)
    assert not torch.equal(high[0], high[1])
