"""Routes: the experts that a sampler chose for the tokens of samples (`SampleAttachments.routes`),
for a trainer that replays them (`models.routing`).

A token that two samples share, in prefix trees or in turns that share a line, is computed once, by
one set of experts. So in the table of a batch the ids of tokens with routes are keys, which are
equal only where id and experts are: samples share their beginning up to the first token for which
other experts were chosen. A micro-batch has ids again.

    ids [5 6 7] and [5 6 8], experts [1 2 3] and [1 4 3]   they share the token 5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import DataError
from ludic.models.images.rows import KEY
from ludic.models.routing import OWN, ROUTES
from ludic.training.types import SAWItem
from ludic.types import stored

ROUTED = KEY + 2**29
"""Keys from here on are tokens with routes; images have those before."""


def check_routes(items: Sequence[SAWItem]) -> tuple[int, int] | None:
    """(layers, top_k) of the routes of samples; None if none has any. Raises DataError for samples
    of different shapes, for bytes of no such shape, and for more tokens than a sample has."""
    routed = [(item, item.attachments.routes) for item in items if item.attachments.routes is not None]
    for item, routes in routed:
        if len(routes.array) > len(stored(item, "input_ids")):
            raise DataError(f"a sample has routes of {len(routes.array)} tokens, and {len(stored(item, 'input_ids'))} ids")
    shapes = {(routes.layers, routes.top_k) for _, routes in routed}
    if len(shapes) > 1:
        raise DataError(f"samples have routes of different models, (layers, top_k) {sorted(shapes)}; use one model")
    return next(iter(shapes), None)


def key_routes(items: Sequence[SAWItem]) -> tuple[Sequence[SAWItem], NDArray[np.int32] | None]:
    """The samples with keys as ids, and the ids: key `ROUTED + n` is `ids[n]`. None if no sample
    has routes. About a microsecond a token."""
    if check_routes(items) is None:
        return items, None
    keyed, known, numbers = [], list[int](), dict[bytes, int]()
    for item in items:
        ids = np.array(stored(item, "input_ids"), dtype=np.int32)
        if (routes := item.attachments.routes) is not None:
            for at, experts in enumerate(routes.array.reshape(len(routes.array), -1)):
                token = int(ids[at])
                ids[at] = ROUTED + numbers.setdefault(xxhash.xxh3_128_digest(experts, token), len(known))
                if len(numbers) > len(known):
                    known.append(token)
        keyed.append(replace(item, input_ids=ids))  # type: ignore[arg-type]
    return keyed, np.array(known, dtype=np.int32)


def restore_ids(columns: dict[str, Any], ids: NDArray[np.int32]) -> None:
    """Put the ids into the `input_ids` of a collation, which are changed."""
    keys = columns["input_ids"]
    keys[keys >= ROUTED] = ids[keys[keys >= ROUTED] - ROUTED]


def collate_routes(items: Sequence[SAWItem], tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """`routes` [B, T, layers, top_k] int16 in the layout of `input_ids`, of the samples of a
    micro-batch; `OWN` where none are recorded. Of turns in one row, the last that has a token. {}
    if no sample has any."""
    if (shape := check_routes(items)) is None:
        return {}
    placed = np.full((*tensors["input_ids"].shape, *shape), OWN, dtype=np.int16)
    rows = tensors["turns"][:, 0].tolist() if "turns" in tensors else range(len(items))
    starts = tensors["cu_seqlens"].tolist() if "cu_seqlens" in tensors else None
    for row, item in zip(rows, items, strict=True):
        if item.attachments.routes is not None:
            own, (at, begin) = item.attachments.routes.array, (row, 0) if starts is None else (0, starts[row])
            placed[at, begin : begin + len(own)] = own
    return {ROUTES: torch.from_numpy(placed).to(tensors["input_ids"].device)}
