"""Structured output through the engine: valid at both depths beside free requests, faults with the radius of a row."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from unittest.mock import patch

import pytest

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.errors import MisuseError, Overloaded, RequestError, StepFailed
from slipstream.engine.grammar_session import GrammarSpec
from slipstream.engine.grammar_store import YIELD_S, GrammarStore
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.text.tokenization import TextTokenizer
from slipstream.engine.worker import WorkerLimits

END = 256
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["ab", "c", None]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
JSON = GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA))
REGEX = GrammarSpec(kind="regex", source="[a-f]{4}(-[0-9]{2}){1,3}")
CHOICE = GrammarSpec(kind="choice", source='["yes", "no", "perhaps"]')


@pytest.fixture(scope="module")
def tokenizer(byte_level):
    """One token a byte, and an end token."""
    made = byte_level()
    made.add_special_tokens(["<end>"])
    return TextTokenizer(made, eos_ids=frozenset({made.token_to_id("<end>")}))


@pytest.fixture
def engine(tokenizer):
    def make(script=None, *, num_pages=2048, num_rows=160, with_tokenizer=True, **settings):
        limits = WorkerLimits(num_pages=num_pages, page_size=4, num_rows=num_rows, max_model_len=256, vocab_size=270)
        made = Engine.on(
            ScriptedWorker(limits, script), tokenizer=tokenizer if with_tokenizer else None, page_size=4, **settings
        )
        made.proves_laws = True
        return made

    return make


def is_valid(spec, text):
    if spec is JSON:
        document = json.loads(text)
        return set(document) == {"n", "kind"} and 0 <= document["n"] <= 999 and document["kind"] in ("ab", "c", None)
    return text in ("yes", "no", "perhaps") if spec is CHOICE else re.fullmatch(REGEX.source, text) is not None


async def answers(running, count):
    """Constrained requests of every kind, each beside a free one."""
    specs = [(JSON, REGEX, CHOICE)[number % 3] for number in range(count)]
    constrained = [
        running.complete([number], SamplingParams(max_tokens=150, seed=number, structured_output=spec))
        for number, spec in enumerate(specs)
    ]
    free = [running.complete([number], SamplingParams(max_tokens=20, seed=number)) for number in range(count)]
    done = await asyncio.gather(*constrained, *free)
    return specs, done[:count], done[count:]


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "llguidance"])
async def test_64_constrained_requests_among_free_ones_are_all_valid_at_both_depths(engine, backend):
    pytest.importorskip(backend.replace("auto", "llguidance"))
    tokens = []
    for overlap in (False, True):
        async with engine(overlap=overlap, grammar_backend=backend) as running:
            specs, constrained, free = await answers(running, 64)
        for spec, answer in zip(specs, constrained, strict=True):
            assert answer.finish_reason == "stop"
            assert is_valid(spec, answer.text), answer.text
        assert any(not is_valid(REGEX, answer.text) for answer in free)
        tokens.append([answer.token_ids for answer in (*constrained, *free)])
    assert tokens[0] == tokens[1]


async def test_retraction_takes_nothing_from_a_grammar(engine):
    async with engine(overlap=True) as running:
        calm = (await answers(running, 12))[1]
    with patch.object(new_token_ratio, "INITIAL", 0.0):
        async with engine(overlap=True, num_pages=42) as running:
            specs, pressed, _ = await answers(running, 12)
            assert running.stats.num_retractions > 0
    assert [answer.token_ids for answer in pressed] == [answer.token_ids for answer in calm]
    assert all(is_valid(spec, answer.text) for spec, answer in zip(specs, pressed, strict=True))


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_token_against_the_grammar_ends_its_own_request_with_an_error(engine, overlap):
    # In the third step the row in place 3 draws as if there were no mask.
    script = Script(mask_faults=frozenset({(2, 3)}), token_of=lambda seed, history: 0)
    async with engine(script, overlap=overlap) as running:
        await running.compile_grammar(SamplingParams(structured_output=REGEX))
        params = [SamplingParams(max_tokens=40, structured_output=REGEX) for _ in range(8)]
        done = await asyncio.gather(
            *(running.complete([number], how) for number, how in enumerate(params)), return_exceptions=True
        )
        failed = [answer for answer in done if isinstance(answer, Exception)]
        assert len(failed) == 1
        assert isinstance(failed[0], StepFailed)
        assert "does not allow" in str(failed[0])
        assert all(is_valid(REGEX, answer.text) for answer in done if not isinstance(answer, Exception))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"structured_output": CHOICE, "bad_words": ("s",)}, "structured_output"),
        (
            {"structured_output": GrammarSpec(kind="choice", source='["yes"]'), "allowed_token_ids": "ye"},
            "structured_output",
        ),
        ({"allowed_token_ids": "ye", "bad_words": ("y", "e")}, "allowed_token_ids"),
    ],
)
async def test_who_leaves_no_token_to_draw_is_told_so_and_nobody_else_is_concerned(
    engine, tokenizer, overlap, asked, param
):
    asked = {**asked}
    if "allowed_token_ids" in asked:
        asked["allowed_token_ids"] = tuple(tokenizer.encode(asked["allowed_token_ids"]))
    script = Script(token_of=lambda seed, history: tokenizer.encode("yes")[0])
    async with engine(script, overlap=overlap) as running:
        others = [asyncio.create_task(running.complete([number], SamplingParams(max_tokens=9))) for number in range(3)]
        with pytest.raises(RequestError, match="to draw") as refused:
            await running.complete([1], SamplingParams(max_tokens=9, **asked))
        assert refused.value.param == param
        assert all(len(answer.token_ids) == 9 for answer in await asyncio.gather(*others))


class Breaking:
    """A session that raises at its third mask; it must never be asked again."""

    is_over = False

    def __init__(self):
        self.num_fills = 0

    def fill(self):
        self.num_fills += 1
        if self.num_fills == 3:
            raise RuntimeError("the matcher is beside itself")
        assert self.num_fills < 3, "asked after its end"
        return b"\xff" * 36

    def accept(self, token_id):
        assert self.num_fills < 3
        return True

    def session(self):
        return self


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_matcher_that_raises_fails_its_own_request_and_is_left_alone(engine, recorder, overlap):
    async with engine(overlap=overlap) as running:
        broken, fine = recorder(), recorder()
        params = SamplingParams(max_tokens=9, structured_output=CHOICE, ignore_eos=True)
        running.submit([1], params, broken, grammar=Breaking())
        running.submit([2], SamplingParams(max_tokens=9, ignore_eos=True), fine)
        await fine.has_end.wait()
        assert "beside itself" in str(broken.ends[0].error)
        assert len(broken.token_ids) == 2
        assert len(fine.token_ids) == 9


async def test_a_grammar_that_is_complete_ends_its_request_whatever_the_rest_asks(engine):
    async with engine() as running:
        how = {"max_tokens": 100, "structured_output": CHOICE}
        for more in ({"ignore_eos": True}, {"min_tokens": 50}, {"min_tokens": 50, "ignore_eos": True}):
            answer = await running.complete([1], SamplingParams(**how, **more))
            assert answer.finish_reason == "stop"
            assert is_valid(CHOICE, answer.text)


async def test_a_cut_answer_says_that_it_was_cut(engine):
    async with engine() as running:
        answer = await running.complete([1], SamplingParams(max_tokens=2, structured_output=REGEX))
    assert (answer.finish_reason, len(answer.text)) == ("length", 2)


async def test_a_schema_that_cannot_be_enforced_is_refused_before_any_step(engine):
    spec = GrammarSpec(kind="json_schema", source='{"type": "object", "properties": {"a": {"not": {}}}}')
    async with engine() as running:
        with pytest.raises(RequestError, match=r"\$\.properties\.a\.not is not supported"):
            await running.complete([1], SamplingParams(structured_output=spec))
        assert running.stats.num_steps == 0


async def test_a_regex_that_cannot_be_enforced_is_refused_before_any_step(engine):
    async with engine() as running:
        with pytest.raises(RequestError, match="the regex cannot be enforced: it has an anchor elsewhere"):
            await running.complete([1], SamplingParams(structured_output=GrammarSpec(kind="regex", source="a^b")))
        assert running.stats.num_steps == 0


async def test_structured_output_needs_a_tokenizer_and_submit_needs_the_grammar(engine, recorder):
    async with engine(with_tokenizer=False) as running:
        with pytest.raises(RequestError, match="needs a tokenizer"):
            await running.complete([1], SamplingParams(structured_output=CHOICE))
    async with engine() as running:
        with pytest.raises(MisuseError, match="compiled"):
            running.submit([1], SamplingParams(structured_output=CHOICE), recorder())


@pytest.mark.parametrize(
    "how", [{"kind": "yaml", "source": "x"}, {"kind": "regex"}, {"kind": "json_object", "source": "x"},
            {"kind": "regex", "source": "a" * 100_000}]
)  # fmt: skip
def test_a_spec_that_fits_no_kind_is_refused(how):
    with pytest.raises(RequestError) as caught:
        GrammarSpec(**how)
    assert caught.value.param == "structured_output"


# ---- the store


class Slow:
    """A backend that compiles when it is told to."""

    def __init__(self):
        self.may_go = threading.Event()
        self.specs = []

    def compile_blocking(self, spec):
        self.specs.append(spec)
        self.may_go.wait(10)
        if spec.source == "bad":
            raise RequestError("bad", param="structured_output")
        return Breaking()


Breaking.num_bytes = 200 << 20


def regex(source):
    return GrammarSpec(kind="regex", source=source)


async def test_requests_that_want_the_same_grammar_share_one_compilation():
    slow = Slow()
    store = GrammarStore(lambda: slow)
    waiting = [asyncio.ensure_future(store.get(regex("a"))) for _ in range(5)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    slow.may_go.set()
    got = await asyncio.gather(*waiting[1:])
    assert len({id(grammar) for grammar in got}) == 1
    assert await store.get(regex("a")) is got[0]
    assert slow.specs == [regex("a")]
    store.close()


async def test_a_compilation_that_takes_too_long_is_refused_and_a_late_result_is_kept():
    slow = Slow()
    store = GrammarStore(lambda: slow, timeout_s=0.02)
    with pytest.raises(RequestError, match="takes longer"):
        await store.get(regex("a"))
    slow.may_go.set()
    for _ in range(100):
        if store.num_compiled:
            break
        await asyncio.sleep(0.005)
    await store.get(regex("a"))
    assert len(slow.specs) == 1
    store.close()


async def test_a_compilation_lets_the_event_loop_go_on_soon():
    usual, seen = sys.getswitchinterval(), []

    class Watches:
        def compile_blocking(self, spec):
            seen.append(sys.getswitchinterval())
            raise RequestError("no", param="structured_output")

    store = GrammarStore(Watches)
    with pytest.raises(RequestError, match="no"):
        await store.get(regex("a"))
    assert seen == [pytest.approx(YIELD_S)]
    assert sys.getswitchinterval() == usual, "also where it fails"
    store.close()


async def test_failures_are_not_kept_and_grammars_only_while_there_is_room():
    slow = Slow()
    slow.may_go.set()
    store = GrammarStore(lambda: slow)
    for _ in range(2):
        with pytest.raises(RequestError):
            await store.get(regex("bad"))
    for name in ("a", "b", "c", "c", "a"):  # two of 200 MB have room
        await store.get(regex(name))
    assert [spec.source for spec in slow.specs] == ["bad", "bad", "a", "b", "c", "a"]
    store.close()


async def test_too_many_waiting_compilations_are_refused_as_overload():
    slow = Slow()
    store = GrammarStore(lambda: slow)
    waiting = [asyncio.ensure_future(store.get(regex(f"a{number}"))) for number in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await store.get(regex("one more"))
    slow.may_go.set()
    await asyncio.gather(*waiting)
    store.close()
