"""Samples have the sampled tokens, their credit and their origin."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import DataError
from ludic.training import ConstantCredit, MonteCarloReturn, PerStepReward
from ludic.training.rollouts.to_samples import batch_from_rollouts, sample_from_step
from ludic.types import Rollout, Step, TokenTrace

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
rewards = st.floats(-9, 9)


@st.composite
def rollouts(draw):
    result = []
    for number in range(draw(st.integers(0, 4))):
        steps = []
        for index in range(draw(st.integers(0, 3))):
            prompt, completion = draw(ids), draw(ids)
            logps = draw(st.none() | st.lists(st.floats(-20, 0), min_size=len(completion), max_size=len(completion)))
            trace = TokenTrace(prompt, completion, logps)
            steps.append(Step(index, "o", "a", None, draw(rewards), False, True, trace=trace))
        result.append(Rollout(id=f"r{number}", steps=steps))
    return result


@given(rollouts())
def test_every_step_becomes_one_sample_of_its_own_tokens(played):
    batch = batch_from_rollouts(played, PerStepReward())
    steps = [(rollout, step) for rollout in played for step in rollout.steps]
    assert len(batch.items) == len(steps)
    for item, (rollout, step) in zip(batch.items, steps, strict=True):
        prompt, completion = step.trace.prompt_token_ids, step.trace.completion_token_ids
        states = [token for token, is_action in zip(item.input_ids, item.action_mask, strict=True) if not is_action]
        actions = [token for token, is_action in zip(item.input_ids, item.action_mask, strict=True) if is_action]
        assert (item.input_ids, states, actions) == (prompt + completion, prompt, completion)
        assert item.attention_mask == [1] * len(item.input_ids)
        logps = None if item.actor_logps is None else item.actor_logps.token_logps
        assert logps == step.trace.completion_logprobs
        assert (item.weight, item.meta["rollout_id"], item.meta["step_index"]) == (step.reward, rollout.id, step.index)


class ByToken:
    """`values` for the first step of each rollout, 0.5 for the others."""

    def __init__(self, values):
        self.values = values

    def compute(self, played):
        return {(each.id, step.index): 0.5 if step.index else self.values for each in played for step in each.steps}


def test_an_array_is_the_credit_of_the_tokens_of_a_step():
    steps = [Step(i, "o", "a", None, 1.0, False, True, trace=TokenTrace([5], [6, 7])) for i in range(2)]
    played = Rollout(id="r", steps=steps)
    first, second = batch_from_rollouts([played], ByToken(np.array([1.0, 2.0], np.float32))).items
    assert first.attachments.token_columns["token_weight"].tolist() == [1, 2]
    assert (first.weight, second.weight, second.attachments.token_columns) == (1.5, 0.5, {})
    assert played.meta["engine"]["credit"] == [1.5, 0.5]
    for values, problem in (
        ([1.0], r"r, step 0 has weights of shape \[1\] for 2"),
        ([[1.0, 2.0]], r"shape \[1, 2\] for 2 sampled tokens"),
        ([1.0, math.nan], "r, step 0 is nan; .*finite"),
    ):
        with pytest.raises(DataError, match=problem):
            batch_from_rollouts([played], ByToken(np.array(values)))


@given(rollouts(), st.integers(1, 6))
def test_the_meta_of_a_batch_is_consistent(played, longest):
    def short(item):
        return len(item.input_ids) <= longest

    batch = batch_from_rollouts(played, ConstantCredit(), short)
    meta = batch.meta
    assert meta["num_samples_before_filter"] == sum(rollout.length for rollout in played)
    assert meta["num_samples_filtered"] == meta["num_samples_before_filter"] - meta["num_samples"]
    assert meta["num_samples"] == len(batch.items)
    assert all(short(item) for item in batch.items)
    assert meta["target_rollouts"] == len(played)
    # Reward over all rollouts, including those without remaining samples; lengths over the
    # remaining samples.
    assert meta["avg_total_reward"] * len(played) == pytest.approx(sum(rollout.total_reward for rollout in played))
    tokens = (meta["avg_prompt_length"] + meta["avg_completion_length"]) * len(batch.items)
    assert tokens == pytest.approx(sum(len(item.input_ids) for item in batch.items))


def rollout_of(reward, group=None):
    trace = TokenTrace([1], [2], None)
    meta = {} if group is None else {"request_meta": {"group_id": group}}
    return Rollout(id=f"{group}/{reward}", steps=[Step(0, "o", "a", None, reward, False, True, trace=trace)], meta=meta)


def test_reward_deviation_and_groups_without_variance_cover_all_rollouts():
    played = [rollout_of(1.0, "a"), rollout_of(0.0, "a"), rollout_of(1.0, "b"), rollout_of(1.0, "b"), rollout_of(0.5, "alone")]
    meta = batch_from_rollouts(played, ConstantCredit(), lambda item: False).meta
    # mean 0.7; squares .09 * 3 + .49 + .04 = .8, by 5
    assert (meta["avg_total_reward"], meta["reward_std"]) == pytest.approx((0.7, 0.4))
    assert meta["frac_reward_zero_std"] == 0.5  # group b, of a and b; a group of one has no variance to lack
    assert "frac_reward_zero_std" not in batch_from_rollouts([rollout_of(1.0)], ConstantCredit()).meta


def test_an_empty_batch_has_means_of_zero():
    meta = batch_from_rollouts([], ConstantCredit()).meta
    assert [meta[f"avg_{name}"] for name in ("total_reward", "completion_length", "prompt_length")] == [0.0, 0.0, 0.0]


def two_steps(**info):
    trace = TokenTrace([1, 2], [3], [-0.5])
    first = Step(0, "see", "do", "then", 0.25, False, False, trace=trace)
    last = Step(1, "then", "end", None, 1.0, True, False, info=info, trace=trace)
    return Rollout(id="r", steps=[first, last])


def test_a_sample_records_its_origin():
    rollout = two_steps()
    assert sample_from_step(rollout, rollout.steps[1], 0.5).meta == {
        "rollout_id": "r",
        "step_index": 1,
        "reward": 1.0,
        "prev_obs": "then",
        "action": "end",
        "total_reward": 1.25,
        "completion_length": 1,
        "prompt_length": 2,
        "truncated": True,
        "terminated": False,
    }


def test_step_info_overrides_rollout_meta_and_tokens_are_left_out():
    rollout = two_steps(colour="red", prompt_token_ids=[9], completion_token_ids=[9], completion_logprobs=[0.0])
    rollout.meta = {"colour": "blue", "topic": "x", "action": "renamed"}
    meta = sample_from_step(rollout, rollout.steps[1], 0.5).meta
    assert (meta["colour"], meta["topic"], meta["action"]) == ("red", "x", "renamed")
    assert not {"prompt_token_ids", "completion_token_ids", "completion_logprobs"} & set(meta)


def test_each_step_has_its_own_credit():
    # gamma 0.5: the last step earns 1, the first 0.25 + 0.5 * 1 = 0.75.
    batch = batch_from_rollouts([two_steps()], MonteCarloReturn(gamma=0.5))
    assert [item.weight for item in batch.items] == [0.75, 1.0]


def test_the_credit_for_the_log_overwrites_nothing_of_the_user():
    rollout = two_steps()
    rollout.meta |= {"credit": "to my mother", "engine": {"env_kind": "count"}}
    batch = batch_from_rollouts([rollout], MonteCarloReturn(gamma=0.5))
    assert rollout.meta["credit"] == batch.items[0].meta["credit"] == "to my mother"
    assert rollout.meta["engine"] == {"env_kind": "count", "credit": [0.75, 1.0]}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named(number):
    rollout = two_steps()
    with pytest.raises(DataError, match=r"weight of rollout r, step 0"):
        batch_from_rollouts([rollout], ConstantCredit(number))
    rollout.steps[1].reward = number
    with pytest.raises(DataError, match=r"reward of rollout r, step 1"):
        batch_from_rollouts([rollout], ConstantCredit())
