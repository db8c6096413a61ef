"""Checks what a caller asks for against what this engine can do, and makes the scheduler's record of it."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Collection, Mapping, Sequence, Set

from .errors import MisuseError, RequestError, shown
from .grammar_session import CompiledGrammar
from .logit_rules import LogitRules
from .outputs import Sink
from .request import Request
from .sampling_params import SamplingParams
from .scheduler.schedule_batch import RowSampling
from .text.detokenizer import Detokenizer
from .text.text_stream import TextStream
from .text.tokenization import TextTokenizer
from .worker import WorkerLimits

LENGTH_CODE = "context_length_exceeded"
MAX_DEADLINE_S = 1e9


class RequestBuilder:
    """Makes requests for one engine. Everything that can be wrong with one is found here, before any compute."""

    def __init__(
        self, limits: WorkerLimits, tokenizer: TextTokenizer | None, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        """`eos_ids`: the model's, for an engine that has no tokenizer to name them."""
        self._limits = limits
        self._tokenizer = tokenizer
        # Of the model's end ids only those that it can draw: the others would be masked outside the logits.
        eos_ids = tokenizer.eos_ids if tokenizer is not None else eos_ids
        self._eos_ids = frozenset(token_id for token_id in eos_ids if 0 <= token_id < limits.vocab_size)
        # A sequence longer than the whole pool could never finish, whatever else was retracted for it.
        self._longest = min(limits.max_model_len, limits.num_pages * limits.page_size)
        self._numbers = itertools.count()
        self._seeds = random.Random()  # an engine of its own: a caller who seeds the global one does not seed us

    def build(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: str | None,
        salt: str | None,
        priority: int = 0,
        deadline: float | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """`grammar`: what `params.structured_output` was compiled to. Raises: RequestError naming the field."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {shown(params)}", param="params")
        for name, value in (("request_id", request_id), ("salt", salt)):
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{name} must be a string, not {shown(value)}", param=name)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, not {shown(priority)}", param="priority")
        ids = self._checked_ids(prompt_ids, params)
        stop_ids, stop_texts = self._stop_ids(params)
        number = next(self._numbers)
        return Request(
            request_id=request_id if request_id is not None else f"req-{number}",
            prompt_ids=ids,
            params=params,
            sampling=RowSampling(
                temperature=0.0 if params.is_greedy else params.temperature,
                top_k=params.top_k if 0 < params.top_k < self._limits.vocab_size else 0,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            ),
            stop_ids=stop_ids,
            stop_texts=stop_texts,
            max_total_tokens=self._checked_length(len(ids), params),
            sink=sink,
            text=self._text_stream(ids, params),
            rules=self._rules(len(ids), params, grammar),
            is_counted=self._limits.counts_tokens and _has_penalties(params),
            salt=salt,
            priority=priority,
            deadline=deadline,
        )

    def _checked_ids(self, prompt_ids: Sequence[int], params: SamplingParams) -> array[int]:
        if isinstance(prompt_ids, (str, bytes, bytearray, Mapping, Set)):  # array would take bytes for packed ids
            raise RequestError(f"the prompt must be a list of token ids, not {shown(prompt_ids)}", param="prompt")
        vocab_size = self._limits.vocab_size
        try:
            num_ids = len(prompt_ids)
        except TypeError:
            raise RequestError(
                f"the prompt must be a list of token ids, not {shown(prompt_ids)}", param="prompt"
            ) from None
        self._checked_length(num_ids, params)  # before its ids are walked: of a prompt far too long that takes a while
        try:
            packed = array("I", prompt_ids)  # unsigned: three times as fast as "i", and no id is negative afterwards
            are_known = not packed or max(prompt_ids) < vocab_size
        except OverflowError:
            packed, are_known = array("I"), False
        except (TypeError, ValueError) as error:
            raise RequestError(f"the prompt must be token ids: {error}", param="prompt") from None
        if not are_known:
            bad = next(token_id for token_id in prompt_ids if not 0 <= token_id < vocab_size)
            raise RequestError(f"token id {shown(bad)} is outside the vocabulary 0…{vocab_size - 1}", param="prompt")
        if not packed:
            raise RequestError("the prompt must have at least one token", param="prompt")
        return array("i", packed.tobytes())

    def _checked_length(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Prompt and output together, at most."""
        longest = self._longest
        num_outputs = 1 if params.max_tokens is None else params.max_tokens
        if num_prompt_tokens + min(num_outputs, 1) > longest:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens; prompt and output together may have {longest}",
                param="prompt",
                code=LENGTH_CODE,
            )
        if num_prompt_tokens + num_outputs > longest:
            raise RequestError(
                f"{num_prompt_tokens} prompt tokens and max_tokens {shown(num_outputs)} exceed the limit of {longest}",
                param="max_tokens",
                code=LENGTH_CODE,
            )
        return longest if params.max_tokens is None else num_prompt_tokens + num_outputs

    def _stop_ids(self, params: SamplingParams) -> tuple[frozenset[int], dict[int, str]]:
        """The ids that end the request, and of those that a stop string asked for, the string."""
        vocab_size = self._limits.vocab_size
        for token_id in params.stop_token_ids:
            if token_id >= vocab_size:
                raise RequestError(f"stop id {shown(token_id)} is outside the vocabulary", param="stop_token_ids")
        texts: dict[int, str] = {}
        if self._tokenizer is not None and params.skip_special_tokens:
            for text in params.stop:
                special = self._tokenizer.token_id(text)
                if special in self._tokenizer.special_ids:  # skipped in the text, where it could never be found
                    assert special is not None
                    texts[special] = text
        own = frozenset(params.stop_token_ids).union(texts)
        stop_ids = own if params.ignore_eos else own | self._eos_ids
        if params.min_tokens and len(stop_ids) >= vocab_size:
            raise RequestError("with every id a stop id, min_tokens cannot be kept", param="min_tokens")
        return stop_ids, texts

    def _rules(
        self, num_prompt_tokens: int, params: SamplingParams, grammar: CompiledGrammar | None
    ) -> LogitRules | None:
        """None for a request that takes the logits as they are: it costs nothing in any step."""
        if (grammar is None) != (params.structured_output is None):
            raise MisuseError("structured_output goes with the grammar that it was compiled to")
        sequences = [*params.bad_words_ids, *self._bad_words(params.bad_words)]
        self._check_ids("bad_words_ids", [token_id for ids in params.bad_words_ids for token_id in ids])
        self._check_ids("logit_bias", dict(params.logit_bias))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        penalises = _has_penalties(params) and not self._limits.counts_tokens
        others = (params.logit_bias, sequences, params.allowed_token_ids, params.logits_processors, grammar)
        if not penalises and not any(others):
            return None
        return LogitRules(
            params,
            num_prompt_tokens=num_prompt_tokens,
            vocab_size=self._limits.vocab_size,
            bad_sequences=sequences,
            grammar=grammar.session() if grammar is not None else None,
            penalises=penalises,
        )

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each word as it is spelled at the start of a text and behind a space."""
        if not words:
            return []
        if self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this engine has none", param="bad_words")
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return list(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and max(ids) >= self._limits.vocab_size:
            raise RequestError(f"id {max(ids)} is outside the vocabulary", param=name)

    def _text_stream(self, ids: array[int], params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            if params.stop:
                raise RequestError("stop strings need a tokenizer, and this engine has none", param="stop")
            return None
        detokenizer = Detokenizer(self._tokenizer, prompt_ids=ids, skip_special_tokens=params.skip_special_tokens)
        return TextStream(detokenizer, params.stop, includes_stop=params.include_stop_str_in_output)


def _has_penalties(params: SamplingParams) -> bool:
    return any((params.repetition_penalty - 1, params.frequency_penalty, params.presence_penalty))


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """The defaults for None. Raises: RequestError for anything that is no SamplingParams."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {shown(params)}", param="params")
    return params


def checked_deadline(deadline_s: object) -> float:
    """Raises: RequestError unless it is a number of seconds from 0 upwards."""
    if (
        isinstance(deadline_s, bool)
        or not isinstance(deadline_s, (int, float))
        or not 0 <= deadline_s <= MAX_DEADLINE_S
    ):
        raise RequestError(
            f"deadline_s must be from 0 to {MAX_DEADLINE_S:g} seconds, not {shown(deadline_s)}", param="deadline_s"
        )
    return float(deadline_s)
