"""What each token contributes to a text, as bytes.

A decoder of `tokenizers` turns a list of tokens into text. For every tokenizer that language models ship, that text
is the concatenation of one piece of bytes per token, except that the first token of a text may lose a space. So a
stream needs no window of earlier tokens that is decoded again and again: it looks its pieces up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_LARGEST_ID = 0xFFFF_FFFF  # tokenizers holds ids as u32 and raises on anything else


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """A chain of decoders, read as rules for one token."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_level: bool = False
    byte_fallback: bool = False
    strips_first_space: bool = False
    first_drops_mark: str | None = None


class Pieces(dict[int, bytes]):
    """Token id → the bytes it adds in the middle of a text; filled on first use.

    Ids that are out of range, or skipped, add `b""`. Safe to share between threads. `texts` has those of the pieces that
    are whole characters.
    """

    def __init__(self, piece_of: Callable[[int], bytes | None], first_of: Callable[[int, bytes], bytes]) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}
        self._piece_of = piece_of
        self._first_of = first_of

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id <= _LARGEST_ID:
            return b""
        piece = self._piece_of(token_id)
        if piece is None:  # not a token: not stored, so that stray ids cannot make the table grow
            return b""
        self[token_id] = piece
        with suppress(UnicodeDecodeError):
            self.texts[token_id] = piece.decode()
        return piece

    def first(self, token_id: int) -> bytes:
        """What the token adds where it is the first visible one of a text."""
        piece = self[token_id]
        return self._first_of(token_id, piece) if piece else piece


class PieceTable:
    """The pieces of one tokenizer, with special tokens shown and with special tokens skipped."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        rules = _read_rules(tokenizer)
        self.each_byte_replaced = rules is not None and rules.byte_fallback
        """True where an invalid byte is one U+FFFD (byte fallback), False where a broken sequence is (byte level)."""
        piece_of: Callable[[int], bytes | None]
        first_of: Callable[[int, bytes], bytes]
        if rules is None:
            probe = _Probe(tokenizer)
            piece_of, first_of = probe.piece, probe.first
        else:
            reader = _RuleReader(tokenizer, rules)
            piece_of, first_of = reader.piece, reader.first
        self.shown = Pieces(piece_of, first_of)
        self.skipping = Pieces(lambda token_id: b"" if token_id in special_ids else piece_of(token_id), first_of)


class _RuleReader:
    """Pieces computed from the token's own text."""

    def __init__(self, tokenizer: Tokenizer, rules: _Rules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._byte_of = _byte_level_alphabet() if rules.byte_level else {}

    def piece(self, token_id: int) -> bytes | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        rules = self._rules
        if rules.byte_level:
            byte_of = self._byte_of
            if all(char in byte_of for char in token):
                return bytes(byte_of[char] for char in token)
            return token.encode()  # an added token, spelled in plain text
        for old, new in rules.replacements:
            token = token.replace(old, new)
        if rules.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass  # looks like a byte token and is none
        return token.encode()

    def first(self, token_id: int, piece: bytes) -> bytes:
        if self._rules.first_drops_mark is not None:
            token = self._tokenizer.id_to_token(token_id) or ""
            return token.replace(self._rules.first_drops_mark, "").encode() if _is_text(token, piece) else piece
        return piece.removeprefix(b" ") if self._rules.strips_first_space else piece


class _Probe:
    """Pieces measured behind an anchor token, for decoders that no rule here describes (WordPiece, none at all)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = next(
            (i for i in sorted(tokenizer.get_vocab().values()) if self._decode([i]).strip().isalnum()), None
        )
        self._anchor_text = "" if self._anchor is None else self._decode([self._anchor])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def piece(self, token_id: int) -> bytes | None:
        if self._tokenizer.id_to_token(token_id) is None:
            return None
        if self._anchor is not None:
            text = self._decode([self._anchor, token_id])
            if text.startswith(self._anchor_text):
                return text[len(self._anchor_text) :].encode()
        return self._decode([token_id]).encode()

    def first(self, token_id: int, piece: bytes) -> bytes:
        return self._decode([token_id]).encode()


def _is_text(token: str, piece: bytes) -> bool:
    return not (len(piece) == 1 and token.startswith("<0x") and len(token) == 6)


def _read_rules(tokenizer: Tokenizer) -> _Rules | None:
    """The rules of the tokenizer's decoder, or None where they cannot be told token by token."""
    if tokenizer.decoder is None:
        return None
    steps = _flatten(json.loads(tokenizer.decoder.__getstate__()))
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return _Rules(byte_level=True)
    if "Metaspace" in kinds:
        return _metaspace_rules(steps) if set(kinds) <= {"Metaspace", "ByteFallback"} else None
    # The order matters: Replace… ByteFallback, Fuse, Strip. A Strip before the Fuse would strip every token.
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    ranks = [order.index(step["type"]) if step["type"] in order else -1 for step in steps]
    if -1 in ranks or ranks != sorted(ranks):
        return None
    replacements = [step for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    if any("String" not in step["pattern"] for step in replacements):
        return None
    if len(strips) > 1 or any((s["content"], s["start"] > 1, s["stop"]) != (" ", False, 0) for s in strips):
        return None
    if strips and strips[0]["start"] and not any(step["type"] == "Fuse" for step in steps):
        return None
    return _Rules(
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in replacements),
        byte_fallback="ByteFallback" in kinds,
        strips_first_space=bool(strips and strips[0]["start"]),
    )


def _metaspace_rules(steps: list[dict[str, Any]]) -> _Rules:
    metaspace = next(step for step in steps if step["type"] == "Metaspace")
    mark = metaspace["replacement"]
    return _Rules(
        replacements=((mark, " "),),
        byte_fallback=any(step["type"] == "ByteFallback" for step in steps),
        first_drops_mark=None if metaspace["prepend_scheme"] == "never" else mark,
    )


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _byte_level_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level vocabularies are written in.

    Source: GPT-2. Bytes that print in Latin-1 stand for themselves, the others for U+0100 onward, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
