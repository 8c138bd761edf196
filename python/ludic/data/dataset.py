"""A data set in memory: read, checked row by row, of one kind and one form; and one data set from
several, each with a weight, shuffled by a seed.

Rows of two responses with scores, as in SHP, are converted to preferences. The columns have the
names of SHP, or plain names:

    {"history": "why?", "human_ref_A": "so", "human_ref_B": "no", "score_A": 12, "score_B": 3}
    {"prompt": "why?", "response_a": "so", "response_b": "no", "score_a": 12, "score_b": 3}

The response with the higher score is the chosen one. Without scores, `labels` (or `label_a`)
decides: 1 is the first response, 0 the second. Rows with equal scores are left out with a warning.
All columns are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from ludic.data.formats import KINDS, REQUIRED, Kind, Row, drop_empty_keys, find_dialogue_columns, find_fault
from ludic.data.rows_on_disk import Changed, Lazy, open_table
from ludic.data.sources import Draw, Table, read_table
from ludic.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger(__name__)

SHOWN_FAULTS = 3


@dataclass(frozen=True, repr=False)
class DataSet(Lazy[Row]):
    """A sequence of rows that passed all checks. Example: the line `{"prompt": "2+2=", "answer":
    "4"}` is a row of kind `prompt`."""

    kind: Kind
    conversational: bool
    """Whether prompts and completions are lists of messages instead of text."""
    table: Table

    @property
    def rows(self) -> Sequence[Row]:
        """All rows have the same columns, in order of first appearance; missing values are None."""
        return self.table.rows

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0])

    def where(self, index: int) -> str:
        """The location of the row, for messages, such as `problems.jsonl, line 17`."""
        return self.table.where(index)

    def digest(self) -> str:
        """A hash of all rows, 16 hex digits. Depends on content and order."""
        hashed = hashlib.sha256(b"[")
        for index, row in enumerate(self.rows):
            hashed.update((", " if index else "").encode() + json.dumps(row, default=str).encode())
        hashed.update(b"]")
        return hashed.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Row:
        return self.rows[index]

    def __repr__(self) -> str:
        form = ", conversational" if self.conversational else ""
        return f"DataSet({self.table.name!r}, kind={self.kind!r}{form}, {len(self):,} rows of {', '.join(self.columns)})"


def load_data(
    source: str,
    *,
    kind: Kind | None = None,
    other_kind: Kind | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    config: str | None = None,
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
    streaming: bool = False,
) -> DataSet:
    """A JSONL, JSON, CSV or parquet file, a folder, or an id for the `datasets` library, in one of
    TRL's formats.

    `kind` selects one kind if the columns fit several; `other_kind` is taken for rows that fit it
    and not `kind`. `columns` maps a required column to the
    source's column, `{"prompt": "question"}`; of several candidates the first that exists is used.
    `config` and `split` are for ids and folders. Rows of two responses with scores, as in SHP,
    become preferences (see `convert_scores`). `limit` is the maximum number of rows; they are
    sampled at random with `seed` and stay in order. `streaming` leaves the rows on disk: each is
    checked once now, and read again on access. It takes JSONL and parquet files, folders and ids, a
    `kind` that is given, and no `limit`.

    Raises DataError, naming file and row, for rows that do not fit the format; ConfigError for an
    unknown kind or a missing column.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit ({limit}) must be at least 1; None reads every row")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"kind ({kind!r}) must be one of {', '.join(KINDS)}")
    if streaming:
        if kind in (None, "preference") or limit is not None:
            raise ConfigError(f"streaming needs a kind other than preference ({kind}), and no limit ({limit})")
        table = open_table(source, config=config, split=split)
    else:
        table = read_table(source, config=config, split=split, draw=Draw(limit, seed))
    if not table.rows:
        raise DataError(f"{source} has no rows")
    fill = _fill_columns(table.rows, columns or {}, source)
    rows = _change(table.rows, fill, streaming)
    if kind in (None, "preference") and has_scored_responses(rows[0]):
        table = convert_scores(replace(table, rows=rows))
        rows = table.rows
    kind = kind or next((name for name, needed in REQUIRED.items() if rows[0].keys() >= set(needed)), None)
    if kind is None:
        formats = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in REQUIRED.items())
        raise DataError(f"columns of {source} ({', '.join(rows[0])}) fit no format ({formats}); set columns={{'prompt': NAME}}")
    if other_kind is not None and not rows[0].keys() >= set(REQUIRED[kind]) and rows[0].keys() >= set(REQUIRED[other_kind]):
        kind = other_kind
    absent = next((column for column in REQUIRED[kind] if column not in rows[0]), None)
    if absent is not None:
        raise DataError(f"{source} ({', '.join(rows[0])}) has no column {absent} for kind {kind}; set columns.{absent}=COLUMN")
    conversational = isinstance(rows[0].get(find_dialogue_columns(kind, rows[0])[0]), list)
    checked = ((table.where(index), find_fault(row, kind, conversational=conversational)) for index, row in enumerate(rows))
    faults = [f"{where}: {fault}" for where, fault in checked if fault is not None]
    if faults:
        more = f"; {len(faults) - SHOWN_FAULTS} more rows have faults" if len(faults) > SHOWN_FAULTS else ""
        raise DataError("; ".join(faults[:SHOWN_FAULTS]) + more)
    clean = partial(drop_empty_keys, kind)
    return DataSet(kind, conversational, replace(table, rows=_change(rows, clean, streaming)))


