"""A step on two ranks, with unlike numbers of samples, is the step on one."""

import pytest
from rank_processes import on_two_ranks
from safetensors.torch import load_file
from training_samples import sorting_items, tiny_model, weights_of

from ludic.training import CheckpointConfig, CheckpointManager, ranks


@pytest.mark.integration
@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp", "lora", "ddp_lora", "fsdp_lora"])
def test_two_ranks_take_the_step_of_one(tmp_path, wrapping):
    result = on_two_ranks("two_ranks.py", tmp_path, wrapping)
    assert result["difference"] < 1e-6
    assert result["stats"]["train/loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert result["stats"]["train/num_samples"] == 12
    assert result["resumed"]
    rewards = [item.meta["total_reward"] for item in sorting_items(12, seed=3)]
    assert result["stats"]["train/avg_total_reward"] == pytest.approx(sum(rewards) / 12)
    if wrapping.endswith("lora"):
        stored = load_file(tmp_path / "checkpoints" / "step_000001" / "adapter_model.safetensors")
        assert {tensor.shape[0] for name, tensor in stored.items() if "lora_A" in name} == {2}  # whole, whatever the sharding
        return
    restored = tiny_model(seed=1)
    CheckpointManager(CheckpointConfig(tmp_path / "checkpoints")).load(restored)  # whole weights, whatever the sharding
    before = weights_of(tiny_model())
    assert any((before[name] != weight).any() for name, weight in weights_of(restored).items())


def test_one_rank_is_a_world_of_its_own():
    assert (ranks.rank(), ranks.world_size(), ranks.is_distributed()) == (0, 1, False)
    assert ranks.sum_over_ranks([1.5, 2.0], "cpu") == ranks.max_over_ranks([1.5, 2.0], "cpu") == [1.5, 2.0]
    ranks.barrier()
