"""Credit of GDPO, ReMax, MaxRL and Pass@k training: worked by hand, and laws for all rewards."""

from dataclasses import replace
from itertools import combinations
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.inference import InferenceSpec, SamplingParams
from ludic.training import (
    EachRewardNormalized,
    GreedyBaselineReturn,
    GroupNormalizedReturn,
    GRPORequestStrategy,
    OverlongPenalty,
    PassAtKReturn,
)
from ludic.training.group_credit import drop_greedy
from ludic.training.rollouts.to_samples import reward_facts
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest, SAWBatch, SAWItem
from ludic.types import Rollout, Step

BINARY = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9)


def answer(reward, group="g", *, greedy=False, steps=1, **named):
    """A rollout whose last step has this reward, and those of reward functions by name."""
    info = {f"rewards/{name}": value for name, value in named.items() if value is not None}
    played = [Step(i, "o", "a", "n", 0.0, False, False) for i in range(steps - 1)]
    meta = {"request_meta": {"group_id": group, **({"greedy": True} if greedy else {})}}
    return Rollout(steps=[*played, Step(steps - 1, "o", "a", "n", reward, False, True, info=info)], meta=meta)


def judged(group, *rewards, weights=(1.0, 1.0)):
    """Answers of a group with two rewards each; None does not apply."""
    return [
        answer(sum(w * r for w, r in zip(weights, pair, strict=True) if r is not None), group, right=pair[0], form=pair[1])
        for pair in rewards
    ]


def credit(assigner, rollouts):
    computed = assigner.compute(rollouts)
    assert set(computed) == {(each.id, step.index) for each in rollouts for step in each.steps}
    return [computed[each.id, each.steps[0].index] for each in rollouts]


def each_normalized(size, normalize="sample", **weights):
    inner = GroupNormalizedReturn(size, normalize_adv=True, normalize=normalize)
    return EachRewardNormalized(inner, weights or {"right": 1.0, "form": 1.0})


def test_gdpo_tells_apart_what_grpo_does_not_as_in_the_papers_example():
    one, both = judged("one", (0, 0), (0, 1)), judged("both", (0, 0), (1, 1))
    # a reward of (0, 1) has mean .5, sample deviation sqrt(.5): -.7071 and .7071. S is their sum
    papers = [-0.7071, 0.7071, -1.4142, 1.4142]
    batch = sqrt((2 * 0.7071**2 + 2 * 1.4142**2) / 3)
    assert credit(each_normalized(2), [*one, *both]) == pytest.approx([value / batch for value in papers], abs=1e-4)
    grpo = GroupNormalizedReturn(2, normalize_adv=True, normalize="sample")
    assert credit(grpo, [*one, *both]) == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-4)


def test_the_weights_of_gdpo_weigh_normalised_rewards():
    # right: (0, 1) -> (-1, 1); form: (10, 0) -> (1, -1). S = (-1 + .25, 1 - .25), deviation .75
    rollouts = judged("g", (0, 10), (1, 0), weights=(1.0, 0.25))
    assert credit(each_normalized(2, "population", right=1.0, form=0.25), rollouts) == pytest.approx([-1.0, 1.0])
    # weight 3 for the form turns the sign
    assert credit(each_normalized(2, "population", right=1.0, form=3.0), judged("g", (0, 10), (1, 0), weights=(1, 3))) == (
        pytest.approx([1.0, -1.0])
    )


def test_a_reward_that_does_not_apply_to_an_answer_adds_nothing_to_it():
    rollouts = judged("g", (0, 1), (1, None), (0, 0), (1, None))
    # right: (-1, 1, -1, 1); form, of answers 0 and 2: (1, -1). S = (0, 1, -2, 1), variance 6 / 4
    expected = [value / sqrt(1.5) for value in (0, 1, -2, 1)]
    assert credit(each_normalized(4, "population"), rollouts) == pytest.approx(expected)


