"""Forward passes of a model in this process, for evaluators and for `TorchBackend`, and the choice
whether they compute log-probabilities without logits (`loss.token_scores`).

It depends on the settings, the model and the weights that it has at the first pass: all
ranks make the same one, once, for all micro-batches. It is the same after a resume, unless the
logits of one of the two are not finite.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.event_loop import TrainFuture
from ludic.inference.local.sampler import nucleus
from ludic.models.flops import FlopCounter
from ludic.models.lora import adapters_off
from ludic.models.output_layer import OutputLayer
from ludic.models.packed_attention import pin_rope, report_kernel
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.models.routing import RoutedPass, Routers, routes_of_pass
from ludic.models.sharding import gather_tensor, unshard
from ludic.models.wrappers import evaluation_mode, unwrap_model
from ludic.training.algorithm import RLAlgorithm, forward_for_loss, forward_logits
from ludic.training.backend.image_pass import ImageEncoder
from ludic.training.backend.precision import autocast
from ludic.training.backend.protocol import ForwardPasses
from ludic.training.batching.packing import MicroBatch, without_trees
from ludic.training.config import TrainerConfig
from ludic.training.loss import Loss, SharedContext
from ludic.training.loss.base import ScoreType, adapted_loss, loss_name
from ludic.training.loss.logprobs import mask_values
from ludic.training.loss.preference import preference_scores
from ludic.training.preflight.layouts import can_compute_trees
from ludic.training.rng import preserved_rng

T = TypeVar("T")
logger = logging.getLogger(__name__)

CHUNKED_FROM = 1 << 26
"""`auto` computes no logits if a full micro-batch would have at least this many: 256 MiB in
float32."""
CHECKED_TOKENS = 8
SAME = 1e-4
"""Largest difference of two computations in float32, relative to the largest logit."""
ROUNDED = 2.0**-7
"""The same where the model rounds its logits to bfloat16 or float16, two or three times."""
SUMMED = 3e-2
"""The same where the output layer and its adapters are summed in bfloat16 or float16."""


class ReadsTokens(Loss):
    """Stands for what reads the log-probabilities of all tokens."""

    reads_shared_only = True


class ReadsActions(ReadsTokens):
    """Stands for what reads the log-probabilities of action tokens alone."""

    reads_actions_only = True


class ModelPasses:
    """`ForwardPasses` of a torch model. Each module of the model keeps its mode."""

    def __init__(self, model: nn.Module, cfg: TrainerConfig) -> None:
        self.model, self.cfg = model, cfg
        self.flops = FlopCounter(model)
        pin_rope(model, cfg.max_seq_len)
        report_kernel(model)

    @cached_property
    def images(self) -> ImageEncoder:
        """The features of images."""
        return ImageEncoder(self.model, self.cfg)

    @cached_property
    def skips_logits(self) -> bool:
        """Whether log-probabilities are computed without logits, where nothing else reads them."""
        return can_skip_logits(self.model, self.cfg)

    @cached_property
    def computes_trees(self) -> bool:
        """Whether micro-batches may be rows of prefix trees. All ranks read it."""
        return can_compute_trees(self.model, self.cfg)

    @cached_property
    def routers(self) -> Routers | None:
        """The routers of a mixture of experts, if the settings ask for them."""
        balanced = self.cfg.router_aux_coef > 0
        return Routers(self.model, balanced=balanced) if self.cfg.replay_routing or balanced else None

    def routed(self, batch: MicroBatch) -> AbstractContextManager[RoutedPass | None]:
        """A context for passes over `batch`, and for their backward passes, in which the routers
        take the experts that its samples bring (`TrainerConfig.replay_routing`)."""
        if self.routers is None:
            return nullcontext()
        return self.routers.running(routes_of_pass(batch.tensors) if self.cfg.replay_routing else None)

    def counting(self, batch: MicroBatch, *kind: Hashable, backward: bool = False) -> AbstractContextManager[None]:
        """A context for one pass over `batch`, whose FLOPs it adds to `flops`."""
        trees: PrefixTrees | None = batch.tensors.get(PREFIX_TREES)
        ids = batch.tensors["input_ids"] if trees is None else trees.input_ids
        layout = (trees is None, "cu_seqlens" in batch.tensors)
        return self.flops.counting(
            (backward, *layout, *kind), tokens=ids.numel(), pairs=ids.numel() * ids.shape[1], backward=backward
        )

    def _run(self, operation: str, compute: Callable[[], T]) -> TrainFuture[T]:
        """The future of an operation, which is computed now. A subclass may compute it later."""
        return TrainFuture.of(operation, compute)

    def forward_logprobs(
        self,
        batch: MicroBatch,
        *,
        temperature: float | None = None,
        top_p: float = 1.0,
        adapters: bool = True,
        actions_only: bool = False,
    ) -> TrainFuture[Tensor]:
        return self._run("forward_logprobs", lambda: self._logprobs(batch, temperature, top_p, adapters, actions_only))

    @torch.no_grad()
    def _logprobs(
        self, batch: MicroBatch, temperature: float | None, top_p: float, adapters: bool, actions_only: bool = False
    ) -> Tensor:
        skips = top_p >= 1.0 and self.skips_logits  # decided with the adapters on, whichever call is first
        without = nullcontext() if adapters else adapters_off(self.model)
        counting = self.counting(batch, "logprobs", skips, adapters)
        routed = self.routed(batch) if adapters else nullcontext()  # a reference routes as it does
        with without, evaluation_mode(self.model), autocast(self.cfg), routed:
            tensors = self.images.bind(batch).tensors
            with counting:
                divisor = self.cfg.temperature if temperature is None else temperature
                if top_p >= 1.0:
                    reads = ReadsActions() if actions_only or PREFIX_TREES in tensors else ReadsTokens()
                    scored = forward_for_loss(self.model, tensors, reads, chunked_logits=skips, temperature=divisor)
                    shared = SharedContext(*scored, temperature=divisor)
                else:
                    tensors = without_trees(tensors)
                    logits = forward_logits(self.model, tensors)
                    top_p_T = torch.full(logits.shape[1:2], top_p, device=logits.device)
                    nuclei = [nucleus(torch.log_softmax(row.float() / divisor, dim=-1), top_p_T) for row in logits]
                    shared = SharedContext(torch.stack(nuclei), tensors)
                return mask_values(shared.token_logp, shared.token_mask) if actions_only else shared.token_logp

    def forward_scores(self, batch: MicroBatch, *, score_type: ScoreType = "reward") -> TrainFuture[Tensor]:
        @torch.no_grad()
        def compute() -> Tensor:
            tensors = self.images.bind(batch).tensors
            with evaluation_mode(self.model), autocast(self.cfg), self.counting(batch, "scores", score_type):
                chunked = score_type == "logprob" and self.skips_logits
                reads = ReadsActions() if chunked or PREFIX_TREES in tensors else ReadsTokens()
                scored = forward_for_loss(self.model, tensors, reads, chunked_logits=chunked)
                return preference_scores(SharedContext(*scored), score_type)

        return self._run("forward_scores", compute)


def forward_action_logprobs(
    passes: ForwardPasses,
    batch: MicroBatch,
    *,
    temperature: float | None = None,
    top_p: float = 1.0,
    adapters: bool = True,
) -> TrainFuture[Tensor]:
    """`forward_logprobs` for callers that read action tokens alone: [B, T - 1]. `passes` of yours
    without the argument `actions_only` score all tokens. They get the other arguments only where
    these differ from their defaults."""
    parameters = inspect.signature(passes.forward_logprobs).parameters
    known = "actions_only" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    arguments: dict[str, Any] = {"actions_only": True} if known else {}
    if temperature is not None:
        arguments["temperature"] = temperature
    if top_p != 1.0:
        arguments["top_p"] = top_p
    if not adapters:
        arguments["adapters"] = False
    return passes.forward_logprobs(batch, **arguments)


def as_forward_passes(model: nn.Module | ForwardPasses, cfg: TrainerConfig) -> ForwardPasses:
    """`ForwardPasses` of a model in this process; a backend is returned as it is."""
    return ModelPasses(model, cfg) if isinstance(model, nn.Module) else model


def can_skip_logits(model: nn.Module, cfg: TrainerConfig) -> bool:
    """Whether log-probabilities of `model` are computed without its logits. One warning says why
    not, if the settings ask for it. Runs the model on a few tokens."""
    if cfg.logits == "full":
        return False
    try:
        if not cfg.cast_logits_to_fp32:
            raise ConfigError("cast_logits_to_fp32=False computes log-probabilities in the dtype of the logits")
        layer = OutputLayer.of(model)
    except ConfigError as error:
        if cfg.logits == "chunked":
            _warn(str(error))
        return False
    if cfg.logits == "auto" and cfg.micro_token_budget * len(layer.weight) < CHUNKED_FROM:
        return False
    reason = _find_difference(model, layer)
    if reason is not None:
        _warn(reason)
    return reason is None


def trains_without_logits(algo: RLAlgorithm, cfg: TrainerConfig) -> bool:
    """Whether the loss of `algo` can be computed without logits. With `logits="chunked"`, a warning
    says why not."""
    loss = adapted_loss(algo)
    parameters = inspect.signature(algo.compute_loss).parameters
    takes_it = "chunked_logits" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if loss.reads_shared_only and takes_it:
        return True
    if cfg.logits == "chunked":
        _warn(f"{loss_name(loss)} reads logits" if takes_it else f"compute_loss of {algo.name} does not take chunked_logits")
    return False


@torch.no_grad()
def _find_difference(model: nn.Module, layer: OutputLayer) -> str | None:
    """What the model's logits have that `layer` does not know; None if they are equal.

    First the layer returns values of our own, of all sizes, and the model shows what it does with
    them. Then it returns its own, and the products are compared.
    """
    inner = unwrap_model(model)
    ids = torch.arange(CHECKED_TOKENS, device=layer.weight.device)[None] % len(layer.weight)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    kind = type(inner).__name__
    try:
        with preserved_rng(), evaluation_mode(model), torch.autocast(layer.weight.device.type, enabled=False):
            probe = layer.probe(CHECKED_TOKENS)
            with layer.replaced_output(probe):
                changed = gather_tensor(forward_logits(inner, batch))
            with layer.captured_inputs(skip=False) as seen:
                logits = gather_tensor(forward_logits(inner, batch))
            with layer.captured_inputs(skip=True):
                skipped = forward_logits(inner, batch)
            unshard(model, layer.module)
    except Exception as error:
        return f"{kind} does not run without its output layer ({type(error).__name__}: {error})"
    if len(seen) != 1 or seen[0].shape[:2] != ids.shape or skipped.shape[:2].numel() > 1:
        return f"{kind} does not call its output layer once on all tokens"
    if not _nearly_equal(layer.transform(probe), changed, rounded=ROUNDED):
        return f"{kind} changes its logits behind the output layer in another way than its configuration says"
    if not logits.isfinite().all():
        return f"{kind} has logits that are not finite"
    try:
        products = layer.products(gather_tensor(seen[0])[0])
    except ConfigError as error:
        return str(error)
    pairs = zip(products.inputs, products.weights, strict=True)
    sums = sum((inputs.float() @ weights.float().T for inputs, weights in pairs), torch.zeros(()))
    sums = sums if products.bias is None else sums + products.bias.float()
    equal = _nearly_equal(layer.transform(sums)[None], logits[..., products.columns], rounded=SUMMED)
    if products.shard is not None:  # all ranks make one choice
        equal = not products.shard.largest(torch.tensor(float(not equal), device=logits.device))
    if not equal:
        return f"{kind} has other logits than its output layer"
    return None


def _nearly_equal(ours: torch.Tensor, model: torch.Tensor, *, rounded: float) -> bool:
    if ours.shape != model.shape:
        return False
    tolerance = rounded if model.dtype in (torch.bfloat16, torch.float16) else SAME
    scale = float(model.abs().max().float())
    return bool((ours.float() - model.float()).abs().max() <= tolerance * scale)


@cache
def _warn(reason: str) -> None:
    logger.warning("all logits of a micro-batch are computed, instead of only the logits of its action tokens: %s", reason)
