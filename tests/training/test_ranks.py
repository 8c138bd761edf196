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


def test_statistics_of_two_ranks_are_those_of_their_samples_together_whatever_keys_each_has(tmp_path):
    found = on_two_ranks("two_ranks_stats.py", tmp_path)
    assert found["x"] == 2.0  # (3 * 1 + 1 * 5) / 4
    assert found["x_std"] == pytest.approx(5**0.5)  # 0, 2 and 4, 6 about 3
    assert (found["count"], found["shortest"], found["longest"]) == (5.0, -1.0, 9.0)
    assert found["only on rank 1"] == 0.5
    assert "unmeasured" not in found
    # rank 1 sampled nothing that was compared: the sums are rank 0's, and so are the numbers
    mismatch = {name: found[f"mismatch/{name}"] for name in ("tokens", "mean", "max", "kl", "ess")}
    assert mismatch == {"tokens": 2.0, "mean": 0.5, "max": 0.75, "kl": 0.25, "ess": 0.5}


def test_one_rank_is_a_world_of_its_own():
    assert (ranks.rank(), ranks.world_size(), ranks.is_distributed()) == (0, 1, False)
    assert ranks.sum_over_ranks([1.5, 2.0], "cpu") == ranks.max_over_ranks([1.5, 2.0], "cpu") == [1.5, 2.0]
    assert ranks.union_over_ranks(["b", "a", "b"], "cpu") == ["b", "a"]
    ranks.barrier()
