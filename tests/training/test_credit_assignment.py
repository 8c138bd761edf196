"""Credit by hand, and properties that hold for all rewards."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.training import (
    BatchNormalizedReturn,
    BranchReturn,
    ConstantCredit,
    EpisodicReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MonteCarloReturn,
    OverlongPenalty,
    PerStepReward,
)
from ludic.training.presets import make_maxent_grpo
from ludic.types import Rollout, Step, TokenTrace


def rollout(*rewards, group=None, name=None):
    steps = [Step(i, "o", "a", "n", r, False, i == len(rewards) - 1) for i, r in enumerate(rewards)]
    meta = {} if group is None else {"request_meta": {"group_id": group}}
    return Rollout(**({"id": name} if name else {}), steps=steps, meta=meta)


def weights(assigner, *rollouts):
    """The weights of each rollout, in order."""
    computed = assigner.compute(list(rollouts))
    assert set(computed) == {(r.id, s.index) for r in rollouts for s in r.steps}
    return [[computed[r.id, s.index] for s in r.steps] for r in rollouts]


def tree(parents, *rewards):
    """An episode of an agent: call i continues `parents[i]`."""
    made = rollout(*rewards)
    for number, (step, parent) in enumerate(zip(made.steps, parents, strict=True)):
        step.info |= {"call": number, "parent": parent}
    return made


def test_returns_of_branches_follow_the_calls_that_continue_one_another():
    # Calls 1 and 2 continue 0, and the outcome is 1.
    assert weights(BranchReturn(0.5), tree([None, 0, 0], 0.0, 0.0, 1.0)) == [[0.5, 1.0, 1.0]]
    # 3 continues 1, and 4 begins anew: G_1 = 0.5, G_0 = 0.5 * (0.5 + 1) / 2.
    assert weights(BranchReturn(0.5), tree([None, 0, 0, 1, None], 0.0, 0.0, 0.0, 0.0, 1.0)) == [[0.375, 0.5, 1.0, 1.0, 1.0]]
    # A reward of a call of its own: G_1 = 3 + 0.5 * 1.
    assert weights(BranchReturn(0.5), tree([None, 0, 1], 0.0, 3.0, 1.0)) == [[1.75, 3.5, 1.0]]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(0, 1))
def test_without_branches_they_are_monte_carlo_returns(rewards, gamma):
    line = tree([None, *range(len(rewards) - 1)], *rewards)
    for played in (line, rollout(*rewards)):
        [expected] = weights(MonteCarloReturn(gamma), played)
        assert weights(BranchReturn(gamma), played)[0] == pytest.approx(expected, abs=1e-12)


def test_monte_carlo_returns_are_discounted():
    # G_2 = 4; G_1 = 2 + 0.5 * 4 = 4; G_0 = 1 + 0.5 * 4 = 3
    assert weights(MonteCarloReturn(0.5), rollout(1.0, 2.0, 4.0)) == [[3.0, 4.0, 4.0]]
    assert weights(MonteCarloReturn(), rollout(1.0, 2.0, 4.0)) == [[7.0, 6.0, 4.0]]


def test_the_simple_assigners_by_hand():
    assert weights(PerStepReward(), rollout(1.0, 2.0)) == [[1.0, 2.0]]
    assert weights(EpisodicReturn(), rollout(1.0, 2.0)) == [[3.0, 3.0]]
    assert weights(ConstantCredit(0.3), rollout(1.0, 2.0)) == [[0.3, 0.3]]


def group(*rewards):
    return [rollout(r, group="g") for r in rewards]


def flat(assigner, *rewards):
    return [w for (w,) in weights(assigner, *group(*rewards))]


def test_a_group_is_centred_and_normalised():
    # R - mean = (.75, -.25, -.25, -.25); std = sqrt((.5625 + 3 * .0625) / 4) = .433013
    assert flat(GroupNormalizedReturn(4), 1, 0, 0, 0) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert flat(GroupNormalizedReturn(4, normalize_adv=True), 1, 0, 0, 0) == pytest.approx([1.7320508] + [-0.5773503] * 3)
    assert flat(GroupNormalizedReturn(2, normalize_adv=True), 1.0, -0.1) == pytest.approx([1.0, -1.0])


def test_positive_only_clamps_before_it_normalises():
    # max(A, 0) = (.75, 0, 0, 0); mean .1875; std = sqrt((.5625^2 + 3 * .1875^2) / 4) = .324760; .75
    # / .324760 = 2.309401
    both = GroupNormalizedReturn(4, normalize_adv=True, positive_only=True)
    assert flat(both, 1, 0, 0, 0) == pytest.approx([2.3094011, 0, 0, 0])


def test_the_standard_deviation_can_have_an_epsilon():
    # the measured recipe: (r - mean) / (std + 1e-4): .5 / .5001
    assert flat(GroupNormalizedReturn(2, normalize_adv=True, eps=1e-4), 1, 0) == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001])


def test_hybrid_centres_by_group_and_scales_by_batch():
    a = [rollout(1.0, group="a"), rollout(0.0, group="a")]  # centred .5, -.5
    b = [rollout(4.0, group="b"), rollout(0.0, group="b")]  # centred 2, -2
    # std of (.5, -.5, 2, -2) = sqrt((.25 + .25 + 4 + 4) / 4) = 1.457738
    got = [w for (w,) in weights(HybridNormalizedReturn(2), *a, *b)]
    assert got == pytest.approx([0.3429972, -0.3429972, 1.3719887, -1.3719887])
    positive = [w for (w,) in weights(HybridNormalizedReturn(2, positive_only=True), *a, *b)]
    assert positive == pytest.approx([0.3429972, 0.0, 1.3719887, 0.0])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e9, -0.3])
@pytest.mark.parametrize("make", [GroupNormalizedReturn, HybridNormalizedReturn])
def test_equal_returns_give_exactly_zero(make, reward):
    assert flat(make(3), *[reward] * 3) == [0.0, 0.0, 0.0]
    assert flat(GroupNormalizedReturn(3, normalize_adv=True), *[reward] * 3) == [0.0, 0.0, 0.0]


def test_every_step_of_a_rollout_gets_its_advantage():
    got = weights(GroupNormalizedReturn(2), rollout(1.0, 1.0, group="g"), rollout(0.0, group="g"))
    assert got == [[1.0, 1.0], [-1.0]]


@pytest.mark.parametrize("make", [GroupNormalizedReturn, HybridNormalizedReturn])
def test_groups_of_another_size_are_errors(make):
    with pytest.raises(ValueError, match="missing group_id"):
        make(1).compute([rollout(1.0)])
    with pytest.raises(ValueError, match="Group size mismatch"):
        make(3).compute(group(1.0, 0.0))
    with pytest.raises(ValueError, match="Group size mismatch"):
        make(1, allow_partial=True).compute(group(1.0, 0.0))
    with pytest.raises(ValueError, match="group_size must be positive, got 0"):
        make(0)
    assert flat(make(3, allow_partial=True), 1.0, 1.0) == [0.0, 0.0]
    assert make(2).compute([]) == {}


def test_the_preset_of_maxent_grpo_counts_the_rollouts_of_a_group_as_grpo_does():
    returns = make_maxent_grpo(group_size=3).credit_assigner
    assert flat(returns, 1.0, 0.0, 0.5) == [1.0, 0.0, 0.5]
    with pytest.raises(DataError, match="has 2 rollouts, group_size is 3"):
        returns.compute(group(1.0, 0.0))
    with pytest.raises(DataError, match="missing group_id"):
        returns.compute([rollout(1.0)])
    partial = make_maxent_grpo(group_size=3, allow_partial=True).credit_assigner
    assert flat(partial, 1.0, 0.0) == [1.0, 0.0]
    with pytest.raises(DataError, match="has 4 rollouts, group_size is 3"):
        partial.compute(group(1.0, 0.0, 1.0, 0.0))
    with pytest.raises(ConfigError, match="group_size must be positive, got 0"):
        EpisodicReturn(0)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5), st.randoms())
def test_advantages_of_a_group_sum_to_zero_in_any_order(rewards, random):
    rollouts = [rollout(r, group=g, name=f"{g}-{i}") for g, rs in enumerate(rewards) for i, r in enumerate(rs)]
    shuffled = random.sample(rollouts, len(rollouts))
    for assigner in (GroupNormalizedReturn(4), GroupNormalizedReturn(4, normalize_adv=True), HybridNormalizedReturn(4)):
        got = assigner.compute(rollouts)
        for g in range(len(rewards)):
            assert sum(got[f"{g}-{i}", 0] for i in range(4)) == pytest.approx(0.0, abs=1e-6)
        again = assigner.compute(shuffled)
        assert np.allclose([got[key] for key in got], [again[key] for key in got], atol=1e-9)


def test_equal_rewards_in_another_order_give_an_equal_return():
    # summed from left to right, .1 + .1 + 1.0 is 1.2 and 1.0 + .1 + .1 is 1.2000000000000002
    rollouts = [rollout(0.1, 0.1, 1.0, group="g"), rollout(1.0, 0.1, 0.1, group="g")]
    for assigner in (GroupNormalizedReturn(2, normalize_adv=True), HybridNormalizedReturn(2)):
        assert weights(assigner, *rollouts) == [[0.0] * 3] * 2


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("assigner", [EpisodicReturn(), GroupNormalizedReturn(2), HybridNormalizedReturn(2)])
def test_a_reward_that_is_not_finite_is_named(assigner, reward):
    with pytest.raises(ValueError, match=r"rewards of rollout bad .*\[1.0, .*\]; .*finite"):
        assigner.compute([rollout(0.0, group="g"), rollout(1.0, reward, group="g", name="bad")])


def test_groups_do_not_affect_each_other():
    a, b = [rollout(r, group=1) for r in (1.0, 0.0)], [rollout(r, group="1") for r in (5.0, 1.0)]
    assert weights(GroupNormalizedReturn(2), a[0], b[0], a[1], b[1]) == [[0.5], [2.0], [-0.5], [-2.0]]


def test_a_group_that_lost_rollouts_is_centred_on_the_remaining_ones():
    # (3 + 0) / 2 = 1.5
    assert flat(GroupNormalizedReturn(4, allow_partial=True), 3.0, 0.0) == [1.5, -1.5]
    assert flat(GroupNormalizedReturn(4, allow_partial=True, normalize_adv=True), 3.0) == [0.0]


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=6), st.integers(-4, 4), st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_normalised_credit_does_not_depend_on_the_scale_of_the_rewards(rewards, shift, scale):
    assigner = GroupNormalizedReturn(len(rewards), normalize_adv=True, eps=0.0)
    if len(set(rewards)) == 1:
        return
    moved = [scale * reward + shift for reward in rewards]
    assert flat(assigner, *moved) == pytest.approx(flat(assigner, *rewards), abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.floats(0, 1))
def test_monte_carlo_equals_its_sum(rewards, gamma):
    got = weights(MonteCarloReturn(gamma), rollout(*rewards))[0]
    slow = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert got == pytest.approx(slow, abs=1e-6)


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), st.booleans())
def test_positive_only_credit_is_never_negative(rewards, normalize):
    for assigner in (
        GroupNormalizedReturn(3, normalize_adv=normalize, positive_only=True),
        HybridNormalizedReturn(3, positive_only=True),
    ):
        assert min(flat(assigner, *rewards)) >= 0.0


def test_each_player_of_a_group_has_its_own_baseline():
    """Regression test: two rollouts per episode made a group of twice its size. Here x wins twice
    and o loses twice, so there is no credit. With one baseline for both, every move of x would have
    weight +1 and every move of o -1."""
    players = [rollout(r, group="g") for r in (1.0, -1.0, 1.0, -1.0)]
    for player, name in zip(players, "xoxo", strict=True):
        player.meta["agent_id"] = name
    assert weights(GroupNormalizedReturn(2), *players) == [[0.0]] * 4
    players[0].steps[0].reward = 0.0  # x's returns: 0 and 1, mean 0.5
    assert weights(GroupNormalizedReturn(2), *players) == [[-0.5], [0.0], [0.5], [0.0]]
    hybrid = [w for (w,) in weights(HybridNormalizedReturn(2, eps=0.0), *players)]
    assert hybrid == pytest.approx([-(2**0.5), 0.0, 2**0.5, 0.0])  # the standard deviation of (-.5, 0, .5, 0) is .353553
    with pytest.raises(ValueError, match=r"group g .*agent x .*2 .*group_size is 3"):
        weights(GroupNormalizedReturn(3), *players)


def test_leave_one_out_compares_a_return_with_the_others():
    # 1 - mean(0, 0, 1) = 2/3; 0 - mean(1, 0, 1) = -2/3
    rloo = GroupNormalizedReturn(4, leave_one_out=True)
    assert flat(rloo, 1, 0, 0, 1) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert flat(GroupNormalizedReturn(4, leave_one_out=True, normalize_adv=True), 1, 0, 0, 1) == pytest.approx([1, -1, -1, 1])
    assert flat(GroupNormalizedReturn(1, leave_one_out=True), 3.0) == [0.0]


def test_a_batch_is_centred_and_scaled_as_one():
    # returns 3, 0, 0: centred 2, -1, -1; std = sqrt((4 + 1 + 1) / 3) = 1.4142136
    got = weights(BatchNormalizedReturn(), rollout(1.0, 2.0), rollout(0.0), rollout(0.0))
    assert got == [pytest.approx([1.4142136, 1.4142136]), pytest.approx([-0.7071068]), pytest.approx([-0.7071068])]
    assert weights(BatchNormalizedReturn(), rollout(0.1), rollout(0.1), rollout(0.1)) == [[0.0], [0.0], [0.0]]
    assert BatchNormalizedReturn().compute([]) == {}


def answer(reward, tokens, **named):
    played = rollout(reward, **named)
    played.steps[0].trace = TokenTrace([1], [2] * tokens)
    return played


def test_an_answer_close_to_its_limit_loses_reward():
    # the last 20 of 100 tokens: 80 tokens cost 0, 85 a quarter, 90 a half, 100 the whole penalty,
    # and more than 100 no more
    by_length = [answer(1.0, n) for n in (1, 80, 85, 90, 100, 110)]
    credit = OverlongPenalty(EpisodicReturn(), max_tokens=100, buffer_tokens=20)
    assert weights(credit, *by_length) == [[1.0], [1.0], [0.75], [0.5], [0.0], [0.0]]
    assert weights(OverlongPenalty(EpisodicReturn(), 100, 20, factor=0.5), *by_length)[3:5] == [[0.75], [0.5]]
    assert weights(OverlongPenalty(EpisodicReturn(), 100, 0), *by_length) == [[1.0]] * 6
    assert [played.total_reward for played in by_length] == [1.0] * 6  # the logged reward stays that of the environment


def test_the_length_penalty_applies_before_the_group_is_centred():
    # rewards 1, 1 minus penalties 0, 1: returns 1, 0, centred .5, -.5; without the penalty both
    # would be 0
    pair = [answer(1.0, 10, group="g"), answer(1.0, 100, group="g")]
    assert weights(OverlongPenalty(GroupNormalizedReturn(2), 100, 20), *pair) == [[0.5], [-0.5]]


def test_a_length_penalty_needs_token_counts():
    with pytest.raises(DataError, match="has no token trace"):
        OverlongPenalty(EpisodicReturn(), 100, 20).compute([rollout(1.0)])
    with pytest.raises(ConfigError, match=r"buffer_tokens \(101\) .*at most 100; max_tokens"):
        OverlongPenalty(EpisodicReturn(), 100, 101)
    with pytest.raises(ConfigError, match=r"factor \(-1\)"):
        OverlongPenalty(EpisodicReturn(), 100, 20, factor=-1)
