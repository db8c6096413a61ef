"""What a model folder says about text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The folder's tokenizer, ready for use, and what its other files add to it."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    """By role, such as `bos_token`: the text of the token."""
    eos_ids: frozenset[int]
    chat_template: str | None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read `tokenizer.json` and, where present, the files around it.

    Raises: ConfigError if there is no fast tokenizer or a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json (a fast tokenizer is needed)", field="model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{path} is no tokenizer: {error}", field="model") from error
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    # Both may be stored with a tokenizer that was saved in training, and would cut or fill prompts here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_missing_tokens(tokenizer, config, special_tokens)
    _set_post_processor(tokenizer, config, special_tokens)
    return TokenizerFiles(
        tokenizer=tokenizer,
        special_tokens=special_tokens,
        eos_ids=_eos_ids(folder, tokenizer, special_tokens.get("eos_token")),
        chat_template=_chat_template(folder, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = orjson.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return content


def _text_of(token: object) -> str | None:
    """A token's text; it is written as a string or as an object with its `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _text_of(token) for name, token in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add the tokens that only `tokenizer_config.json` knows, in the order of their ids."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    wanted = [
        AddedToken(
            token["content"],
            single_word=bool(token.get("single_word")),
            lstrip=bool(token.get("lstrip")),
            rstrip=bool(token.get("rstrip")),
            normalized=bool(token.get("normalized")),
            special=bool(token.get("special")) or token["content"] in special_tokens.values(),
        )
        for _, token in sorted(listed.items(), key=lambda item: int(item[0]))
    ]
    known_or_listed = known | {token.content for token in wanted}
    named = (*special_tokens.values(), *_texts(config.get("additional_special_tokens")))
    wanted += [
        AddedToken(text, special=True, normalized=False)
        for text in dict.fromkeys(named)
        if text and text not in known_or_listed
    ]
    missing = [token for token in wanted if token.content not in known]
    if missing:
        tokenizer.add_tokens(missing)


def _texts(tokens: object) -> Iterable[str]:
    return [text for token in tokens if (text := _text_of(token))] if isinstance(tokens, list) else []


def _set_post_processor(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Where `tokenizer_config.json` says whether BOS and EOS are added, that holds and not what tokenizer.json does."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = special_tokens.get("bos_token") if config.get("add_bos_token") else None
    eos = special_tokens.get("eos_token") if config.get("add_eos_token") else None
    used = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    tokenizer.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, token_id) for token, token_id in used if token_id is not None],
    )


def _eos_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None) -> frozenset[int]:
    """Every id that ends a text, by any of the files: they name different ones for chat models."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        found.update(token_id for token_id in (ids if isinstance(ids, list) else [ids]) if isinstance(token_id, int))
    if eos_token is not None and (token_id := tokenizer.token_to_id(eos_token)) is not None:
        found.add(token_id)
    return frozenset(found)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's source: its own file, or the configuration's, where several may stand by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return source if isinstance(source, str) else None
