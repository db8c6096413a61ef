"""What an engine is made of: the model found and read, a worker for the device, a scheduler for the worker's limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ..streams.marks import MarkSwitch
from .config import EngineConfig
from .errors import ConfigError, RequestError
from .grammar_session import GrammarBackend
from .grammar_store import GrammarStore
from .scheduler.scheduler import Scheduler
from .text.chat_template import ChatTemplate
from .text.tokenization import TextTokenizer
from .worker import Worker, WorkerLimits


class OpenedModel(NamedTuple):
    """A model that was found, and the worker that will compute it, not started yet."""

    worker: Worker
    name: str
    tokenizer: TextTokenizer | None
    chat_template: ChatTemplate | None
    eos_ids: frozenset[int]  # the ids that end a text, by all of the model's files


async def open_model(config: EngineConfig, marks: MarkSwitch) -> OpenedModel:
    """Find the model, read its texts, and make the worker for this machine's device. Raises: ConfigError."""
    # Importing torch takes a second or two: not on the loop, which answers /health meanwhile.
    tp_worker, model_source, end_ids = await asyncio.to_thread(_import_device_side)
    needs_weights = config.load_format != "dummy"
    found = await asyncio.to_thread(model_source.resolve_model, config.model, needs_weights=needs_weights)
    tokenizer, chat_template, num_ids = None, None, None
    if config.skip_tokenizer:
        eos_ids = frozenset(await asyncio.to_thread(end_ids.read_eos_ids, found.path))
    else:
        tokenizer = await asyncio.to_thread(TextTokenizer.load, found.path)
        chat_template = tokenizer.chat_template
        if config.chat_template is not None:
            source = await asyncio.to_thread(_read_template, config.chat_template)
            chat_template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
        eos_ids = tokenizer.eos_ids
        # A vocabulary that is padded beyond its tokenizer has ids that mean nothing; an end id may lie there all the same.
        num_ids = max((await asyncio.to_thread(tokenizer.count_ids), *(end_id + 1 for end_id in eos_ids)))
    worker = tp_worker.TpWorker(config, found.path, marks, num_ids=num_ids)
    return OpenedModel(worker, found.name, tokenizer, chat_template, eos_ids)


def _import_device_side() -> tuple[ModuleType, ModuleType, ModuleType]:
    from .forward import tp_worker
    from .loader import eos_ids, model_source

    return tp_worker, model_source, eos_ids


def open_grammars(config: EngineConfig, tokenizer: TextTokenizer | None, limits: WorkerLimits) -> GrammarStore:
    """The store of compiled grammars. Its library is loaded with the first grammar."""

    def make_backend() -> GrammarBackend:
        if tokenizer is None:
            raise RequestError("structured output needs a tokenizer", param="structured_output")
        from .grammars.backends import make_grammar_backend

        return make_grammar_backend(config.grammar_backend, tokenizer, limits.vocab_size)

    return GrammarStore(make_backend)


def make_scheduler(config: EngineConfig, limits: WorkerLimits, worker: Worker) -> Scheduler:
    """The scheduler that `config` asks for, over a started worker."""
    return Scheduler(
        limits,
        chunked_prefill_size=config.chunked_prefill_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        prefix_cache=config.prefix_cache,
        schedule_policy=config.schedule_policy,
        policy_window=config.policy_window,
        priority_preemption=config.priority_preemption,
        eviction_policy=config.eviction_policy,
        itl_budget_s=None if config.itl_budget_ms is None else config.itl_budget_ms / 1e3,
        hidden_states=config.hidden_states,
        on_pages_home=worker.poison if config.debug_canary else None,
    )


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the chat template {path}: {error.strerror}", field="chat_template") from None
