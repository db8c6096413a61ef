"""Prompts of any kind to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..engine.errors import RequestError
from .intake import Texts


async def encode_prompts(
    texts: Texts,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    param: str = "prompt",
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Each prompt's ids, texts encoded as the model wants them at the start of a sequence.

    Raises: RequestError naming `param`.
    """
    if isinstance(prompt, str):
        return await _encode(texts, [prompt], param, add_special_tokens)
    if isinstance(prompt[0], str):  # all parts are of one kind: that has been checked
        return await _encode(texts, cast("list[str]", prompt), param, add_special_tokens)
    if isinstance(prompt[0], int):
        return [list(cast("Sequence[int]", prompt))]
    return [list(part) for part in cast("Sequence[Sequence[int]]", prompt)]


async def encode_chat(
    texts: Texts,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of `messages` in the model's chat format, which brings its own special tokens.

    Raises: RequestError, also where the model has no chat template.
    """
    tokenizer, chat_template = texts.tokenizer, texts.chat_template
    if tokenizer is None or chat_template is None:
        raise RequestError(
            "this model has no chat template; use completions", param="messages", code="no_chat_template"
        )
    text = chat_template.render(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        extra=extra,
    )
    try:
        return await tokenizer.encode_async(text, add_special_tokens=False)
    except RequestError as error:
        raise RequestError(str(error), param="messages", code=error.code) from error


async def _encode(texts: Texts, prompts: Sequence[str], param: str, add_special_tokens: bool) -> list[list[int]]:
    tokenizer = texts.tokenizer
    if tokenizer is None:
        raise RequestError("this server has no tokenizer: send token ids", param=param, code="no_tokenizer")
    try:
        return await tokenizer.encode_batch_async(prompts, add_special_tokens=add_special_tokens)
    except RequestError as error:
        raise RequestError(str(error), param=param, code=error.code) from error
