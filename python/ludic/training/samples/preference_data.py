"""Makes samples from preference data: rows, files and data sets. `samples.preference` lists the
formats of a row."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ludic.data import DataSet, load_data
from ludic.errors import DataError, RowError
from ludic.training.samples.pair_facts import check_label, meta_value
from ludic.training.samples.preference import PreferenceItems, Row
from ludic.training.types import SAWItem
from ludic.types import Message

logger = logging.getLogger(__name__)

SHOWN_FAULTS = 3
Response = str | list[Message]


def create_preference_saw_items(
    prompt: str | list[Message] | None,
    chosen: Response,
    rejected: Response,
    tokenizer: Any,
    *,
    label: float = 1.0,
    pair_id: str | int | None = None,
    max_length: int | None = None,
    use_chat_template: bool = False,
    system_prompt: str | None = None,
) -> tuple[SAWItem, SAWItem]:
    """Return the (chosen, rejected) samples of one pair.

    >>> chosen, rejected = create_preference_saw_items("2+2=", "4", "5", tokenizer, pair_id="sum")

    `label` is the probability that the chosen response is better. Without `pair_id` the pair gets a
    unique id. Raises DataError for an empty response and for two equal responses; see
    `PreferenceItems`.
    """
    pair_maker = PreferenceItems(tokenizer, use_chat_template, system_prompt, max_length)
    name = uuid.uuid4().hex if pair_id is None else pair_id
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return pair_maker.of_row(row, f"pair {name}", pair_id=name, label=label)


def preference_dataset_to_saw_items(
    dataset: DataSet | Iterable[Row],
    tokenizer: Any,
    *,
    prompt_col: str = "prompt",
    chosen_col: str = "chosen",
    rejected_col: str = "rejected",
    label_col: str | None = None,
    max_length: int | None = None,
    use_chat_template: bool = False,
    system_prompt: str | None = None,
    strict: bool = False,
    left_out: Counter[str] | None = None,
) -> list[SAWItem]:
    """Return the samples of all rows: chosen and rejected of row 0, then of row 1 and so on. The id
    of row i is `pref_i`.

    A row that gives no pair (an empty response, two equal responses, a prompt that fills
    `max_length`) is skipped. A warning has the number of such rows and shows the first ones;
    `left_out` gets the number for each reason (`RowFault`, or `malformed`). Raises DataError if no
    row is left, and with `strict` for the first such row.
    """
    pair_maker = PreferenceItems(tokenizer, use_chat_template, system_prompt, max_length)
    names = {"prompt": prompt_col, "chosen": chosen_col, "rejected": rejected_col}
    source: Iterable[Row] = dataset.rows if isinstance(dataset, DataSet) else dataset
    rows = ({**row, **{name: row.get(column) for name, column in names.items()}} for row in source)
    where = dataset.where if isinstance(dataset, DataSet) else lambda index: f"row {index}"
    return _make_items(pair_maker, rows, where, label_col=label_col, strict=strict, left_out=left_out)


def _make_items(
    pair_maker: PreferenceItems,
    rows: Iterable[Row],
    where: Callable[[int], str],
    *,
    label_col: str | None,
    strict: bool = False,
    strict_labels: bool = False,
    left_out: Counter[str] | None = None,
) -> list[SAWItem]:
    items: list[SAWItem] = []
    faults: list[str] = []
    reasons: Counter[str] = Counter() if left_out is None else left_out
    for index, row in enumerate(rows):
        label: Any = 1.0 if label_col is None else row.get(label_col)
        if strict_labels:
            check_label(label, where(index))
        try:
            items.extend(pair_maker.of_row(row, where(index), pair_id=f"pref_{index}", label=label))
        except DataError as error:
            if strict:
                raise
            faults.append(str(error))
            reasons[error.reason if isinstance(error, RowError) else "malformed"] += 1
    if faults:
        report = f"{len(faults)} rows make no pair: {'; '.join(faults[:SHOWN_FAULTS])}"
        if not items:
            raise DataError(f"no row is left: {report}")
        logger.warning("skipped %s%s", report, "; and so on" if len(faults) > SHOWN_FAULTS else "")
    return items


def load_preference_items(
    source: str,
    tokenizer: Any,
    *,
    config: str | None = None,
    split: str = "train",
    columns: Mapping[str, str | Sequence[str]] | None = None,
    label_col: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    max_length: int | None = None,
    use_chat_template: bool = False,
    system_prompt: str | None = None,
    left_out: Counter[str] | None = None,
) -> list[SAWItem]:
    """Return the samples of a JSONL, JSON, CSV or parquet file, of a folder, or of a data set id
    for the `datasets` library. Rows are in one of TRL's preference formats, or have two scored
    responses as in SHP.

    `columns` maps names to columns (`{"chosen": "better"}`); `config` and `split` are for ids and
    folders. At most `limit` rows are read; they are drawn at random with `seed`, since data sets
    are often sorted, and keep their order.

    Raises DataError, naming file and row, for a row of another format and for a label that is not a
    probability. A row that gives no pair is skipped with a warning and counted in `left_out`
    (`preference_dataset_to_saw_items`), and so is a row with two equal scores (`equal_scores`).
    """
    data = load_data(source, kind="preference", columns=columns, config=config, split=split, limit=limit, seed=seed)
    pair_maker = PreferenceItems(tokenizer, use_chat_template, system_prompt, max_length, as_arrays=True)
    if left_out is not None and data.table.equal_scores:
        left_out["equal_scores"] += len(data.table.equal_scores)
    return _make_items(pair_maker, data.rows, data.where, label_col=label_col, strict_labels=True, left_out=left_out)


def shuffle_preference_pairs(items: Sequence[SAWItem], seed: int | None = None) -> list[SAWItem]:
    """Return the pairs in a random order that depends on the seed. The samples of a pair become
    neighbours and keep their order.

    Example: pairs a b a b shuffled to the order (b, a) are b b a a.
    """
    by_pair: dict[Any, list[SAWItem]] = {}
    for row, item in enumerate(items):
        by_pair.setdefault(meta_value(item, row, "pair_id"), []).append(item)
    pairs = list(by_pair.values())
    return [item for index in np.random.default_rng(seed).permutation(len(pairs)) for item in pairs[index]]
