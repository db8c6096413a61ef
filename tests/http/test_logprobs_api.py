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
        refused = await served.post("/v1/completions", {**body, "stream": True})
        assert (refused.status, refused.json["error"]["param"]) == (400, "echo")
        for more in ({"prompt_logprobs": 1}, {"top_logprobs": 2}):
            assert (await served.post("/v1/completions", {**body, **more})).status == 400


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
