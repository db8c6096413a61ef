"""How text ends: stop strings, stop ids, the model's end ids, min_tokens, with a real tokenizer and scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import Completion
from slipstream.engine.request_builder import RequestBuilder
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.text.detokenizer import Detokenizer
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.tokenization import TextTokenizer
from slipstream.engine.worker import WorkerLimits

DEPTHS = pytest.mark.parametrize("overlap", [False, True])
EOS = "<|end|>"


@pytest.fixture(scope="module")
def tokenizer(byte_level: Callable[[], Tokenizer]) -> TextTokenizer:
    """One token a byte, and three special ones."""
    backend = byte_level()
    backend.add_special_tokens([EOS, "<|turn|>", "<|pad|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    eos_id = backend.token_to_id(EOS)
    return TextTokenizer(backend, special_tokens={"eos_token": EOS}, eos_ids=frozenset({eos_id, 99_999}))


@pytest.fixture
def says(tokenizer: TextTokenizer) -> Callable[..., Engine]:
    """An engine whose model says `answer` to any prompt of one character, whatever the seed."""

    def make(answer: str, *, overlap: bool = True, raw_ids: Sequence[int] = ()) -> Engine:
        ids = list(raw_ids) or tokenizer.encode(answer, add_special_tokens=False)
        limits = WorkerLimits(num_pages=64, page_size=4, num_rows=4, max_model_len=256, vocab_size=tokenizer.vocab_size)
        script = Script(token_of=lambda seed, history: ids[(len(history) - 1) % len(ids)])
        engine = Engine.on(ScriptedWorker(limits, script), tokenizer=tokenizer, page_size=4, overlap=overlap)
        engine.proves_laws = True
        return engine

    return make


async def answer_of(engine: Engine, **params) -> Completion:
    """The whole answer, streamed and at once, which must agree."""
    async with engine:
        params = {"max_tokens": 60, **params}
        whole = await engine.complete("?", SamplingParams(**params))
        deltas = [delta async for delta in engine.generate("?", SamplingParams(**params))]
        assert "".join(delta.text for delta in deltas) == whole.text
        await engine.drain(5)
        stats = engine.stats
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    return whole


@DEPTHS
async def test_the_models_end_id_ends_and_is_not_shown(says, overlap: bool) -> None:
    whole = await answer_of(says("hello" + EOS + "never", overlap=overlap))
    assert (whole.text, whole.finish_reason) == ("hello", "stop")
    assert whole.usage.output_tokens == 6
    assert whole.stop_reason == whole.token_ids[-1]


@DEPTHS
async def test_the_end_id_is_shown_to_who_asks_for_it(says, overlap: bool) -> None:
    engine = says("hello" + EOS, overlap=overlap)
    whole = await answer_of(engine, include_stop_str_in_output=True, skip_special_tokens=False)
    assert whole.text == "hello" + EOS


async def test_ignore_eos_goes_on_to_the_length(says) -> None:
    whole = await answer_of(says("ab" + EOS), ignore_eos=True, max_tokens=7)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ababa", "length", None)
    assert whole.usage.output_tokens == 7


@DEPTHS
@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
async def test_a_stop_string_over_several_tokens_ends_where_it_is_complete(
    says, overlap: bool, include: bool, text: str
) -> None:
    whole = await answer_of(
        says("one STOP two", overlap=overlap), stop=["STOP", "two"], include_stop_str_in_output=include
    )
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (text, "stop", "STOP")
    assert whole.usage.output_tokens == len("one STOP")


async def test_what_only_began_like_a_stop_string_comes_out(says) -> None:
    whole = await answer_of(says("a STO b"), stop="STOP", max_tokens=5)
    assert (whole.text, whole.finish_reason) == ("a STO", "length")
    whole = await answer_of(says("a STO" + EOS), stop="STOP")
    assert (whole.text, whole.finish_reason) == ("a STO", "stop")


async def test_a_character_cut_by_the_length_is_shown_as_broken(says) -> None:
    assert (await answer_of(says("é"), max_tokens=1)).text == "\N{REPLACEMENT CHARACTER}"
    assert (await answer_of(says("é"), max_tokens=2)).text == "é"


async def test_a_stop_id_ends_and_is_shown_only_if_asked_for(says, tokenizer) -> None:
    stop_id = tokenizer.token_id("d")
    whole = await answer_of(says("abcdef"), stop_token_ids=[stop_id])
    assert (whole.text, whole.stop_reason, whole.finish_reason) == ("abc", stop_id, "stop")
    whole = await answer_of(says("abcdef"), stop_token_ids=[stop_id], include_stop_str_in_output=True)
    assert whole.text == "abcd"


@DEPTHS
@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 6])
async def test_until_min_tokens_are_out_no_end_id_is_drawn(says, tokenizer, overlap: bool, min_tokens: int) -> None:
    """The scripted worker draws the next id instead of a suppressed one: the end id itself comes with the next turn."""
    engine = says("abcd" + EOS, overlap=overlap)
    whole = await answer_of(engine, min_tokens=min_tokens)
    assert whole.usage.output_tokens == (5 if min_tokens < 5 else 10)
    assert whole.token_ids[-1] == tokenizer.token_id(EOS)
    assert whole.token_ids.count(tokenizer.token_id(EOS)) == 1


@DEPTHS
async def test_until_min_tokens_are_out_no_stop_string_counts(says, overlap: bool) -> None:
    whole = await answer_of(says("a.b.c.d", overlap=overlap), stop=".", min_tokens=3)
    assert (whole.text, whole.stop_reason) == ("a.b", ".")
    whole = await answer_of(says("a.b.c.d", overlap=overlap), stop=".", min_tokens=4)
    assert (whole.text, whole.usage.output_tokens) == ("a.b", 4)
    whole = await answer_of(says("a.b.c.d", overlap=overlap), stop=".", min_tokens=5)
    assert whole.text == "a.b.c"


@DEPTHS
async def test_a_stop_string_that_is_a_special_token_stops_though_it_is_skipped(says, overlap: bool) -> None:
    engine = says("fine<|turn|>more", overlap=overlap)
    whole = await answer_of(engine, stop=["<|turn|>", "xyz"])
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("fine", "stop", "<|turn|>")


async def test_a_special_token_that_is_shown_stops_as_text(says) -> None:
    whole = await answer_of(says("fine<|turn|>more"), stop="<|turn|>", skip_special_tokens=False)
    assert (whole.text, whole.stop_reason) == ("fine", "<|turn|>")


async def test_a_special_stop_counts_even_where_end_ids_are_ignored(says) -> None:
    whole = await answer_of(says("fine" + EOS + "more"), stop=EOS, ignore_eos=True)
    assert (whole.text, whole.stop_reason) == ("fine", EOS)


def test_only_special_tokens_become_stop_ids(tokenizer) -> None:
    limits = WorkerLimits(num_pages=8, page_size=4, num_rows=1, max_model_len=32, vocab_size=tokenizer.vocab_size)
    params = SamplingParams(stop=["<|turn|>", "<think>", "a", "zz"], ignore_eos=True)
    request = RequestBuilder(limits, tokenizer).build([1], params, None, request_id=None, salt=None)  # type: ignore[arg-type]
    turn_id = tokenizer.token_id("<|turn|>")
    assert request.stop_ids == {turn_id}
    assert request.stop_texts == {turn_id: "<|turn|>"}


def test_end_ids_that_the_model_cannot_draw_are_left_out(tokenizer) -> None:
    limits = WorkerLimits(num_pages=8, page_size=4, num_rows=1, max_model_len=32, vocab_size=tokenizer.vocab_size)
    request = RequestBuilder(limits, tokenizer).build([1], SamplingParams(), None, request_id=None, salt=None)  # type: ignore[arg-type]
    assert 99_999 in tokenizer.eos_ids
    assert request.stop_ids == {tokenizer.token_id(EOS)}


async def test_text_prompts_and_ids_give_the_same(says, tokenizer) -> None:
    async with says("yes" + EOS) as engine:
        by_text = await engine.complete("?")
        by_ids = await engine.complete(tokenizer.encode("?", add_special_tokens=False))
        assert by_text.token_ids == by_ids.token_ids
        assert by_text.text == by_ids.text == "yes"
        long_prompt = "word " * 40
        results = await asyncio.gather(*(engine.complete(long_prompt, SamplingParams(max_tokens=2)) for _ in range(4)))
        assert {result.usage.prompt_tokens for result in results} == {200}


class TestTextStream:
    """One request's text by itself."""

    def stream(
        self, tokenizer: TextTokenizer, *stops: str, includes_stop: bool = False, skip: bool = True
    ) -> TextStream:
        return TextStream(Detokenizer(tokenizer, skip_special_tokens=skip), tuple(stops), includes_stop=includes_stop)

    def feed(self, stream: TextStream, tokenizer: TextTokenizer, text: str) -> tuple[str, str | None]:
        out, stop = "", None
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            piece, stop = stream.push(token_id)
            out += piece
            if stop is not None:
                break
        return out, stop

    def test_without_stops_each_token_releases_its_text(self, tokenizer) -> None:
        stream = self.stream(tokenizer)
        assert [stream.push(tokenizer.token_id(char)) for char in "abc"] == [("a", None), ("b", None), ("c", None)]
        assert stream.flush() == ""

    def test_text_that_may_become_a_stop_is_held_and_flushed(self, tokenizer) -> None:
        stream = self.stream(tokenizer, "stop")
        assert self.feed(stream, tokenizer, "go sto") == ("go ", None)
        assert stream.flush() == "sto"
        assert stream.flush() == ""

    @pytest.mark.parametrize(("includes_stop", "text"), [(False, "go "), (True, "go stop")])
    def test_the_stop_itself_is_shown_only_if_asked_for(self, tokenizer, includes_stop: bool, text: str) -> None:
        stream = self.stream(tokenizer, "stop", includes_stop=includes_stop)
        assert self.feed(stream, tokenizer, "go stop on") == (text, "stop")

    def test_text_before_the_watch_begins_is_never_part_of_a_stop(self, tokenizer) -> None:
        stream = self.stream(tokenizer, "ab")
        assert stream.push(tokenizer.token_id("a"), looks_for_stops=False) == ("a", None)
        assert stream.push(tokenizer.token_id("b")) == ("b", None)

    def test_ending_at_an_id_releases_what_was_held(self, tokenizer) -> None:
        stream = self.stream(tokenizer, "stop")
        self.feed(stream, tokenizer, "go sto")
        assert stream.end_at(tokenizer.token_id(EOS)) == "sto"
        shown = self.stream(tokenizer, "stop", includes_stop=True, skip=False)
        self.feed(shown, tokenizer, "go sto")
        assert shown.end_at(tokenizer.token_id(EOS)) == "sto" + EOS

    def test_an_incomplete_character_is_flushed_as_broken(self, tokenizer) -> None:
        stream = self.stream(tokenizer)
        first, second = tokenizer.encode("é", add_special_tokens=False)
        assert stream.push(first) == ("", None)
        assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
        whole = self.stream(tokenizer)
        whole.push(first)
        assert whole.push(second) == ("é", None)
        assert whole.flush() == ""
