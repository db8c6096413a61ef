"""Loading a model folder and encoding text."""

import asyncio
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from slipstream.engine.errors import ConfigError, RequestError
from slipstream.engine.text.tokenization import INLINE_CHARS, TextTokenizer

LONG = "The stream slips past the stones. " * (INLINE_CHARS // 10)


class ThreadNoting(TextTokenizer):
    """Notes the threads that encode."""

    threads: list[int]

    def encode_batch(self, texts, *, add_special_tokens=True):
        self.threads.append(threading.get_ident())
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


@pytest.fixture
def noting(byte_level: TextTokenizer) -> ThreadNoting:
    tokenizer = ThreadNoting(byte_level.backend, special_tokens=byte_level.special_tokens)
    tokenizer.threads = []
    return tokenizer


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def test_a_folder_gives_the_tokenizer_and_its_special_tokens(model_folder):
    tokenizer = TextTokenizer.load(model_folder)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert tokenizer.bos_id == tokenizer.token_id("<|begin|>")
    assert tokenizer.special_ids == {
        tokenizer.token_id(t) for t in ("<|begin|>", "<|end|>", "<|turn|>", "<｜end▁of▁text｜>")
    }
    assert tokenizer.vocab_size == max(tokenizer.backend.get_vocab().values()) + 1
    assert tokenizer.token_id("<think>") == tokenizer.vocab_size - 1
    assert tokenizer.chat_template is not None


def test_truncation_and_padding_stored_with_a_tokenizer_do_not_touch_prompts(model_folder):
    stored = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert (stored.truncation["max_length"], stored.padding["length"]) == (8, 8)
    tokenizer = TextTokenizer.load(model_folder)
    assert len(tokenizer.encode("gamma " * 50)) > 50
    assert len(tokenizer.encode("g")) == 2


def test_the_ids_that_end_a_text_come_from_every_file(model_folder):
    end = TextTokenizer.load(model_folder).token_id("<|end|>")
    edit(model_folder / "generation_config.json", eos_token_id=[7, 8])
    edit(model_folder / "config.json", eos_token_id=9)
    assert TextTokenizer.load(model_folder).eos_ids == {7, 8, 9, end}
    edit(model_folder / "generation_config.json", eos_token_id=7)
    edit(model_folder / "tokenizer_config.json", eos_token=None)
    assert TextTokenizer.load(model_folder).eos_ids == {7, 9}
    edit(model_folder / "generation_config.json", eos_token_id=None)
    edit(model_folder / "config.json", eos_token_id=None)
    assert TextTokenizer.load(model_folder).eos_ids == frozenset()


def test_special_tokens_may_stand_in_their_own_file(model_folder):
    edit(model_folder / "tokenizer_config.json", eos_token=None)
    edit(model_folder / "special_tokens_map.json", eos_token="<|turn|>", bos_token="<|end|>")
    tokens = TextTokenizer.load(model_folder).special_tokens
    assert tokens == {"bos_token": "<|begin|>", "eos_token": "<|turn|>"}


def test_tokens_that_only_the_configuration_lists_are_added(model_folder):
    size = TextTokenizer.load(model_folder).vocab_size
    added = {str(size + n): {"content": text, "special": n == 1} for n, text in enumerate(("<tool>", "<|call|>"))}
    edit(model_folder / "tokenizer_config.json", added_tokens_decoder=added, pad_token="<|pad|>")
    tokenizer = TextTokenizer.load(model_folder)
    ids = [tokenizer.token_id(text) for text in ("<tool>", "<|call|>", "<|pad|>")]
    assert ids == [size, size + 1, size + 2]
    assert [i in tokenizer.special_ids for i in ids] == [False, True, True]
    assert tokenizer.encode("<|call|>", add_special_tokens=False) == [size + 1]


@pytest.mark.parametrize(("flags", "around"), [
    ({}, ("<|begin|>", None)),
    ({"add_bos_token": False}, (None, None)),
    ({"add_bos_token": True}, ("<|begin|>", None)),
    ({"add_bos_token": True, "add_eos_token": True}, ("<|begin|>", "<|end|>")),
    ({"add_eos_token": True}, (None, "<|end|>")),
])  # fmt: skip
def test_the_configuration_decides_which_special_tokens_surround_a_prompt(model_folder, flags, around):
    edit(model_folder / "tokenizer_config.json", **flags)
    tokenizer = TextTokenizer.load(model_folder)
    bare = tokenizer.encode("gamma", add_special_tokens=False)
    before, after = ([tokenizer.token_id(text)] if text else [] for text in around)
    assert tokenizer.encode("gamma") == [*before, *bare, *after]


def test_a_text_that_begins_with_bos_gets_no_second_one(byte_level):
    plain = byte_level.encode("gamma")
    assert plain[0] == byte_level.bos_id
    assert byte_level.encode("<|begin|>gamma") == plain
    assert byte_level.encode("gamma", add_special_tokens=False) == plain[1:]
    assert byte_level.encode_batch(["gamma", "<|begin|>gamma"]) == [plain, plain]


def test_pieces_bytes_and_ids_that_are_no_tokens(byte_level, byte_fallback):
    assert byte_level.token_bytes(byte_level.token_id("Ġgamma")) == b" gamma"
    assert byte_level.token_bytes(byte_level.bos_id) == b"<|begin|>"
    assert byte_fallback.token_bytes(byte_fallback.token_id("<0x0A>")) == b"\n"
    assert byte_fallback.id_to_piece(byte_fallback.token_id("▁▁")) == "▁▁"
    for stray in (-1, byte_level.vocab_size, 2**32):
        assert byte_level.id_to_piece(stray) is None
        assert byte_level.token_bytes(stray) == b""


def test_the_bytes_of_the_tokens_join_to_the_text(byte_level, byte_fallback):
    text = "\n12 gamma 한국어\t終"
    for tokenizer, lead in ((byte_level, ""), (byte_fallback, " ")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == lead + text


async def test_short_texts_are_encoded_at_once_and_long_ones_in_a_thread(noting):
    own = threading.get_ident()
    assert await noting.encode_async("gamma") == noting.encode("gamma")
    assert noting.threads == [own, own]
    long = await noting.encode_async(LONG)
    assert long == noting.encode(LONG)
    assert noting.threads[2] != own
    texts = ["gamma"] * INLINE_CHARS
    assert await noting.encode_batch_async(texts) == [noting.encode("gamma")] * len(texts)
    assert noting.threads[4] != own


async def test_the_loop_turns_while_a_long_text_is_encoded(byte_level):
    encoding = asyncio.ensure_future(byte_level.encode_async(LONG * 20))
    turns = 0
    while not encoding.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    assert len(await encoding) > 1000


def test_several_threads_share_one_tokenizer(byte_level):
    texts = [f"gamma {n} 한국어 stones {n * n}" for n in range(200)]
    expected = [byte_level.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(byte_level.encode, texts)) == expected
        assert list(pool.map(byte_level.decode, expected)) == texts


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff" + "x" * INLINE_CHARS])
async def test_text_that_is_no_unicode_is_the_requests_fault(byte_level, text):
    with pytest.raises(RequestError, match="surrogate"):
        await byte_level.encode_async(text)


def test_a_text_that_the_tokenizer_fails_on_is_the_requests_fault(wordpiece):
    assert wordpiece.encode("the") != []
    lacking = json.loads(wordpiece.backend.to_str())
    lacking["model"]["unk_token"] = "[absent]"
    broken = TextTokenizer(Tokenizer.from_str(json.dumps(lacking)))
    with pytest.raises(RequestError, match="cannot encode"):
        broken.encode("終")


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_a_configuration_error(model_folder, content):
    (model_folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match="generation_config"):
        TextTokenizer.load(model_folder)


@pytest.mark.parametrize(("stored", "prompt"), [
    ("{{ bos_token }}plain", "<|begin|>plain"),
    ([{"name": "tool_use", "template": "other"}, {"name": "default", "template": "named"}], "named"),
])  # fmt: skip
def test_the_chat_template_is_found_in_the_configuration(model_folder, stored, prompt):
    edit(model_folder / "tokenizer_config.json", chat_template=stored)
    template = TextTokenizer.load(model_folder).chat_template
    assert template.render([{"role": "user", "content": "x"}]) == prompt


def test_a_template_file_wins_over_the_configuration(model_folder):
    (model_folder / "chat_template.jinja").write_text("file, not configuration", encoding="utf-8")
    template = TextTokenizer.load(model_folder).chat_template
    assert template.render([{"role": "user", "content": "x"}]) == "file, not configuration"


@pytest.mark.parametrize("stored", [None, [], [{"name": "rag", "template": "x"}]])
def test_a_model_may_have_no_chat_template(model_folder, stored):
    edit(model_folder / "tokenizer_config.json", chat_template=stored)
    assert TextTokenizer.load(model_folder).chat_template is None


def test_the_room_imports_neither_torch_nor_transformers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import slipstream.engine.text.tokenization, slipstream.engine.text.stop_strings"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
