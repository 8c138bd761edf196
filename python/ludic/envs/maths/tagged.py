"""Answers between `<answer>` tags, after thoughts between `<think>` tags, compared as written: the
reward of runs whose policy is to learn this format.

The comparison removes what differs in notation only, such as `\\left`, spaces and a dollar sign. It
does no algebra; `comparison="math_verify"` does.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from ludic.envs.maths.grader import MathGrader, MathReward, completion_text, first_present, math_target, shared_grader
from ludic.errors import ConfigError, DataError, GradingError, check_value

logger = logging.getLogger(__name__)

Template = Literal["strict", "opened", "relaxed"]
Which = Literal["first", "last"]
Comparison = Literal["canonical", "math_verify"]

SYSTEM_PROMPT = (
    "Think about the problem between <think> and </think>, then write the final answer, and nothing else, between "
    "<answer> and </answer>."
)
_TAG = re.compile(r"<(/?)(think|answer)>", re.IGNORECASE | re.ASCII)
_SYMBOLS = str.maketrans(
    {"π": r"\pi", "Π": r"\Pi", "τ": r"\tau", "θ": r"\theta", "Θ": r"\Theta"}
    | {"φ": r"\phi", "Φ": r"\Phi", "∞": r"\infty", "−": "-"}
)
_NOTATION = re.compile(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\[,;!]|\$|\s")
_FRACTION = re.compile(r"\\[dt]?frac(?=\{)")
_TOKEN = re.compile(r"(?<![A-Za-z0-9_)}\]])\(([A-Za-z0-9_\\]+)\)(?![A-Za-z0-9_({\[])")
_NUMBER = re.compile(r"([-+]?)(\d+\.?\d*|\.\d+)", re.ASCII)


def tagged_answer(text: str, *, template: Template = "strict", which: Which = "last") -> str | None:
    """The text between `<answer>` and `</answer>`; None if the text does not fit the template.

    `strict`: the text begins with `<think>`, and the answer follows `</think>`. `opened`: the chat
    template has written `<think>` into the prompt, so that the text begins inside the thought.
    `relaxed`: the tags of the answer are enough. `which` of several answers counts.

    >>> tagged_answer("<think>6*7</think> It is <answer>42</answer>.")
    '42'
    """
    check_value("template", template, choices=get_args(Template))
    check_value("which", which, choices=get_args(Which))
    begin = _end_of_thought(text, template)
    if begin is None:
        return None
    found, opened = None, None
    for tag in _TAG.finditer(text, begin):
        name = tag[0].lower()
        if name == "<answer>" and (opened is None or which == "last"):
            opened = tag.end()
        elif name == "</answer>" and opened is not None:
            found, opened = text[opened : tag.start()], None
            if which == "first":
                break
    return found


def canonical_answer(text: str) -> str:
    r"""The text without differences of notation. Its canonical form is its own.

    Spaces, `$`, `\left`, `\right` and thin spaces are deleted, Greek letters and ∞ become commands,
    `\frac{a}{b}` becomes `(a)/(b)`, braces and brackets around the whole of it and brackets around
    one token are removed, and numbers have neither a plus sign nor superfluous zeros.

    >>> canonical_answer(r"$\frac{1}{2}$"), canonical_answer("1 / 2"), canonical_answer("-3.00")
    ('1/2', '1/2', '-3')
    """
    text, before = text.translate(_SYMBOLS), None
    while text != before:  # each round is shorter, or the last
        before = text
        text = _NOTATION.sub("", text)
        text = _replace_fractions(text)
        text = _TOKEN.sub(r"\1", text)
        text = _unwrap(text)
        text = _shorten_number(text)
    return text


class TaggedMathReward(MathReward):
    """Reward function `pure_accuracy_math`: 1 for the right answer between tags, else 0.

    The right answer is the column `answer`, or the last `\\boxed{...}` of `solution`. In training
    the text must fit `template`; where `is_eval` the tags of the answer are enough, so that a
    policy that has not learnt the format is measured by its answers. `comparison`: as written
    (`canonical_answer`), or by the processes of math-verify (`grader`, or the shared one).
    """

    def __init__(
        self,
        *,
        template: Template = "strict",
        comparison: Comparison = "canonical",
        which: Which = "last",
        grader: MathGrader | None = None,
    ) -> None:
        check_value("template", template, choices=get_args(Template))
        check_value("comparison", comparison, choices=get_args(Comparison))
        check_value("which", which, choices=get_args(Which))
        if grader is not None and comparison != "math_verify":
            raise ConfigError(f"comparison ({comparison}) uses no grader; leave it out, or set comparison='math_verify'")
        super().__init__("pure_accuracy_math", ["answer", "solution"], math_target, SYSTEM_PROMPT, grader)
        self._template, self._comparison, self._which = template, comparison, which
        self._has_hinted = False

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without a right answer."""
        if not self.target_of(row).strip():
            raise DataError("the right answer is empty")

    def target_of(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"]) if row.get("answer") is not None else math_target(first_present(row, "solution"))

    async def __call__(self, completions: Sequence[Any], *, is_eval: bool = False, **columns: Any) -> list[float | GradingError]:
        """Columns come from the data set; completions are text, messages or None."""
        template: Template = "relaxed" if is_eval else self._template
        texts = ["" if completion is None else completion_text(completion) for completion in completions]
        answers = [tagged_answer(text, template=template, which=self._which) for text in texts]
        untold = template != "relaxed" and set(answers) == {None} and any("<answer>" in text for text in texts)
        if untold and not self._has_hinted:
            self._has_hinted = True
            logger.warning("all answers with <answer> earn 0: <think>...</think> must come before; ask for it in the prompt")
        rows = self._rows(len(answers), columns)
        pairs = [(answer, self.target_of(row)) for answer, row in zip(answers, rows, strict=True)]
        if self._comparison == "canonical":
            return [
                float(answer is not None and canonical_answer(answer) == canonical_answer(target)) for answer, target in pairs
            ]
        grader = self._grader or shared_grader()
        return list(await asyncio.gather(*(_grade(grader, answer, target) for answer, target in pairs)))


async def _grade(grader: MathGrader, answer: str | None, target: str) -> float | GradingError:
    if answer is None or not answer.strip():
        return 0.0
    try:
        return float(await grader.grade(f"\\boxed{{{answer}}}", target))
    except GradingError as error:
        return error


def _end_of_thought(text: str, template: Template) -> int | None:
    """Where an answer may begin; None if the thought is missing or not ended."""
    if template == "relaxed":
        return 0
    tags = _TAG.finditer(text)
    if template == "strict":
        first = next(tags, None)
        if first is None or first[0].lower() != "<think>" or text[: first.start()].strip():
            return None
    return next((tag.end() for tag in tags if tag[0].lower() == "</think>"), None)


def _replace_fractions(text: str) -> str:
    r"""Each `\frac{a}{b}` as `(a)/(b)`, nested ones too; one with an unclosed brace stays."""
    closing, pieces = _match_braces(text), list(text)
    for fraction in _FRACTION.finditer(text):
        opened = fraction.end()
        middle = closing.get(opened)
        end = None if middle is None else closing.get(middle + 1)
        if middle is not None and end is not None:
            pieces[fraction.start() : opened + 1] = ["("] + [""] * (opened - fraction.start())
            pieces[middle], pieces[middle + 1], pieces[end] = ")/", "(", ")"
    return "".join(pieces)


def _match_braces(text: str) -> dict[int, int]:
    """Index of an opening brace -> index of the brace that closes it."""
    opened, closing = list[int](), dict[int, int]()
    for index, character in enumerate(text):
        if character == "{":
            opened.append(index)
        elif character == "}" and opened:
            closing[opened.pop()] = index
    return closing


def _unwrap(text: str) -> str:
    """Without braces around the whole text, and without brackets around a number."""
    if _match_braces(text).get(0) == len(text) - 1:
        return text[1:-1]
    inner = text[1:-1]
    return inner if text.startswith("(") and text.endswith(")") and _NUMBER.fullmatch(inner) else text


def _shorten_number(text: str) -> str:
    """`-0` and `0.` are 0, `+3.50` is 3.5; anything else than a number stays."""
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text
    whole, _, part = number[2].partition(".")
    digits = (whole.lstrip("0") or "0") + ("." + part.rstrip("0") if part.rstrip("0") else "")
    return f"-{digits}" if number[1] == "-" and digits != "0" else digits
