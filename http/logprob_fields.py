"""Log-probabilities in the shapes of OpenAI's two endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from ..engine.outputs import TokenLogprobs


class Pieces(Protocol):
    """What a tokenizer says of its tokens and texts."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def shown_bytes(self, token_id: int, *, starts_text: bool, skips_special: bool) -> bytes: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class TokenTexts:
    """The text of single tokens; without a tokenizer their ids."""

    def __init__(self, tokenizer: Pieces | None) -> None:
        self._tokenizer = tokenizer

    def content(self, token_id: int) -> bytes:
        return b"token_id:%d" % token_id if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        return self.content(token_id).decode("utf-8", "replace")

    def shown(self, token_id: int, *, starts_text: bool, skips_special: bool) -> bytes:
        """What the token adds to an answer's text: nothing if it is skipped, no space in front if it is the first."""
        if self._tokenizer is None:
            return b""
        return self._tokenizer.shown_bytes(token_id, starts_text=starts_text, skips_special=skips_special)


def chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion: one entry a token, in order."""
    return {
        "content": [
            {
                **_entry(texts, each.token_id, each.logprob),
                "top_logprobs": [
                    _entry(texts, token_id, logprob)
                    for token_id, logprob in zip(each.top_ids, each.top_logprobs, strict=True)
                ],
            }
            for each in logprobs
        ],
        "refusal": None,
    }


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": list(texts.content(token_id))}


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, piece by piece: offsets count on from piece to piece.

    A token's string is its own, with the space in front of it and for a special token its name. Its offset is where
    what it adds to the text begins.
    """

    def __init__(
        self, texts: TokenTexts, *, has_top: bool, skips_special: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        """`skips_special`: the text does without special tokens. `prompt_ids`: what the text continues."""
        self._texts = texts
        self._has_top = has_top
        self._skips_special = skips_special
        self._has_begun = any(texts.shown(each, starts_text=False, skips_special=skips_special) for each in prompt_ids)
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, first_id: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """An echoed prompt. Nothing comes before its first token, which has no log-probability."""
        rest = [(each.token_id, each.logprob, each if self._has_top else None) for each in logprobs]
        return self._columns([(first_id, None, None), *rest], skips_special=True)

    def piece(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens. The drawn token stands among the likeliest, whether or not it is one of them."""
        rows = [(each.token_id, each.logprob, each if self._has_top else None) for each in logprobs]
        return self._columns(rows, skips_special=self._skips_special)

    def _columns(
        self, rows: Sequence[tuple[int, float | None, TokenLogprobs | None]], *, skips_special: bool
    ) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprob, scored in rows:
            shown = self._texts.shown(token_id, starts_text=not self._has_begun, skips_special=skips_special)
            # A first token of nothing but a space adds nothing, and is the first all the same.
            self._has_begun = self._has_begun or bool(
                self._texts.shown(token_id, starts_text=False, skips_special=skips_special)
            )
            columns["tokens"].append(self._texts.text(token_id))
            columns["token_logprobs"].append(logprob)
            columns["top_logprobs"].append(None if scored is None else self._top(scored))
            columns["text_offset"].append(self._place(shown))
        return columns if self._has_top else {**columns, "top_logprobs": None}

    def _place(self, content: bytes) -> int:
        """The offset of the character that the first byte belongs to: one character may take several tokens."""
        first, rest = content[:1], content[1:]
        self._offset += len(self._decoder.decode(first))
        is_whole = bool(first) and not self._decoder.getstate()[0]
        place = self._offset - is_whole
        self._offset += len(self._decoder.decode(rest))
        return place

    def _top(self, scored: TokenLogprobs) -> dict[str, float]:
        """By text; of tokens with the same text (parts of characters, unknown ones) the later have their ids for it."""
        top = {self._texts.text(scored.token_id): scored.logprob}
        for token_id, logprob in zip(scored.top_ids, scored.top_logprobs, strict=True):
            if token_id != scored.token_id:
                text = self._texts.text(token_id)
                top[f"token_id:{token_id}" if text in top else text] = logprob
        return top


def prompt_logprobs(texts: TokenTexts, scores: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first its own entry and the likeliest ones', by id.
    The rank is known for the likeliest.
    """
    told: list[dict[str, Any] | None] = [None]
    for each in scores:
        entries = {str(each.token_id): _ranked(texts, each.token_id, each.logprob, None)}
        for rank, (token_id, logprob) in enumerate(zip(each.top_ids, each.top_logprobs, strict=True), 1):
            if rank <= num_top or token_id == each.token_id:
                entries[str(token_id)] = _ranked(texts, token_id, logprob, rank)
        told.append(entries)
    return told


def _ranked(texts: TokenTexts, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": texts.text(token_id)}


def first_of(scores: Sequence[TokenLogprobs], num_top: int) -> list[TokenLogprobs]:
    """The scores with no more than so many of the likeliest tokens."""
    return [each._replace(top_ids=each.top_ids[:num_top], top_logprobs=each.top_logprobs[:num_top]) for each in scores]


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two pieces as one."""
    return {name: None if first[name] is None or second[name] is None else first[name] + second[name] for name in first}
