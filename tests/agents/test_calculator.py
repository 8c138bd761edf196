"""The calculator of `ludic train gsm8k-tools`."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ludic.agents.calculator import calculate
from ludic.agents.tool_agent import check_tool
from ludic.errors import DataError

WHOLE = st.integers(-(10**6), 10**6)


@given(WHOLE, WHOLE, WHOLE.filter(bool), st.sampled_from("+-*"))
def test_whole_numbers_are_exact_and_fractions_have_ten_digits(a: int, b: int, c: int, sign: str) -> None:
    whole = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert calculate(f"({a}) {sign} ({b})") == str(whole)
    value = Fraction(whole, c)
    shown = calculate(f"(({a}) {sign} ({b})) / ({c})")
    assert shown == (str(value.numerator) if value.denominator == 1 else f"{whole / c:.10g}")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(12 + 3.5) * 4", "62"), ("$1,200 × 3", "3600"), ("1,200,300 - 1", "1200299"), ("2^10", "1024"),
     ("7 // 2 + 7 % 2", "4"), ("0.1 + 0.2", "0.3"), ("2 ** -1", "0.5"), ("2 ** 0.5", "1.414213562"), ("-3", "-3"), ("10 ÷ 4", "2.5")],
)  # fmt: skip
def test_numbers_are_written_as_models_write_them(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("__import__('os').getcwd()", "numbers"),
        ("a + 1", "Name is not calculated"),
        ("(1,2)", "Tuple is not calculated"),
        ("3,5", "Tuple is not calculated"),
        ("True + 1", "Constant is not calculated"),
        ("1 / 0", "divides by zero"),
        ("9 ** 9 ** 9", "is too large"),
        ("(-2) ** 0.5", "no such root"),
        ("10 ** 99.5 ** 1.5", "is too large"),
        ("1e400", "numbers"),
        ("3 +", "numbers"),
        ("1+" * 150 + "1", "at most 200"),
    ],
)
def test_anything_else_is_an_error_that_the_model_reads(expression: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        calculate(expression)


def test_a_model_is_told_of_it() -> None:
    assert list(check_tool(calculate)["function"]["parameters"]["properties"]) == ["expression"]
