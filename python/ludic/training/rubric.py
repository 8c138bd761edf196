"""What a judge is asked: criteria, and questions about one answer or several, each with the JSON
schema of its verdict and what a verdict is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError, GradingError, check_value

SCALES = {"yes_no": "true or false", "0-10": "0 to 10, 10 is best"}
"""How a criterion is judged -> how the judge is told."""


@dataclass(frozen=True)
class Criterion:
    """One item of a rubric."""

    text: str
    weight: float = 1.0
    """Below 0: what the text describes counts against an answer."""
    scale: str = "yes_no"


def read_rubric(rubric: Any, scale: str) -> list[Criterion]:
    """The criteria of a setting or of a column `rubric`. Raises ConfigError for another form, and
    if no weight is above 0."""
    listed = [rubric] if isinstance(rubric, str) else rubric
    form = "must be a text, or a list of texts and of {text: ..., weight: 2, scale: yes_no or 0-10}"
    if not isinstance(listed, Sequence) or not listed:
        raise ConfigError(f"rubric ({rubric!r:.100}) {form}")
    criteria = []
    for item in listed:
        given = {"text": item} if isinstance(item, str) else item
        known = isinstance(given, Mapping) and {"text"} <= given.keys() <= {"text", "weight", "scale"}
        if not known or not isinstance(given["text"], str) or not given["text"].strip():
            raise ConfigError(f"an item of rubric ({item!r:.100}) {form}")
        criterion = Criterion(**{"scale": scale, **given})
        check_value("weight of a rubric's item", criterion.weight, above=-math.inf, below=math.inf)
        check_value("scale of a rubric's item", criterion.scale, choices=tuple(SCALES))
        criteria.append(criterion)
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ConfigError(f"rubric ({rubric!r:.100}) needs an item with a weight above 0, so that some answer earns more")
    return criteria


@dataclass(frozen=True)
class Question:
    """What a judge is asked about one answer, or about several."""

    data: Mapping[str, Any]
    """The problem, its reference, and the answers: JSON that is shown as data."""
    task: str
    """What to do with it."""
    verdict: Mapping[str, Any]
    """JSON schemas of the verdict's keys."""
    score: Callable[[Mapping[str, Any]], list[float]]
    """A verdict -> a number from 0 to 1 for each answer shown, in order; below 0 by negative
    weights. Raises GradingError for a verdict that the schema cannot rule out."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the verdict, which begins with its reason."""
        properties = {"reason": {"type": "string"}, **self.verdict}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def read(self, verdict: Any) -> list[float]:
        """The scores of a verdict. Raises GradingError unless it follows the schema."""
        properties = self.schema["properties"]
        if not isinstance(verdict, dict) or verdict.keys() != properties.keys():
            raise GradingError(f"its keys must be {', '.join(properties)}")
        for name, value in verdict.items():
            rule = properties[name]
            each, rule = (value, rule["items"]) if rule["type"] == "array" and isinstance(value, list) else ([value], rule)
            kind = {"string": str, "boolean": bool, "integer": int}.get(rule["type"], dict)
            for one in each:
                if type(one) is not kind or ("enum" in rule and one not in rule["enum"]):
                    allowed = f"one of {', '.join(map(str, rule['enum']))}" if "enum" in rule else f"a {rule['type']}"
                    raise GradingError(f"{name} ({one!r:.60}) must be {allowed}")
        return self.score(verdict)


def ask_points(shown: Mapping[str, Any], answer: Any, rubric: Sequence[Criterion]) -> Question:
    """One answer by each criterion. Its score is sum(w v) / sum(w > 0) over the criteria, v from 0
    to 1: 1 or 0 for yes or no, a tenth of 0 to 10. `shown`: the problem and the reference."""
    names = [f"item_{number}" for number, _ in enumerate(rubric, 1)]
    listed = "\n".join(f"- {name} ({SCALES[item.scale]}): {item.text}" for name, item in zip(names, rubric, strict=True))
    task = f"Judge the answer to the problem by each criterion on its own:\n{listed}\n{_explain(shown, ', '.join(names))}"
    rules = [{"type": "boolean"} if item.scale == "yes_no" else _one_of(range(11)) for item in rubric]
    total = math.fsum(max(0.0, item.weight) for item in rubric)

    def score(verdict: Mapping[str, Any]) -> list[float]:
        values = [verdict[name] / (1 if item.scale == "yes_no" else 10) for name, item in zip(names, rubric, strict=True)]
        return [math.fsum(item.weight * value for item, value in zip(rubric, values, strict=True)) / total]

    return Question({**shown, "answer": answer}, task, dict(zip(names, rules, strict=True)), score)


def ask_pair(shown: Mapping[str, Any], answers: Sequence[Any], rubric: Sequence[Criterion]) -> Question:
    """Which of two answers is better: 1 for it and 0 for the other, or 0.5 for both."""
    task = f"Which answer to the problem is better, answer_A or answer_B? {_criteria(rubric)}\n" + _explain(
        shown, "better (A, B, or tie)"
    )
    scores = {"A": [1.0, 0.0], "B": [0.0, 1.0], "tie": [0.5, 0.5]}
    data = {**shown, "answer_A": answers[0], "answer_B": answers[1]}
    return Question(data, task, {"better": _one_of(scores)}, lambda verdict: scores[verdict["better"]])


def ask_ranking(shown: Mapping[str, Any], answers: Sequence[Any], rubric: Sequence[Criterion]) -> Question:
    """An order of n answers: 1 for the best, 0 for the last, 1 / (n - 1) from each to the next."""
    count = len(answers)
    task = f"Rank the {count} answers to the problem, each once. {_criteria(rubric)}\n" + _explain(
        shown, "ranking (their numbers, the best first)"
    )

    def score(verdict: Mapping[str, Any]) -> list[float]:
        ranking = verdict["ranking"]
        if sorted(ranking) != list(range(1, count + 1)):
            raise GradingError(f"ranking ({ranking}) must have each number from 1 to {count} once")
        return [1 - ranking.index(number) / (count - 1) for number in range(1, count + 1)]

    rule = {"type": "array", "items": _one_of(range(1, count + 1)), "minItems": count, "maxItems": count}
    numbered = {str(number): answer for number, answer in enumerate(answers, 1)}
    return Question({**shown, "answers": numbered}, task, {"ranking": rule}, score)


def _one_of(choices: Any) -> dict[str, Any]:
    listed = list(choices)
    return {"type": "integer" if isinstance(listed[0], int) else "string", "enum": listed}


def _criteria(rubric: Sequence[Criterion]) -> str:
    listed = "\n".join(f"- {item.text}" + ("" if item.weight == 1 else f" (weight {item.weight:g})") for item in rubric)
    return f"Their order means nothing. The criteria:\n{listed}"


def _explain(shown: Mapping[str, Any], keys: str) -> str:
    known = "The reference is a right answer; others may be right too.\n" if "reference" in shown else ""
    return f"{known}Answer with one JSON object: reason (one or two sentences), then {keys}."
