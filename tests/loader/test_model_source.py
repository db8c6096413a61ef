from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from slipstream.engine.errors import ConfigError
from slipstream.engine.loader.demo_model import DEMO_MODEL_NAME
from slipstream.engine.loader.model_source import resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def said():
    return []


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "org" / "my-model"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_folder_is_taken_as_it_is_and_named_after_itself(folder, said):
    for name in (str(folder), "org/my-model", "./org/my-model/"):
        found = resolve_model(name, say=said.append)
        assert (found.path, found.name) == (folder, "my-model")
    assert said == []


def test_a_folder_without_config_or_weights_is_refused(folder, said):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no safetensors files \(found pytorch_model\.bin"):
        resolve_model(str(folder), say=said.append)
    assert resolve_model(str(folder), say=said.append, needs_weights=False).path == folder
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(str(folder), say=said.append, needs_weights=False)


@pytest.mark.parametrize("name", ["", "nonsense", "./org/none", "/org/none", "a/b/c", "../x/y", "~/none"])
def test_what_is_no_model_is_refused_with_a_list_of_what_is_accepted(name, said):
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, say=said.append)
    message = str(caught.value)
    assert caught.value.field == "model"
    assert all(part in message for part in (DEMO_MODEL_NAME, "config.json", ".gguf", "org/name"))
    assert said == []


def test_a_file_that_is_no_gguf_is_refused(tmp_path, said):
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no \.gguf"):
        resolve_model("weights.pt", say=said.append)


def test_a_gguf_that_is_not_there_is_refused(said):
    with pytest.raises(ConfigError, match="No such file"):
        resolve_model("gone.gguf", say=said.append)


def test_a_gguf_is_converted_once_and_again_when_it_changes(write_gguf, vocabulary, cache, said):
    embedding = np.zeros((len(vocabulary), 64), np.float32)
    source = write_gguf({"model.embed_tokens.weight": embedding})
    first = resolve_model(str(source), say=said.append)
    assert (first.name, first.path.parent) == ("tiny", cache / "models")
    assert (first.path / "model.safetensors").is_file()
    assert resolve_model("tiny.gguf", say=said.append) == first
    assert said == ["converting tiny.gguf to safetensors, once"]

    write_gguf({"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(64, np.float32)})
    assert resolve_model("tiny.gguf", say=said.append) == first
    assert len(said) == 2
    assert b"model.norm.weight" in (first.path / "model.safetensors").read_bytes()


def test_a_hub_id_is_fetched_by_the_hubs_own_client(folder, said, monkeypatch):
    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    found = resolve_model("some-org/Model-1.5B", say=said.append)
    assert (found.path, found.name) == (folder, "some-org/Model-1.5B")
    (name, patterns), *_ = asked
    assert name == "some-org/Model-1.5B"
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern or pattern == "*" for pattern in patterns)


def test_offline_a_hub_id_that_is_not_cached_fails_in_one_line(said, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match="'no-org/no-model' is no local folder") as caught:
        resolve_model("no-org/no-model", say=said.append)
    assert "\n" not in str(caught.value)
