"""The built-in tasks: verifiers by hand and by property, measured frequencies of teachers, and
disjoint splits."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.tasks import Addition, DigitSort, Problem, Task
from ludic.tasks.digits import sum_matches, textbook, without_carry

TASKS: list[Task] = [DigitSort(), Addition()]
numbers = st.integers(min_value=10, max_value=99)


def reward(task: Task, problem: Problem, answer: str) -> float:
    env = task.make_env(problem)
    env.env_reset(seed=0)
    return env.env_step(answer).reward


# ---- sorting
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("012459", 1.0),
        ("954210", 0.0),  # in descending order
        ("01245", 0.0),  # one digit lost
        ("0124599", 0.0),  # one digit too many
        (" 012459", 0.0),  # white space is not accepted
        ("", 0.0),
    ],
)
def test_only_the_exact_answer_gets_the_reward(answer: str, expected: float) -> None:
    problem = Problem(id="529140", question="529140>", answer="012459")
    assert reward(DigitSort(), problem, answer) == expected


@given(seed=st.integers(0, 2**32))
def test_the_answer_is_the_digits_of_the_question_in_ascending_order(seed: int) -> None:
    problem = DigitSort().draw(Random(seed))
    digits = problem["question"].removesuffix(">")
    assert Counter(problem["answer"]) == Counter(digits)
    assert all(a <= b for a, b in zip(problem["answer"], problem["answer"][1:], strict=False))


@given(seed=st.integers(0, 2**32), answer=st.text(alphabet="0123456789", min_size=5, max_size=7))
def test_any_other_string_of_digits_gets_nothing(seed: int, answer: str) -> None:
    problem = DigitSort().draw(Random(seed))
    assert reward(DigitSort(), problem, answer) == float(answer == problem["answer"])


def test_the_sorting_teacher_makes_the_documented_errors() -> None:
    task, rng, kinds = DigitSort(), Random(1), Counter[str]()
    for _ in range(20_000):
        problem = task.draw(rng)
        shown = task.demonstrate(problem, rng)
        if shown == problem["answer"]:
            kinds["right"] += 1
        elif shown == problem["answer"][::-1]:
            kinds["backwards"] += 1
        else:
            # One digit fewer, the rest in order.
            assert len(shown) == 5
            assert not Counter(shown) - Counter(problem["answer"])
            assert shown == "".join(sorted(shown))
            kinds["lost"] += 1
    # Frequencies .25, .5, .25; the standard error over 20,000 draws is at most .0036.
    assert kinds["right"] / 20_000 == pytest.approx(0.25, abs=0.02)
    assert kinds["backwards"] / 20_000 == pytest.approx(0.5, abs=0.02)


def test_no_rearrangement_of_a_held_out_problem_is_trained_on() -> None:
    task, rng = DigitSort(), Random(2)
    held = {problem["answer"] for problem in task.heldout()}
    assert all(task.draw(rng)["answer"] not in held for _ in range(5_000))


# ---- addition
# ------------------------------------------------------------------------------------------


def test_the_scratchpads_match_the_documentation() -> None:
    assert textbook(47, 38) == "7+8=15,4+3+1=8>85"  # 7+8 is 15, so the tens are 4+3+1
    assert without_carry(47, 38) == "7+8=15,4+3=7>75"
    assert textbook(99, 99) == "9+9=18,9+9+1=19>198"
    assert without_carry(99, 99) == "9+9=18,9+9=18>188"  # ten too few, as always when a carry is forgotten


@given(a=numbers, b=numbers)
def test_a_correct_scratchpad_ends_in_the_sum_and_a_forgotten_carry_costs_ten(a: int, b: int) -> None:
    if a % 10 + b % 10 >= 10:
        assert textbook(a, b).split(">")[1] == str(a + b)
        assert int(without_carry(a, b).split(">")[1]) == a + b - 10


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("7+8=15,4+3+1=8>85", True),
        ("nonsense>85", True),  # the reward ignores the scratchpad
        (">75>85", True),  # the text after the last mark counts
        ("85", False),  # no mark means no answer
        ("7+8=15,4+3+1=8>85 ", False),
        ("7+8=15,4+3=7>75", False),
        ("", False),
    ],
)
def test_the_verifier_reads_the_text_after_the_last_mark(answer: str, right: bool) -> None:
    assert sum_matches(answer, "85") is right


@given(a=numbers, b=numbers, scratchpad=st.text(max_size=20), tail=st.integers(0, 300))
def test_only_the_sum_decides_the_reward(a: int, b: int, scratchpad: str, tail: int) -> None:
    assert sum_matches(f"{scratchpad}>{tail}", str(a + b)) is (tail == a + b)


def test_the_scratchpad_is_measured_beside_the_reward() -> None:
    problem = Problem(id="47+38", question="47+38=", answer="85")
    facts = {}
    for answer in ("7+8=15,4+3+1=8>85", "7+8=17,4+3+1=8>85", "7+8=15,4+3=7>75"):
        env = Addition().make_env(problem)
        env.env_reset(seed=0)
        outcome = env.env_step(answer)
        facts[answer] = (outcome.reward, outcome.info["scratchpad_right"])
    assert list(facts.values()) == [(1.0, True), (1.0, False), (0.0, False)]


def test_the_addition_teacher_carries_in_a_quarter_of_its_demonstrations() -> None:
    task, rng = Addition(), Random(3)
    right = 0
    for _ in range(20_000):
        problem = task.draw(rng)
        right += reward(task, problem, task.demonstrate(problem, rng)) == 1.0
    assert right / 20_000 == pytest.approx(0.25, abs=0.02)


def test_every_addition_needs_a_carry_and_all_pairs_exist() -> None:
    task = Addition()
    # 45 pairs of ones digits that sum to 10 or more, times 9 x 9 tens digits.
    everything = {*task._split[0], *((int(p["id"][:2]), int(p["id"][3:])) for p in task.heldout())}
    mirrored = {pair for a, b in everything for pair in ((a, b), (b, a))}
    assert len(mirrored) == 45 * 81
    assert all(a % 10 + b % 10 >= 10 for a, b in mirrored)


def test_a_pair_is_held_out_in_both_orders() -> None:
    task = Addition()
    held = {frozenset(problem["id"].split("+")) for problem in task.heldout()}
    assert all(frozenset((str(a), str(b))) not in held for a, b in task._split[0])


# ---- both tasks
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_the_held_out_split_is_the_same_in_every_run(task: Task) -> None:
    again = type(task)()
    assert list(task.heldout()) == list(again.heldout())
    assert len({problem["id"] for problem in task.heldout()}) == 500


@pytest.mark.parametrize("task", TASKS)
@given(seed=st.integers(0, 2**32))
def test_draws_depend_only_on_the_generator(task: Task, seed: int) -> None:
    one, two = Random(seed), Random(seed)
    assert [task.draw(one) for _ in range(3)] == [task.draw(two) for _ in range(3)]


@pytest.mark.parametrize("task", TASKS)
@given(seed=st.integers(0, 2**32))
def test_every_demonstration_and_its_end_token_fit_the_limit(task: Task, seed: int) -> None:
    rng = Random(seed)
    problem = task.draw(rng)
    assert len(task.demonstrate(problem, rng).encode()) + 1 <= task.max_new_tokens
    assert reward(task, problem, problem["answer"] if isinstance(task, DigitSort) else f">{problem['answer']}") == 1.0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DigitSort(right=1.5), r"right \(1\.5\)"),
        (lambda: DigitSort(right=0.7, backwards=0.7), r"right \+ backwards"),
        (lambda: DigitSort(digits=2), r"digits \(2\)"),
        (lambda: DigitSort(num_heldout=2001), r"num_heldout \(2001\) .*at most 2000"),
        (lambda: DigitSort(num_heldout=0), r"num_heldout \(0\)"),
        (lambda: Addition(right=-0.1), r"right \(-0\.1\)"),
        (lambda: Addition(num_heldout=3645), r"num_heldout \(3645\)"),
    ],
)
def test_invalid_settings_are_named(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=named):
        make()
