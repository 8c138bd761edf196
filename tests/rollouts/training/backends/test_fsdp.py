"""The backend of several ranks: two gloo ranks equal one process. `support/fsdp_backends` runs
them."""

import json

import pytest
import torch
from forked_scripts import run_script
from training_samples import tiny_model

from ludic.errors import ConfigError
from ludic.models.sharding import find_large_modules
from ludic.rollouts.training.backends.fsdp import FSDPConfig, FSDPTrainingBackend
from ludic.rollouts.training.rl_losses import sft_loss


def test_without_a_process_group_the_error_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"needs a process group.*torchrun.*ranks\.start"):
        FSDPTrainingBackend(tiny_model(), lambda model: torch.optim.SGD(model.parameters(), lr=1), sft_loss, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharding_strategy": "HALF"}, "must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        ({"clip_grad": 0.0}, r"clip_grad \(0.0\) must be above 0"),
        ({"auto_wrap_min_params": 0}, "must be at least 1"),
        ({"sharding_strategy": "NO_SHARD", "cpu_offload": True}, "cpu_offload needs a sharded model"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FSDPConfig(**settings)


def test_large_modules_are_blocks_of_a_model_that_names_none():
    block = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(2, 2), torch.nn.Linear(4, 1))  # 12, 6 and 5
    model = torch.nn.ModuleDict({"block": block, "head": torch.nn.Linear(2, 1)})
    assert find_large_modules(model, 10) == [block, block[0]]
    assert find_large_modules(model, 24) == []
    assert find_large_modules(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 2)), 12) == []


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("fsdp") / "found.json"
    run_script("fsdp_backends.py", out)
    return json.loads(out.read_text())


@pytest.mark.integration
@pytest.mark.xdist_group("FSDP ranks")
def test_batches_by_column_train_as_in_one_process(found):
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        assert found["columns"][strategy]["loss"] <= 1e-6, strategy
        assert found["columns"][strategy]["weights"] <= 1e-6, strategy
        (before, after), (_, expected) = found["columns"][strategy]["norms"]
        assert after == pytest.approx(expected, rel=1e-5), strategy
        if strategy == "NO_SHARD":  # that of one rank is no answer
            assert before == [None] * 3
        else:
            assert before == pytest.approx(expected, rel=1e-5), strategy


@pytest.mark.integration
@pytest.mark.xdist_group("FSDP ranks")
def test_what_two_ranks_saved_one_process_goes_on_with_and_back(found):
    (_, on_rank_0, version), (_, on_rank_1, _) = found["saved"]
    assert (on_rank_0 > 0, on_rank_1, version) == (True, 0, 2)
    assert found["alone"][0] <= 1e-6
    assert found["back"][0] <= 1e-6
    assert (found["alone"][2], found["back"][1]) == (3, 4)


@pytest.mark.integration
@pytest.mark.xdist_group("FSDP ranks")
def test_both_loops_on_two_ranks_equal_one_process_and_every_prompt_is_played_once(found):
    for name, differences in found["loops"].items():
        assert differences["weights"] <= 1e-6, name
        assert differences["loss"] <= 1e-6, name
    one, first, second = found["seen"]
    assert (sorted(first), second) == (sorted(one), [])
    versions = ["step_000001", "step_000002", "step_000003"]
    assert found["loaded"] == [versions, versions, []]
