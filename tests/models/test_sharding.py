"""Of a model that nothing shards; `training/test_ranks` has sharded ones."""

import torch
from torch import nn

from ludic.models.sharding import gather_state, gather_tensor, is_sharded, scatter_state, shard_like


def test_a_plain_model_is_not_sharded_and_its_tensors_are_whole():
    model = nn.Linear(2, 3)
    assert not is_sharded(model)
    assert gather_tensor(model.weight) is model.weight
    assert shard_like(model.bias, model.bias) is model.bias


def test_what_is_gathered_from_one_model_is_scattered_into_another():
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    scatter_state(other, gather_state(model))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_names_that_a_state_lacks_keep_their_values():
    model = nn.Linear(2, 3)
    bias = model.bias.detach().clone()
    scatter_state(model, {"weight": torch.ones(3, 2)})
    assert torch.equal(model.weight, torch.ones(3, 2))
    assert torch.equal(model.bias, bias)
