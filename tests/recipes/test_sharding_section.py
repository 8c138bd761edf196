"""The `sharding` section of a recipe: its values, and what is refused."""

import pytest
import torch

from ludic.errors import ConfigError
from ludic.models.sharding import ShardingSettings
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.model import build_sharding, has_no_weights, is_shared_out
from ludic.recipes.sections import ShardingSection, check_sharding
from ludic.runs.shared_model import check_sampling, choose_precision, describe_precision, place_model
from ludic.training import TrainerConfig


def test_a_section_is_the_settings_of_the_model():
    section = ShardingSection("hybrid", shards=4, param_dtype="bfloat16", activation_checkpointing=True)
    check_sharding(section, world_size=8)
    assert build_sharding(section) == ShardingSettings(
        "hybrid", shards=4, param_dtype=torch.bfloat16, activation_checkpointing=True
    )


@pytest.mark.parametrize("compose_any", [compose, compose_sft, compose_rm, compose_dpo])
def test_every_training_command_has_the_section_and_one_word_sets_its_kind(compose_any):
    assert compose_any([]).sharding == ShardingSection()
    assert compose_any(["sharding=full", "sharding.param_dtype=bfloat16"]).sharding == ShardingSection(
        "full", param_dtype="bfloat16"
    )


@pytest.mark.parametrize(
    ("section", "world_size", "message"),
    [
        ({"kind": "hybrid", "shards": 3}, 8, r"sharding\.shards \(3\) must divide the number of ranks \(8\)"),
        ({"kind": "full", "cpu_offload": True}, 1, r"needs several processes; set ranks=N"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(section, world_size, message):
    with pytest.raises(ConfigError, match=message):
        check_sharding(ShardingSection(**section), world_size=world_size)


@pytest.mark.parametrize("compose_any", [compose, compose_sft, compose_rm, compose_dpo])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["kind=fsdp"], r"sharding\.kind \(fsdp\) .*none, full, hybrid"),
        (["kind=full", "param_dtype=float16"], r"sharding\.param_dtype \(float16\) .*float32, bfloat16"),
        (["kind=full", "reduce_dtype=int8"], r"sharding\.reduce_dtype \(int8\) .*float32, bfloat16"),
        (
            ["param_dtype=bfloat16"],
            r"sharding\.param_dtype \(bfloat16\) needs .*kind=full or sharding\.kind=hybrid",
        ),
        (["cpu_offload=true"], r"sharding\.cpu_offload \(True\) needs .*kind=full or sharding\.kind=hybrid"),
        (["kind=full", "shards=2"], r"sharding\.shards \(2\) needs sharding\.kind=hybrid;"),
        (["kind=hybrid", "shards=0"], r"sharding\.shards \(0\) must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_with_the_rule(compose_any, settings, message):
    with pytest.raises(ConfigError, match=message):
        compose_any([f"sharding.{setting}" for setting in settings])


def test_one_process_trains_the_whole_model():
    section = ShardingSection("full", activation_checkpointing=True)
    check_sharding(section, world_size=1)
    assert not is_shared_out(section)
    assert not has_no_weights(section)


@pytest.mark.parametrize(("param_dtype", "passes"), [("float32", None), ("bfloat16", "bf16"), (None, None)])
def test_one_process_steps_float32_where_param_dtype_says_so(param_dtype, passes):
    section = ShardingSection("full", param_dtype=param_dtype)
    check_sharding(section, world_size=1)
    model = place_model(torch.nn.Linear(2, 2).bfloat16(), section, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32 if param_dtype else torch.bfloat16}
    assert choose_precision(TrainerConfig(), section).mixed_precision_dtype == passes
    assert (describe_precision(section) is None) == (param_dtype is None)


def test_several_ranks_leave_param_dtype_to_fsdp(monkeypatch):
    monkeypatch.setattr("ludic.training.ranks.is_distributed", lambda: True)
    section, cfg = ShardingSection("full", param_dtype="bfloat16"), TrainerConfig()
    assert choose_precision(cfg, section) is cfg
    assert describe_precision(section) is None
    model = place_model(torch.nn.Linear(2, 2).bfloat16(), section, "cpu")
    assert model.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("every", [0, 2])
def test_a_copy_that_is_also_measured_is_sampled_after_each_step(every, monkeypatch):
    """An evaluation would replace the weights of an older version between two publications."""
    settings = ["sort", f"trainer.sync_every_steps={every}"]
    check_sampling(compose([*settings, "sharding=full"]))  # one process has one model
    monkeypatch.setattr("ludic.training.ranks.is_distributed", lambda: True)
    with pytest.raises(ConfigError, match=rf"trainer\.sync_every_steps \({every}\) must be 1 with sharding\.kind=full"):
        check_sampling(compose([*settings, "sharding=full"]))
    for allowed in (["sharding=none"], ["sharding=full", "place.actors=1"], ["sharding=full", "inference=vllm"]):
        check_sampling(compose([*settings, *allowed]))
    check_sampling(compose(["sort", "sharding=full", "trainer.sync_every_steps=1"]))
