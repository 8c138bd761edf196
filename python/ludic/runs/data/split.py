"""Which rows of a data set are held out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ludic.training.types import SAWItem

_SPLIT_SEED = 20_000  # the held-out rows are the same in every run


def split_by_prompt(rows: Sequence[list[SAWItem]], share: float) -> tuple[list[SAWItem], list[SAWItem]]:
    """Split the samples of all rows into (training, held out).

    Rows with the same prompt stay together, so that no prompt is both trained and measured. At most
    `share` of the rows is held out."""
    by_prompt: dict[bytes, list[int]] = {}
    for number, items in enumerate(rows):
        by_prompt.setdefault(identify_prompt(items[0]), []).append(number)
    groups = list(by_prompt.values())
    heldout_rows: set[int] = set()
    for index in np.random.default_rng(_SPLIT_SEED).permutation(len(groups)):
        if len(heldout_rows) + len(groups[index]) <= int(share * len(rows)):
            heldout_rows.update(groups[index])
    train = [item for number, items in enumerate(rows) if number not in heldout_rows for item in items]
    return train, [item for number in sorted(heldout_rows) for item in rows[number]]


def explain_no_heldout(rows: int, share: float, prompts: int, smallest: int) -> str:
    """Why no rows are held out, and the remedy. `rows` is the number of rows, `prompts` of
    different prompts, `smallest` of the rows with the rarest prompt."""
    if share == 0:
        return "heldout is 0; set heldout=0.05, or give heldout_data"
    return (
        f"heldout ({share:g}) of {rows:,} rows is {int(share * rows):,}, rows with one prompt stay together, and each of the {prompts:,} "
        f"different prompts is in {smallest:,} rows or more; raise heldout to {smallest / rows:.2g} or above, or give heldout_data"
    )


def identify_prompt(item: SAWItem) -> bytes:
    """The same for two samples with the same prompt: the digest from the sample's row, else the
    tokens before the first trained one."""
    if "prompt_digest" in item.meta:
        return str(item.meta["prompt_digest"]).encode()
    return np.asarray(item.input_ids[: int(np.argmax(item.action_mask))]).tobytes()
