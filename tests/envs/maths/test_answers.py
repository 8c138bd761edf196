"""Extracting answers from GSM8K and MATH rows and from a model's text."""

import pytest

from ludic.envs.maths import final_answer, gsm8k_target, math_target
from ludic.errors import DataError


@pytest.mark.parametrize(
    ("solution", "target"),
    [
        ("She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "18"),
        ("#### 1,042", "1042"),
        ("It sinks.\n#### -3", "-3"),
        ("5 #### first 7\n#### 12 eggs, that is 1 dozen", "1"),  # the last number, as documented
        ("#### $2.50", "2.50"),
    ],
)
def test_the_target_of_gsm8k_is_the_last_number_after_the_mark(solution, target):
    assert gsm8k_target(solution) == target


@pytest.mark.parametrize("solution", ["18", "#### none", "", "####"])
def test_a_solution_without_a_number_after_the_mark_is_an_error(solution):
    with pytest.raises(DataError, match="has no number after ####"):
        gsm8k_target(solution)


@pytest.mark.parametrize(
    ("solution", "target"),
    [
        (r"We get \boxed{3}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"Thus \boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"  \frac{14}{3} ", r"\frac{14}{3}"),
    ],
)
def test_the_target_of_math_is_the_last_box_or_the_bare_answer(solution, target):
    assert math_target(solution) == target


@pytest.mark.parametrize("solution", ["", "  ", r"\boxed{ }"])
def test_a_solution_without_an_answer_is_an_error(solution):
    with pytest.raises(DataError, match="has no answer"):
        math_target(solution)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{1}, then \boxed{2}.", r"\boxed{2}"),
        (r"<think>\boxed{9}</think> It is 7.", " It is 7."),
        ("7 + 5 = 12\n#### 12", " 12"),
        ("The answer is 12", "The answer is 12"),
        ("", ""),
    ],
)
def test_the_final_answer_is_extracted(text, answer):
    assert final_answer(text) == answer


def test_only_the_end_of_a_long_text_without_a_box_is_read():
    assert final_answer("x" * 10_000 + "12") == "x" * 1_998 + "12"
