"""Tiny tokenizers of the families that language models use, trained in process."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipstream.engine.text.tokenization import TextTokenizer

CORPUS = [
    "The stream slips past the stones, and the stones stay where they are.",
    "def f(x):\n        return [x, x + 1]\n\tpass",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. ภาษาไทย 한국어 문장 流れる水は腐らず",
    "gamma gamma gamma delta 12 345",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|begin|>", "<|end|>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # A special token that byte-level decoders cannot map, and an added one that stays visible.
    tokenizer.add_special_tokens(["<|turn|>", "<｜end▁of▁text｜>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    marks = normalizers.Replace(" ", "▁")
    words = [marks.normalize_str("▁" + line.encode("ascii", "ignore").decode()) for line in CORPUS]
    source = Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁*[^▁]+"), "isolated")
    source.train_from_iterator(words, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    learned = json.loads(source.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁▁▁▁", *learned["vocab"]]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), *(tuple(pair) for pair in learned["merges"])]
    merges = list(dict.fromkeys(pair for pair in merges if "".join(pair) in vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, show_progress=False, special_tokens=["[UNK]", "[CLS]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> TextTokenizer:
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return TextTokenizer(byte_level_tokenizer(), special_tokens=special, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def byte_fallback() -> TextTokenizer:
    return TextTokenizer(byte_fallback_tokenizer(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def metaspace() -> TextTokenizer:
    return TextTokenizer(metaspace_tokenizer())


@pytest.fixture(scope="session")
def wordpiece() -> TextTokenizer:
    return TextTokenizer(wordpiece_tokenizer())


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder around the byte-level tokenizer, as models are published."""
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|begin|>", "special": True},
        "eos_token": "<|end|>",
        "pad_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path
