"""References: policies that do not change while a model is trained. Penalties and weights of
MaxEnt-GRPO and the KL term of GRPO read their log-probabilities.

A reference scores micro-batches of any layout. Server log-probabilities are never a reference:
the server gets new weights.

Log-probabilities of a reference that are computed once, before the first step, and then read:
for pairs and other data that come again every pass.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from ludic.errors import CheckpointError, ConfigError, DataError, check_value, shorten_names
from ludic.event_loop import TrainFuture, await_if_needed
from ludic.files.atomic import name_aside
from ludic.files.manifest import HASH
from ludic.models.flops import FlopCounter
from ludic.models.images.rows import IMAGES, RowImages
from ludic.models.loading import load_model
from ludic.models.sharding import is_sharded
from ludic.models.tensor_files import StoredTensors
from ludic.models.wrappers import has_adapters, unwrap_model
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm, forward_logits
from ludic.training.backend.forward import ModelPasses, forward_action_logprobs
from ludic.training.backend.offload import Offload
from ludic.training.backend.protocol import ForwardPasses, TrainingBackend, with_defaults
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import MicroBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.loss.actions import split_actions
from ludic.training.loss.base import adapted_loss
from ludic.training.loss.batch import CANDIDATES, Batch, num_rows
from ludic.training.loss.context import SharedContext
from ludic.training.preflight.layouts import explain_rows, require_slices
from ludic.training.types import ReferencePolicy as ReferencePolicy, SAWItem
from ludic.types import ImageSpan, cut_spans

logger = logging.getLogger(__name__)

KEY_BYTES = 16
"""Length of a `sample_key`."""


class FrozenModel:
    """A copy of `model`: without gradient, in evaluation mode, at the temperature of `cfg`.

    Each rank has a whole copy. Make it before the first step, and in a resumed run from the same
    weights as at its start, not from its present weights.
    """

    def __init__(self, model: nn.Module, cfg: TrainerConfig) -> None:
        if is_sharded(model):
            raise ConfigError("a FrozenModel copies a whole model, and this one is sharded; use FrozenModel.from_pretrained(...)")
        self._freeze(copy.deepcopy(unwrap_model(model)), cfg)

    @classmethod
    def from_pretrained(cls, source: str, cfg: TrainerConfig, *, dtype: str = "auto") -> FrozenModel:
        """The model of a folder in Hugging Face layout, of a run, or of the hub. `dtype`: of the
        weights, by default as they are stored."""
        frozen = cls.__new__(cls)
        frozen._freeze(load_model(source, dtype), cfg)
        return frozen

    def _freeze(self, model: nn.Module, cfg: TrainerConfig) -> None:
        model.requires_grad_(requires_grad=False)
        self.model = model.eval().to(cfg.model_device)
        self._passes = ModelPasses(self.model, replace(cfg, replay_routing=False, router_aux_coef=0.0))
        require_slices(self.model, cfg)
        self.flops = self._passes.flops
        """Counts the FLOPs of its passes."""

    def offload(self) -> TrainFuture[None]:
        """As `TrainingBackend.offload`."""
        return TrainFuture.of("offload", Offload([self.model]).to_host)

    def reload(self) -> TrainFuture[None]:
        return TrainFuture.of("reload", lambda: Offload([self.model]).to_device(self._passes.cfg.model_device))

    @property
    def computes_trees(self) -> bool:
        return self._passes.computes_trees

    def logps(self, micro_batch: MicroBatch) -> TrainFuture[Tensor]:
        return forward_action_logprobs(self._passes, _without_size(micro_batch))

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """[B, T, V], or [1, S, V] of a padding-free batch."""
        return forward_logits(self.model, self._passes.images.bind(MicroBatch(dict(batch), 0)).tensors)


class WithoutAdapters:
    """The model of `backend` with its adapters switched off: no second copy in memory."""

    def __init__(self, backend: TrainingBackend) -> None:
        self.backend = backend

    @property
    def computes_trees(self) -> bool:
        return computes_trees(self.backend)

    def logps(self, micro_batch: MicroBatch) -> TrainFuture[Tensor]:
        return forward_action_logprobs(self.backend, _without_size(micro_batch), adapters=False)


def _without_size(micro_batch: MicroBatch) -> MicroBatch:
    return MicroBatch(micro_batch.tensors, 0, micro_batch.sample_names)


class AttachedReference:
    """The log-probabilities that the samples bring with them,
    `SampleAttachments.reference_logps`: nothing is scored. Every sample needs them."""

    computes_trees = False

    def logps(self, micro_batch: MicroBatch) -> Tensor:
        """Raises DataError: the trainer asks only for samples without them."""
        names = shorten_names(micro_batch.sample_names, limit=3)
        raise DataError(f"{names}: not every sample has reference_logps; set them, or pass reference=FrozenModel(model, cfg)")


class CachedReference:
    """`inner`, asked once for each sample: for data that come again, such as offline batches.

    A sample is known by the ids up to its end and by which of them are actions. `max_samples` are
    kept on the CPU; the ones that were not used for longest are dropped. A micro-batch with a new
    sample is scored whole. With several ranks, they all score if one must.
    """

    def __init__(self, inner: ReferencePolicy, max_samples: int = 100_000) -> None:
        check_value("max_samples", max_samples, "leave CachedReference out to keep nothing", least=1)
        self.inner, self.max_samples = inner, max_samples
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.hits = self.misses = 0
        """Micro-batches that were known, and that were scored."""

    @property
    def computes_trees(self) -> bool:
        return computes_trees(self.inner)

    @property
    def flops(self) -> FlopCounter | None:
        """The counter of `inner`."""
        return getattr(self.inner, "flops", None)

    async def logps(self, micro_batch: MicroBatch) -> Tensor:
        tensors = micro_batch.tensors
        keys = sample_keys(micro_batch)
        missing = float(any(key not in self._kept for key in keys))
        if ranks.max_over_ranks([missing], tensors["input_ids"].device)[0]:
            self.misses += 1
            scored = await await_if_needed(self.inner.logps(micro_batch))
            for key, values in zip(keys, split_actions(scored, tensors), strict=True):
                self._kept[key] = values.cpu()
        else:
            self.hits += 1
        rows = [self._kept[key] for key in keys]
        for key in keys:
            self._kept.move_to_end(key)
        while len(self._kept) > self.max_samples:
            self._kept.popitem(last=False)
        return place_actions(rows, micro_batch)


def computes_trees(scorer: ReferencePolicy | ForwardPasses) -> bool:
    """Its `computes_trees`, which one from outside may lack."""
    return bool(getattr(scorer, "computes_trees", False))


def decide_trees(backend: TrainingBackend, reference: ReferencePolicy | None, cfg: TrainerConfig) -> None:
    """Find out which passes compute prefix trees, and say why others do not, before the first batch
    is sampled: it may set the model's attention. All ranks call it."""
    if cfg.prefix_sharing != "off":
        if with_defaults(backend).shares_prefixes is None:
            explain_rows(f"{type(backend).__name__} does not compute them", type(backend), cfg)
        for scorer in (backend, reference):
            _ = scorer is not None and computes_trees(scorer)


