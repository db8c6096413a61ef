"""The text process: reads bodies from its standard input, writes records and ids to its standard output, in order."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import traceback
from array import array
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..engine.errors import RequestError
from ..engine.text.chat_template import ChatTemplate
from ..engine.text.tokenization import TextTokenizer
from .failures import Refused
from .intake import Intake
from .native import GENERATE, TOKENIZE
from .openai_chat import CHAT
from .openai_completions import COMPLETIONS
from .openai_responses import RESPONSES
from .text_process import LENGTH_BYTES

INTAKES: dict[str, Intake[Any]] = {each.name: each for each in (CHAT, COMPLETIONS, GENERATE, RESPONSES, TOKENIZE)}


@dataclass(slots=True)
class ReadyTexts:
    """The tokenizer and the template that the parent sent."""

    tokenizer: TextTokenizer | None
    chat_template: ChatTemplate | None

    @classmethod
    def made_from(cls, settings: tuple[dict[str, Any] | None, str | None]) -> ReadyTexts:
        made_from, source = settings
        tokenizer = None
        if made_from is not None:
            tokenizer = TextTokenizer.from_json(
                made_from["json"], special_tokens=made_from["special_tokens"], eos_ids=made_from["eos_ids"]
            )
        special_tokens = tokenizer.special_tokens if tokenizer is not None else None
        template = None if source is None else ChatTemplate(source, special_tokens=special_tokens)
        return cls(tokenizer, template)


async def answer(texts: ReadyTexts, name: str, raw: bytes) -> tuple[object, ...]:
    """What became of one body, as plain values."""
    try:
        intake = INTAKES[name]
        body = intake.check(raw)
        prompts = await intake.encode(texts, body)
        return "made", intake.without_prompt(body), [array("i", ids).tobytes() for ids in prompts]
    except RequestError as error:
        return "request error", str(error), error.param, error.code
    except OverflowError:
        return "request error", "a token id is outside the vocabulary", "prompt", None
    except Refused as error:
        return "refused", error.status, str(error), error.code
    except Exception:  # our bug: it is told where it can be logged
        return "bug", traceback.format_exc()


def _read(source: BinaryIO) -> Any:
    """The next message; EOFError once the parent is gone."""
    head = source.read(LENGTH_BYTES)
    body = source.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else b""
    if not body:
        raise EOFError
    return pickle.loads(body)


def _write(sink: BinaryIO, message: object) -> None:
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    sink.write(len(packed).to_bytes(LENGTH_BYTES, "little"))
    sink.write(packed)
    sink.flush()


def main() -> None:
    """Serve the parent until it closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    try:
        texts = ReadyTexts.made_from(_read(source))
        _write(sink, ("ready",))
        with asyncio.Runner() as runner:
            while True:
                name, raw = _read(source)
                _write(sink, runner.run(answer(texts, name, raw)))
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
