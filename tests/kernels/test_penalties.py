"""Penalties by counts on the device: against their definition, transformers, the host's edits, and scripts of rows."""

from array import array
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from slipstream.engine.logit_rules import LogitRules
from slipstream.engine.sampling.logit_changes import LogitChanges
from slipstream.engine.sampling.token_counts import TokenCounts
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler.schedule_batch import RowPenalties, RowSampling, RowStart, ScheduleBatch
from slipstream.engine.worker import SampleInputs

CPU = torch.device("cpu")
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
LONG_VOCAB = 5003  # more than one chunk, and no multiple of anything
NUM_ROWS = 4


def start_of(row, params, history, num_prompt):
    """The start of a row as the scheduler sends it."""
    first = num_prompt if params.repetition_penalty == 1 else 0
    penalties = RowPenalties(
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        num_tokens=len(history),
        num_prompt=num_prompt - first,
        history=array("i", history[first:]).tobytes(),
    )
    return RowStart(row=row, sampling=GREEDY, penalties=penalties)


def batch_of(rows, samples=None):
    """As much of a batch as says who samples."""
    return ScheduleBatch(
        step=0,
        num_decode=len(rows),
        rows=tuple(rows),
        num_prior=(1,) * len(rows),
        num_new=(1,) * len(rows),
        samples=tuple(samples) if samples is not None else (True,) * len(rows),
        extend_ids=b"",
        table_rows=b"",
        table_columns=b"",
        table_pages=b"",
        starts=(),
    )


def ints(packed):
    return torch.frombuffer(bytearray(packed), dtype=torch.int32)


class Device:
    """Counts over a relay, driven as a step drives them."""

    def __init__(self, vocab):
        self.relay = torch.full((NUM_ROWS + 1,), -1, dtype=torch.int64)
        self.counts = TokenCounts(num_rows=NUM_ROWS, vocab_size=vocab, next_ids=self.relay, device=CPU)

    def start(self, *starts):
        packed = self.counts.rows.apply(starts)
        if packed is not None:
            self.counts.start(packed, ints(packed.block))

    def penalised(self, logits, rows, lengths, dead=frozenset(), samples=None):
        batch = batch_of(rows, samples)
        places = self.counts.rows.places(batch, dead)
        out = logits.clone()
        if places:
            sampling = [rows[at] for at in batch.sample_indices]
            columns = [torch.tensor(values, dtype=torch.int32) for values in (sampling, lengths)]
            self.counts.penalise(out, ints(places), *columns)
        return out


def by_the_host(logits, params, history, num_prompt):
    """One row's logits after the edits that the host would send. Shapes: [vocab] → [vocab]."""
    rules = LogitRules(params, num_prompt_tokens=num_prompt, vocab_size=logits.shape[0])
    edit = rules.edit(0, array("i", history))
    if edit is None:
        return logits.clone()
    packed = LogitChanges.packed(SampleInputs(edits=(edit,)), (0,), vocab_size=logits.shape[0])
    out = logits[None].clone()
    packed.edit_(out, ints(packed.block))
    return out[0]


def by_definition(logits, params, history, num_prompt):
    """The same in float64, id by id."""
    out = logits.double()
    outputs = Counter(history[num_prompt:])
    for token in set(history):
        x = out[token]
        out[token] = x * params.repetition_penalty if x < 0 else x / params.repetition_penalty
    for token, count in outputs.items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


ALL = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.37, presence_penalty=-0.21)


@pytest.mark.parametrize(
    "params",
    [
        ALL,
        SamplingParams(repetition_penalty=0.7),
        SamplingParams(frequency_penalty=1.9),
        SamplingParams(presence_penalty=0.3),
        SamplingParams(frequency_penalty=-0.1, presence_penalty=1.1),
    ],
)
def test_every_penalty_is_its_definition_and_bit_for_bit_the_hosts(params):
    device = Device(LONG_VOCAB)
    prompt = torch.randint(LONG_VOCAB, (1500,)).tolist()
    history = prompt + torch.randint(60, (300,)).tolist() + [LONG_VOCAB - 1, 4095, 4096, prompt[0]]
    device.start(start_of(3, params, history, len(prompt)))
    logits = torch.randn(1, LONG_VOCAB) * 5
    changed = device.penalised(logits, [3], [len(history)])[0]
    assert torch.equal(changed, by_the_host(logits[0], params, history, len(prompt)))
    assert torch.allclose(changed.double(), by_definition(logits[0], params, history, len(prompt)), atol=1e-5)


@pytest.mark.parametrize("penalty", [1.4, 0.6])
def test_the_repetition_penalty_is_transformers(penalty):
    device = Device(300)
    histories = [[5, 9, 11, 9, 250, 1, 2, 1], [0, 299, 7, 7, 7, 7, 7, 31]]
    params = SamplingParams(repetition_penalty=penalty)
    device.start(*(start_of(row, params, history, 4) for row, history in enumerate(histories, 1)))
    logits = torch.randn(2, 300) * 4
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(histories), logits.clone())
    assert torch.equal(device.penalised(logits, [1, 2], [8, 8]), theirs)


def test_what_was_drawn_since_the_start_is_counted_from_the_relay():
    device, history = Device(40), [1, 2, 3]
    device.relay[2] = 17  # the draw of the row's last owner
    device.start(start_of(2, ALL, history, 3))
    for token in (5, 5, 2, 39, 0, 5):
        logits = torch.randn(1, 40)
        changed = device.penalised(logits, [2], [len(history)])[0]
        assert torch.equal(changed, by_the_host(logits[0], ALL, history, 3))
        device.relay[2] = token
        history.append(token)


