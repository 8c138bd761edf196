"""The vision tower in a training step: it computes each image once, however many answers and
micro-batches read it.

    frozen   the features of an image, computed once and kept
    trained  1. features of all images of the mini-batch
             2. micro-batches read leaves with their values, whose gradients add up
             3. one backward pass of the tower, from the leaves' gradients

A trained tower computes more patches than the budget in several passes. Each is then computed
twice: without gradient for step 2, and again in step 3, so that the activations of one pass are in
memory, as in activation checkpointing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ludic import _core
from ludic.errors import BudgetError, ConfigError
from ludic.models.images.features import Features, divide_in_passes, encode_images, find_image_modules, find_tower_owner
from ludic.models.images.processor import ImageProcessor, find_processor, require_processor
from ludic.models.images.rows import IMAGES, RowImages
from ludic.models.images.support import check_images
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.models.sharding import is_sharded, reshard
from ludic.models.wrappers import evaluation_mode
from ludic.training import ranks
from ludic.training.backend.precision import HALF_PRECISION, autocast
from ludic.training.backend.protocol import MicroBatches
from ludic.training.batching.mini_batches import MiniBatch
from ludic.training.batching.packing import MicroBatch
from ludic.training.config import TrainerConfig
from ludic.training.rng import preserved_rng, rng_state, set_rng_state

CACHE_BYTES = 512 * 2**20
"""Features that are kept."""
COUNTS = ("images/encoded", "images/patches", "images/encode_s")
"""What the tower has computed: images, their patches, and seconds."""
REMEDIES = {"trees": "prefix_sharing=off", "padding_free": "packing=optimal"}
"""Settings of the trainer that lead to another layout."""


class ImageEncoder:
    """The tower of `model`, and the features that it has computed.

    Features that are kept were computed for each image alone, in evaluation mode: they depend on no
    other image, so that a resumed run has the same bits. They are dropped when a weight of the
    tower changes.
    """

    def __init__(self, model: nn.Module, cfg: TrainerConfig) -> None:
        self._model, self._cfg = model, cfg
        self._kept: OrderedDict[tuple[str, tuple[bool, ...]], Features] = OrderedDict()
        """Digest, and which adapters of the tower are switched off -> features. The last are those
        that were used last."""
        self._kept_bytes = 0
        self._weights: list[tuple[int, int]] = []
        """Parameters of the tower, and how often they were changed, when `_kept` was computed."""
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self.is_sharded = is_sharded(model) and find_processor(model) is not None
        """Whether ranks share out the tower: then all of them run it equally often."""
        if self.is_sharded:
            with suppress(ConfigError), preserved_rng():  # text may still be trained
                check_images(model, self._processor)
        if isinstance(model, DistributedDataParallel) and find_processor(model) is not None and self.is_trained:
            raise ConfigError(
                "DistributedDataParallel does not see the passes of a trained vision tower; leave it out, ranks sum gradients without it"
            )

    def bind(self, batch: MicroBatch, features: Mapping[str, Features] | None = None) -> MicroBatch:
        """The micro-batch with the features of its images; None means without gradient. Raises
        ConfigError for a layout in which the model computes images wrongly."""
        images: RowImages | None = batch.tensors.get(IMAGES)
        if features is None:
            features = self.find([] if images is None else images.distinct)
        if images is None:
            return batch
        layout = "trees" if PREFIX_TREES in batch.tensors else "padding_free" if "cu_seqlens" in batch.tensors else "padded"
        support = check_images(self._model, self._processor)
        if layout not in support.layouts:
            raise ConfigError(f"{support.reasons[layout]}; set {REMEDIES[layout]}")
        return replace(batch, tensors={**batch.tensors, IMAGES: images.bind(features)})

    @torch.no_grad()
    def find(self, digests: Iterable[str]) -> dict[str, Features]:
        """The features of images, without gradient. All ranks that share out the tower call it."""
        digests = list(digests)
        if not (digests or self.is_sharded):
            return {}
        if self.is_sharded:
            reshard(self._model)  # whole weights are other tensors
        modules: list[Any] = list(find_image_modules(self._model).values())
        weights = [(id(parameter), parameter._version) for module in modules for parameter in module.parameters(recurse=False)]
        if weights != self._weights:
            self._weights = weights
            self._kept.clear()
            self._kept_bytes = 0
        adapters = tuple(bool(module.disable_adapters) for module in modules if hasattr(module, "disable_adapters"))
        features = {}
        missing = [[digest] for digest in digests if (digest, adapters) not in self._kept]
        for [digest] in missing:
            self.count_patches(digest)
        with evaluation_mode(find_tower_owner(self._model)):
            for part in self.join_passes(missing):
                for digest, made in zip(part, self.encode(part), strict=False):
                    self._kept[digest, adapters] = made
                    self._kept_bytes += made.nbytes
        for digest in digests:
            self._kept.move_to_end((digest, adapters))
            features[digest] = self._kept[digest, adapters]
        while self._kept_bytes > CACHE_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return features

    def drop_changed(self) -> None:
        """Drop the features of a trained tower: some optimizers change weights unseen."""
        if self._kept and self.is_trained:
            self._weights = []

    def encode(self, digests: Sequence[str]) -> list[Features]:
        """The features of images, which are one pass of the tower if their arrays fit together. For
        no images, those of a blank picture."""
        started = time.perf_counter()
        images = [self._processor.process(digest) for digest in digests]
        with autocast(self._cfg):
            features = encode_images(self._model, images or [self._processor.blank])
        self._counts["images/encoded"] += len(images)
        self._counts["images/patches"] += sum(image.num_patches for image in images)
        self._counts["images/encode_s"] += time.perf_counter() - started
        return features

    @property
    def is_trained(self) -> bool:
        """Whether a weight of the tower is trained."""
        trained = {parameter for parameter in self._model.parameters() if parameter.requires_grad}
        modules = find_image_modules(self._model).values()
        return any(parameter in trained for module in modules for parameter in module.parameters(recurse=False))

    def plan_passes(self, digests: Sequence[str]) -> list[list[str]]:
        """The images of each pass, within the budget of patches. All ranks that share out the tower
        call it."""
        if not digests:
            return self.join_passes([])
        patches = np.array([self.count_patches(digest) for digest in digests], dtype=np.int32)
        plan = _core.plan_padding_free(patches, self._cfg.patch_budget)
        passes = [[digests[place] for place in sorted(part)] for part in plan.to_lists()]
        if self.is_sharded:
            images = [[self._processor.process(digest) for digest in part] for part in passes]
            passes = [
                [part[place] for place in places]
                for part, own in zip(passes, images, strict=True)
                for places in divide_in_passes(own)
            ]
        return self.join_passes(passes)

    def join_passes(self, passes: list[list[str]]) -> list[list[str]]:
        """`passes`, and so many without images that all ranks that share out the tower have equally
        many. Example: [[a], [b]] beside a rank of three is [[a], [b], []]."""
        if not self.is_sharded:
            return passes
        [most] = ranks.max_over_ranks([float(len(passes))], self._cfg.model_device)
        return passes + [[]] * (int(most) - len(passes))

    def count_patches(self, digest: str) -> int:
        """The patches of an image. Raises BudgetError for more than one pass may have."""
        patches, budget = self._processor.process(digest).num_patches, self._cfg.patch_budget
        if patches > budget:
            width, height = self._processor.store.size(digest)
            raise BudgetError(
                f"image {digest} ({width}x{height}) has {patches} patches, and image_patch_budget is {budget}; "
                "raise it, or lower images.max_pixels"
            )
        return patches

    def take_counts(self) -> dict[str, float]:
        """What the tower has computed since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    @property
    def _processor(self) -> ImageProcessor:
        return require_processor(self._model)


