"""Log-probabilities in OpenAI's shapes: chat and completions, streamed and whole, echo and scoring."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from slipstream.engine.outputs import TokenLogprobs
from slipstream.engine.scripted_worker import Script
from slipstream.http.logprob_fields import CompletionLogprobs, TokenTexts

MESSAGES = [{"role": "user", "content": "x"}]


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 6, "ignore_eos": True, "seed": 3, **more}


async def test_logprobs_alone_give_each_token_and_no_alternatives(serving: Any) -> None:
    async with serving() as served:
        choice = (await served.post("/v1/chat/completions", chat(logprobs=True))).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in content)
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]


async def test_a_stream_brings_every_token_s_logprobs_once_with_its_own_alternatives(serving: Any) -> None:
    async with serving() as served:
        whole = (await served.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=3))).json["choices"][0]
        streamed = await served.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=3, stream=True))
    choices = [event["choices"][0] for event in streamed.events[:-1]]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
    assert entries == whole["logprobs"]["content"]
    assert len({str(entry["top_logprobs"]) for entry in entries}) == 6
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]


async def test_rows_that_ask_for_none_have_none(serving: Any) -> None:
    async with serving() as served:
        assert (await served.post("/v1/chat/completions", chat())).json["choices"][0]["logprobs"] is None
        answer = await served.post("/v1/completions", {"prompt": "x", "logprobs": False, "max_tokens": 2})
        assert answer.json["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("k", [0, 2])
async def test_completions_logprobs_have_the_drawn_token_and_offsets_that_sum_to_the_text(serving: Any, k: int) -> None:
    async with serving() as served:
        body = {"prompt": "ab", "logprobs": k, "max_tokens": 5, "ignore_eos": True, "seed": 1}
        whole = (await served.post("/v1/completions", body)).json["choices"][0]
        streamed = await served.post("/v1/completions", {**body, "stream": True})
    scores = whole["logprobs"]
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == 5
    assert scores["text_offset"] == sorted(scores["text_offset"])
    places = list(zip(scores["tokens"], scores["text_offset"], strict=True))
    complete = [(token, place) for token, place in places if "\ufffd" not in token]
    assert len(complete) >= 2
    assert all(whole["text"].startswith(token, place) for token, place in complete), (whole["text"], places)
    if k:
        assert all(token in top for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True))
        assert all(1 <= len(top) <= k + 1 for top in scores["top_logprobs"])
    else:
        assert scores["top_logprobs"] is None
    pieces = [event["choices"][0]["logprobs"] for event in streamed.events[:-1] if event["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == scores[name]


async def test_scoring_gives_the_prompt_back_and_leaves_the_engine_alive(serving: Any, tokenizer: Any) -> None:
    prompt = "Your answer: Yes"
    ids = tokenizer.encode(prompt)
    async with serving() as served:
        for _ in range(2):
            body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
            answer = (await served.post("/v1/completions", body)).json
            choice = answer["choices"][0]
            assert choice["text"] == prompt
            assert choice["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 0
            assert "".join(choice["logprobs"]["tokens"]) == prompt
            assert choice["logprobs"]["token_logprobs"][0] is None
            # The scripted worker's score of a token tells which token it was and where it stood.
            expected = [-float(token) - place / 1024 for place, token in enumerate(ids)][1:]
            assert choice["logprobs"]["token_logprobs"][1:] == expected
        assert served.engine.state.is_ready


async def test_echo_and_logprobs_cover_prompt_and_output_and_never_a_part(serving: Any, tokenizer: Any) -> None:
    prompt = "the stream slips " * 12
    async with serving() as served:
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "ignore_eos": True}
        choice = (await served.post("/v1/completions", body)).json["choices"][0]
        assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(prompt)) + 3
        assert choice["text"].startswith(prompt)
        assert choice["logprobs"]["text_offset"][-1] < len(choice["text"]) + 3
        assert (await served.post("/v1/completions", {**body, "top_logprobs": 2})).status == 400


def streamed_choices(answer: Any, count: int) -> list[dict[str, Any]]:
    """What the events of each choice add up to."""
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": None} for _ in range(count)]
    for event in answer.events[:-1]:
        (piece,) = event["choices"]
        choice = choices[piece["index"]]
        choice["text"] += piece["text"]
        if piece["logprobs"] is not None:
            before = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
            choice["logprobs"] = {name: before[name] + piece["logprobs"][name] for name in before}
    return choices


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("prompt", [["the stream slips " * 9, "past"], [[40], [41, 42]]])
async def test_an_echo_with_logprobs_is_the_same_streamed_and_whole(serving: Any, prompt: Any, max_tokens: int) -> None:
    async with serving() as served:
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2, "ignore_eos": True}
        whole = (await served.post("/v1/completions", {**body, "seed": 1})).json["choices"]
        streamed = streamed_choices(await served.post("/v1/completions", {**body, "seed": 1, "stream": True}), 4)
    for one, other in zip(streamed, whole, strict=True):
        assert one == {"text": other["text"], "logprobs": other["logprobs"]}
        assert other["logprobs"]["token_logprobs"][0] is None


async def test_prompt_logprobs_have_every_token_but_the_first_by_id_with_its_rank(serving: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("slips past")
    async with serving() as served:
        body = {"prompt": ids, "max_tokens": 1, "n": 2, "prompt_logprobs": 2}
        for choice in (await served.post("/v1/completions", body)).json["choices"]:
            first, *rest = choice["prompt_logprobs"]
            assert first is None
            for place, (token, entries) in enumerate(zip(ids[1:], rest, strict=True), 1):
                own = {"logprob": -token - place / 1024, "rank": None, "decoded_token": tokenizer.decode([token])}
                # The scripted worker likes ids 0 and 1 best, wherever they are.
                assert entries.pop(str(token)) == own
                assert [(name, entry["rank"], entry["logprob"]) for name, entry in entries.items()] == [
                    ("0", 1, 0.0),
                    ("1", 2, 0.0),
                ]
        # Beside an echo with fewer alternatives each keeps its own number.
        both = {**body, "echo": True, "logprobs": 1}
        for choice in (await served.post("/v1/completions", both)).json["choices"]:
            assert [len(entries) for entries in choice["prompt_logprobs"][1:]] == [3] * (len(ids) - 1)
            assert [len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(ids)]] == [2] * (len(ids) - 1)
            assert choice["text"].startswith("slips past")
        chat_answer = (await served.post("/v1/chat/completions", chat(prompt_logprobs=0, n=2))).json
        assert len(chat_answer["prompt_logprobs"]) == chat_answer["usage"]["prompt_tokens"]
        assert all(len(entries) == 1 for entries in chat_answer["prompt_logprobs"][1:])
        refused = await served.post("/v1/chat/completions", chat(prompt_logprobs=0, stream=True))
        assert (refused.status, refused.json["error"]["param"]) == (400, "prompt_logprobs")


async def test_tokens_with_the_same_text_keep_a_key_each(serving: Any, tokenizer: Any) -> None:
    half = [token for token in range(300) if tokenizer.token_bytes(token) in (b"\xe2", b"\xf0", b"\xc3")]
    texts = TokenTexts(tokenizer)
    score = TokenLogprobs(half[0], -3.0, tuple(half), (-1.0, -2.0, -3.0))
    (top,) = CompletionLogprobs(texts, has_top=True).piece([score])["top_logprobs"]
    assert top == {"\ufffd": -3.0, f"token_id:{half[1]}": -2.0, f"token_id:{half[2]}": -3.0}


@pytest.mark.parametrize("start", [-1, 0, 1, 3, 500])
async def test_the_native_endpoint_scores_outputs_and_the_prompt_from_where_it_is_asked(
    serving: Any, tokenizer: Any, start: int
) -> None:
    ids = tokenizer.encode("slips past")
    asked = {
        "input_ids": ids, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2,
        "return_text_in_logprobs": True, "sampling_params": {"max_tokens": 4, "ignore_eos": True, "seed": 1},
    }  # fmt: skip
    async with serving() as served:
        whole = (await served.post("/generate", asked)).json
        streamed = (await served.post("/generate", {**asked, "stream": True})).events[:-1]
        batch = (await served.post("/generate", {**asked, "input_ids": [ids, [5]]})).json
        scoring = {**asked, "sampling_params": {"max_tokens": 0}}
        scored = (await served.post("/generate", scoring)).json["meta_info"]
        scored_stream = (await served.post("/generate", {**scoring, "stream": True})).events[:-1]
    told = whole["meta_info"]
    expected = [[None, ids[0], tokenizer.decode(ids[:1])]] if start == 0 else []
    expected += [
        [-token - place / 1024, token, tokenizer.decode([token])]
        for place, token in enumerate(ids)
        if place >= max(1, start) and start >= 0
    ]
    assert told["input_token_logprobs"] == scored["input_token_logprobs"] == expected
    assert len(told["input_top_logprobs"]) == len(expected)
    assert [token for _, token, _ in told["output_token_logprobs"]] == whole["output_ids"]
    assert all(len(top) == 2 for top in told["output_top_logprobs"])
    added: dict[str, list[Any]] = {}
    for event in streamed:
        for name, values in event["meta_info"].items():
            if name.endswith("_logprobs"):
                added[name] = added.get(name, []) + values
    assert added == {name: values for name, values in told.items() if name.endswith("_logprobs")}
    assert [token for event in streamed for token in event["output_ids"]] == whole["output_ids"]
    assert "".join(event["text"] for event in streamed) == whole["text"]
    if start >= 0:
        assert scored_stream[0]["meta_info"]["input_token_logprobs"] == expected
    assert batch[0]["meta_info"]["input_token_logprobs"] == expected
    assert batch[1]["meta_info"]["input_token_logprobs"] == ([[None, 5, tokenizer.decode([5])]] if start == 0 else [])


async def test_native_logprob_fields_need_return_logprob(serving: Any) -> None:
    async with serving() as served:
        for field in ({"logprob_start_len": 0}, {"top_logprobs_num": 1}, {"return_text_in_logprobs": True}):
            answer = await served.post("/generate", {"text": "x", **field})
            assert (answer.status, answer.json["error"]["param"]) == (400, next(iter(field)))
        asked = {"input_ids": [7], "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_tokens": 0}}
        (last,) = (await served.post("/generate", {**asked, "stream": True})).events[:-1]
        assert last["meta_info"]["input_token_logprobs"] == [[None, 7, None]]
        plain = await served.post("/generate", {"text": "x", "sampling_params": {"max_tokens": 1}})
        assert "output_token_logprobs" not in plain.json["meta_info"]


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_alone_puts_the_prompt_before_each_choice(serving: Any, scripted: Any, stream: bool) -> None:
    async with serving(Script(token_of=scripted.saying("!?"))) as served:
        body = {"prompt": "PROMPT", "echo": True, "n": 2, "max_tokens": 9, "stream": stream}
        answer = await served.post("/v1/completions", body)
    if stream:
        texts = ["", ""]
        for event in answer.events[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        texts = [choice["text"] for choice in answer.json["choices"]]
    assert texts == ["PROMPT!?"] * 2


async def test_top_logprobs_need_logprobs(serving: Any) -> None:
    async with serving() as served:
        answer = await served.post("/v1/chat/completions", chat(top_logprobs=3))
    assert (answer.status, answer.json["error"]["param"]) == (400, "top_logprobs")


async def test_the_openai_client_reads_them(serving: Any) -> None:
    async with serving() as served, openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            logprobs=True,
            top_logprobs=2,
            max_tokens=3,  # type: ignore[arg-type]
        )
        assert answer.choices[0].logprobs is not None
        assert all(len(entry.top_logprobs) == 2 for entry in answer.choices[0].logprobs.content or [])


class _Bytes:
    """A tokenizer whose tokens are these."""

    tokens = ("hé".encode(), b" \xf0\x9f", b"\x98\x80", b" ok", b"!")

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def shown_bytes(self, token_id: int, *, starts_text: bool, skips_special: bool) -> bytes:
        return self.tokens[token_id]

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.tokens[each] for each in ids).decode()


def test_offsets_stay_right_behind_a_character_of_several_tokens() -> None:
    scored = CompletionLogprobs(TokenTexts(_Bytes()), has_top=False)
    first = scored.prompt(0, [])
    rest = scored.piece([TokenLogprobs(token_id=each, logprob=-1.0, top_ids=(), top_logprobs=()) for each in (1, 2)])
    last = scored.piece([TokenLogprobs(token_id=each, logprob=-1.0, top_ids=(), top_logprobs=()) for each in (3, 4)])
    text = _Bytes().decode(range(5))
    assert text == "hé 😀 ok!"
    offsets = first["text_offset"] + rest["text_offset"] + last["text_offset"]
    assert offsets == [0, text.index(" 😀"), text.index("😀"), text.index(" ok"), text.index("!")]
