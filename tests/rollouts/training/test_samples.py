"""Conversions of samples: by numbers worked by hand, there and back, and every fault named with the
sample and the remedy."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import DataError
from ludic.rollouts.training.samples import (
    batch_of_samples,
    check_sample,
    item_of_sample,
    rollout_of_sample,
    sample_of_rollout,
)
from ludic.rollouts.training.types import Sample, SampleStatus
from ludic.training.credit_assignment import GroupNormalizedReturn, MonteCarloReturn
from ludic.types import Rollout, Step, TokenTrace


def sample(reward=1.0, **changes):
    fields = {"tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "rollout_log_probs": [0, 0, -0.5, -0.25], "group_index": 3}
    return Sample("2+2=", "4", reward=reward, index=9, status=SampleStatus.COMPLETED, **{**fields, **changes})


def test_an_item_trains_the_tokens_of_the_mask():
    item = item_of_sample(sample(metadata={"weight_version": 2, "correct": True}), weight=0.5)
    assert (item.input_ids, item.action_mask, item.weight) == ([5, 6, 7, 8], [0, 0, 1, 1], 0.5)
    assert item.actor_logps.token_logps == [-0.5, -0.25]
    assert item.meta["request_meta"] == {"group_id": 3}
    assert item.meta["policy_version"] == 2
    assert (item.meta["prompt_length"], item.meta["completion_length"]) == (2, 2)
    assert item.meta["correct"]


def test_a_batch_has_the_credit_of_groups():
    """Rewards 1, 0 of one group have mean 0.5; 3, 1 of the other have mean 2."""
    samples = [sample(1.0), sample(0.0), sample(3.0, group_index=4), sample(1.0, group_index=4)]
    batch = batch_of_samples(samples, GroupNormalizedReturn(group_size=2))
    assert [item.weight for item in batch.items] == [0.5, -0.5, 1.0, -1.0]
    assert batch.meta["avg_total_reward"] == 1.25
    assert batch.meta["frac_reward_zero_std"] == 0.0
    assert len({item.meta["rollout_id"] for item in batch.items}) == 4


def test_an_answer_of_several_turns_is_one_item():
    turns = sample(tokens=[1, 2, 3, 4, 5], loss_mask=[0, 1, 0, 1, 1], rollout_log_probs=None)
    [item] = batch_of_samples([turns], MonteCarloReturn()).items
    assert (item.action_mask, item.weight) == ([0, 1, 0, 1, 1], 1.0)


@st.composite
def turns(draw):
    """A dialogue: prompt, answer, more prompt, answer. No mask is 0 at its end."""
    tokens, mask, logps = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        for is_said in (0.0, 1.0):
            length = draw(st.integers(1, 3))
            tokens += draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
            mask += [is_said] * length
            logps += [-is_said * draw(st.floats(0, 5)) for _ in range(length)]
    return tokens, mask, draw(st.sampled_from([None, logps]))


@given(turns())
def test_a_dialogue_is_an_episode_and_back(dialogue):
    tokens, mask, logps = dialogue
    before = sample(tokens=tokens, loss_mask=mask, rollout_log_probs=logps)
    rollout = rollout_of_sample(before)
    after = sample_of_rollout(rollout)
    assert (after.tokens, after.loss_mask, after.rollout_log_probs) == (tokens, mask, logps)
    assert (after.reward, after.status) == (1.0, SampleStatus.COMPLETED)
    assert rollout.steps[-1].trace.prompt_token_ids + rollout.steps[-1].trace.completion_token_ids == tokens


def test_an_episode_is_one_sample_only_if_its_steps_go_on():
    first = Step(0, "p", "a", "q", 0.5, False, False, trace=TokenTrace([1], [2], [-0.1]))
    second = Step(1, "q", "b", None, 1.0, False, True, trace=TokenTrace([1, 2, 3], [4], [-0.2]))
    made = sample_of_rollout(Rollout(id="r", steps=[first, second], meta={"request_meta": {"group_id": 7}}))
    assert (made.tokens, made.loss_mask) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert made.rollout_log_probs == [0, -0.1, 0, -0.2]
    assert (made.reward, made.group_index, made.response) == (1.5, 7, "a\nb")
    cut = Step(1, "q", "b", None, 1.0, False, True, trace=TokenTrace([1, 3], [4]))
    with pytest.raises(DataError, match=r"step 1 of rollout r must extend.*keep all turns"):
        sample_of_rollout(Rollout(id="r", steps=[first, cut]))
    with pytest.raises(DataError, match="for_rl"):
        sample_of_rollout(Rollout(id="r", steps=[Step(0, "p", "a", None, 0, False, True)]))
    with pytest.raises(DataError, match="no steps"):
        sample_of_rollout(Rollout(id="r"))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        # the document's own example encodes the answer alone, and masks prompt and answer
        ({"tokens": [7, 8]}, r"sample 9 has 2 tokens and a loss_mask of 4; both must cover"),
        ({"tokens": [...]}, r"sample 9 must be a list of whole numbers.*tolist"),
        ({"loss_mask": "0011"}, "must be a list of numbers"),
        ({"loss_mask": [0, 0, -1, 1]}, "the value -1; 0 is no loss"),
        ({"loss_mask": [0, 0, math.nan, 1]}, "the value nan"),
        ({"reward": math.inf}, "the reward of sample 9 is inf"),
        ({"rollout_log_probs": [-0.5, -0.25]}, "2 rollout_log_probs for 4 tokens; put 0"),
        ({"rollout_log_probs": [-0.5]}, "give one for each token"),
        ({"rollout_log_probs": "a"}, "must be a list of numbers"),
    ],
)
def test_a_wrong_sample_is_named_with_the_remedy(changes, remedy):
    with pytest.raises(DataError, match=remedy):
        check_sample(sample(**changes))


def test_a_mask_with_fractions_is_where_tokens_are_trained_and_what_they_count_for():
    item = item_of_sample(sample(loss_mask=[0, 0.1, 1, 0.0]))
    assert (item.action_mask, item.attachments.action_fractions) == ([0, 1, 1, 0], [float(np.float32(0.1)), 1.0])
    assert item_of_sample(sample(loss_mask=[0, 1.0, 1, 0.0])).attachments.action_fractions is None
    with pytest.raises(DataError, match=r"sample 9 has fractions, .*round them"):
        rollout_of_sample(sample(loss_mask=[0, 0.1, 1, 1]))


def test_the_trainer_wants_something_to_train():
    with pytest.raises(DataError, match=r"sample 9 has no token .*train"):
        item_of_sample(sample(loss_mask=[0] * 4))
    with pytest.raises(DataError, match="sample 2 has 1 tokens"):
        item_of_sample(Sample("p", tokens=[1]), place=2)
