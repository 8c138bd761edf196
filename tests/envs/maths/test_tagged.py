"""The reward of answers between tags: what counts as the answer, and which notations are equal."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from ludic.envs.maths import TaggedMathReward, canonical_answer, tagged_answer
from ludic.errors import ConfigError, DataError, GradingError

RIGHT = "<think>6*7</think> It is <answer>42</answer>."


@pytest.mark.parametrize(
    ("text", "strict", "opened", "relaxed"),
    [
        (RIGHT, "42", "42", "42"),
        ("\n<THINK>a</Think><Answer> 42 </ANSWER>", " 42 ", " 42 ", " 42 "),
        ("6*7</think><answer>42</answer>", None, "42", "42"),
        ("<answer>42</answer>", None, None, "42"),
        ("So: <think>6*7</think><answer>42</answer>", None, "42", "42"),
        ("<think>6*7 <answer>42</answer>", None, None, "42"),
        ("<think><answer>1</answer></think> no answer", None, None, "1"),
        ("<think>a</think><answer>42", None, None, None),
        ("<think>a</think></answer>42<answer>", None, None, None),
        ("<think>a</think><answer></answer>", "", "", ""),
        ("", None, None, None),
    ],
)
def test_a_template_says_where_the_answer_may_stand(text, strict, opened, relaxed):
    found = [tagged_answer(text, template=template) for template in ("strict", "opened", "relaxed")]
    assert found == [strict, opened, relaxed]


def test_the_first_or_the_last_of_several_answers_counts():
    text = "<think>a</think><answer>1</answer> or <answer>b<answer>2</answer> <answer>3"
    assert (tagged_answer(text, which="first"), tagged_answer(text)) == ("1", "2")


@pytest.mark.parametrize(
    "forms",
    [
        [r"\frac{1}{2}", r"$\dfrac{1}{2}$", "1/2", "(1)/(2)", r"\left( 1 \right) / 2", "{1/2}"],
        ["3", "3.00", "+3", "03", " 3. ", "(3)", "{(3)}", "$3$"],
        ["0", "-0", "+0.0", ".0"],
        ["0.5", ".50", "00.5"],
        ["-7", "(-7)", "−7", "- 7"],
        ["2π", r"2\pi", r"2 \pi"],
        [r"\frac{\frac{1}{2}}{x+1}", "(1/2)/(x+1)", "(1/2)/(x + 1)"],
        [r"(1,\infty)", r"\left(1, ∞\right)", r"(1,\!\infty)"],
    ],
)
def test_notations_of_one_answer_are_equal(forms):
    assert len({canonical_answer(form) for form in forms}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("2(3)", "23"), ("(2)(3)", "23"), ("(1,2)", "1,2"), ("1,000", "1"), ("30", "3"), ("{1}{2}", "12"), (r"\leftarrow", "arrow")],
)
def test_different_answers_stay_different(one, other):
    assert canonical_answer(one) != canonical_answer(other)


@given(st.text(alphabet=r"01.+-(){}[],/$\ frac x∞π", max_size=30))
def test_a_canonical_form_is_its_own(text):
    assert canonical_answer(canonical_answer(text)) == canonical_answer(text)


@given(st.integers(-(10**6), 10**6), st.integers(0, 3))
def test_a_number_is_equal_to_itself_with_superfluous_zeros_and_no_other(number, zeros):
    padded = f"{number}.{'0' * zeros}"
    assert canonical_answer(padded) == str(number) != canonical_answer(str(number + 1))


def score(completions, reward=None, **columns):
    return asyncio.run((reward or TaggedMathReward())(completions, **columns))


def test_the_format_counts_in_training_and_not_in_evaluation():
    texts = [RIGHT, "<answer>42</answer>", "42", RIGHT.replace("42", "41"), None]
    columns = {"answer": ["42.0"] * len(texts)}
    assert score(texts, **columns) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert score(texts, **columns, is_eval=True) == [1.0, 1.0, 0.0, 0.0, 0.0]
    messages = [[{"role": "assistant", "content": text or ""}] for text in texts]
    assert score(messages, **columns) == score(texts, **columns)


def test_answers_without_thoughts_that_earn_nothing_are_hinted_at_once(caplog):
    reward = TaggedMathReward()
    bare = ["<answer>42</answer>", "42"]
    assert asyncio.run(reward(bare, answer=["42", "42"], is_eval=True)) == [1.0, 0.0]
    assert asyncio.run(reward([*bare, RIGHT], answer=["42"] * 3)) == [0.0, 0.0, 1.0]
    assert asyncio.run(reward(["42"], answer=["42"])) == [0.0]
    assert not caplog.records
    for _ in range(2):
        assert asyncio.run(reward(bare, answer=["42", "42"])) == [0.0, 0.0]
    [record] = caplog.records
    assert "<think>...</think> must come before" in record.message


def test_the_right_answer_is_in_the_column_answer_or_in_the_box_of_the_solution():
    reward = TaggedMathReward(template="opened")
    texts = ["a</think><answer>42</answer>"] * 2
    assert score(texts, reward, answer=["42", None], solution=["7", r"It is $\boxed{42}$"]) == [1.0, 1.0]
    with pytest.raises(DataError, match="a row needs solution"):
        reward.check_row({"prompt": "6*7"})
    with pytest.raises(DataError, match="is empty"):
        reward.check_row({"answer": " "})


class Grader:
    """Says whether both have the same length; fails for `?`."""

    async def grade(self, answer, target):
        if "?" in answer:
            raise GradingError("no verdict")
        return len(answer) == len("\\boxed{}") + len(target)


def test_a_grader_can_compare_instead_and_its_failure_is_no_verdict():
    reward = TaggedMathReward(template="relaxed", comparison="math_verify", grader=Grader())
    texts = [f"<answer>{body}</answer>" for body in ("7", "12", "?", "")]
    right, wrong, failed, empty = score(texts, reward, answer=["1"] * 4)
    assert (right, wrong, empty) == (1.0, 0.0, 0.0)
    assert isinstance(failed, GradingError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "loose"}, r"template \('loose'\) .*strict, opened, relaxed"),
        ({"which": "any"}, r"which \('any'\) .*first, last"),
        ({"comparison": "sympy"}, r"comparison \('sympy'\) .*canonical, math_verify"),
        ({"grader": Grader()}, r"comparison \(canonical\) uses no grader"),
    ],
)
def test_unknown_choices_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TaggedMathReward(**settings)
