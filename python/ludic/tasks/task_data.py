"""Where the problems of a task come from, and which of them are held out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ludic.data import DataMixture
from ludic.data.rows_on_disk import Changed
from ludic.errors import ConfigError
from ludic.tasks.base import Problem

P = TypeVar("P", bound=Problem)
Source = str | DataMixture
Keys = NDArray[np.bytes_]
MOST_HELD_OUT = 200
"""Of those that are chosen by their number."""


@dataclass(frozen=True)
class TaskData:
    """The data set of a task. Its fields but `source` and `streaming` are settings of
    `task.args`.

    Example: `TaskData("problems.jsonl", num_heldout=50)`.
    """

    source: Any = None
    """A source of `load_data`, or a mixture of several, as `DataMixture` or its mapping."""
    prompt_column: str | None = None
    """None: the first column that there is of those that usually hold the prompt."""
    answer_column: str | None = None
    """The column that reward functions get as `answer`; None: the one of that name, if any."""
    config: str | None = None
    """Of an id of the `datasets` library."""
    split: str = "train"
    num_heldout: int | None = None
    """The prompts with the lowest hashes, the same for any order of the rows and any seed; None: a
    tenth of the prompts, at most 200. All rows of a held-out prompt are held out."""
    heldout_data: str | None = None
    """Data that is held out instead, its first `num_heldout` rows if that is given."""
    heldout_split: str = "test"
    streaming: bool = False
    """Leave the rows of `source` on disk, and read each again when its problem is played. A setting
    of its own in a recipe."""

    @classmethod
    def of(cls, data: TaskData | Source | Mapping[str, Any] | None) -> TaskData:
        """The record itself, or one of a source alone. ConfigError for what is neither."""
        given = data if isinstance(data, TaskData) else cls(data)
        source = given.source
        if isinstance(source, Mapping):
            return cls(**{**vars(given), "source": DataMixture.from_mapping(source)})
        if not isinstance(source, str | DataMixture):
            raise ConfigError(
                f"data ({source!r}) must be a file, a folder, a hub id, or {{datasets: [{{id: a.jsonl}}, {{id: b.jsonl}}]}}"
            )
        return given

    def divide(
        self, read: Callable[[Any, str, str], Sequence[P]], *, key: Callable[[P], str], name: str | None = None
    ) -> tuple[Sequence[P], Sequence[P], Sequence[P]]:
        """(all problems of the source, those to train on, those held out).

        `read` returns the problems of (a source, its split, a prefix of their ids); problems with
        the same `key`, a hash in hex digits, have the same prompt. `name` is the source's in
        messages.
        """
        problems = read(self.source, self.split, "")
        shown = name or str(self.source)
        keys = _list_keys(problems, key)
        if self.heldout_data is not None:
            heldout = read(self.heldout_data, self.heldout_split, "heldout-")[: self.num_heldout]
            held_keys = _list_keys(heldout, key)
        else:
            number = self.num_heldout
            share = self.source.test_split_size if isinstance(self.source, DataMixture) else None
            if number is None and share is not None:
                number = max(1, round(share * len(np.unique(keys))))
            held_keys, rows = hold_out(keys, number, shown)
            heldout = [problems[row] for row in rows]
        kept = np.flatnonzero(~np.isin(keys, held_keys))
        training: Sequence[P] = Changed(array("q", kept.tolist()), lambda _, row: problems[row])
        if not self.streaming:
            training = list(training)
        if not training:
            raise ConfigError(f"every prompt of {shown} is held out and none is left to train on; lower task.args.num_heldout")
        return problems, training, heldout


def hold_out(keys: Keys, number: int | None, source: str) -> tuple[Keys, list[int]]:
    """(the `number` lowest keys, the first row that has each); None: a tenth of the different keys,
    at most 200. The same prompts for any order of the rows.

    Example: the keys c a b a and number 2 are (a b, rows 1 and 2).
    """
    distinct, first = np.unique(keys, return_index=True)
    if len(distinct) == 1:
        raise ConfigError(
            f"{source} has one prompt (rows: {len(keys)}), and at least one is held out for evaluation; add a second "
            "prompt, or name a separate file with task.args.heldout_data"
        )
    if number is None:
        number = min(MOST_HELD_OUT, max(1, len(distinct) // 10))
    if not 1 <= number < len(distinct):
        raise ConfigError(
            f"num_heldout ({number}) must be at least 1 and less than the {len(distinct)} different prompts of {source}; or name "
            "a separate file with task.args.heldout_data"
        )
    return distinct[:number], first[:number].tolist()


def _list_keys(problems: Sequence[P], key: Callable[[P], str]) -> Keys:
    """The first 16 bytes of each key, in its order."""
    return np.fromiter((bytes.fromhex(key(problem)[:32]) for problem in problems), "S16", len(problems))


def hash_text(text: str) -> str:
    """A key of prompts, by whose order they are held out."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