def _change(rows: Sequence[Row], change: Callable[[Row], Row], streaming: bool) -> Sequence[Row]:
    return Changed(rows, lambda _, row: change(row)) if streaming else [change(row) for row in rows]


def _fill_columns(rows: Sequence[Row], columns: Mapping[str, str | Sequence[str]], source: str) -> Callable[[Row], Row]:
    """A function that gives a row the columns of all rows, and the copies that `columns` asks
    for."""
    names = dict.fromkeys(name for row in rows for name in row)
    present, copies = list(names), dict[str, str]()
    for name, originals in columns.items():
        candidates = [originals] if isinstance(originals, str) else list(originals)
        original = next((candidate for candidate in candidates if candidate in present), None)
        if original is None:
            expected, can_be_named = " or ".join(map(repr, candidates)), name == "prompt" and len(candidates) > 1
            remedy = "; name it with task.args.prompt_column=COLUMN of `ludic train`" if can_be_named else ""
            raise ConfigError(f"{source} has no column {expected} to be its {name}; it has {', '.join(present)}{remedy}")
        if original != name:
            copies[name] = original
            present += [name] if name not in present else []

    def fill(row: Row) -> Row:
        filled = {name: row.get(name) for name in names}
        for name, original in copies.items():
            filled[name] = filled[original]
        return filled

    return fill


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
    has_both = all(any(column in columns for column in COLUMNS[name]) for name in ("response_a", "response_b"))
    return has_both and not {"chosen", "rejected"}.issubset(columns)


def convert_scores(table: Table) -> Table:
    """The rows with `prompt`, `chosen` and `rejected`. Raises DataError, naming the row, if it has
    neither scores nor a label."""
    rows: list[Row] = []
    numbers: list[int] = []
    equal: list[int] = []
    for index, row in enumerate(table.rows):
        first_is_better = _first_is_better(row, table.where(index))
        if first_is_better is None:
            equal.append(table.numbers[index])
            continue
        responses = [_get_value(row, "response_a"), _get_value(row, "response_b")]
        chosen, rejected = responses if first_is_better else responses[::-1]
        rows.append({**row, "prompt": _get_value(row, "prompt"), "chosen": chosen, "rejected": rejected})
        numbers.append(table.numbers[index])
    if equal:
        logger.warning("%s: left out %d rows whose two scores are equal", table.name, len(equal))
    if not rows:
        raise DataError(f"{table.name}: the two scores are equal in every row; there is no preference to learn")
    return replace(table, rows=rows, numbers=numbers, equal_scores=equal)


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


def _get_value(row: Row, name: str) -> Any:
    return next((row[column] for column in COLUMNS[name] if column in row), None)


