"""A data set in memory: read, checked row by row, and of one kind and one form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from ludic.data.formats import (
    KINDS,
    REQUIRED,
    Kind,
    Row,
    dialogue_columns,
    fault_of,
    is_conversational,
    kind_of,
    without_empty_keys,
)
from ludic.data.scored_responses import has_scored_responses, preferences_of_scores
from ludic.data.sources import Draw, Table, read_table
from ludic.errors import ConfigError, DataError

SHOWN_FAULTS = 3


@dataclass(frozen=True, repr=False)
class DataSet(Sequence[Row]):
    """Rows that have passed all checks: `data[0]` and `for row in data` give them. Example: the
    line `{"prompt": "2+2=", "answer": "4"}` is a row of kind `prompt`."""

    kind: Kind
    conversational: bool
    """Prompts and completions are lists of messages instead of text."""
    table: Table

    @property
    def rows(self) -> list[Row]:
        """All rows have the same columns, in the order of first appearance; None where a row has
        nothing."""
        return self.table.rows

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0])

    def where(self, index: int) -> str:
        """The row's place for a message, such as `problems.jsonl, line 17`."""
        return self.table.where(index)

    def digest(self) -> str:
        """16 hex digits over all rows: another order or content is another digest."""
        return hashlib.sha256(json.dumps(self.rows, default=str).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self.rows[index]

    def __repr__(self) -> str:
        form = ", conversational" if self.conversational else ""
        return f"DataSet({self.table.name!r}, kind={self.kind!r}{form}, {len(self):,} rows of {', '.join(self.columns)})"


def load_data(
    source: str,
    *,
    kind: Kind | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    config: str | None = None,
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
) -> DataSet:
    """A JSONL, JSON, CSV or parquet file, a folder, or an id for the `datasets` library, in one of
    TRL's formats.

    `kind` asks for one kind where the columns would fit several. `columns` says which column of the
    source has the content of one that the kind needs: `{"prompt": "question"}`; of several the
    first that is there. `config` and `split` are for ids and folders. Rows of two responses with
    scores, as SHP has them, become preferences (see `scored_responses`). `limit` is the most rows
    that are read, drawn at random by `seed` and left in their order.

    Raises DataError that names file and row for what is not of the format; ConfigError for a kind
    or column that is not there.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit ({limit}) must be at least 1; None reads every row")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"kind ({kind!r}) must be one of {', '.join(KINDS)}")
    table = read_table(source, config=config, split=split, draw=Draw(limit, seed))
    if not table.rows:
        raise DataError(f"{source} has no rows")
    rows = _copied(_filled(table.rows), columns or {}, source)
    if kind in (None, "preference") and has_scored_responses(rows[0]):
        table = preferences_of_scores(Table(table.name, table.unit, rows, table.numbers))
        rows = table.rows
    found = kind or _kind(rows, source)
    if not set(REQUIRED[found]).issubset(rows[0]):
        raise DataError(
            f"{source} has the columns {', '.join(rows[0])}; kind {found} needs {' and '.join(REQUIRED[found])}; "
            "say which column is which with columns={'prompt': 'question'}"
        )
    table = replace(table, rows=rows)
    conversational = is_conversational(found, rows[0])
    _check(table, found, conversational)
    return DataSet(found, conversational, replace(table, rows=[_plain(found, row) for row in rows]))


def _filled(rows: Sequence[Row]) -> list[Row]:
    """Every row with the columns of all."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _copied(rows: list[Row], columns: Mapping[str, str | Sequence[str]], source: str) -> list[Row]:
    for name, originals in columns.items():
        candidates = [originals] if isinstance(originals, str) else list(originals)
        original = next((candidate for candidate in candidates if candidate in rows[0]), None)
        if original is None:
            wanted = " or ".join(repr(candidate) for candidate in candidates)
            raise ConfigError(f"{source} has no column {wanted} to be its {name}; it has {', '.join(rows[0])}")
        rows = [{**row, name: row[original]} for row in rows] if original != name else rows
    return rows


def _kind(rows: Sequence[Row], source: str) -> Kind:
    found = kind_of(rows[0])
    if found is None:
        formats = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in REQUIRED.items())
        raise DataError(
            f"{source} has the columns {', '.join(rows[0])}, which fit no format ({formats}); say which column is which with "
            "columns={'prompt': 'question'}"
        )
    return found


def _check(table: Table, kind: Kind, conversational: bool) -> None:
    found = ((index, fault_of(row, kind, conversational=conversational)) for index, row in enumerate(table.rows))
    faults = [f"{table.where(index)}: {fault}" for index, fault in found if fault is not None]
    if faults:
        more = f"; {len(faults) - SHOWN_FAULTS} more rows have faults" if len(faults) > SHOWN_FAULTS else ""
        raise DataError("; ".join(faults[:SHOWN_FAULTS]) + more)


def _plain(kind: Kind, row: Row) -> Row:
    changed: dict[str, Any] = {
        name: without_empty_keys(row[name]) for name in dialogue_columns(kind, row) if isinstance(row[name], list)
    }
    return {**row, **changed} if changed else row
