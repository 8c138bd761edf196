"""A step on two ranks with different numbers of samples equals the step on one."""

import re

import pytest
import torch
from rank_processes import on_two_ranks
from safetensors.torch import load_file, save_file
from training_samples import ListSource, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import CheckpointError
from ludic.files.atomic import read_json, write_json
from ludic.models.state_files import read_optimizer
from ludic.models.tensor_files import StoredTensors
from ludic.training import CheckpointConfig, CheckpointManager, Trainer, make_sft, ranks


class Positioned(ListSource):
    """A source that keeps a position."""

    def __init__(self):
        super().__init__(sorting_items(4))
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.integration
@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp", "lora", "ddp_lora", "fsdp_lora"])
def test_a_step_on_two_ranks_equals_the_step_on_one(tmp_path, wrapping):
    result = on_two_ranks("two_ranks.py", tmp_path, wrapping)
    assert result["difference"] < 1e-6
    assert result["stats"]["train/loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert result["stats"]["train/num_samples"] == 12
    assert result["resumed"]
    rewards = [item.meta["total_reward"] for item in sorting_items(12, seed=3)]
    assert result["stats"]["train/avg_total_reward"] == pytest.approx(sum(rewards) / 12)
    if wrapping.endswith("lora"):
        stored = load_file(tmp_path / "checkpoints" / "step_000001" / "adapter_model.safetensors")
        assert {tensor.shape[0] for name, tensor in stored.items() if "lora_A" in name} == {
            2
        }  # whole tensors, however they are sharded
        return
    restored = tiny_model(seed=1)
    CheckpointManager(CheckpointConfig(tmp_path / "checkpoints")).load(restored)  # whole weights, however they are sharded
    before = weights_of(tiny_model())
    assert any((before[name] != weight).any() for name, weight in weights_of(restored).items())


@pytest.mark.integration
@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp", "ddp_lora"])
def test_a_step_on_prefix_trees_on_two_ranks_equals_the_step_on_one(tmp_path, wrapping):
    """The step on one process has rows of their own, with padding."""
    result = on_two_ranks("two_ranks.py", tmp_path, wrapping, "auto")
    assert result["difference"] < 1e-5
    assert result["stats"]["train/loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert result["stats"]["train/num_samples"] == 12
    assert result["stats"]["perf/sharing_factor"] > 1.1  # of the samples of rank 0
    assert result["resumed"]


def test_statistics_of_two_ranks_equal_those_of_all_samples_with_any_keys(tmp_path):
    stats = on_two_ranks("two_ranks_stats.py", tmp_path)
    assert stats["x"] == 2.0  # (3 * 1 + 1 * 5) / 4
    assert stats["x_std"] == pytest.approx(5**0.5)  # 0, 2 and 4, 6 around a mean of 3
    assert (stats["count"], stats["shortest"], stats["longest"]) == (5.0, -1.0, 9.0)
    assert stats["only on rank 1"] == 0.5
    assert "unmeasured" not in stats
    # rank 1 had nothing to compare, so sums and results are those of rank 0
    mismatch = {name: stats[f"mismatch/{name}"] for name in ("tokens", "mean", "max", "kl", "ess")}
    assert mismatch == {"tokens": 2.0, "mean": 0.5, "max": 0.75, "kl": 0.25, "ess": 0.5}


@pytest.mark.integration
@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp"])
def test_bfloat16_weights_have_masters_that_resume_on_two_ranks(tmp_path, wrapping):
    result = on_two_ranks("two_ranks_half.py", tmp_path, wrapping)
    assert result["dtypes"] == ["torch.float32"]
    assert result["moved"] > 0.99
    assert result["resumed"]
    with StoredTensors((tmp_path / "checkpoints" / "step_000001").glob("optimizer*.safetensors")) as stored:
        masters = [tensor.shape for name, tensor in stored.describe().items() if name.endswith("/master")]
    weights = {name: tensor.shape for name, tensor in weights_of(tiny_model()).items()}
    assert sorted(masters) == sorted(weights.values())  # the parts are whole tensors, however they are sharded


@pytest.mark.integration
def test_two_ranks_that_would_play_the_same_episodes_are_refused(tmp_path):
    assert "each of 2 ranks the same prompts" in on_two_ranks("two_ranks_playing.py", tmp_path)["message"]


def test_a_sharded_checkpoint_with_parameter_names_is_read_by_position(tmp_path):
    """As sharded runs wrote them: with names in the groups and as keys."""
    trainer = Trainer(
        model=tiny_model(),
        algo=make_sft(),
        batch_source=ListSource(sorting_items(8)),
        cfg=cpu_config(),
        checkpoint_config=CheckpointConfig(tmp_path, every_n_steps=1),
    )
    trainer.train_sync(1)
    folder = tmp_path / "step_000001"
    names = [name for name, _ in trainer.model.named_parameters()]
    content = read_json(folder / "optimizer.json")
    content["param_groups"][0]["params"] = names
    write_json(folder / "optimizer.json", content)
    stored = load_file(folder / "optimizer.safetensors")
    named = {f"{names[int(key.split('/')[0])]}/{key.split('/')[1]}": tensor for key, tensor in stored.items()}
    save_file(named, folder / "optimizer.safetensors")
    before = trainer.optimizer.state_dict()["state"]
    other = torch.optim.AdamW(tiny_model().parameters())
    read_optimizer(other, tiny_model(), folder)
    after = other.state_dict()["state"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[index][name], after[index][name]) for index in before for name in before[index])


def test_a_single_rank_needs_no_process_group():
    assert (ranks.rank(), ranks.world_size(), ranks.is_distributed()) == (0, 1, False)
    assert ranks.sum_over_ranks([1.5, 2.0], "cpu") == ranks.max_over_ranks([1.5, 2.0], "cpu") == [1.5, 2.0]
    assert ranks.union_over_ranks(["b", "a", "b"], "cpu") == ["b", "a"]
    ranks.barrier()


def test_each_rank_resumes_with_its_data_and_generators_and_learns_of_a_full_disk_on_another(tmp_path):
    result = on_two_ranks("two_ranks_resume.py", tmp_path)
    for whole, resumed in result["drawn"]:
        assert resumed == whole
    assert result["drawn"][0] != result["drawn"][1]
    for fails, each in ((fails, [errors[fails] for errors in result["errors"]]) for fails in ("replace_folder", "write_json")):
        first, second = each
        assert first.startswith("OSError: [Errno 28]"), fails
        assert re.search("^RankError: saving .*step 0 failed on rank 0 of", second), fails
        assert "OSError: [Errno 28] " in second


def test_positions_of_two_ranks_that_differ_are_refused_on_one_and_equal_ones_are_taken(tmp_path):
    trainer = Trainer(model=tiny_model(), algo=make_sft(), batch_source=Positioned(), cfg=cpu_config())
    metadata = trainer._run_state()
    both = [{"batch_source": {"position": 2}}, {"batch_source": {"position": 7}}]
    with pytest.raises(CheckpointError, match=r"resume on 2 ranks, not 1: .*data positions differ"):
        trainer._restore_run({**metadata, "ranks": both})
    trainer._restore_run({**metadata, "batch_source": {"position": 2}, "ranks": [both[0], both[0]]})
    assert trainer.batch_source.position == 2
    pending = [{"batch_source": {"position": 4, "pending_batches": name, "states_after_pending": []}} for name in "ab"]
    trainer._restore_run({**metadata, "ranks": pending})  # each generates its own again
    assert trainer.batch_source.position == 4
