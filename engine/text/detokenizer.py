"""Token ids to text, a few at a time."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .pieces import Pieces

if TYPE_CHECKING:
    from .tokenization import TextTokenizer

_LONGEST_TAIL = 3  # bytes of a UTF-8 character that lacks its last one


class Detokenizer:
    """The text of one choice, as it grows.

    The text is the continuation of the prompt: a first space belongs to it whenever the prompt shows any text, and a
    character that the prompt left incomplete is completed here. Deltas never end inside a code point; what they hold
    back is an incomplete character (three bytes at most), and never one that can no longer be completed. The deltas
    and the flush together are the text that `TextTokenizer.decode` gives for the same ids, and no id makes `push`
    raise. Not for use from two threads at once.
    """

    __slots__ = ("_each_byte", "_owed", "_pieces", "_started", "_tail")

    def __init__(
        self, tokenizer: TextTokenizer, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        table = tokenizer.piece_table
        self._pieces = table.skipping if skip_special_tokens else table.shown
        self._each_byte = table.each_byte_replaced
        self._tail, self._started = _end_of(prompt_ids, self._pieces)
        self._owed = False  # the tail of the prompt alone is no text of ours

    def push_one(self, token_id: int) -> str:
        """`push` of a single id."""
        if self._started and not self._tail:
            text = self._pieces.texts.get(token_id)
            if text is not None:  # whole characters behind whole characters, as nearly always
                return text
        return self.push((token_id,))

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; may be empty."""
        pieces = self._pieces
        if not self._started:
            added = self._first(ids)
        elif len(ids) == 1:
            added = pieces[ids[0]]
        else:
            added = b"".join([pieces[token_id] for token_id in ids])
        if not added:
            return ""
        self._owed = True
        content = self._tail + added
        text, used = decode_utf8(content, each_byte=self._each_byte, final=False)
        self._tail = content[used:]
        return text

    def flush(self) -> str:
        """The incomplete tail, as U+FFFD; once. Afterwards there is nothing left."""
        if not self._owed:
            return ""
        tail, self._tail, self._owed = self._tail, b"", False
        return decode_utf8(tail, each_byte=self._each_byte, final=True)[0]

    def _first(self, ids: Sequence[int]) -> bytes:
        for index, token_id in enumerate(ids):
            if self._pieces[token_id]:
                self._started = True
                rest = [self._pieces[later] for later in ids[index + 1 :]]
                return self._pieces.first(token_id) + b"".join(rest)
        return b""


def decode_utf8(content: bytes, *, each_byte: bool, final: bool) -> tuple[str, int]:
    """Decode as far as `content` is decided: the text and the number of bytes used.

    Invalid input is U+FFFD, one for each maximal broken sequence (as the Unicode standard advises and byte-level
    decoders do) or, with `each_byte`, one for each byte of it (as byte-fallback decoders do). Unless `final`, an
    incomplete character at the end stays unused.
    """
    if not each_byte:
        return utf_8_decode(content, "replace", final)
    parts: list[str] = []
    view = memoryview(content)
    start = 0
    while True:
        try:
            text, used = utf_8_decode(view[start:], "strict", final)
        except UnicodeDecodeError as error:
            parts.append(utf_8_decode(view[start : start + error.start])[0])
            parts.append("\N{REPLACEMENT CHARACTER}" * (error.end - error.start))
            start += error.end
        else:
            return "".join((*parts, text)), start + used


def _end_of(prompt_ids: Sequence[int], pieces: Pieces) -> tuple[bytes, bool]:
    """The incomplete character at the prompt's end, and whether the prompt shows any text."""
    end = b""
    for token_id in reversed(prompt_ids):
        end = pieces[token_id] + end
        if len(end) >= _LONGEST_TAIL:
            break
    if not end or end[-1] < 0x80:
        return b"", bool(end)
    return end[utf_8_decode(end, "replace", False)[1] :], True
