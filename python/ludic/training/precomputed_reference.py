"""Log-probabilities of a reference that are computed once, before the first step, and then read:
for pairs and other data that come again every pass."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from ludic.errors import CheckpointError, DataError
from ludic.files.atomic import name_aside
from ludic.files.manifest import HASH
from ludic.models.tensor_files import StoredTensors
from ludic.training import ranks
from ludic.training.batching.micro_batching import MicroBatch
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.loss.context import split_actions
from ludic.training.reference import KEY_BYTES, place_actions, sample_key, sample_keys
from ludic.training.token_columns import exchange_rows
from ludic.training.types import HasTensors, SAWItem

logger = logging.getLogger(__name__)

Score = Callable[[MicroBatch], Tensor]
"""Returns [B, T - 1] log-probabilities of a micro-batch."""


class PrecomputedReference:
    """The log-probabilities of known samples: nothing is scored any more, and no model is kept.

    A sample is known by its tokens and by which of them are actions, so it may come in any batch,
    layout or order. The values of a run that is resumed are those that it began with, read from the
    file or computed again from the same weights, bit for bit.

    >>> reference = PrecomputedReference.score([batch], cfg, forward)
    >>> reference.save(folder / "reference.logps")
    """

    computes_trees = False

    def __init__(self, known: Mapping[bytes, Tensor]) -> None:
        """`known`: [A] float32 log-probabilities of the action tokens, by `sample_key`."""
        self._known = dict(known)

    def __len__(self) -> int:
        return len(self._known)

    @classmethod
    def score(
        cls, batches: Sequence[MacroBatch], cfg: TrainerConfig, forward: Score, *, trees: bool = False
    ) -> PrecomputedReference:
        """What `forward` computes for the samples of the batches; with `trees` it may get rows of
        prefix trees. All ranks call it, and each scores a share. Raises DataError for a value that
        is not finite."""
        known: dict[bytes, Tensor] = {}
        for batch in batches:
            values = score_actions(batch, cfg, forward, trees=trees)
            for row, (item, logps) in enumerate(zip(batch.items, values, strict=True)):
                if not bool(torch.isfinite(logps).all()):
                    raise DataError(
                        f"the reference gives {batch.name(row)} log-probabilities that are not all finite; check its weights and dtype"
                    )
                known[item_key(item)] = logps
        return cls(known)

    def logps(self, micro_batch: HasTensors) -> Tensor:
        """[B, T - 1] the values at the action tokens, 0 elsewhere. Raises DataError for a sample
        that is not known."""
        has_actions = (micro_batch.tensors["action_mask"] != 0).any()
        keys = sample_keys(micro_batch) if has_actions else []  # a row without weight stands for no sample
        rows = [self._known.get(key) for key in keys]
        missing = [name for name, row in zip(micro_batch.sample_names, rows, strict=False) if row is None]
        if missing:
            raise DataError(
                f"there are no reference log-probabilities of {missing[0]}: they were computed for other samples, or for another "
                "max_seq_len; compute them for all samples that are trained or measured"
            )
        return place_actions([row for row in rows if row is not None], micro_batch)

    def of_item(self, item: SAWItem) -> Tensor:
        """[A] the values of one sample. Raises DataError if it is not known."""
        found = self._known.get(item_key(item))
        if found is None:
            raise DataError(f"there are no reference log-probabilities of pair {item.meta.get('pair_id')}; compute them first")
        return found

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        values = list(self._known.values())
        tensors = {
            "keys": torch.from_numpy(np.frombuffer(b"".join(self._known), dtype=np.uint8).copy().reshape(-1, KEY_BYTES)),
            "counts": torch.tensor([len(each) for each in values], dtype=torch.int64),
            "logps": torch.cat([*values, torch.zeros(0)]),
        }
        aside = name_aside(path)
        save_file(tensors, aside, metadata={HASH: _hash(tensors)})
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)

    @classmethod
    def load(cls, path: Path) -> PrecomputedReference:
        """Read what `save` wrote. Raises CheckpointError for a file that is damaged or something
        else. A file of an older version has no hash, and is read with a warning."""
        with StoredTensors([path]) as stored:
            tensors = {name: stored.read(name) for name in stored.names()}
            wanted = stored.metadata.get(HASH)
        if wanted is None:
            logger.warning("%s has no hash: an older version wrote it, and it cannot be verified", path)
        try:
            keys, counts, logps = (tensors[name] for name in ("keys", "counts", "logps"))
            fits = keys.shape == (len(counts), KEY_BYTES) and int(counts.sum()) == len(logps) and bool((counts >= 0).all())
            types = (keys.dtype, counts.dtype, logps.dtype) == (torch.uint8, torch.int64, torch.float32)
        except (KeyError, RuntimeError, TypeError):
            fits = types = False
        if not (fits and types and wanted in (None, _hash(tensors))):
            raise CheckpointError(
                f"{path} does not hold the reference log-probabilities as written; delete it, and a resumed run computes them again"
            )
        parts = logps.split(counts.tolist())
        return cls({bytes(key.numpy().tobytes()): part.clone() for key, part in zip(keys, parts, strict=True)})


def _hash(tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def item_key(item: SAWItem) -> bytes:
    """The `sample_key` of a sample outside of a batch."""
    ids, mask = (torch.from_numpy(np.asarray(column).astype(np.int64)) for column in (item.input_ids, item.action_mask))
    return sample_key(ids, mask)


def score_actions(batch: MacroBatch, cfg: TrainerConfig, forward: Score, *, trees: bool = False) -> list[Tensor]:
    """[N] what `forward` computes for the [A] predicted action tokens of each sample, on the CPU;
    with `trees` it may get rows of prefix trees. All ranks have the batch and call this; each
    computes a share."""
    shared = replace(batch, share=RankShare.of_this_rank())
    whole = (TreeMiniBatch if trees else MiniBatch)(shared, np.arange(len(batch.items)), cfg)
    by_row: dict[int, Tensor] = {}
    for index, micro_batch in enumerate(whole):
        values = split_actions(forward(micro_batch), micro_batch.tensors)
        by_row.update(zip(map(int, whole.micro_batch_rows(index)), values, strict=False))
    if ranks.is_distributed():
        by_row = exchange_rows(by_row, shared, cfg.model_device)
    return [by_row[row].float().cpu() for row in range(len(batch.items))]