def test_what_is_not_of_a_reward_function_is_a_further_reward():
    rollouts = judged("g", (0, 0), (1, 0))
    rollouts[1].steps[-1].reward -= 0.3  # S: right (-1, 1), the rest (1, -1)
    assert credit(each_normalized(2, "population"), rollouts) == pytest.approx([0.0, 0.0])
    assert replace(OverlongPenalty(each_normalized(2), 4, 2)).inner == each_normalized(2)


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=4, max_size=4), st.floats(0.5, 20), st.integers(-9, 9)
)
def test_gdpo_is_blind_to_scale_and_offset_of_each_reward(pairs, scale, offset):
    moved = [(a, scale * b + offset) for a, b in pairs]
    one, other = (credit(each_normalized(4, "population"), judged("g", *rewards)) for rewards in (pairs, moved))
    assert one == pytest.approx(other, abs=1e-4)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=4, max_size=4))
def test_one_reward_alone_has_the_advantages_of_grpo(rewards):
    rollouts = [answer(value, right=value) for value in rewards]
    grpo = credit(GroupNormalizedReturn(4, normalize_adv=True), rollouts)
    assert credit(each_normalized(4, "population", right=1.0), rollouts) == pytest.approx(grpo, abs=1e-6)


def test_a_flat_group_gets_exactly_0_next_to_others():
    rollouts = [*judged("flat", (1, 0.1), (1, 0.1)), *judged("g", (0, 0.1), (1, 0.7))]
    assert credit(each_normalized(2), rollouts)[:2] == [0.0, 0.0]
    assert credit(each_normalized(2), []) == []
    with pytest.raises(DataError, match="group flat has 1 rollouts, group_size is 2"):
        credit(each_normalized(2), rollouts[1:])


def test_the_sample_deviation_is_larger_by_the_root_of_g_over_g_minus_1():
    returns = [answer(value) for value in (1, 0, 0, 0, 0, 1, 0, 0)]
    here, there = (
        credit(GroupNormalizedReturn(8, normalize_adv=True, normalize=kind), returns) for kind in ("population", "sample")
    )
    assert np.divide(here, there) == pytest.approx(sqrt(8 / 7))
    partial = GroupNormalizedReturn(8, normalize_adv=True, normalize="sample", allow_partial=True)
    assert credit(partial, returns[:1]) == [0.0]
    with pytest.raises(ConfigError, match=r"normalize \('std'\) .*population, sample, mean"):
        GroupNormalizedReturn(8, normalize="std")


def maxrl(size):
    return GroupNormalizedReturn(size, normalize_adv=True, normalize="mean", eps=0.0)


def test_maxrl_divides_by_the_mean():
    # mean 1/4: (1 - 1/4) / (1/4) = 3 and -1
    assert credit(maxrl(4), [answer(value) for value in (1, 0, 0, 0)]) == [3.0, -1.0, -1.0, -1.0]
    assert credit(GroupNormalizedReturn(2, normalize_adv=True, normalize="mean"), [answer(0.0), answer(0.0)]) == [0.0, 0.0]
    with pytest.raises(DataError, match=r"normalize=mean .*>= 0; a group has -0.5"):
        credit(maxrl(2), [answer(-0.5), answer(1.0)])


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_the_expected_gradient_of_maxrl_is_that_of_the_truncated_log_likelihood(size, chance):
    # a policy with one logit: grad log pi = r - P, grad P = P (1 - P). The expectation over the
    # number of right answers is (1 - (1 - P)^(G - 1)) / P grad P (arXiv:2602.02710, theorem 5)
    expected = 0.0
    for right in range(size + 1):
        rewards = [1.0] * right + [0.0] * (size - right)
        flat = right in (0, size)
        advantages = [0.0] * size if flat else credit(maxrl(size), [answer(value) for value in rewards])
        gradient = sum(a * (r - chance) for a, r in zip(advantages, rewards, strict=True)) / size
        expected += comb(size, right) * chance**right * (1 - chance) ** (size - right) * gradient
    assert expected == pytest.approx((1 - (1 - chance) ** (size - 1)) / chance * chance * (1 - chance))


