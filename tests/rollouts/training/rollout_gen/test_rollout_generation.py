"""Batches without concurrency: groups, rewards before filters, no refill, and every mistake of the
functions passed in named with the remedy."""

import functools
import logging

import pytest

from ludic.errors import ConfigError, ConfigTypeError, DataError, RolloutError
from ludic.rollouts.training import DataBuffer, RolloutConfig, Sample
from ludic.rollouts.training.rollout_gen import (
    apply_sample_transforms,
    compute_response_lengths,
    convert_to_batch,
    extract_sample_fields,
    generate_rollout_batches,
)
from ludic.training.rollouts.member_calls import seed_of_member


def answer(prompts):
    return [Sample(prompt, response=f"<{prompt}>", tokens=[1, 2], loss_mask=[0, 1]) for prompt in prompts]


def test_a_batch_has_every_prompt_n_times_and_the_buffer_goes_on():
    config = RolloutConfig(2, n_samples_per_prompt=2, generate_fn=answer)
    batches = generate_rollout_batches(DataBuffer(list("abc"), seed=1, epochs=1), config)
    first, last = batches  # the last one is what was left
    assert first.metadata["prompts"] == ["a", "a", "b", "b"]
    assert [sample.group_index for sample in first.samples] == [0, 0, 1, 1]
    assert [sample.index for sample in last.samples] == [4, 5]
    assert (first.metadata["step_id"], last.metadata["step_id"], last.metadata["epoch_id"]) == (0, 1, 0)
    assert first.tokens == [[1, 2]] * 4
    assert first.response_lengths == [1] * 4


def test_the_function_gets_seeds_that_repeat_the_run():
    seen = []

    def generate(prompts, seeds, temperature):
        seen.append((seeds, temperature))
        return answer(prompts)

    config = RolloutConfig(2, n_samples_per_prompt=2, generate_fn=generate, seed=5)
    batches = generate_rollout_batches(DataBuffer(list("ab")), config, temperature=0.7)
    next(batches), next(batches)
    assert seen[1] == ([seed_of_member(5, 2, 0), seed_of_member(5, 2, 1), seed_of_member(5, 3, 0), seed_of_member(5, 3, 1)], 0.7)
    assert len({seed for seeds, _ in seen for seed in seeds}) == 8


def test_rewards_come_before_the_filter_which_judges_whole_groups():
    def accept(group):
        assert len({sample.prompt for sample in group}) == 1
        return sum(sample.reward for sample in group) > 2

    config = RolloutConfig(2, 2, generate_fn=answer, reward_fn=lambda sample: {"a": 1, "b": 2}[sample.prompt], filter_fn=accept)
    batch = next(generate_rollout_batches(DataBuffer(list("ab")), config))
    assert (batch.metadata["prompts"], batch.rewards) == (["b", "b"], [2.0, 2.0])  # 1 + 1 is refused, 2 + 2 is not


def test_samples_without_a_group_are_grouped_in_the_order_of_the_list():
    samples = [Sample(prompt, reward=reward) for prompt, reward in (("a", 0), ("a", 0), ("b", 0), ("b", 1))]
    config = RolloutConfig(2, 2, generate_fn=answer, filter_fn=lambda group: any(sample.reward for sample in group))
    assert apply_sample_transforms(samples, config) == samples[2:]
    assert apply_sample_transforms(samples, RolloutConfig(2, 2, generate_fn=answer)) == samples


def test_a_filter_that_refuses_everything_ends_with_an_error():
    def check_nothing(group):
        return False

    config = RolloutConfig(1, generate_fn=answer, filter_fn=check_nothing, patience=3)
    with pytest.raises(RolloutError, match="check_nothing refused all groups of 3 batches"):
        next(generate_rollout_batches(DataBuffer(["a"]), config))


def test_over_sampling_is_said_to_have_no_effect(caplog):
    with caplog.at_level(logging.WARNING):
        generate_rollout_batches(DataBuffer(["a"]), RolloutConfig(1, over_sampling_factor=1.5, generate_fn=answer))
    assert "AsyncRolloutManager over-samples" in caplog.text


async def answer_later(prompts):
    return answer(prompts)


class Agent:
    async def __call__(self, prompts):
        return answer(prompts)


async def judge_later(sample):
    return 1.0


@pytest.mark.parametrize(
    ("settings", "error", "remedy"),
    [
        ({"generate_fn": answer_later}, ConfigTypeError, "answer_later is a coroutine function.*use AsyncRolloutManager"),
        ({"generate_fn": functools.partial(answer_later)}, ConfigTypeError, "use AsyncRolloutManager"),
        ({"generate_fn": Agent()}, ConfigTypeError, "Agent is a coroutine function"),
        ({"generate_fn": lambda prompts: answer_later(prompts)}, ConfigTypeError, "use AsyncRolloutManager"),
        ({"reward_fn": judge_later}, ConfigTypeError, "judge_later is a coroutine function"),
        ({"reward_fn": lambda sample: judge_later(sample)}, ConfigTypeError, "use AsyncRolloutManager"),
        ({"reward_fn": lambda sample: [1.0]}, ConfigError, "returned a list; a reward function must return a number"),
        ({"filter_fn": judge_later}, ConfigTypeError, "a filter must be a plain function"),
        ({"generate_fn": functools.partial(answer, ["a"])}, ConfigTypeError, "take a list of prompts"),
        ({"generate_fn": lambda prompts: None}, DataError, "returned None; it must return a list"),
        ({"generate_fn": lambda prompts: ["4"]}, DataError, "list with a str; .*a Sample"),
        ({"generate_fn": lambda prompts: answer(prompts * 2)}, DataError, "returned 2 samples for 1 prompts"),
        ({"generate_fn": lambda prompts: [Sample("a", tokens=[1])]}, DataError, "sample 0 .*1 tokens .*loss_mask of 0"),
    ],
)
def test_a_wrong_function_is_an_error_that_names_the_remedy(settings, error, remedy):
    config = RolloutConfig(1, **{"generate_fn": answer, **settings})
    with pytest.raises(error, match=remedy):
        next(generate_rollout_batches(DataBuffer(["a"]), config))


def test_columns_of_samples():
    samples = [Sample("a", "x", [1, 2], [0, 0.5], reward=1, metadata={"correct": True}), Sample("b", metadata={"turns": 2})]
    batch = convert_to_batch(samples, epoch_id=1, step_id=2)
    assert extract_sample_fields(samples) == ([[1, 2], []], [[0, 0.5], []], [1.0, 0.0])
    assert compute_response_lengths(batch.loss_masks) == [1, 0]
    assert batch.metadata == {
        "epoch_id": 1,
        "step_id": 2,
        "batch_size": 2,
        "prompts": ["a", "b"],
        "responses": ["x", ""],
        "sample_correct": [True, None],
        "sample_turns": [None, 2],
    }
    assert batch.samples == samples
    with pytest.raises(DataError, match="at least one sample"):
        convert_to_batch([])