@dataclass(frozen=True)
class MixtureEntry:
    """A data set of a mixture."""

    id: str
    """A file, a folder, or an id for the `datasets` library."""
    config: str | None = None
    """Of an id."""
    split: str = "train"
    """Of an id or a folder."""
    columns: Sequence[str] | None = None
    """The columns to keep. None means all."""
    weight: float = 1.0
    """Up to 1: the share of the rows that is taken, at random. Above: whole copies of all rows,
    and a share. 2.5 is every row twice and half of them a third time."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ConfigError(f"the id of a data set ({self.id!r}) must be a file, a folder, or an id of the hub")
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not 0 < self.weight < math.inf:
            raise ConfigError(f"the weight of {self.id} ({self.weight!r}) must be a number above 0; 1 takes each row once")
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise ConfigError(f"the columns of {self.id} ({self.columns!r}) must be a list of names; leave it out to keep all")

    def draw(self, count: int, seed: int) -> list[int]:
        """The rows that are taken, of `count`, in random order; copies follow each other.

        A weight of 2.5 and 4 rows: 0 to 3 in random order, again, and two of them.
        """
        order = list(range(count))
        Random(seed).shuffle(order)
        copies, part = divmod(math.floor(Fraction(repr(self.weight)) * count), count)
        return order * copies + order[:part]


@dataclass(frozen=True)
class DataMixture:
    """Data sets to mix, and the seed of their order."""

    datasets: Sequence[MixtureEntry]
    seed: int = 0
    test_split_size: float | None = None
    """The share of the prompts that a task holds out. None means the task's default."""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ConfigError("a mixture needs at least one data set in `datasets`")
        if self.test_split_size is not None and not 0 < self.test_split_size < 1:
            raise ConfigError(f"test_split_size ({self.test_split_size}) must be between 0 and 1; it is a share of the prompts")
        declared = [entry for entry in self.datasets if entry.columns is not None]
        for entry in declared[1:]:
            own, first = list(entry.columns or ()), list(declared[0].columns or ())
            if set(own) != set(first):
                raise ConfigError(f"{entry.id} has the columns {own}, {declared[0].id} {first}; they must be equal")

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> DataMixture:
        """The mixture that a recipe describes: `{datasets: [{id: a.jsonl, weight: 0.5}, ...],
        seed: 0}`. Raises ConfigError for an unknown key."""
        _check_keys(content, cls, "data")
        entries = content.get("datasets")
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise ConfigError(f"data.datasets ({entries!r}) must be a list of data sets, such as [{{id: a.jsonl, weight: 0.5}}]")
        datasets = []
        for index, entry in enumerate(entries):
            where = f"data.datasets[{index}]"
            if not isinstance(entry, Mapping):
                raise ConfigError(f"{where} ({entry!r}) must have keys: {{id: a.jsonl, weight: 0.5}}")
            _check_keys(entry, MixtureEntry, where)
            if "id" not in entry:
                raise ConfigError(f"{where} has no id; set it to a file, a folder, or an id of the hub")
            datasets.append(MixtureEntry(**entry))
        return cls(**{**content, "datasets": datasets})


def load_mixture(
    mixture: DataMixture, *, kind: Kind = "prompt", columns: Mapping[str, str | Sequence[str]] | None = None
) -> DataSet:
    """The rows of all data sets, shuffled. `kind` and `columns` are arguments of `load_data`, for
    each.

    The same mixture gives the same rows in the same order. A row keeps the file and the line that
    it came from (`DataSet.where`). Raises ConfigError if a weight takes no row, or if some data
    sets have text and others messages, and whatever `load_data` raises.
    """
    taken: list[tuple[Row, str, Path | None]] = []
    forms: dict[bool, str] = {}
    for entry in mixture.datasets:
        loaded = load_data(entry.id, kind=kind, columns=columns, config=entry.config, split=entry.split)
        forms.setdefault(loaded.conversational, entry.id)
        kept = loaded.columns
        if entry.columns is not None:
            if missing := [name for name in entry.columns if name not in kept]:
                raise ConfigError(f"{entry.id} has no column {' and '.join(missing)}; it has {', '.join(kept)}")
            kept = [name for name in kept if name in entry.columns or name in (columns or {})]
        drawn = entry.draw(len(loaded), mixture.seed)
        if not drawn:
            raise ConfigError(f"the weight of {entry.id} ({entry.weight}) takes none of its {len(loaded)} rows; raise it")
        own = loaded.table
        taken += [({name: loaded[index][name] for name in kept}, own.where(index), own.folder_of(index)) for index in drawn]
    if len(forms) > 1:
        raise ConfigError(f"the prompts of {forms[True]} are messages and of {forms[False]} text; mix data of one form")
    Random(mixture.seed).shuffle(taken)
    names = dict.fromkeys(name for row, *_ in taken for name in row)
    rows = [{name: row.get(name) for name in names} for row, *_ in taken]
    name = " + ".join(entry.id for entry in mixture.datasets)
    places, folders = [place for _, place, _ in taken], [folder for *_, folder in taken]
    table = Table(name, "row", rows, range(1, len(rows) + 1), places=places, folders=folders)
    return DataSet(kind, next(iter(forms)), table)


def _check_keys(content: Mapping[str, Any], kind: type[Any], where: str) -> None:
    known = [item.name for item in fields(kind)]
    for key in content:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}{did_you_mean(str(key), known, 'it has ' + ', '.join(known))}")
