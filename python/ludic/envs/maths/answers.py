"""Extracts answers: from rows of GSM8K and MATH, and from a model's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ludic.errors import DataError
from ludic.parsers import extract_last_boxed_content

READ_AT_MOST = 2_000
"""How many characters at the end of an answer without a box are searched for an expression. The
time of the search grows faster than the length."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_THOUGHT_ENDS = re.compile(r"</think>", re.IGNORECASE)


def gsm8k_target(solution: str) -> str:
    """The last number after `####`, without commas. `gsm8k_target("6*7=42\\n#### 1,042") ==
    "1042"`."""
    _, mark, final = solution.rpartition("####")
    numbers = NUMBER.findall(final) if mark else []
    if not numbers:
        raise DataError(f"the solution {solution[-80:]!r} has no number after ####")
    return str(numbers[-1].replace(",", ""))


def math_target(solution: str) -> str:
    r"""The content of the last `\boxed{...}`, or the whole text without a box: MATH-500 has the
    bare answer in a column."""
    boxed = extract_last_boxed_content(solution)
    target = (solution if boxed is None else boxed).strip()
    if not target:
        raise DataError(f"the solution {solution[-80:]!r} has no answer")
    return target


def final_answer(text: str) -> str:
    r"""The part of a model's text to compare: after `</think>` if there is one, the last
    `\boxed{...}`; without a box what follows the last `####`, or the last 2,000 characters, in
    which math-verify looks for the last expression."""
    answer = _THOUGHT_ENDS.split(text)[-1]
    boxed = extract_last_boxed_content(answer)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}"
    return answer.rpartition("####")[2][-READ_AT_MOST:]


def first_present(row: Mapping[str, Any], *keys: str) -> str:
    """The text of the first of these columns that is not None."""
    for key in keys:
        if row.get(key) is not None:
            return str(row[key])
    raise DataError(f"a row needs {' or '.join(keys)}; it has {', '.join(sorted(row))}")


def completion_text(completion: Any) -> str:
    """The text of a completion, or the content of the last of its messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
