"""Log-probabilities with a tokenizer of the SentencePiece kind: spaces before words, bytes for what it has no piece for."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.engine.scripted_worker import Script
from slipstream.engine.text.tokenization import TextTokenizer
from slipstream.http.settings import FrontSettings

WORDS = ("▁Item", "▁is", "▁the", "▁a", "▁b")
PROMPT = "Item\n12 is the 7\nčas"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """As Llama 2's: `<s>` in front, words with their space, single digits, bytes for newlines and what is rare."""
    letters = sorted({char for word in WORDS for char in word} | set("127"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            tokens.append(word[:end])
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    model = models.BPE(
        vocab=vocab, merges=list(dict.fromkeys(merges)), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁*[^▁]+"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = "{{ messages[0].content }}"
    return TextTokenizer(backend, special_tokens=special, eos_ids=frozenset({2}), chat_template=template)


def placed(choice: dict[str, Any]) -> list[tuple[str, int]]:
    scores = choice["logprobs"]
    return list(zip(scores["tokens"], scores["text_offset"], strict=True))


@pytest.mark.parametrize("skips_special", [True, False])
async def test_each_token_is_its_own_piece_and_stands_in_the_text_where_its_offset_says(
    serving: Any, tokenizer: Any, skips_special: bool
) -> None:
    """The start token is not in the text, nor is the first word's space; a letter of two bytes has two tokens."""
    prompt_ids = tokenizer.encode(PROMPT)
    answer_ids = [*tokenizer.encode("is the 1\nč", add_special_tokens=False), 2]
    script = Script(token_of=lambda seed, history: answer_ids[min(len(history) - len(prompt_ids), len(answer_ids) - 1)])
    async with serving(script) as served:
        body = {"prompt": PROMPT, "logprobs": 1, "max_tokens": 20, "skip_special_tokens": skips_special}
        echoed = (await served.post("/v1/completions", {**body, "echo": True})).json["choices"][0]
        plain = (await served.post("/v1/completions", body)).json["choices"][0]
        streamed = (await served.post("/v1/completions", {**body, "stream": True})).events[:-1]
    assert echoed["text"] == PROMPT + " is the 1\nč"
    assert plain["text"] == " is the 1\nč"
    for choice, ids in ((echoed, [*prompt_ids, *answer_ids]), (plain, answer_ids)):
        assert [token for token, _ in placed(choice)] == [
            tokenizer.token_bytes(each).decode("utf-8", "replace") for each in ids
        ]
        for token, place in placed(choice):
            if "\ufffd" in token:
                assert choice["text"][place] == "č"
            elif token not in ("<s>", "</s>"):
                begins_text = choice is echoed and place == 0
                assert choice["text"].startswith(token.lstrip() if begins_text else token, place), (token, place)
        assert choice["logprobs"]["text_offset"][-1] == len(choice["text"]), "the end token is behind all"
    assert placed(echoed)[:3] == [("<s>", 0), (" Item", 0), ("\n", 4)]
    pieces = [event["choices"][0]["logprobs"] for event in streamed if event["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [value for each in pieces for value in each[name]] == plain["logprobs"][name]


async def test_without_text_before_it_a_continuation_begins_without_its_space(serving: Any, tokenizer: Any) -> None:
    answer_ids = tokenizer.encode("is the 7", add_special_tokens=False)
    script = Script(token_of=lambda seed, history: answer_ids[min(len(history) - 1, len(answer_ids) - 1)])
    async with serving(script) as served:
        body = {"prompt": [1], "logprobs": 0, "max_tokens": len(answer_ids)}
        choice = (await served.post("/v1/completions", body)).json["choices"][0]
    assert choice["text"] == "is the 7"
    assert placed(choice) == [(" is", 0), (" the", 2), (" ", 6), ("7", 7)]


async def test_a_loglikelihood_request_has_an_entry_for_every_token(serving: Any, tokenizer: Any) -> None:
    """As evaluation harnesses ask: sixty tokens echoed with their scores, one token generated."""
    prompt = "Item 12\nis the " * 8
    num_tokens = len(tokenizer.encode(prompt))
    assert num_tokens > 60
    async with serving() as served:
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        answer = (await served.post("/v1/completions", body)).json
    scores = answer["choices"][0]["logprobs"]
    assert {len(scores[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        num_tokens + 1
    }
    assert scores["token_logprobs"][0] is None
    assert all(isinstance(value, float) for value in scores["token_logprobs"][1:])
    assert scores["top_logprobs"][0] is None
    assert all(top for top in scores["top_logprobs"][1:])
    assert answer["usage"]["prompt_tokens"] == num_tokens


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_batch_of_eight_has_its_scores_in_prompt_order(serving: Any, tokenizer: Any, as_ids: bool) -> None:
    texts = [f"{'Item is the '[: 3 + number]}{number}" for number in range(8)]
    prompts = [tokenizer.encode(text) for text in texts] if as_ids else texts
    body = {"echo": True, "logprobs": 2, "max_tokens": 3, "ignore_eos": True, "seed": 5, "n": 2}
    async with serving() as served:
        together = (await served.post("/v1/completions", {**body, "prompt": prompts})).json
        alone = [(await served.post("/v1/completions", {**body, "prompt": prompt})).json for prompt in prompts]
    assert [choice["index"] for choice in together["choices"]] == list(range(16))
    expected = [choice for answer in alone for choice in answer["choices"]]
    for choice, lone in zip(together["choices"], expected, strict=True):
        assert (choice["text"], choice["logprobs"]) == (lone["text"], lone["logprobs"])
    assert together["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)


@pytest.mark.parametrize("interval", ["1", "4"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_tokens_that_share_a_chunk_keep_their_own_alternatives(serving: Any, path: str, interval: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 13, "ignore_eos": True, "seed": 3}
    if path == "/v1/completions":
        asked |= {"prompt": "Item", "logprobs": 3}
    else:
        asked |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3}
    async with serving(Script(step_time_s=0.002), front=FrontSettings(stream_interval=interval)) as served:
        whole = (await served.post(path, asked)).json["choices"][0]["logprobs"]
        events = (await served.post(path, {**asked, "stream": True})).events[:-1]
    pieces = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    if path == "/v1/completions":
        sizes = [len(piece["tokens"]) for piece in pieces]
        alternatives = [top for piece in pieces for top in piece["top_logprobs"]]
        assert alternatives == whole["top_logprobs"]
        assert all(token in top for token, top in zip(whole["tokens"], alternatives, strict=True))
    else:
        sizes = [len(piece["content"]) for piece in pieces]
        alternatives = [entry["top_logprobs"] for piece in pieces for entry in piece["content"]]
        assert alternatives == [entry["top_logprobs"] for entry in whole["content"]]
        assert all(len(top) == 3 for top in alternatives)
    assert sum(sizes) == 13
    assert len({str(top) for top in alternatives}) > 6
    if interval == "4":
        assert max(sizes) > 1, "several tokens in one chunk"
