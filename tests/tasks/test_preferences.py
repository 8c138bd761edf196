"""The built-in preferences: qualities and probabilities by hand, measured label frequencies, and
disjoint splits."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.tasks import DigitPreferences, Preference
from ludic.tasks.preferences import bayes_accuracy, drawn_accuracy

digits = st.text(alphabet="0123456789", min_size=1, max_size=12)


def test_quality_is_the_mean_digit_and_its_negative_for_low() -> None:
    task = DigitPreferences()
    assert task.quality("high>", "1236") == 3.0
    assert task.quality("low>", "1236") == -3.0


def test_the_probability_is_bradley_terry() -> None:
    # Means 3 and 2, temperature 0.5: sigmoid(2) = 0.880797.
    assert DigitPreferences().probability("high>", "33", "2") == pytest.approx(0.880797, abs=1e-6)
    assert DigitPreferences(temperature=1.0).probability("low>", "33", "2") == pytest.approx(0.268941, abs=1e-6)


@given(first=digits, second=digits, prompt=st.sampled_from(["high>", "low>"]), temperature=st.floats(1e-3, 10))
def test_the_probabilities_of_the_two_orders_sum_to_one(first: str, second: str, prompt: str, temperature: float) -> None:
    task = DigitPreferences(temperature=temperature)
    assert task.probability(prompt, first, second) + task.probability(prompt, second, first) == pytest.approx(1.0, abs=1e-12)


@given(seed=st.integers(0, 2**32))
def test_a_pair_records_its_probability(seed: int) -> None:
    task = DigitPreferences(num_heldout=10)
    pair = task.draw(Random(seed))
    assert pair["probability"] == pytest.approx(task.probability(pair["prompt"], pair["chosen"], pair["rejected"]), abs=1e-12)
    assert pair["probability"] != 0.5
    assert {len(pair["chosen"]), len(pair["rejected"])} <= set(range(4, 13))


def test_labels_are_drawn_with_their_probabilities() -> None:
    task, rng, frequencies, won = DigitPreferences(), Random(1), Counter[int](), Counter[int]()
    for _ in range(20_000):
        pair = task.draw(rng)
        better = max(pair["probability"], 1 - pair["probability"])
        bucket = int(better * 10)
        frequencies[bucket] += 1
        won[bucket] += pair["probability"] > 0.5
    for bucket, middle in ((6, 0.65), (7, 0.75), (8, 0.85)):
        # At least 1,500 draws each: a standard error of at most .013. The middle of a bucket is not
        # exactly its mean.
        assert frequencies[bucket] > 1_500
        assert won[bucket] / frequencies[bucket] == pytest.approx(middle, abs=0.04)


def test_the_bayes_accuracy_is_the_mean_of_the_larger_probability() -> None:
    pairs = [
        Preference(prompt="high>", chosen="9", rejected="1", probability=0.9),
        Preference(prompt="high>", chosen="4", rejected="5", probability=0.3),
    ]
    assert bayes_accuracy(pairs) == pytest.approx((0.9 + 0.7) / 2)
    assert drawn_accuracy(pairs) == 0.5  # the second label was drawn against the better response


def test_the_labels_of_the_held_out_pairs_agree_with_their_bayes_accuracy() -> None:
    held = DigitPreferences().heldout()
    # 5,000 labels: a standard error of .005.
    assert drawn_accuracy(held) == pytest.approx(bayes_accuracy(held), abs=0.015)
    assert len(held) == 5_000


def test_no_held_out_response_is_trained_on() -> None:
    task, rng = DigitPreferences(min_digits=3, max_digits=4, num_heldout=400), Random(2)
    held = {pair["prompt"] + pair[side] for pair in task.heldout() for side in ("chosen", "rejected")}  # type: ignore[literal-required]
    trained = [task.draw(rng) for _ in range(5_000)]
    assert not any(pair["prompt"] + pair["chosen"] in held or pair["prompt"] + pair["rejected"] in held for pair in trained)


def test_pairs_depend_only_on_the_generator() -> None:
    one, two = (DigitPreferences() for _ in range(2))
    assert one.heldout() == two.heldout()
    assert [one.draw(Random(3)) for _ in range(3)] == [two.draw(Random(3)) for _ in range(3)]
    assert one.draw(Random(3)) != one.draw(Random(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_digits": 0}, r"min_digits \(0\)"),
        ({"min_digits": 9, "max_digits": 8}, r"min_digits \(9\) .* max_digits is 8"),
        ({"temperature": 0.0}, r"temperature \(0.0\)"),
        ({"num_heldout": 0}, r"num_heldout \(0\)"),
        ({"max_digits": 4, "num_heldout": 501}, r"num_heldout \(501\) .*at most 500"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DigitPreferences(**settings)  # type: ignore[arg-type]
