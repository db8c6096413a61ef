"""An engine that answers with the alphabet, for the commands that talk. Needs no torch and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slipstream.engine import engine as engine_module
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.text.tokenization import TextTokenizer
from slipstream.engine.worker import WorkerLimits

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"


def alphabet_engine(config: EngineConfig, *, step_time_s: float | None = None) -> Engine:
    """Goes on with the letter after the last one it read, and begins with `a` after anything else."""
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(LETTERS))
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate([*LETTERS, *others])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()

    def next_letter(seed: int, history: Sequence[int]) -> int:
        return (history[-1] + 1) % len(LETTERS) if history[-1] < len(LETTERS) else 0

    limits = WorkerLimits(num_pages=32, page_size=16, num_rows=4, max_model_len=200, vocab_size=256)
    worker = ScriptedWorker(limits, Script(token_of=next_letter, step_time_s=step_time_s))
    return Engine.on(worker, tokenizer=TextTokenizer(tokenizer, chat_template=TEMPLATE), page_size=16)


@pytest.fixture
def alphabet_answers(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Let the commands make that engine instead of a real one; the engines that they made are listed."""
    made: list[Engine] = []

    def make(config: EngineConfig) -> Engine:
        made.append(alphabet_engine(config))
        return made[-1]

    maker: Callable[[EngineConfig], Engine] = make
    monkeypatch.setattr(engine_module, "Engine", maker)
    return made