def sample_keys(micro_batch: MicroBatch) -> list[bytes]:
    """The `sample_key` of each sample."""
    batch = MicroBatch(micro_batch.tensors, num_rows(micro_batch.tensors))
    names = [name for name in ("input_ids", "action_mask", CANDIDATES) if name in batch.tensors]
    keys = []
    for row in batch.parts():
        images: RowImages | None = row.tensors.get(IMAGES)
        keys.append(sample_key(*(row.tensors[name][0] for name in names), images=() if images is None else images.spans[0]))
    return keys


def sample_key(
    input_ids: Tensor, action_mask: Tensor, candidates: Tensor | None = None, *, images: Sequence[ImageSpan] = ()
) -> bytes:
    """The digest of a sample, [T] int64 ids, [T] mask and [T, K] candidates: of its ids up to its
    end, and of where its actions and images are. Padding does not change it."""
    mask = action_mask != 0
    end = int(mask.nonzero().max()) + 1 if mask.any() else 0  # nothing after the last action changes a log-probability
    digest = blake2b(digest_size=KEY_BYTES)
    for column in (input_ids[:end], mask[:end].to(torch.uint8)):
        digest.update(column.cpu().numpy().tobytes())
    if candidates is not None and (own := candidates[:end]).any():
        places = own.nonzero()
        digest.update(torch.cat([places, own[tuple(places.T)][:, None]], dim=1).cpu().numpy().tobytes())
    for span in cut_spans(images, 0, end=end):
        digest.update(f"{span.digest} {span.start}".encode())
    return digest.digest()


