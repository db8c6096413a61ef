"""Strictness: everything used or reported, everything filled or refused, by name."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from slipstream.engine.errors import ConfigError, MisuseError
from slipstream.engine.loader.safetensors_loader import iterate_tensors, load_weights, weight_files
from slipstream.engine.loader.weight_target import WeightTarget


class TinyModel(nn.Module):
    """A merged q, k, v matrix and an embedding that may be tied to its head."""

    ignorable = re.compile(r".*\.inv_freq")

    def __init__(self, *, tied=False, dtype=torch.float32):
        super().__init__()
        self.qkv = nn.Parameter(torch.full((8, 4), torch.nan, dtype=dtype))
        self.embed = nn.Parameter(torch.full((10, 4), torch.nan, dtype=dtype))
        self.norm = nn.Parameter(torch.full((4,), torch.nan, dtype=dtype))
        self.tied = tied

    def weight_targets(self):
        targets = {
            "q": WeightTarget(param=self.qkv, row_start=0, num_rows=4),
            "k": WeightTarget(param=self.qkv, row_start=4, num_rows=2),
            "v": WeightTarget(param=self.qkv, row_start=6, num_rows=2),
            "embed": WeightTarget(param=self.embed),
            "norm": WeightTarget(param=self.norm),
        }
        return targets | ({"head": WeightTarget(param=self.embed)} if self.tied else {})


@pytest.fixture
def checkpoint():
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "embed": (10, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_merged_rows_land_in_the_order_of_their_targets(checkpoint):
    model = TinyModel()
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    report = load_weights(model, reversed(checkpoint.items()))
    merged = torch.cat([checkpoint["q"], checkpoint["k"], checkpoint["v"]])
    assert torch.equal(model.qkv, merged)
    assert torch.equal(model.embed, checkpoint["embed"])
    assert torch.equal(model.norm, checkpoint["norm"])
    assert (report.num_tensors, report.num_bytes, report.ignored) == (5, (32 + 40 + 4) * 4, ())
    assert before == {name: param.data_ptr() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.float64])
def test_weights_are_cast_to_the_dtype_of_their_parameter(checkpoint, stored):
    model = TinyModel(dtype=torch.bfloat16)
    load_weights(model, ((name, tensor.to(stored)) for name, tensor in checkpoint.items()))
    assert torch.equal(model.embed, checkpoint["embed"].to(stored).to(torch.bfloat16))


def test_missing_tensors_are_all_named(checkpoint):
    del checkpoint["k"], checkpoint["norm"]
    with pytest.raises(ConfigError, match="the checkpoint lacks k, norm") as caught:
        load_weights(TinyModel(), checkpoint.items())
    assert caught.value.field == "model"


def test_unknown_tensors_are_all_named(checkpoint):
    more = {"q.bias": torch.zeros(4), "q.scale": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"no place for q\.bias, q\.scale"):
        load_weights(TinyModel(), (checkpoint | more).items())


def test_long_lists_of_names_are_cut(checkpoint):
    more = {f"extra{i:02}": torch.zeros(1) for i in range(20)}
    with pytest.raises(ConfigError, match=r"extra07 and 12 more$"):
        load_weights(TinyModel(), (checkpoint | more).items())


def test_a_misshapen_tensor_names_both_shapes(checkpoint):
    checkpoint["k"] = torch.zeros(4, 4)
    with pytest.raises(ConfigError, match=r"k has shape \(4, 4\).*needs \(2, 4\)"):
        load_weights(TinyModel(), checkpoint.items())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused_instead_of_cast(checkpoint, dtype):
    checkpoint["q"] = checkpoint["q"].to(dtype)
    with pytest.raises(ConfigError, match=f"q is stored as {dtype}"):
        load_weights(TinyModel(), checkpoint.items())


def test_weights_beyond_float16_are_refused_when_float16_was_forced(checkpoint):
    checkpoint["norm"][1] = 7e4
    load_weights(TinyModel(dtype=torch.bfloat16), checkpoint.items())
    with pytest.raises(ConfigError, match="norm holds values that float16 cannot") as caught:
        load_weights(TinyModel(dtype=torch.float16), checkpoint.items())
    assert caught.value.field == "dtype"


def test_ignorable_tensors_are_reported(checkpoint):
    more = {"layers.0.inv_freq": torch.zeros(2)}
    assert load_weights(TinyModel(), (checkpoint | more).items()).ignored == ("layers.0.inv_freq",)


def test_a_tensor_that_comes_twice_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="holds norm twice"):
        load_weights(TinyModel(), [*checkpoint.items(), ("norm", checkpoint["norm"])])


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_model_that_still_holds_its_head_keeps_the_embedding(checkpoint, head_first):
    head = {"head": torch.zeros(10, 4)}
    model = TinyModel(tied=True)
    report = load_weights(model, (head | checkpoint if head_first else checkpoint | head).items())
    assert torch.equal(model.embed, checkpoint["embed"])
    assert (report.num_tensors, report.ignored) == (5, ("head",))
    assert report.num_bytes == (32 + 40 + 4) * 4


def test_a_tied_model_is_filled_from_the_other_side_of_the_tie(checkpoint):
    checkpoint["head"] = checkpoint.pop("embed")
    model = TinyModel(tied=True)
    assert load_weights(model, checkpoint.items()).ignored == ()
    assert torch.equal(model.embed, checkpoint["head"])


def test_a_tied_model_without_either_side_is_refused_by_the_embeddings_name(checkpoint):
    del checkpoint["embed"]
    with pytest.raises(ConfigError, match=r"lacks embed$"):
        load_weights(TinyModel(tied=True), checkpoint.items())


@pytest.mark.parametrize(
    "change",
    [
        {"v": (7, 1)},  # a gap before
        {"v": (6, 1)},  # a gap after
        {"v": (5, 3)},  # an overlap
        {"v": (6, 3)},  # beyond the end
        {"v": None},
    ],
)
def test_a_mapping_that_does_not_cover_each_row_once_is_our_bug(checkpoint, change):
    class Wrong(TinyModel):
        def weight_targets(self):
            targets = super().weight_targets()
            (name, rows), *_ = change.items()
            del targets[name]
            if rows is not None:
                targets[name] = WeightTarget(param=self.qkv, row_start=rows[0], num_rows=rows[1])
            return targets

    with pytest.raises(MisuseError, match="qkv"):
        load_weights(Wrong(), checkpoint.items())


def shard(folder, parts, *, listed=None):
    weight_map = {}
    for number, part in enumerate(parts):
        name = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map | (listed or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_file_and_indexed_shards_give_the_same_tensors(checkpoint, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    save_file(checkpoint, tmp_path / "one" / "model.safetensors")
    names = list(checkpoint)
    shard(
        tmp_path / "many",
        [{n: checkpoint[n] for n in names[:2]}, {n: checkpoint[n] for n in names[2:]}],
    )
    # What some publishers lay beside their shards must not be read a second time.
    save_file(checkpoint, tmp_path / "many" / "consolidated.safetensors")
    for folder in (tmp_path / "one", tmp_path / "many"):
        found = list(iterate_tensors(folder))
        assert sorted(name for name, _ in found) == sorted(names)
        assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in found)


def test_an_index_that_names_an_absent_file_is_refused_before_any_tensor(checkpoint, tmp_path):
    shard(tmp_path, [{"q": checkpoint["q"]}, {"k": checkpoint["k"]}])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        next(iterate_tensors(tmp_path))


def test_an_index_that_disagrees_with_its_file_is_refused(checkpoint, tmp_path):
    listed = {"ghost": "model-00001-of-00001.safetensors"}
    shard(tmp_path, [{"q": checkpoint["q"]}], listed=listed)
    with pytest.raises(ConfigError, match="disagree about ghost"):
        list(iterate_tensors(tmp_path))


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_broken_index_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        weight_files(tmp_path)


@pytest.mark.parametrize("kept_bytes", [4, 100, -4])
def test_a_file_cut_short_is_named(checkpoint, tmp_path, kept_bytes):
    file = tmp_path / "model.safetensors"
    save_file(checkpoint, file)
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        list(iterate_tensors(tmp_path))


def test_several_files_without_an_index_are_not_guessed_at(checkpoint, tmp_path):
    save_file(checkpoint, tmp_path / "a.safetensors")
    assert weight_files(tmp_path) == (tmp_path / "a.safetensors",)
    save_file(checkpoint, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"no model\.safetensors\.index\.json: a\..*, b\."):
        weight_files(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no safetensors"):
        list(iterate_tensors(tmp_path))
