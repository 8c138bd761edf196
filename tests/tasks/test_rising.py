"""The task with many right answers: which are right, what the teacher shows, what is measured."""

from collections import Counter
from itertools import product
from random import Random
from types import SimpleNamespace

import pytest

from ludic.errors import ConfigError
from ludic.recipes.build import build_episodic_task
from ludic.recipes.compose import compose
from ludic.tasks import Rising, as_episodic
from ludic.tasks.digits import right_answers, rises_above


def test_the_right_answers_are_all_rising_digits_above_the_question():
    assert [len(right_answers(low)) for low in range(7)] == [84, 56, 35, 20, 10, 4, 1]
    for low in range(7):
        texts = ["".join(digits) for digits in product("0123456789", repeat=3)]
        assert [text for text in texts if rises_above(text, str(low))] == [
            text for text in texts if str(low) < text[0] < text[1] < text[2]
        ]


@pytest.mark.parametrize(
    ("answer", "reward"), [("479", 1), ("379", 0), ("447", 0), ("974", 0), ("4789", 0), ("47", 0), (" 479", 0)]
)
def test_any_right_answer_earns_the_reward(answer, reward):
    task = Rising()
    problem = task.heldout()[3]
    env = task.make_env(problem)
    assert env.env_reset()[0] == problem["question"] == "3>"
    assert env.env_step(answer).reward == reward


def test_the_teacher_is_right_as_often_as_it_should_be_and_shows_every_right_answer():
    task, rng = Rising(right=0.4), Random(0)
    problem = task.heldout()[4]
    shown = [task.demonstrate(problem, rng) for _ in range(4000)]
    right = [answer for answer in shown if answer in right_answers(4)]
    assert abs(len(right) / 4000 - 0.4) < 0.03
    assert set(right) == set(right_answers(4))
    assert max(Counter(right).values()) < 2 * min(Counter(right).values())
    assert {len(answer) for answer in shown} == {3}


def test_questions_are_drawn_alike_and_all_are_measured():
    task, rng = Rising(), Random(0)
    counts = Counter(task.draw(rng)["id"] for _ in range(5000))
    assert set(counts) == set("01234")
    assert all(abs(count - 1000) < 150 for count in counts.values())
    assert task.heldout()[4]["answer"] == "567, or any of 9 others"


def play(low, answer):
    step = SimpleNamespace(action=answer, info={})
    return {"id": str(low)}, SimpleNamespace(steps=[step], total_reward=float(rises_above(answer, str(low))))


def test_distinct_right_answers_and_their_entropy_are_means_over_questions():
    task = as_episodic(Rising(lows=[3, 4]))
    played = [play(3, "456")] * 8 + [play(4, answer) for answer in ["567", "568"] * 3 + ["123", "x"]]
    assert task.measure({"held out": played}) == pytest.approx({"distinct_of_8": 1.5, "entropy_of_right": 0.34657359})
    assert list(task.rates) == ["distinct_of_8", "distinct_of_32", "entropy_of_right"]
    assert task.measure({"held out": []}) == {}


def test_a_recipe_names_it():
    assert build_episodic_task(compose(["task.kind=rising", "task.args={lows:[3]}"])).suites()["held out"][0]["question"] == "3>"


@pytest.mark.parametrize("lows", [(), (7,), (-1,), (3, 3)])
def test_digits_without_an_answer_are_refused(lows):
    with pytest.raises(ConfigError, match="different digits from 0 to 6"):
        Rising(lows=lows)