def place_actions(rows: list[Tensor], micro_batch: MicroBatch) -> Tensor:
    """[B, T - 1] the values at the action tokens of their samples, 0 elsewhere."""
    mask = SharedContext(micro_batch.tensors["input_ids"], micro_batch.tensors).token_mask
    placed = torch.zeros_like(mask)
    for sample, values in enumerate(rows):
        placed[sample, mask[sample].bool()] = values.to(placed)
    return placed


def resolve_reference(
    reference: ReferencePolicy | None, algo: RLAlgorithm, backend: TrainingBackend, model: nn.Module | None
) -> ReferencePolicy | None:
    """The reference that a trainer uses: the given one, the algorithm's teacher, or none if the
    algorithm reads none. If it reads one and none is given, the model with its adapters switched
    off. Raises ConfigError if it has none."""
    if algo.reads_teacher:
        teacher, kind = algo.teacher, "FrozenModel.from_pretrained(folder, cfg)"
        if teacher is None:
            raise ConfigError(f"{algo.name} has no teacher; pass teacher= to make_opd, such as {kind}")
        if reference is not None:
            raise ConfigError(f"{algo.name} has a teacher, which is its reference; leave reference= out")
        if adapted_loss(algo).reads_teacher and not hasattr(teacher, "logits"):
            raise ConfigError(f"a divergence reads logits, which {type(teacher).__name__} does not give; pass teacher={kind}")
        return teacher if algo.reads_reference else None
    if reference is not None:
        if not algo.reads_reference:
            logger.warning("%s reads no reference; the one that is given is never asked", algo.name)
        return reference
    if not algo.reads_reference:
        return None
    if model is None or not has_adapters(unwrap_model(model)):
        raise ConfigError(f"{algo.name} reads a reference, and the model has no adapters; pass reference=FrozenModel(model, cfg)")
    return WithoutAdapters(backend)


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
                    raise DataError(f"the reference gives {batch.name(row)} log-probabilities that are not all finite; check it")
                known[item_key(item)] = logps
        return cls(known)

    def logps(self, micro_batch: MicroBatch) -> Tensor:
        """[B, T - 1] the values at the action tokens, 0 elsewhere. Raises DataError for a sample
        that is not known."""
        has_actions = (micro_batch.tensors["action_mask"] != 0).any()
        keys = sample_keys(micro_batch) if has_actions else []  # a row without weight stands for no sample
        rows = [self._known.get(key) for key in keys]
        missing = [name for name, row in zip(micro_batch.sample_names, rows, strict=False) if row is None]
        if missing:
            raise DataError(f"no reference log-probabilities of {missing[0]} at this max_seq_len; compute them for all samples")
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
            raise CheckpointError(f"{path} does not hold the reference log-probabilities as written; delete it")
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
    return sample_key(ids, mask, images=item.images)


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


def exchange_rows(
    own: dict[int, Tensor], batch: MacroBatch, device: torch.device | str, width: tuple[int, ...] = ()
) -> dict[int, Tensor]:
    """Row -> [A, *width] values of all rows of a batch that all ranks have. Each rank has computed
    some, and later mini-batches give it others.

    Example: 3 rows of 2, 1 and 2 tokens, of which rank 0 has the first and rank 1 the others:
    [a b 0 0 0] + [0 0 c d e] = [a b c d e] is divided at 2 and 3.
    """
    counts = batch.table.target_counts.tolist()
    ends = list(accumulate(counts))
    column = torch.zeros(sum(counts), *width, device=device)
    for row, logps in own.items():
        column[ends[row] - counts[row] : ends[row]] = logps.to(column)
    ranks.add_over_ranks(column)
    return dict(enumerate(column.split(counts)))
