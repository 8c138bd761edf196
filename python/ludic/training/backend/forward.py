"""Forward passes of a model in this process, for evaluators and for `TorchBackend`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ludic.inference.local.sampler import nucleus
from ludic.models.evaluation_mode import evaluation_mode
from ludic.models.lora import adapters_off
from ludic.models.positions import pin_rope
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.training.algorithm import forward_for_loss, forward_logits
from ludic.training.backend.futures import TrainFuture
from ludic.training.backend.logits_path import can_skip_logits
from ludic.training.backend.precision import autocast
from ludic.training.backend.protocol import ForwardPasses
from ludic.training.batching.micro_batching import MicroBatch
from ludic.training.config import TrainerConfig
from ludic.training.loss import Loss, SharedContext
from ludic.training.loss.base import ScoreType
from ludic.training.loss.logprobs import mask_values
from ludic.training.loss.preference import preference_scores
from ludic.training.preflight.layouts import can_compute_trees

T = TypeVar("T")


class ReadsActions(Loss):
    """Stands for what reads the log-probabilities of action tokens alone."""

    reads_actions_only = True


class ModelPasses:
    """`ForwardPasses` of a torch model. Each module of the model keeps its mode."""

    def __init__(self, model: nn.Module, cfg: TrainerConfig) -> None:
        self.model, self.cfg = model, cfg
        pin_rope(model, cfg.max_seq_len)

    @cached_property
    def skips_logits(self) -> bool:
        """Whether log-probabilities are computed without logits, where nothing else reads them."""
        return can_skip_logits(self.model, self.cfg)

    @cached_property
    def computes_trees(self) -> bool:
        """Whether micro-batches may be rows of prefix trees. All ranks read it."""
        return can_compute_trees(self.model, self.cfg)

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

    def forward_scores(self, batch: MicroBatch, *, score_type: ScoreType = "reward") -> TrainFuture[Tensor]:
        return self._run("forward_scores", lambda: self._scores(batch, score_type))

    @torch.no_grad()
    def _logprobs(
        self, batch: MicroBatch, temperature: float | None, top_p: float, adapters: bool, actions_only: bool = False
    ) -> Tensor:
        skips = top_p >= 1.0 and self.skips_logits  # decided with the adapters on, whichever call is first
        without = nullcontext() if adapters else adapters_off(self.model)
        with without, evaluation_mode(self.model), autocast(self.cfg):
            divisor = self.cfg.temperature if temperature is None else temperature
            if top_p >= 1.0:
                reads = ReadsActions() if actions_only or PREFIX_TREES in batch.tensors else Loss()
                scored = forward_for_loss(self.model, batch.tensors, reads, chunked_logits=skips, temperature=divisor)
                shared = SharedContext(*scored, temperature=divisor)
            else:
                tensors = {name: value for name, value in batch.tensors.items() if name != PREFIX_TREES}
                logits = forward_logits(self.model, tensors)
                top_p_T = torch.full(logits.shape[1:2], top_p, device=logits.device)
                nuclei = [nucleus(torch.log_softmax(row.float() / divisor, dim=-1), top_p_T) for row in logits]
                shared = SharedContext(torch.stack(nuclei), tensors)
            return mask_values(shared.token_logp, shared.token_mask) if actions_only else shared.token_logp

    @torch.no_grad()
    def _scores(self, batch: MicroBatch, score_type: ScoreType) -> Tensor:
        with evaluation_mode(self.model), autocast(self.cfg):
            chunked = score_type == "logprob" and self.skips_logits
            reads = ReadsActions() if chunked or PREFIX_TREES in batch.tensors else Loss()
            scored = forward_for_loss(self.model, batch.tensors, reads, chunked_logits=chunked)
            return preference_scores(SharedContext(*scored), score_type)


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
