"""Which token ids end a text: the union of every file that names one.

Chat models often name only the document end in config.json and the turn end elsewhere; honouring
one source alone makes the model run on into the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def read_eos_ids(folder: Path, config: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Sorted ids that config.json, generation_config.json or the tokenizer call an end of text.

    `config` is the content of config.json for who has read it. Missing files contribute nothing. Raises ConfigError for
    a file that is not valid JSON.
    """
    found = set(config_eos_ids(_read_optional(folder / "config.json") if config is None else config))
    found.update(_ids(_read_optional(folder / "generation_config.json").get("eos_token_id")))
    found.update(_tokenizer_eos(folder))
    return tuple(sorted(found))


def config_eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Sorted ids that a parsed config.json itself calls an end of text."""
    return tuple(sorted(set(_ids(config.get("eos_token_id")))))


def _ids(value: object) -> Iterator[int]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            yield item


def _tokenizer_eos(folder: Path) -> Iterator[int]:
    tokenizer = _read_optional(folder / "tokenizer_config.json")
    named = tokenizer.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str):
        return
    listed = tokenizer.get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        for token_id, token in listed.items():
            if isinstance(token, dict) and token.get("content") == text:
                yield int(token_id)
        return
    # Folders saved by transformers 5 list added tokens only in tokenizer.json.
    for token in _read_optional(folder / "tokenizer.json").get("added_tokens") or []:
        if token.get("content") == text:
            yield int(token["id"])


def _read_optional(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="model") from error
    return raw if isinstance(raw, dict) else {}
