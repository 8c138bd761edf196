"""Numbers of the action tokens of samples: the token columns of their table.

A micro-batch has them in the layout of `input_ids`.

    action_mask   0 1 0 1    token_weight  0.5 -1    in a micro-batch:  0 0.5 0 -1

Of `action_fractions`, which say that tokens count in part, a micro-batch has the values in its
action mask, in place of ones. Sums over action tokens are then weighted, and a number of tokens is
the sum of the fractions; all losses read both from the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic import _core
from ludic.errors import DataError
from ludic.training.batching.candidates import check_candidates
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import weigh_values
from ludic.training.types import TOKEN_WEIGHT, SAWItem
from ludic.types import stored

FRACTIONS = "action_fractions"
"""The token column of what action tokens count for."""


def table_of_items(items: Sequence[SAWItem]) -> _core.SampleTable:
    """The items as a table with their token columns. Raises as `SampleTable.from_items`,
    `read_token_columns` and `check_candidates`."""
    table = _core.SampleTable.from_items(items)
    if not has_columns(items):
        return table
    check_candidates(items)
    return add_token_columns(table, items)


def has_columns(items: Sequence[SAWItem]) -> bool:
    """Whether a sample has token columns, fractions or candidates. Most batches have none, and pay
    for this pass alone."""
    for item in items:
        each = item.attachments
        if each.token_columns or each.action_fractions is not None or each.candidates is not None:
            return True
    return False


def add_token_columns(table: _core.SampleTable, items: Sequence[SAWItem]) -> _core.SampleTable:
    """The table of the items with their token columns."""
    for name, values in read_token_columns(items).items():
        table = table.with_token_column(name, values)
    return table


def read_token_columns(items: Sequence[SAWItem]) -> dict[str, NDArray[np.float32]]:
    """Name -> values of the action tokens of all samples, one sample after another. A sample
    without `token_weight` has its weight at every token, one without fractions ones; fractions that
    are all ones are left out.

    Example: a sample of weight 2 and two action tokens, and one with the token weights [0, 1], have
    the token weights [2, 2, 0, 1].

    Raises DataError for another number of values than a sample has action tokens, for a column that
    some samples lack, and for a fraction that is not > 0 in float32.
    """
    attached = [item.attachments for item in items]
    counts = [int(np.count_nonzero(np.asarray(stored(item, "action_mask")))) for item in items]
    given: dict[str, list[Any]] = {
        name: [item.attachments.token_columns.get(name, item.weight if name == TOKEN_WEIGHT else None) for item in items]
        for name in sorted({name for each in attached for name in each.token_columns})
    }
    given[FRACTIONS] = [1.0 if each.action_fractions is None else each.action_fractions for each in attached]
    columns = {
        name: np.concatenate([_read_values(name, each, row, counts[row]) for row, each in enumerate(rows)])
        for name, rows in given.items()
    }
    if (columns[FRACTIONS] == 1).all():
        del columns[FRACTIONS]
    return columns


def _read_values(name: str, given: Any, row: int, actions: int) -> NDArray[np.float32]:
    """[A] values of a sample in float32; a single number is the value of each token."""
    if given is None:
        raise DataError(f"sample {row} has no token column {name}, which other samples have; give it to all of them")
    with np.errstate(over="ignore"):  # too large ones become inf, which is refused
        values = np.asarray(given, dtype=np.float32)
    if values.ndim == 0:
        return np.full(actions, values)
    if len(values) != actions:
        raise DataError(f"sample {row} has {len(values)} {name} for {actions} action tokens; there must be one each")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > (0 if name == FRACTIONS else -np.inf))))
    if len(wrong):
        rule = "finite numbers > 0" if name == FRACTIONS else "finite numbers"
        raise DataError(f"{name}[{wrong[0]}] of sample {row} is {values[wrong[0]]} in float32; give {rule}")
    return values


def refuse_columns(items: Iterable[SAWItem], because: str) -> None:
    """Raise DataError if tokens count in part, or have credit of their own."""
    attached = [item.attachments for item in items]
    if any(each.action_fractions is not None for each in attached):
        raise DataError(f"{because}, in which tokens cannot count in part; leave out action_fractions, or use masks of 0 and 1")
    if any(TOKEN_WEIGHT in each.token_columns for each in attached):
        raise DataError(f"{because}, but samples have {TOKEN_WEIGHT}, credit for each token; use a credit assigner of one number")


def row_starts(table: _core.SampleTable) -> NDArray[np.int64]:
    """[N] where each sample begins in a column [S]. Example: lengths [3, 2] give [0, 3]."""
    lengths = table.lengths.astype(np.int64)
    return lengths.cumsum() - lengths


def count_tokens(table: _core.SampleTable) -> NDArray[Any]:
    """[N] predicted action tokens of each sample, in part where they count in part."""
    if FRACTIONS not in table.token_columns or not len(table):
        return table.target_counts
    fractions, starts = table.token_column(FRACTIONS).astype(np.float64), row_starts(table)
    fractions[starts] = 0  # the first token of a sample has no prediction
    return np.add.reduceat(fractions, starts)


def count_in_part(tensors: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch in any layout, with the column of fractions as its action mask.
    `old_logp_action` then has weighted sums. Returns `tensors` as they are without fractions."""
    if FRACTIONS not in tensors:
        return tensors
    weighted = {name: value for name, value in tensors.items() if name != FRACTIONS}
    weighted["action_mask"] = tensors[FRACTIONS]
    if "actor_logps" in tensors:
        shared = SharedContext(tensors["input_ids"], weighted)
        weighted["old_logp_action"] = weigh_values(shared.sampler_logp, shared.token_mask).sum(dim=1)
    return weighted
