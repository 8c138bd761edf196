"""Functions for sharded models on a model without shards; `training/test_ranks` has sharded
ones."""

import torch
from torch import nn

from ludic.models.sharding import gather_state, gather_tensor, is_sharded, scatter_state, shard_like


def test_a_plain_model_is_not_sharded_and_has_whole_tensors():
    model = nn.Linear(2, 3)
    assert not is_sharded(model)
    assert gather_tensor(model.weight) is model.weight
    assert shard_like(model.bias, model.bias) is model.bias


def test_weights_gathered_from_one_model_can_be_scattered_into_another():
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    scatter_state(other, gather_state(model))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_weights_missing_in_a_state_keep_their_values():
    model = nn.Linear(2, 3)
    bias = model.bias.detach().clone()
    scatter_state(model, {"weight": torch.ones(3, 2)})
    assert torch.equal(model.weight, torch.ones(3, 2))
    assert torch.equal(model.bias, bias)
