"""Ends of text as users met them: a stop inside one token, a stop that never comes, markers that should stay hidden."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import Completion
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.text.tokenization import TextTokenizer
from slipstream.engine.worker import WorkerLimits

DEPTHS = pytest.mark.parametrize("overlap", [False, True])
TURN = "<|turn|>"


@pytest.fixture(scope="module")
def tokenizer(byte_level: Callable[[], Tokenizer]) -> TextTokenizer:
    """One token a byte, two whole words, and two special tokens."""
    backend = byte_level()
    backend.add_special_tokens(["<|end|>", TURN])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (" gamma", " delta")])
    return TextTokenizer(backend, eos_ids=frozenset({backend.token_to_id("<|end|>")}))


@pytest.fixture
def says(tokenizer: TextTokenizer) -> Callable[..., Engine]:
    def make(answer: str, *, overlap: bool = True) -> Engine:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        limits = WorkerLimits(num_pages=64, page_size=4, num_rows=4, max_model_len=256, vocab_size=tokenizer.vocab_size)
        script = Script(token_of=lambda seed, history: ids[(len(history) - 1) % len(ids)])
        engine = Engine.on(ScriptedWorker(limits, script), tokenizer=tokenizer, page_size=4, overlap=overlap)
        engine.proves_laws = True
        return engine

    return make


async def answer_of(engine: Engine, **params: object) -> Completion:
    """The whole answer, streamed and at once, which must agree."""
    async with engine:
        how = SamplingParams(**{"max_tokens": 60, **params})  # type: ignore[arg-type]
        whole = await engine.complete("?", how)
        deltas = [delta async for delta in engine.generate("?", how)]
        assert "".join(delta.text for delta in deltas) == whole.text
        assert all(delta.finished is None for delta in deltas[:-1])
        assert deltas[-1].finished is not None
        assert deltas[-1].finished.stop_reason == whole.stop_reason
    return whole


@DEPTHS
@pytest.mark.parametrize(("include", "text"), [(False, "alpha "), (True, "alpha gam")])
async def test_a_stop_inside_one_token_cuts_the_text_right_before_it_and_counts_the_token(
    says, overlap: bool, include: bool, text: str
) -> None:
    whole = await answer_of(
        says("alpha gamma delta", overlap=overlap), stop=["gam"], include_stop_str_in_output=include
    )
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (text, "stop", "gam")
    assert whole.usage.output_tokens == len("alpha") + 1


@DEPTHS
async def test_a_stop_that_never_comes_delays_no_token(says, recorder, overlap: bool) -> None:
    """Push by push: with the stop as without it, but for text that may still become the stop."""
    pushes: list[list[str]] = []
    for stop in ((), ("END",)):
        async with says("one two END-less", overlap=overlap) as engine:
            sink, texts = recorder(), []
            sink.push = lambda ids, text, texts=texts: texts.append(text)
            engine.submit(engine.tokenizer.encode("?"), SamplingParams(max_tokens=9, stop=stop), sink)
            await sink.has_end.wait()
            pushes.append(texts)
    assert pushes[0] == pushes[1] == list("one two E")


@DEPTHS
async def test_text_is_held_only_while_it_may_become_a_stop(says, recorder, overlap: bool) -> None:
    async with says("an ENDx", overlap=overlap) as engine:
        sink = recorder()
        texts = []
        sink.push = lambda ids, text: texts.append(text)
        engine.submit(engine.tokenizer.encode("?"), SamplingParams(max_tokens=7, stop=("ENDE",)), sink)
        await sink.has_end.wait()
    assert texts == ["a", "n", " ", "", "", "", "ENDx"]


@DEPTHS
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("include", "shown"), [(False, ""), (True, TURN)])
async def test_the_marker_of_a_stop_id_is_shown_only_to_who_asks_for_it(
    says, tokenizer, overlap: bool, skip: bool, include: bool, shown: str
) -> None:
    """And nothing of the visible text before it is taken away with it."""
    turn_id = tokenizer.token_id(TURN)
    whole = await answer_of(
        says("trailing space " + TURN + "more", overlap=overlap),
        stop_token_ids=[turn_id],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )
    assert whole.text == "trailing space " + ("" if skip else shown)
    assert (whole.finish_reason, whole.stop_reason) == ("stop", turn_id)
    assert whole.usage.output_tokens == len("trailing space ") + 1


async def test_a_stop_id_hides_itself_and_no_token_that_looks_like_it(says, tokenizer) -> None:
    """A visible token as the stop id: the same letters elsewhere stay."""
    stop_id = tokenizer.token_id("d")
    whole = await answer_of(says("a delta and gammad"), stop_token_ids=[stop_id])
    assert whole.text == "a delta an"
