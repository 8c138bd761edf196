"""The closing sentences of a report on direct preference optimization."""

import re

import pytest
from hypothesis import given, strategies as st

from ludic.runs.dpo import describe_results

FINISHED = {
    "status": "finished",
    "steps": 5,
    "before": None,
    "after": None,
    "eval_rewards/accuracies": 0.75,
    "eval_num_pairs": 100.0,
    "eval_rewards/chosen": 0.2,
    "eval_rewards/rejected": -0.3,
}


def rate(mean, low, high):
    return {"answers": 10, "score": {"mean": mean, "low": low, "high": high}}


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        # Wilson's interval of 75 of 100 is 65.7 % to 82.5 %
        ({}, "in 75.0% of 100 held-out pairs, more often than not (95 % interval 65.7% to 82.5%).", "less likely"),
        # of 3 of 4 it is 30.1 % to 95.4 %
        (
            {"eval_num_pairs": 4.0},
            "which this number of pairs does not tell from chance (95 % interval 30.1% to 95.4%)",
            "more often",
        ),
        ({"eval_rewards/accuracies": 0.25}, "less often than not", "more often"),
        ({"bayes_accuracy": 0.84}, "; 84.0% is the best possible on average).", "less likely"),
        ({"eval_rewards/chosen": -0.1}, "Chosen responses became less likely", "quality"),
        ({}, "Nothing here measures whether sampled answers are better.", "noise"),
        ({"status": "interrupted"}, "stopped before its end was measured", "held-out"),
        ({"steps": 0}, "Nothing was trained.", "held-out"),
        ({"before": rate(0.2, 0.1, 0.3), "after": rate(0.5, 0.4, 0.6)}, "answers rose from 0.200 to 0.500", "Nothing here"),
        ({"before": rate(0.5, 0.4, 0.6), "after": rate(0.2, 0.1, 0.3)}, "answers fell from 0.500 to 0.200", "rose"),
        ({"before": rate(0.2, 0.1, 0.3), "after": rate(0.3, 0.2, 0.4)}, "which may be noise", "rose"),
        ({"before": rate(0.2, None, None), "after": rate(0.3, None, None)}, "is not known", "rose"),
        ({"before": rate(0.2, 0.1, 0.3), "after": rate(0.2, 0.1, 0.3)}, "did not change: 0.200", "noise"),
    ],
)
def test_a_sentence_is_printed_only_if_the_numbers_support_it(changes, said, unsaid):
    text = describe_results({**FINISHED, **changes})
    assert said in text
    assert unsaid not in text


def test_without_held_out_pairs_nothing_is_claimed_of_them():
    summary = {name: value for name, value in FINISHED.items() if not name.startswith("eval_")}
    assert re.search("^No pairs are held out, .*raise heldout", describe_results(summary))


@given(share=st.floats(0, 1), pairs=st.integers(1, 10_000))
def test_better_than_chance_is_said_only_if_the_interval_is_above_a_half(share, pairs):
    """By the score test: |s - n / 2| > 1.96 sqrt(n) / 2 is what a fair coin does 1 time in 20."""
    share = round(share * pairs) / pairs
    text = describe_results({**FINISHED, "eval_rewards/accuracies": share, "eval_num_pairs": float(pairs)})
    distance = abs(share * pairs - pairs / 2) - 1.959963985 * pairs**0.5 / 2
    if abs(distance) > 1e-6:
        assert ("more often" in text) == (distance > 0 and share > 0.5)
        assert ("less often" in text) == (distance > 0 and share < 0.5)
