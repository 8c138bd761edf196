"""Functions for sharded models on a model without shards, and what is refused;
`training/backend/test_sharded_ranks` has sharded ones."""

import pytest
import torch
from torch import nn
from training_samples import tiny_model

from ludic.errors import ConfigError
from ludic.models.sharded_loading import load_sharded
from ludic.models.sharding import (
    ShardingSettings,
    find_blocks,
    find_own_region,
    gather_tensor,
    get_local,
    is_sharded,
    make_mesh,
    make_shard,
    reshard,
)
from ludic.training import LoraSettings, apply_lora


def test_a_plain_model_is_not_sharded_and_has_whole_tensors():
    model = nn.Linear(2, 3)
    assert not is_sharded(model)
    reshard(model)
    assert gather_tensor(model.weight) is get_local(model.weight) is model.weight
    assert make_shard(model.bias, model.bias) is model.bias
    assert find_own_region(model.weight) == ((0, 3), (0, 2))


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"kind": "none"}, r"kind \(none\) must be full or hybrid"),
        ({"kind": "full", "shards": 2}, r"shards \(2\) .*>= 1 .*kind='hybrid'"),
        ({"kind": "hybrid", "shards": 0}, r"shards \(0\)"),
        ({"param_dtype": torch.float16}, r"param_dtype \(torch\.float16\) must be float32 or bfloat16"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        ShardingSettings(**settings)


def test_one_process_without_a_group_cannot_shard():
    with pytest.raises(ConfigError, match=r"\(kind='full'\) needs a process group: .*ranks\.start\(\) under torchrun"):
        make_mesh(ShardingSettings("full"), "cpu")


@pytest.mark.parametrize("adapted", [False, True])
def test_the_blocks_are_those_that_transformers_names(adapted):
    model = apply_lora(tiny_model(), LoraSettings(rank=2)) if adapted else tiny_model()
    assert [type(block).__name__ for block in find_blocks(model)] == ["Qwen2DecoderLayer"] * 2
    assert find_blocks(nn.Linear(2, 2)) == []


def test_only_a_folder_with_weights_is_read_in_slices(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for source in ("Qwen/Qwen2.5-0.5B", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"folder with the weights .*download it, or merge"):
            load_sharded(source, "float32", ShardingSettings("full"), None)