class ImagePass:
    """The images of one mini-batch.

    >>> images = ImagePass(encoder, batch)
    >>> for micro_batch in batch:
    ...     loss_of(images.bind(micro_batch)).backward()
    ...     images.move_gradients()
    >>> images.backward()
    """

    def __init__(self, encoder: ImageEncoder, batch: MicroBatches) -> None:
        self._encoder, self._places = encoder, _list_images(batch)
        digests = list(dict.fromkeys(self._places))
        is_trained = (bool(digests) or encoder.is_sharded) and encoder.is_trained
        self._passes = encoder.plan_passes(digests) if is_trained else []
        self._states: list[dict[str, Any]] = []
        """Of the random generators before each pass: dropout draws the same masks when it is
        computed again."""
        self._made: list[Features] = []
        """With graph, of a single pass."""
        self._sums: dict[Tensor, Tensor] = {}
        """Half-precision leaf -> the sum of its gradients in float32."""
        self._features = {} if is_trained else encoder.find(digests)
        for part in self._passes:
            self._states.append(rng_state())
            with torch.set_grad_enabled(len(self._passes) == 1):
                made = encoder.encode(part)
            self._made = made if len(self._passes) == 1 else []
            for digest, each in zip(part, made, strict=False):
                self._features[digest] = each.with_tensors([tensor.detach().requires_grad_() for tensor in each.tensors])

    def bind(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with the features of its images."""
        return self._encoder.bind(batch, self._features)

    def move_gradients(self) -> None:
        """Add the gradients of half-precision leaves up in float32, as `MasterWeights` does."""
        for leaf in (tensor for each in self._features.values() for tensor in each.tensors):
            if leaf.grad is not None and leaf.dtype in HALF_PRECISION:
                self._sums[leaf] = self._sums[leaf].add_(leaf.grad) if leaf in self._sums else leaf.grad.float()
                leaf.grad = None

    def backward(self) -> None:
        """Add the gradients of the tower."""
        for part, state in zip(self._passes, self._states, strict=True):
            made, self._made = self._made, []
            if not made:
                with preserved_rng():
                    set_rng_state(state)
                    made = self._encoder.encode(part)
            pairs = [
                (tensor, self._sums.get(leaf, leaf.grad))
                for digest, each in zip(part, made, strict=False)
                for tensor, leaf in zip(each.tensors, self._features[digest].tensors, strict=True)
            ]
            if self._encoder.is_sharded:  # ranks join in each backward pass
                pairs = [(tensor, torch.zeros_like(tensor) if grad is None else grad) for tensor, grad in pairs]
                pairs += [] if part else [(tensor, torch.zeros_like(tensor)) for each in made for tensor in each.tensors]
            given = [
                (tensor, gradient.to(tensor.dtype)) for tensor, gradient in pairs if tensor.requires_grad and gradient is not None
            ]
            if given:
                torch.autograd.backward([tensor for tensor, _ in given], [gradient for _, gradient in given])

    def counts(self) -> dict[str, float]:
        """The numbers of distinct images and of their places in samples, and what the tower has
        computed since the last call; {} without images."""
        if not self._places:
            return {}
        numbers = {"images/distinct": float(len(self._features)), "images/occurrences": float(len(self._places))}
        return {**numbers, **self._encoder.take_counts()}


def _list_images(batch: MicroBatches) -> list[str]:
    """The images of the samples that are computed, in their order, one for each place."""
    if not isinstance(batch, MiniBatch):
        return [span.digest for each in batch if IMAGES in each.tensors for spans in each.tensors[IMAGES].spans for span in spans]
    if batch.batch.images is None:
        return []
    rows = [own if len(own := batch.micro_batch_rows(index)) else batch.stand_in for index in range(len(batch))]
    return [span.digest for row in np.sort(np.concatenate([batch.stand_in[:0], *rows])) for span in batch.batch.images.spans[row]]