def test_pass_at_k_by_hand():
    # 3 wrong of 4, k = 2: M = 1 - 3 / 6, s = 1/2. Right: .5 / .5; wrong: (.5 - 2 / 3) / .5
    got = credit(PassAtKReturn(4, k=2), [answer(value) for value in (1, 0, 0, 0)])
    assert got == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    # 1 wrong of 4, k = 2: every set has a right answer
    assert credit(PassAtKReturn(4, k=2), [answer(value) for value in (1, 1, 0, 1)]) == [0.0] * 4


@given(BINARY, st.data())
def test_pass_at_k_is_the_advantage_of_all_sets_averaged_over_those_with_the_answer(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    sets = list(combinations(range(len(rewards)), k))
    best = np.array([max(rewards[i] for i in members) for members in sets])
    advantage = (best - best.mean()) / best.std() if best.std() else np.zeros(len(sets))
    expected = [np.mean([a for a, members in zip(advantage, sets, strict=True) if i in members]) for i in range(len(rewards))]
    got = credit(PassAtKReturn(len(rewards), k), [answer(value) for value in rewards])
    assert got == pytest.approx(expected, abs=1e-9)


def test_pass_at_k_refuses_what_is_not_right_or_wrong():
    with pytest.raises(DataError, match=r"a return is 0\.5"):
        credit(PassAtKReturn(2, k=1), [answer(0.5), answer(1.0)])
    for k in (0, 3, 1.5):
        with pytest.raises(ConfigError, match=rf"k \({k}\) must be"):
            PassAtKReturn(2, k=k)


@given(BINARY, st.sampled_from([0.0, 1.0, -2.5]), st.integers(1, 3))
def test_remax_subtracts_the_return_of_the_greedy_answer(rewards, greedy, steps):
    rollouts = [answer(value, steps=steps) for value in rewards] + [answer(greedy, greedy=True)]
    assert credit(GreedyBaselineReturn(len(rollouts)), rollouts) == [*(value - greedy for value in rewards), 0.0]


def test_the_greedy_answer_does_not_count_in_the_logged_rewards():
    facts = reward_facts([answer(1.0), answer(1.0), answer(0.0, greedy=True)])
    assert facts == {"avg_total_reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 0.0}  # which its advantages are not


def test_remax_needs_the_greedy_answer_of_each_group():
    rollouts = [answer(1.0, "a"), answer(0.0, "a", greedy=True), answer(1.0, "b"), answer(0.0, "b")]
    with pytest.raises(DataError, match=r"without a greedy answer: 1; .*greedy=True"):
        credit(GreedyBaselineReturn(2), rollouts)


def test_a_group_can_have_a_greedy_member_which_is_not_trained():
    request = RolloutRequest(
        EnvSpec("e"), ProtocolSpec("p"), env_seed=7, sampling_seed=100, inference=InferenceSpec(SamplingParams(0.9, 33, top_k=5))
    )
    members = GRPORequestStrategy(2, greedy=True).expand([request, request])
    sampled, greedy = SamplingParams(0.9, 33, top_k=5), SamplingParams(0.0, 33)
    assert [each.inference.sampling for each in members] == [sampled, sampled, greedy] * 2
    assert len({each.meta["group_id"] for each in members[:3]}) == 1
    assert {each.env_seed for each in members} == {7}
    items = [
        SAWItem([1, 2], [1, 1], [0, 1], 1.0, meta={"request_meta": each.meta, "number": i}) for i, each in enumerate(members)
    ]
    assert [item.meta["number"] for item in drop_greedy(SAWBatch(items)).items] == [0, 1, 3, 4]
