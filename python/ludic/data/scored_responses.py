"""Converts rows of two responses with scores, as in SHP, to preferences.

The columns have the names of SHP, or plain names:

    {"history": "why?", "human_ref_A": "so", "human_ref_B": "no", "score_A": 12, "score_B": 3}
    {"prompt": "why?", "response_a": "so", "response_b": "no", "score_a": 12, "score_b": 3}

The response with the higher score is the chosen one. Without scores, `labels` (or `label_a`)
decides: 1 is the first response, 0 the second. Rows with equal scores are left out with a warning.
All columns are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ludic.data.formats import Row
from ludic.data.sources import Table
from ludic.errors import DataError

logger = logging.getLogger(__name__)

COLUMNS = {
    "prompt": ("prompt", "history"),
    "response_a": ("response_a", "human_ref_A"),
    "response_b": ("response_b", "human_ref_B"),
    "score_a": ("score_a", "score_A"),
    "score_b": ("score_b", "score_B"),
    "label_a": ("label_a", "labels"),
}
"""Content of a column -> its possible names."""


def has_scored_responses(columns: Mapping[str, Any]) -> bool:
    """Whether the columns are two responses instead of chosen and rejected."""
    has_both = all(_find_column(columns, name) for name in ("response_a", "response_b"))
    return has_both and not {"chosen", "rejected"}.issubset(columns)


def convert_scores(table: Table) -> Table:
    """The rows with `prompt`, `chosen` and `rejected`. Raises DataError, naming the row, if it has
    neither scores nor a label."""
    rows: list[Row] = []
    numbers: list[int] = []
    equal: list[int] = []
    for index, row in enumerate(table.rows):
        first_is_better = _first_is_better(row, table.where(index))
        if first_is_better is not None:
            rows.append(_make_preference(row, first_is_better))
            numbers.append(table.numbers[index])
        else:
            equal.append(table.numbers[index])
    if equal:
        logger.warning("%s: left out %d rows whose two scores are equal", table.name, len(equal))
    if not rows:
        raise DataError(f"{table.name}: the two scores are equal in every row; there is no preference to learn")
    return Table(table.name, table.unit, rows, numbers, equal)


def _first_is_better(row: Row, where: str) -> bool | None:
    """Whether the first response is better; None if the scores are equal."""
    scores = [_get_value(row, name) for name in ("score_a", "score_b")]
    if scores != [None, None]:
        if not all(isinstance(score, int | float) and not isinstance(score, bool) and score == score for score in scores):
            raise DataError(f"{where}: the scores of its responses ({scores[0]!r} and {scores[1]!r}) must be two numbers")
        return None if scores[0] == scores[1] else bool(scores[0] > scores[1])
    label = _get_value(row, "label_a")
    if label not in (0, 1):
        raise DataError(f"{where}: its label ({label!r}) must be 1 if the first response is better, else 0; or give scores")
    return bool(label)


def _make_preference(row: Row, first_is_better: bool) -> Row:
    responses = [_get_value(row, "response_a"), _get_value(row, "response_b")]
    chosen, rejected = responses if first_is_better else responses[::-1]
    return {**row, "prompt": _get_value(row, "prompt"), "chosen": chosen, "rejected": rejected}


def _get_value(row: Row, name: str) -> Any:
    column = _find_column(row, name)
    return None if column is None else row[column]


def _find_column(columns: Mapping[str, Any], name: str) -> str | None:
    return next((column for column in COLUMNS[name] if column in columns), None)
