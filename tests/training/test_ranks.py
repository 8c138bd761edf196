"""A step on two ranks, with unlike numbers of samples, is the step on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_samples import sorting_items, tiny_model, weights_of

from ludic.training import CheckpointConfig, CheckpointManager, ranks

SCRIPT = Path(__file__).parents[1] / "support" / "two_ranks.py"


@pytest.mark.integration
@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp", "lora", "ddp_lora", "fsdp_lora"])
def test_two_ranks_take_the_step_of_one(tmp_path, wrapping):
    out = tmp_path / "result.json"
    paths = [str(SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "store"), str(out), wrapping],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    result = json.loads(out.read_text())
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
