"""A reward-model step on two ranks with different numbers of pairs equals the step on one, and so
does an evaluation."""

import pytest
from preference_samples import reward_model, rm_config, sorted_pairs
from rank_processes import on_two_ranks
from training_samples import ListSource

from ludic.training import RMTrainer, make_bradley_terry


@pytest.mark.integration
@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp"])
def test_a_reward_model_step_on_two_ranks_equals_the_step_on_one(tmp_path, wrapping):
    result = on_two_ranks("two_ranks_rm.py", tmp_path, wrapping)
    assert result["difference"] < 2e-6
    assert result["stats"]["train/loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert result["stats"]["train/total_pairs"] == result["stats"]["train/num_pairs"] == 9
    alone = RMTrainer(
        model=reward_model(),
        algo=make_bradley_terry(beta=1.5),
        batch_source=ListSource([]),
        cfg=rm_config(),
        eval_items=sorted_pairs(7, seed=5),
    ).evaluate()
    assert result["eval"] == pytest.approx({name.removeprefix("eval_"): value for name, value in alone.items()}, abs=1e-5)
