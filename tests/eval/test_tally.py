"""Numbers from rollouts and failures, by hand."""

import json

import pytest

from ludic.errors import DataError, RolloutError
from ludic.eval import measure, share_interval
from ludic.training.rollouts.episodes import EpisodeFailure
from ludic.types import Rollout, Step


def episode(problem, reward, index=None, **info):
    meta = {} if problem is None else {"problem_id": problem}
    meta |= {} if index is None else {"episode_idx": index}
    return Rollout(steps=[Step(0, "q", "a", None, reward, False, True, info=info)], meta=meta)


def failure(problem, error="OSError: gone", index=99):
    return EpisodeFailure(index, "env", 0, error, 2, {"problem_id": problem})


ROLLOUTS = [
    *(episode("a", reward) for reward in (1.0, 1.0, 0.0, 1.0)),  # 3 of 4 right
    *(episode("b", reward) for reward in (0.0, 0.0, 0.5, 0.0)),  # none right
    *(episode("c", reward) for reward in (1.0, 0.0)),  # 1 of 2 right, and two episodes failed
]
FAILURES = [failure("c"), failure("c", "TimeoutError: "), *(failure("d") for _ in range(4))]


def test_failures_do_not_count_as_wrong_answers():
    found = measure(ROLLOUTS, FAILURES)
    assert found.accuracy.value == pytest.approx((3 / 4 + 0 + 1 / 2) / 3)
    assert found.accuracy.num_problems == 3
    assert found.reward.value == pytest.approx((3 / 4 + 1 / 8 + 1 / 2) / 3)
    assert [(p.problem_id, p.answers, p.right, p.failed) for p in found.problems] == [
        ("a", 4, 3, 0),
        ("b", 4, 0, 0),
        ("c", 2, 1, 2),
        ("d", 0, 0, 4),
    ]
    assert (found.num_episodes, found.num_failed_episodes, found.num_unanswered_problems) == (16, 6, 1)
    assert found.errors == {"OSError: gone": 5, "TimeoutError: ": 1}
    assert next(iter(found.errors)) == "OSError: gone"
    assert found.samples_per_problem == 4


def test_the_bounds_count_failures_as_all_wrong_or_all_right():
    """All wrong: (3/4 + 0 + 1/4 + 0) / 4. All right: (3/4 + 0 + 3/4 + 1) / 4."""
    assert measure(ROLLOUTS, FAILURES).accuracy_bounds == pytest.approx((0.25, 0.625))
    whole = measure(ROLLOUTS)
    assert whole.accuracy_bounds == pytest.approx((whole.accuracy.value, whole.accuracy.value))


def test_pass_at_k_covers_the_problems_with_at_least_k_answers():
    """k = 2: a 1 - 0/6 = 1, b 0, c 1. k = 4: a 1, b 0; c has only two answers."""
    found = measure(ROLLOUTS, FAILURES).pass_at_k
    assert list(found) == [1, 2, 4]
    assert [(found[k].value, found[k].num_problems) for k in found] == [
        (pytest.approx((0.75 + 0 + 0.5) / 3), 3),
        (pytest.approx(2 / 3), 3),
        (0.5, 2),
    ]
    assert found[4].low == pytest.approx(share_interval([1.0, 0.0]).low)


def test_the_reward_from_which_an_answer_is_right_can_be_set():
    assert measure(ROLLOUTS).accuracy.value == pytest.approx((3 / 4 + 0 + 1 / 2) / 3)
    assert measure(ROLLOUTS, solved_at=0.5).accuracy.value == pytest.approx((3 / 4 + 1 / 4 + 1 / 2) / 3)


def test_rollouts_without_a_problem_id_are_separate_problems():
    found = measure([episode(None, 1.0), episode(None, 0.0)])
    assert (found.accuracy.value, found.accuracy.num_problems, found.samples_per_problem) == (0.5, 2, 1)


def test_other_metrics_are_averaged_by_problem():
    rollouts = [episode("a", 1.0, tidy=True, length=2), episode("a", 1.0, tidy=False, length=4), episode("b", 0.0, length=9)]
    found = measure(
        rollouts,
        also={
            "tidy": lambda rollout: rollout.steps[-1].info.get("tidy"),
            "length": lambda rollout: rollout.steps[-1].info["length"],
            "unknown": lambda rollout: None,
        },
    )
    assert {name: interval.value for name, interval in found.also.items()} == {"tidy": 0.5, "length": 6.0}
    assert found.also["tidy"].num_problems == 1
    assert found.shares == ("tidy",)


def test_the_numbers_for_a_trainer_are_flat():
    found = measure(ROLLOUTS, FAILURES).metrics()
    assert {"accuracy", "accuracy_low", "accuracy_high", "reward", "pass@1", "pass@2", "pass@4"} <= set(found)
    assert found["num_failed_episodes"] == 6.0
    assert all(type(value) is float for value in found.values())
    alone = measure([episode("a", 0.5)]).metrics()
    assert "reward_low" not in alone  # unknown


def test_the_numbers_for_programs_are_json():
    content = json.loads(json.dumps(measure(ROLLOUTS, FAILURES).to_dict(), allow_nan=False))
    assert content["num_problems"] == 4
    assert content["pass_at_k"]["2"]["num_problems"] == 3
    assert "problems" not in content


def test_only_one_of_several_players_is_measured():
    def player(name, reward):
        rollout = episode("a", reward, index=3)
        rollout.meta["agent_id"] = name
        return rollout

    both = [player("x", 1.0), player("o", -1.0)]
    with pytest.raises(DataError, match=r"episode 3 gave 2 rollouts; .*select="):
        measure(both)
    assert measure(both, select=lambda rollout: rollout.meta["agent_id"] == "x").accuracy.value == 1.0


def test_rewards_of_0_and_1_have_the_interval_of_a_share_and_others_students():
    binary = measure([episode("a", 1.0), episode("b", 0.0), episode("c", 0.0)])
    assert binary.reward == binary.accuracy
    assert binary.reward.low > 0  # Student's would be below: 1/3 -+ 4.3 * 0.33
    graded = measure([episode("a", 0.5), episode("b", 0.0), episode("c", 0.0)])
    assert graded.reward.low < 0


def test_an_empty_tally_is_an_error():
    with pytest.raises(RolloutError, match="nothing to measure"):
        measure([], FAILURES)
