"""The tokenizer files of a Hugging Face folder, rebuilt from the metadata of a GGUF file.

Only byte-level BPE (`tokenizer.ggml.model = gpt2`), and only pre-tokenizers that are known exactly:
a near miss splits some texts differently from the training, which no error would ever show.
Source of the split rules: the models' own tokenizer.json files, and llama.cpp for `default`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigError

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """What one value of `tokenizer.ggml.pre` stands for."""

    steps: tuple[Mapping[str, Any], ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _split(pattern: str) -> Mapping[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(*, use_regex: bool) -> Mapping[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = {
    "smollm": _PreTokenizer(steps=({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))),
    "gpt-2": _PreTokenizer(steps=(_byte_level(use_regex=True),)),
    "default": _PreTokenizer(
        steps=(
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(_GPT2_SPLIT),
            _split(r"\p{N}+"),
            _split("[0-9][0-9][0-9]"),
            _byte_level(use_regex=False),
        )
    ),
    "llama-bpe": _PreTokenizer(
        steps=(_split(_LLAMA3_SPLIT), _byte_level(use_regex=False)),
        ignore_merges=True,
        adds_bos=True,
    ),
    "qwen2": _PreTokenizer(steps=(_split(_QWEN2_SPLIT), _byte_level(use_regex=False)), nfc=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Ids of the special tokens that the file names; `ends` are all that end a text."""

    bos: int | None
    eos: int | None
    pad: int | None
    unk: int | None
    ends: tuple[int, ...]


def read_special_ids(metadata: Mapping[str, Any]) -> SpecialIds:
    """Read them from the metadata. End of turn and end of message end a text like eos does."""
    ends = {
        metadata[key]
        for key in (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
        if key in metadata
    }
    return SpecialIds(
        bos=metadata.get("tokenizer.ggml.bos_token_id"),
        eos=metadata.get("tokenizer.ggml.eos_token_id"),
        pad=metadata.get("tokenizer.ggml.padding_token_id"),
        unk=metadata.get("tokenizer.ggml.unknown_token_id"),
        ends=tuple(sorted(ends)),
    )


def check_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming what is supported, unless this tokenizer can be rebuilt exactly."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(
            f"unsupported GGUF tokenizer {model!r}; supported: 'gpt2' (byte-level BPE). "
            "Use the model's Hugging Face folder instead",
            field="model",
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"unsupported GGUF pre-tokenizer {pre!r}; supported: {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder instead",
            field="model",
        )
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    if not tokens or len(kinds) != len(tokens) or "tokenizer.ggml.merges" not in metadata:
        raise ConfigError("the GGUF file lacks its vocabulary, types or merges", field="model")
    if len(set(tokens)) != len(tokens):
        raise ConfigError("the GGUF vocabulary holds a token twice", field="model")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, *, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    check_tokenizer(metadata)
    special = read_special_ids(metadata)
    added = _added_tokens(metadata)
    tokenizer = _tokenizer(metadata, special, added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = _settings(metadata, special, added, context_length)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1), encoding="utf-8")


def _added_tokens(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _tokenizer(metadata: Mapping[str, Any], special: SpecialIds, added: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    pre = _PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    # Text such as <|im_end|> in the vocabulary is found through added_tokens, never by merging, so
    # leaving it in the BPE vocabulary too only keeps the ids dense.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "post_processor": _post_processor(metadata, special, adds_bos=pre.adds_bos),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _post_processor(metadata: Mapping[str, Any], special: SpecialIds, *, adds_bos: bool) -> dict[str, Any] | None:
    """The template that puts bos before and eos after a text, if the file asks for either."""
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    before = special.bos if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    after = special.eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    used = {tokens[token_id]: token_id for token_id in (before, after) if token_id is not None}
    if not used:
        return None

    def template(sequence: str, type_id: int) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if before is not None:
            pieces.insert(0, {"SpecialToken": {"id": tokens[before], "type_id": type_id}})
        if after is not None:
            pieces.append({"SpecialToken": {"id": tokens[after], "type_id": type_id}})
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in used.items()
        },
    }


def _settings(
    metadata: Mapping[str, Any],
    special: SpecialIds,
    added: Sequence[Mapping[str, Any]],
    context_length: int,
) -> dict[str, Any]:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    named = {"bos": special.bos, "eos": special.eos, "pad": special.pad, "unk": special.unk}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
    }
    for name, token_id in named.items():
        if token_id is not None:
            settings[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings
