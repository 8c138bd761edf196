"""Decides whether a run computes log-probabilities without logits (`loss.token_scores`).

The choice depends on the settings, the model and the weights that it has at the first pass: all
ranks make the same one, once, for all micro-batches. It is the same after a resume, unless the
logits of one of the two are not finite.
"""

from __future__ import annotations

import inspect
import logging

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.models.evaluation_mode import evaluation_mode
from ludic.models.output_layer import OutputLayer
from ludic.models.published import unwrap_model
from ludic.models.sharding import gather_tensor, unshard
from ludic.training.algorithm import RLAlgorithm, forward_logits
from ludic.training.config import TrainerConfig
from ludic.training.loss.base import adapted_loss, loss_name
from ludic.training.rng import preserved_rng

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
_said: set[str] = set()
"""Warnings that have been logged."""


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


def _warn(reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        logger.warning("all logits of a micro-batch are computed, instead of only the logits of its action tokens: %s", reason)
