"""The concluding sentences of a run in every case: only what the numbers support is claimed."""

from dataclasses import replace

import pytest

from ludic.eval.statistics import Interval
from ludic.runs.held_out import Answer, Evaluation, make_comparable
from ludic.runs.report.reinforce import Change, Facts, collect_facts, conclude, count_idle

ROSE = Change(0.25, 0.95, Interval(0.7, 0.6, 0.8, 50))
FELL = Change(0.95, 0.25, Interval(-0.7, -0.8, -0.6, 50))
NOISE = Change(0.1, 0.2, Interval(0.1, -0.05, 0.25, 5))
LOWER = Change(0.145, 0.12, Interval(-0.025, -0.3, 0.25, 5))
SAME = Change(0.3, 0.3, Interval(0.0, -0.1, 0.1, 50))
ALONE = Change(-0.5, 0.5, Interval(1.0, None, None, 1))
UP = Change(-1.0, 2.0, Interval(3.0, 2.5, 3.5, 50))
RUN = Facts(requested_steps=10, steps=10)
SAID = {
    "stopped": "was stopped before its end",
    "none": "There was no reinforcement",
    "idle": "Nothing was trained on",
    "some idle": "3 of 10 steps had no signal",
    "early": "Early stopping ended the run at step 3 of 10",
    "rose": "held-out reward of sampled answers rose from",
    "fell": "held-out reward of sampled answers fell from",
    "noise": "which may be noise",
    "same": "did not change",
    "unknown noise": "how much of it is noise",
    "saturated": "nothing left to learn",
    "none right": "there is little to reinforce",
    "sharpens": "selects and sharpens these",
    "score rose": "held-out score of the reward model rose",
    "over-optimised": "over-optimised",
    "score alone": "Nothing here measures whether answers with a higher score are better",
    "clip": "The clip acted on 1.50%",
}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (Facts(10, 4, measured=False), {"stopped"}),
        (Facts(10, 10, 10, measured=False), {"stopped", "idle"}),
        (Facts(0, 0, reward=SAME), {"none"}),
        (replace(RUN, idle_steps=10, reward=SAME, clip_fraction=0.015), {"idle"}),
        (replace(RUN, idle_steps=10, reward=NOISE, right=(0.1, 0.2)), {"idle"}),
        (replace(RUN, idle_steps=3, reward=ROSE), {"some idle", "rose"}),
        (replace(RUN, steps=3, reward=ROSE), {"early", "rose"}),
        (replace(RUN, steps=3, idle_steps=3, reward=SAME), {"early", "idle"}),
        (replace(RUN, reward=ROSE), {"rose"}),
        (replace(RUN, reward=ROSE, right=(0.25, 0.95)), {"rose", "sharpens"}),
        (replace(RUN, reward=ROSE, right=(0.0, 0.95)), {"rose"}),
        (replace(RUN, reward=ROSE, right=(0.25, 0.95), clip_fraction=0.015), {"rose", "sharpens", "clip"}),
        (replace(RUN, reward=FELL, right=(0.95, 0.25)), {"fell"}),
        (replace(RUN, reward=NOISE, right=(0.1, 0.2)), {"noise"}),
        (replace(RUN, reward=LOWER, right=(0.1, 0.1)), {"noise"}),
        (replace(RUN, reward=SAME, right=(0.3, 0.3)), {"same"}),
        (replace(RUN, reward=SAME, right=(0.0, 0.0)), {"same", "none right"}),
        (replace(RUN, reward=ALONE), {"unknown noise"}),
        (replace(RUN, reward=Change(0.1, 0.9)), {"unknown noise"}),
        (replace(RUN, reward=Change(1.0, 1.0, Interval(0, -0.02, 0.02, 50)), right=(1.0, 1.0)), {"saturated"}),
        (replace(RUN, reward=ROSE, score=UP), {"rose", "score rose"}),
        (replace(RUN, reward=FELL, score=UP), {"fell", "score rose", "over-optimised"}),
        (replace(RUN, reward=LOWER, score=UP), {"noise", "score rose"}),
        (replace(RUN, reward=FELL, score=NOISE), {"fell", "noise"}),
        (replace(RUN, reward=UP, reward_is_score=True), {"score rose", "score alone"}),
        (replace(RUN, reward=NOISE, reward_is_score=True), {"noise", "score alone"}),
    ],
)
def test_a_sentence_is_printed_only_if_the_numbers_support_it(facts: Facts, said: set[str]) -> None:
    text = conclude(facts)
    assert {name for name, part in SAID.items() if part in text} == said


def test_a_change_is_printed_with_its_interval_and_the_number_of_problems() -> None:
    assert "rose from 0.250 to 0.950 (95 % interval +0.600 to +0.800, 50 problems)" in conclude(replace(RUN, reward=ROSE))


def measured(rewards: list[float | None], *, samples: int = 4, right: float | None = None) -> Evaluation:
    known = [reward for reward in rewards if reward is not None]
    return Evaluation(
        sum(known) / len(known), None, {}, [], len(known) * samples, sampled_right=right, by_problem={"sampled_reward": rewards}
    )


def between(before: Evaluation, after: Evaluation) -> Facts:
    return collect_facts(before, after, requested_steps=1, steps=1, idle_steps=0, reward_is_score=False, clip_fraction=None)


def test_five_problems_with_four_answers_do_not_show_small_changes() -> None:
    """Regression test: 0.145 -> 0.120 on 5 problems x 4 samples was called over-optimised."""
    found = between(measured([0.25, 0.25, 0.0, 0.0, 0.25]), measured([0.25, 0.0, 0.0, 0.25, 0.0])).reward
    assert found is not None
    assert not found.rose
    assert not found.fell


def test_many_problems_show_small_changes() -> None:
    found = between(measured([0.25, 0.5] * 100), measured([1.0, 0.75] * 100)).reward
    assert found is not None
    assert found.rose


def test_only_problems_graded_in_both_evaluations_are_compared() -> None:
    found = between(measured([0.0, None, 1.0]), measured([0.0, 1.0, None])).reward
    assert found is not None
    assert found.difference is not None
    assert (found.difference.value, found.difference.num_problems) == (0.0, 1)


def test_an_evaluation_without_intervals_supports_no_claim() -> None:
    """The progress.json of an earlier version has only means."""
    old = Evaluation.from_dict({"sampled_reward": 0.2, "greedy_accuracy": 0.1, "facts": {}, "answers": []})
    facts = between(old, replace(old, sampled_reward=0.9))
    assert facts.reward == Change(0.2, 0.9)
    assert "how much of it is noise" in conclude(facts)


def test_an_accuracy_known_only_before_or_after_is_not_shown() -> None:
    marked = Evaluation(0.0, 0.0, {}, [Answer("q", "a", "b", 0.0, success=False)], greedy_reward=0.0, solved_at=1.0)
    graded = Evaluation(0.5, None, {}, [Answer("q", "a", "b", 0.5)], greedy_reward=0.5)
    before, after = make_comparable(marked, graded)
    assert before is not None
    assert after is not None
    assert before.rates() == {"sampled_reward": 0.0, "greedy_reward": 0.0}
    assert [answer.success for answer in before.answers] == [None]
    assert make_comparable(marked, marked) == (marked, marked)
    assert make_comparable(marked, None) == (marked, None)


def test_only_steps_without_trained_tokens_count_as_idle() -> None:
    assert count_idle([{"perf/padded_tokens": 0.0}, {"perf/padded_tokens": 12.0}, {"eval/sampled_reward": 0.5}]) == 1
