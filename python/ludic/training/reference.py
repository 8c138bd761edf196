"""References: policies that do not change while a model is trained. Penalties and weights of
MaxEnt-GRPO and the KL term of GRPO read their log-probabilities.

A reference scores micro-batches of any layout. Server log-probabilities are never a reference:
the server gets new weights.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from hashlib import blake2b

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, DataError, shorten_names
from ludic.event_loop import await_if_needed
from ludic.models.adapters import has_adapters
from ludic.models.loading import load_model
from ludic.models.published import unwrap_model
from ludic.models.sharding import is_sharded
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.forward import ModelPasses, forward_action_logprobs
from ludic.training.backend.futures import TrainFuture
from ludic.training.backend.protocol import ForwardPasses, TrainingBackend
from ludic.training.backend.torch import shares_prefixes
from ludic.training.batching.micro_batching import MicroBatch
from ludic.training.config import TrainerConfig
from ludic.training.loss.batch import num_rows
from ludic.training.loss.context import SharedContext, split_actions
from ludic.training.types import HasTensors, ReferencePolicy

logger = logging.getLogger(__name__)

KEY_BYTES = 16
"""Length of a `sample_key`."""


class FrozenModel:
    """A copy of `model`: without gradient, in evaluation mode, at the temperature of `cfg`.

    Each rank has a whole copy. Make it before the first step, and of a resumed run from the same
    weights as at its begin, not from those that it has now.
    """

    def __init__(self, model: nn.Module, cfg: TrainerConfig) -> None:
        if is_sharded(model):
            raise ConfigError("a FrozenModel copies a whole model, and this one is sharded; use FrozenModel.from_pretrained(...)")
        self._freeze(copy.deepcopy(unwrap_model(model)), cfg)

    @classmethod
    def from_pretrained(cls, source: str, cfg: TrainerConfig, *, dtype: str = "auto") -> FrozenModel:
        """The model of a folder in Hugging Face layout, of a run, or of the hub. `dtype`: that of
        the weights, by default as they are stored."""
        frozen = cls.__new__(cls)
        frozen._freeze(load_model(source, dtype), cfg)
        return frozen

    def _freeze(self, model: nn.Module, cfg: TrainerConfig) -> None:
        model.requires_grad_(requires_grad=False)
        self.model = model.eval().to(cfg.model_device)
        self._passes = ModelPasses(self.model, cfg)

    @property
    def computes_trees(self) -> bool:
        return self._passes.computes_trees

    def logps(self, micro_batch: HasTensors) -> TrainFuture[Tensor]:
        return forward_action_logprobs(self._passes, _without_size(micro_batch))


class WithoutAdapters:
    """The model of `backend` with its adapters switched off: no second copy in memory."""

    def __init__(self, backend: TrainingBackend) -> None:
        self.backend = backend

    @property
    def computes_trees(self) -> bool:
        return computes_trees(self.backend)

    def logps(self, micro_batch: HasTensors) -> TrainFuture[Tensor]:
        return forward_action_logprobs(self.backend, _without_size(micro_batch), adapters=False)


def _without_size(micro_batch: HasTensors) -> MicroBatch:
    return MicroBatch(micro_batch.tensors, 0, micro_batch.sample_names)


class AttachedReference:
    """The log-probabilities that the samples bring with them,
    `SampleAttachments.reference_logps`: nothing is scored. Every sample needs them."""

    computes_trees = False

    def logps(self, micro_batch: HasTensors) -> Tensor:
        """Raises DataError: the trainer asks only for samples without them."""
        names = shorten_names(micro_batch.sample_names, limit=3)
        raise DataError(
            f"of the batch with {names} not every sample has reference_logps, and the reference is AttachedReference; set "
            "SampleAttachments.reference_logps on each, or pass reference=FrozenModel(model, cfg)"
        )


class CachedReference:
    """`inner`, asked once for each sample: for data that come again, such as offline batches.

    A sample is known by the ids up to its end and by which of them are actions. `max_samples` are
    kept on the CPU; the ones that were not used for longest are dropped. A micro-batch with a new
    sample is scored whole. With several ranks, they all score if one must.
    """

    def __init__(self, inner: ReferencePolicy, max_samples: int = 100_000) -> None:
        if max_samples < 1:
            raise ConfigError(f"max_samples ({max_samples}) must be >= 1; leave CachedReference out to keep nothing")
        self.inner, self.max_samples = inner, max_samples
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.hits = self.misses = 0
        """Micro-batches that were known, and that were scored."""

    @property
    def computes_trees(self) -> bool:
        return computes_trees(self.inner)

    async def logps(self, micro_batch: HasTensors) -> Tensor:
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
        shares_prefixes(backend, cfg)
        for scorer in (backend, reference):
            _ = scorer is not None and computes_trees(scorer)


def sample_keys(micro_batch: HasTensors) -> list[bytes]:
    """The `sample_key` of each sample."""
    batch = MicroBatch(micro_batch.tensors, num_rows(micro_batch.tensors))
    return [sample_key(row.tensors["input_ids"][0], row.tensors["action_mask"][0]) for row in batch.parts()]


def sample_key(input_ids: Tensor, action_mask: Tensor) -> bytes:
    """The digest of a sample, [T] int64 ids and [T] mask: of its ids up to its end, and of where
    its actions are. Padding does not change it."""
    mask = action_mask != 0
    end = int(mask.nonzero().max()) + 1 if mask.any() else 0  # nothing after the last action changes a log-probability
    digest = blake2b(digest_size=KEY_BYTES)
    for column in (input_ids[:end], mask[:end].to(torch.uint8)):
        digest.update(column.cpu().numpy().tobytes())
    return digest.digest()


def place_actions(rows: list[Tensor], micro_batch: HasTensors) -> Tensor:
    """[B, T - 1] the values at the action tokens of their samples, 0 elsewhere."""
    mask = SharedContext(micro_batch.tensors["input_ids"], micro_batch.tensors).token_mask
    placed = torch.zeros_like(mask)
    for sample, values in enumerate(rows):
        placed[sample, mask[sample].bool()] = values.to(placed)
    return placed


def resolve_reference(
    reference: ReferencePolicy | None, algo: RLAlgorithm, backend: TrainingBackend, model: nn.Module | None
) -> ReferencePolicy | None:
    """The reference that a trainer uses: the given one, or none if the algorithm reads none. If it
    reads one and none is given, the model with its adapters switched off. Raises ConfigError if it
    has none."""
    if reference is not None:
        if not algo.reads_reference:
            logger.warning("%s reads no reference; the one that is given is never asked", algo.name)
        return reference
    if not algo.reads_reference:
        return None
    if model is None or not has_adapters(unwrap_model(model)):
        raise ConfigError(
            f"{algo.name} reads a reference, and the model has no adapters that could be switched off; "
            "pass reference=FrozenModel(model, cfg) to Trainer, or set beta and reference_kl to 0"
        )
    return WithoutAdapters(backend)


__all__ = ["AttachedReference", "CachedReference", "FrozenModel", "ReferencePolicy", "WithoutAdapters", "resolve_reference"]
