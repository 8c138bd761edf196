"""A calculator as a tool of a model: `ludic train gsm8k-tools`, or `tools=
[ludic.agents.calculator:calculate]`.

Only numbers, operators and brackets are computed; nothing of an expression is run as code.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from ludic.errors import DataError

_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_OTHER_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", "$": ""})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
MOST_CHARACTERS = 200
MOST_DIGITS = 100
"""Of a numerator or denominator, so that no call takes long."""


def calculate(expression: str) -> str:
    """Calculate an expression with + - * / // % ** and brackets, and return the number.

    Args:
        expression: numbers and operators, such as (12 + 3.5) * 4
    """
    if len(expression) > MOST_CHARACTERS:
        raise DataError(f"expression has {len(expression)} characters, and at most {MOST_CHARACTERS} are calculated; divide it")
    try:
        text = _THOUSANDS.sub("", expression.translate(_OTHER_SIGNS)).strip()
        value = _compute(ast.parse(text, mode="eval").body)
    except ZeroDivisionError as error:
        raise DataError(f"expression ({expression}) divides by zero") from error
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise DataError(f"expression ({expression}) must have numbers, + - * / // % ** and brackets only: {error}") from error
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _compute(node: ast.expr) -> Fraction:
    """The exact value. Raises ValueError for anything but arithmetic, and for large numbers."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check(Fraction(str(number)))
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_compute(inner))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_compute(left), _compute(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _check(Fraction(_OPERATORS[type(sign)](_compute(left), _compute(right))))
    raise ValueError(f"{type(node).__name__} is not calculated")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Exact for whole exponents up to 100; roots are rounded."""
    if abs(exponent) > MOST_DIGITS:
        raise ValueError(f"the exponent {exponent} is too large")
    if exponent.denominator == 1:
        return _check(base**exponent.numerator)
    root = float(base) ** float(exponent)
    if isinstance(root, complex):
        raise ValueError(f"{base} has no such root")
    return Fraction(str(root))


def _check(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise ValueError("the number is too large")
    return value
