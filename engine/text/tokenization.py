"""Text to token ids, without stopping the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tokenizers import Tokenizer

from ..errors import RequestError
from .chat_template import ChatTemplate
from .detokenizer import Detokenizer
from .pieces import PieceTable
from .tokenizer_files import read_tokenizer_files

# Encoding costs 0.3 to 0.45 µs a character (English to Chinese, 49k byte-level vocabulary): 0.5 ms at most, which is
# a slice of the loop. A thread's round trip costs about 0.1 ms, and more when the loop is busy.
INLINE_CHARS = 1_000


class TextTokenizer:
    """One model's tokenizer. Immutable once made, and safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
    ) -> None:
        self.backend = tokenizer
        """The tokenizer of the `tokenizers` library, to read from (its vocabulary, its JSON); never to change."""
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        """By role, such as `bos_token`: the text of the token."""
        self.eos_ids = eos_ids
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        """The number of tokens, added ones included. The model's embedding may be larger."""
        self.bos_id = self._named_id("bos_token")
        self.piece_table = PieceTable(tokenizer, self.special_ids)
        """What each token adds to a text."""
        self.chat_template = (
            None if chat_template is None else ChatTemplate(chat_template, special_tokens=self.special_tokens)
        )

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Read a model folder.

        Raises: ConfigError if its tokenizer or its chat template cannot be used.
        """
        files = read_tokenizer_files(folder)
        return cls(
            files.tokenizer,
            special_tokens=files.special_tokens,
            eos_ids=files.eos_ids,
            chat_template=files.chat_template,
        )

    @classmethod
    def from_json(
        cls, source: str, *, special_tokens: Mapping[str, str] | None = None, eos_ids: frozenset[int] = frozenset()
    ) -> TextTokenizer:
        """A tokenizer from its JSON, as `backend.to_str()` gives it: for a process that is handed one."""
        return cls(Tokenizer.from_str(source), special_tokens=special_tokens, eos_ids=eos_ids)

    def count_ids(self) -> int:
        """The number that every token's id is below. Walks the vocabulary: 20 ms and more, so not on the event loop."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a short text, on the caller's thread.

        A text that begins with the BOS token is complete: nothing is added to it, so that there are never two. The
        text of a chat template is encoded with `add_special_tokens=False`.

        Raises: RequestError if the text cannot be encoded.
        """
        return self.encode_batch((text,), add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for several texts, on the caller's thread; it lets go of the GIL."""
        bos = self.special_tokens.get("bos_token")
        add = [add_special_tokens and not (bos and text.startswith(bos)) for text in texts]
        if len(set(add)) > 1:
            pairs = zip(texts, add, strict=True)
            return [self._encode([text], add_special_tokens=flag)[0] for text, flag in pairs]
        return self._encode(list(texts), add_special_tokens=all(add))

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode` for a text of any length: a long one is encoded in a thread."""
        return (await self.encode_batch_async((text,), add_special_tokens=add_special_tokens))[0]

    async def encode_batch_async(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode_batch` for texts of any length: in a thread if they are long together."""
        if sum(map(len, texts)) <= INLINE_CHARS:
            return self.encode_batch(texts, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_batch, texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all of `ids`; the same that a `Detokenizer` gives piece by piece.

        It is what `tokenizers` decodes too, but for one thing: where a byte-fallback tokenizer meets an invalid byte,
        only that byte is lost and not the valid characters that stand beside it.
        """
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled exactly so in the vocabulary (a special token's text is)."""
        return self.backend.token_to_id(text)

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that is no token."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds in the middle of a text, special tokens shown; empty for an id that is no token."""
        return self.piece_table.shown[token_id]

    def shown_bytes(self, token_id: int, *, starts_text: bool, skips_special: bool) -> bytes:
        """What the token adds to a text as a detokenizer shows it. `starts_text`: nothing visible is before it."""
        pieces = self.piece_table.skipping if skips_special else self.piece_table.shown
        return pieces.first(token_id) if starts_text else pieces[token_id]

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        # Only this call lets go of the GIL; Tokenizer.encode holds it for a quarter of a second on 100k tokens.
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError("the text is not valid Unicode (it holds a lone surrogate)") from error
        except BaseException as error:
            # Rust reports a failed text as a bare Exception and a panic as a BaseException of its own.
            if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
                raise RequestError(f"the tokenizer cannot encode the text: {error}") from error
            raise
        return [encoding.ids for encoding in encodings]
