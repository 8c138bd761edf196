"""Values of the action tokens of samples, to and from the layout of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ludic.training.loss.batch import Batch
from ludic.training.loss.context import SharedContext


def split_actions(values: Tensor, batch: Batch) -> list[Tensor]:
    """Select the values of the action tokens from per-token values [B, T - 1]: one tensor [A] per
    sample, which does not depend on the layout of the batch.

    Example: values [[1, 2], [3, 0]] with mask [[0, 1], [1, 0]] give [2] and [3].
    """
    mask = SharedContext(batch["input_ids"], batch).token_mask.bool()
    return [row[actions] for row, actions in zip(values, mask, strict=True)]


def collate_actions(rows: Sequence[Tensor | None], batch: Batch) -> Tensor:
    """Arrange values of the samples' action tokens, [A] or [A, K], in the layout of
    `batch["input_ids"]`: the inverse of `split_actions`. All other positions, and samples with
    None, get 0; to the right of a smaller K are zeros too.

    Example: padding-free samples [a b c] and [d e] with the action tokens c and e; values [2] and
    [3] give [[0, 0, 2, 0, 3]].
    """
    ids: Tensor = batch["input_ids"]
    context = SharedContext(ids, batch)
    given = [row for row in rows if row is not None]
    is_wide = bool(given) and given[0].ndim == 2
    more = (max(row.shape[1] for row in given),) if is_wide else ()
    mask, dtype = context.token_mask, given[0].dtype if is_wide else torch.float32
    values = torch.zeros(*mask.shape, *more, dtype=dtype, device=mask.device)
    for sample, row in enumerate(rows):
        if row is not None:
            actions = mask[sample].bool()
            values[sample][(actions, slice(row.shape[1])) if is_wide else actions] = row.to(values)
    shape = ids.shape[0], ids.shape[1] - 1
    index = context.token_index
    if index is None:
        flat = values
    else:
        flat = values.new_zeros(shape[0] * shape[1], *more).index_put((index.source,), values[index.sample, index.column])
    return torch.nn.functional.pad(flat.view(*shape, *more), (*(0, 0) * len(more), 1, 0))