def test_rows_without_penalties_and_padded_rows_are_left_alone_and_launch_nothing():
    device = Device(40)
    device.start(RowStart(row=1, sampling=GREEDY), RowStart(row=2, sampling=GREEDY))
    logits = torch.randn(5, 40)
    assert not device.counts.rows.places(batch_of([1, 2]), frozenset())
    device.start(start_of(2, ALL, [4, 5], 1))
    changed = device.penalised(logits, [1, 2], [2, 2])  # three rows of padding behind them
    assert torch.equal(changed[[0, 2, 3, 4]], logits[[0, 2, 3, 4]])
    assert not torch.equal(changed[1], logits[1])
    # The row goes, somebody without penalties comes: its cost has gone with it.
    device.start(RowStart(row=2, sampling=GREEDY))
    assert not device.counts.rows.places(batch_of([1, 2]), frozenset())


def test_a_row_in_the_middle_of_its_prompt_has_no_place():
    device = Device(40)
    device.start(start_of(2, ALL, [4, 5], 2), start_of(3, ALL, [4], 1))
    rows = device.counts.rows
    assert list(array("i", rows.places(batch_of([1, 2, 3], [True, False, True]), frozenset()))) == [1]
    assert list(array("i", rows.places(batch_of([1, 2, 3]), frozenset()))) == [1, 2]
    assert list(array("i", rows.places(batch_of([1, 2, 3]), frozenset({1})))) == [2]
    assert list(array("i", rows.places(batch_of([1, 2, 3]), frozenset()))) == [1, 2]


def test_logits_that_are_not_finite_stay_so_and_rows_may_be_strided():
    device = Device(40)
    device.start(start_of(1, ALL, [0, 1, 2, 3], 2))
    logits = torch.randn(2, 64)[:, :40]
    logits[0, :3] = torch.tensor([float("nan"), float("-inf"), float("inf")])
    changed = logits.clone()
    wide = torch.zeros(2, 64)
    wide[:, :40] = logits
    device.counts.penalise(wide[:, :40], *(torch.tensor([n], dtype=torch.int32) for n in (0, 1, 4)))
    changed[0] = by_the_host(logits[0], ALL, [0, 1, 2, 3], 2)
    assert torch.equal(wide[:, :40].nan_to_num(nan=7.5), changed.nan_to_num(nan=7.5))
    assert not wide[:, 40:].any()


def test_logits_of_another_vocabulary_are_refused():
    device = Device(40)
    device.start(start_of(1, ALL, [0], 1))
    with pytest.raises(ValueError, match="40 ids"):
        device.penalised(torch.zeros(1, 41), [1], [1])


# ---- scripts

VOCAB = 7
PENALTIES = (ALL, SamplingParams(repetition_penalty=1.5), SamplingParams(frequency_penalty=0.5), None)
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
STARTS = st.tuples(st.integers(1, NUM_ROWS), IDS, st.integers(0, 9), st.sampled_from(PENALTIES), st.booleans())
STEPS = st.tuples(
    st.lists(STARTS, max_size=3, unique_by=lambda start: start[0]),
    st.permutations(range(1, NUM_ROWS + 1)),
    st.lists(st.integers(0, VOCAB - 1), min_size=NUM_ROWS, max_size=NUM_ROWS),
    st.frozensets(st.integers(1, NUM_ROWS), max_size=1),
    st.integers(0, 2),
)


class Row:
    """What the script knows of a row: the truth that the device only hears the beginning of."""

    def __init__(self, ids, num_prompt, params, is_chunked):
        self.history, self.num_prompt, self.params = list(ids), num_prompt, params
        self.waits = is_chunked  # the first step computes a piece of its prompt, and samples nothing


@settings(max_examples=80)
@given(st.lists(STEPS, min_size=1, max_size=8))
def test_whatever_starts_ends_and_shares_a_step_each_draw_sees_the_exact_history(script):
    """Starts with and without outputs (a retraction), chunks, rows that end and are surplus, padding, any order."""
    torch.manual_seed(0)
    device, rows = Device(VOCAB), {}
    for starts, order, draws, dead_rows, padding in script:
        for row, ids, num_prompt, params, is_chunked in starts:
            rows[row] = Row(ids, max(1, min(num_prompt, len(ids))), params, is_chunked)
        device.start(
            *(
                start_of(at, rows[at].params, rows[at].history, rows[at].num_prompt)
                if rows[at].params
                else RowStart(row=at, sampling=GREEDY)
                for at, *_ in starts
            )
        )
        batch = [at for at in order if at in rows]
        samples = [not rows[at].waits for at in batch]
        sampling = [at for at in batch if not rows[at].waits]
        dead = frozenset(place for place, at in enumerate(batch) if at in dead_rows)
        logits = torch.randn(len(sampling) + padding, VOCAB)
        changed = device.penalised(logits, batch, [len(rows[at].history) for at in sampling], dead, samples)
        for place, at in enumerate(sampling):
            own = rows[at]
            alive = own.params is not None and at not in dead_rows
            host = by_the_host(logits[place], own.params, own.history, own.num_prompt) if alive else logits[place]
            assert torch.equal(changed[place], host), (at, own.history)
        assert torch.equal(changed[len(sampling) :], logits[len(sampling) :])
        for at in batch:
            if not rows[at].waits and at not in dead_rows:
                device.relay[at] = draws[at - 1]
                rows[at].history.append(draws[at - 1])
            rows[at].waits = False
        for at in dead_rows:
            rows.pop(at, None)
