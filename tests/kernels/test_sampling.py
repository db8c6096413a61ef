"""The sampler against its definition in torch, with the torch sampler's own random numbers."""

import math

import pytest
import torch

from slipstream.engine.kernels.sampling import make_sampler_workspace, sample
from slipstream.engine.sampling.counter_random import exponential
from slipstream.engine.sampling.cuda_sampler import CudaSampler, SampleKind
from slipstream.engine.sampling.sampling_table import SamplingTable

VOCAB = 5000
MAX_ROWS = 20


def make_table(num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    table = SamplingTable(num_rows + 1, torch.device("cpu"))
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, value in columns.items():
        column = getattr(table, name)
        column[0] = 9  # row 0 is padding: if it were read, this would show
        column[1:] = torch.tensor(value, dtype=column.dtype)
    table.seed[1:] = torch.arange(1, num_rows + 1) * 12345678901234567
    return table


def run(logits, table, workspace=None, num_live=None, dead=(), **options):
    """Samples rows 1.. of the table; returns ids, flags and the relay, which starts at -7 everywhere."""
    num_rows = logits.shape[0]
    workspace = workspace or make_sampler_workspace(max_rows=MAX_ROWS, vocab_size=logits.shape[1], device="cpu")
    rows = torch.arange(1, num_rows + 1, dtype=torch.int32)
    live = torch.tensor([num_rows if num_live is None else num_live], dtype=torch.int32)
    is_dead = torch.tensor([row in dead for row in range(num_rows)], dtype=torch.uint8)
    ids, bad = torch.full((num_rows,), -5), torch.full((num_rows,), -5, dtype=torch.int32)
    relay = torch.full((num_rows + 1,), -7)
    lengths = torch.arange(num_rows, dtype=torch.int32) * 3 + 5
    sample(logits, rows, live, lengths, is_dead, table, relay, workspace, ids=ids, bad=bad, **options)
    assert not workspace.arrivals.any()
    return ids.tolist(), bad.tolist(), relay.tolist()


def reference(logits, table, num_rows):
    lengths = torch.arange(num_rows, dtype=torch.int32) * 3 + 5
    noise = exponential(table.seed[1:], lengths, torch.arange(logits.shape[1], dtype=torch.int32))
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
        table.seed[1] = seed
        seen.add(run(logits, table, workspace)[0][0])
    assert seen == {10, 20, 30}


def test_a_draw_depends_on_seed_and_length_but_not_on_batch_mates():
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


def test_many_greedy_rows_in_long_chunks_choose_as_few_rows_do():
    logits = torch.randn(17, VOCAB)
    ids = run(logits, make_table(17), greedy=True)[0]
    assert ids == logits.argmax(-1).tolist()
    assert ids[:16] == run(logits[:16], make_table(16), greedy=True)[0]


@pytest.mark.parametrize("kind", list(SampleKind))
def test_ids_that_only_pad_the_vocabulary_are_never_drawn(kind):
    logits = torch.randn(3, VOCAB + 37) * 3
    table, relay = make_table(3, temperature=1.0, top_k=50), torch.full((4,), -7)
    rows, lengths = torch.arange(1, 4, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32)
    found = []
    for padding in (-60.0, 60.0):
        logits[:, VOCAB:] = padding
        sampler = CudaSampler(max_rows=3, num_ids=VOCAB, table=table, next_ids=relay, device=torch.device("cpu"))
        sampler.draw(logits, rows, sampler.counts[3:], lengths, kind)
        found.append(sampler.results.tolist())
    assert found[0] == found[1]
    assert max(found[0][:3]) < VOCAB
    assert found[0][3:] == [0, 0, 0]
