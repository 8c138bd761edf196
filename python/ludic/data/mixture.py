"""One data set from several: each with a weight, shuffled by a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from random import Random
from typing import Any

from ludic.data.dataset import DataSet, load_data
from ludic.data.formats import Kind, Row
from ludic.data.sources import Table
from ludic.errors import ConfigError, did_you_mean


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
            if set(entry.columns or ()) != set(declared[0].columns or ()):
                raise ConfigError(
                    f"the columns of {entry.id} ({', '.join(entry.columns or ())}) must equal the columns of {declared[0].id} "
                    f"({', '.join(declared[0].columns or ())}); keep the same columns of each"
                )

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
    taken: list[tuple[Row, str]] = []
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
        taken += [({name: loaded[index][name] for name in kept}, loaded.where(index)) for index in drawn]
    if len(forms) > 1:
        raise ConfigError(
            f"the prompts of {forms[True]} are messages and the prompts of {forms[False]} text; mix data of one form"
        )
    Random(mixture.seed).shuffle(taken)
    names = dict.fromkeys(name for row, _ in taken for name in row)
    rows = [{name: row.get(name) for name in names} for row, _ in taken]
    name = " + ".join(entry.id for entry in mixture.datasets)
    table = Table(name, "row", rows, range(1, len(rows) + 1), places=[place for _, place in taken])
    return DataSet(kind, next(iter(forms)), table)


def _check_keys(content: Mapping[str, Any], kind: type[Any], where: str) -> None:
    known = [item.name for item in fields(kind)]
    for key in content:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}{did_you_mean(str(key), known, 'it has ' + ', '.join(known))}")
