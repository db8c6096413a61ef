from __future__ import annotations

import torch
from torch import nn

from slipstream.engine.loader.dummy_loader import fill_dummy_weights


class Block(nn.Module):
    def __init__(self, *, layers=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(layers))
        self.input_layernorm = nn.LayerNorm(64)
        self.q_norm = nn.RMSNorm(64)


def filled(seed=0, **shape):
    model = Block(**shape)
    before = [param.data_ptr() for param in model.parameters()]
    fill_dummy_weights(model, seed=seed)
    assert before == [param.data_ptr() for param in model.parameters()]
    return model.state_dict()


def test_the_same_seed_gives_the_same_weights_and_another_gives_others():
    first, again, other = filled(1), filled(1), filled(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.weight"], other["layers.0.weight"])


def test_more_layers_leave_the_first_as_it_was_and_differ_from_it():
    one, two = filled(layers=1), filled(layers=2)
    assert torch.equal(one["layers.0.weight"], two["layers.0.weight"])
    assert not torch.equal(two["layers.0.weight"], two["layers.1.weight"])


def test_norm_scales_are_one_and_all_else_is_small_noise():
    found = filled()
    assert torch.equal(found["input_layernorm.weight"], torch.ones(64))
    assert torch.equal(found["q_norm.weight"], torch.ones(64))
    weights = found["layers.0.weight"].float()
    assert weights.dtype is torch.float32
    assert abs(float(weights.mean())) < 0.002
    assert 0.018 < float(weights.std()) < 0.022
    assert float(found["layers.0.bias"].float().abs().max()) > 0
