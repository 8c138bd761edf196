"""The critic of PPO: a model of the return from each token on.

It is a second model with its own backend, optimizer and learning rate: a value head on the layers
of the policy, or a model of its own. Before a macro-batch is divided, the critic values all its
action tokens; generalised advantage estimation, over the turns of an episode, makes advantages and
returns of rewards and values. The critic then takes its optimizer steps, on the same mini-batches
as the policy after it.

Shapes: A action tokens of a sample, N samples, S action tokens of all samples.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludic import _core
from ludic.errors import ConfigError, DataError
from ludic.event_loop import TrainFuture
from ludic.models.flops import counting_forward_alone
from ludic.models.output_layer import OutputLayer
from ludic.models.sharding import gather_tensor, get_local, reshard
from ludic.models.wrappers import evaluation_mode, find_text_config, is_classifier, unwrap_transformer
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm, forward_for_loss
from ludic.training.backend.precision import autocast
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch, rows_by_key
from ludic.training.batching.packing import MicroBatch
from ludic.training.batching.token_columns import refuse_columns
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment import PerStepReward
from ludic.training.loss.context import SharedContext
from ludic.training.loss.value import RETURNS, VALUES, CriticSettings, ValueLoss

T = TypeVar("T")
Columns = list[NDArray[np.float64]]
"""[A] or [A, 2] numbers of the action tokens of each row."""


class ValueHead(nn.Module):
    """A linear layer on the inputs of the policy's output layer, [.., T, D] to [.., T, 1]. Its
    values are 0 at first. The policy gets no gradient: its weights are not among the parameters."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self._layer = OutputLayer.of(policy)
        self._policy = (policy,)  # no submodule
        self.head = _zero_linear(self._layer.weight)

    def get_base_model(self) -> nn.Module:
        """The transformer whose layers it reads, as `unwrap_transformer` finds it."""
        inner: nn.Module = unwrap_transformer(self._policy[0])
        return inner

    def forward(self, **inputs: Tensor) -> Tensor:
        policy = self._policy[0]
        with torch.no_grad(), evaluation_mode(policy), self._layer.captured_inputs(skip=True) as seen, counting_forward_alone():
            policy(**inputs)
        hidden = gather_tensor(seen[0]).float()
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden)
        return values


def as_value_model(model: nn.Module) -> nn.Module:
    """A causal model of transformers as a critic: its output layer becomes one output, which is 0
    at first. Changes `model`. Raises ConfigError for a model without an output layer."""
    layer = OutputLayer.of(model)  # refuses other kinds of layers
    if unwrap_transformer(model) is not model:
        raise ConfigError(f"a critic is made of a plain model, not of {type(model).__name__}; add adapters and shards afterwards")
    inner = cast(Any, model)
    head = _zero_linear(layer.weight).to(layer.weight.dtype)
    inner.set_output_embeddings(head)
    inner.config.tie_word_embeddings = False
    config = find_text_config(model)
    for setting, neutral in (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0)):
        if getattr(config, setting, None) is not None:
            setattr(config, setting, neutral)
    return model


def _zero_linear(like: Tensor) -> nn.Linear:
    """[D] to one output, 0 at first, on the device of `like` [V, D]. No random number is drawn."""
    linear = nn.utils.skip_init(nn.Linear, like.shape[1], 1, device=like.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class Critic:
    """The critic of a run. `backend` has its model and optimizer, which checkpoints save."""

    def __init__(self, settings: CriticSettings, model: nn.Module | None, policy: nn.Module, cfg: TrainerConfig) -> None:
        """`model`: one output for each token (`as_value_model`); None means a value head on
        `policy`. Raises ConfigError for a model with more outputs or another vocabulary than the
        policy."""
        self.settings = settings
        if model is not None:
            _check_critic(model, policy)
        critic = ValueHead(policy) if model is None else model
        lr = settings.lr
        if lr is None:  # AdamW moves a value by lr times the sum of |inputs|, which grows with their number
            lr = 1 / critic.head.in_features if isinstance(critic, ValueHead) else cfg.lr
        self.cfg = replace(cfg, lr=lr, logits="full", replay_routing=False, router_aux_coef=0.0)
        algorithm = RLAlgorithm("critic", PerStepReward(), ValueLoss(settings.value_clip))
        self.in_thread = False
        """Whether it computes in a thread: batches are generated meanwhile, which need the event
        loop."""
        self.backend = TorchBackend(critic, self.cfg, algo=algorithm)
        head: Any = critic.head if isinstance(critic, ValueHead) else unwrap_transformer(model).get_output_embeddings()
        with torch.no_grad():  # values that are all 0 do not show whether the layers compute trees
            weight = get_local(head.weight)
            kept = weight.clone()
            weight.copy_(torch.linspace(-1, 1, kept.numel()).view_as(kept))
            self.trees = bool(self.backend.shares_prefixes)
            """Whether its micro-batches may be rows of prefix trees: the same in a resumed run."""
            weight.copy_(kept)
            reshard(self.backend.model)  # the gathered copy has the other weights

    async def values(self, micro_batch: MicroBatch) -> Tensor:
        """[B, T - 1, 2] value before and after each next token, without gradient."""
        return await self._compute(lambda: TrainFuture.of("values", lambda: self._values(micro_batch)))

    async def weigh(self, macro: MacroBatch, scored: Mapping[int, Tensor], *, step: int) -> tuple[MacroBatch, dict[str, float]]:
        """The batch with the advantage of each token in place of the rewards, and statistics over
        all ranks, from `values` [A, 2] of its rows. Trains the critic on it. Raises DataError for
        values that are not finite. All ranks call it."""
        refuse_columns(macro.items, "a critic makes credit of the rewards of steps")
        values = [scored[row].double().cpu().numpy() for row in range(len(macro.items))]
        with ranks.agree("valuing a batch"):
            for row, each in enumerate(values):
                if not np.isfinite(each).all():
                    raise DataError(f"the critic's values of {macro.name(row)} are not all finite; lower critic_lr")
        advantages, returns = self._estimate(macro, values)
        own = [each[:, 0] for each in values]
        stats, (mean, deviation) = _measure(macro, advantages, returns, own, self.cfg.model_device)
        if self.settings.normalize_adv:
            advantages = [(each - mean) / (deviation + 1e-8) for each in advantages]
        macro = macro.with_token_weights(advantages, self.cfg.model_device, **{VALUES: own, RETURNS: returns})
        return macro, {**stats, **await self._train(macro, step)}

    @torch.no_grad()
    def _values(self, micro_batch: MicroBatch) -> Tensor:
        loss, tensors = self.backend.algo.loss, self.backend.images.bind(micro_batch).tensors
        with evaluation_mode(self.backend.model), autocast(self.cfg), self.backend.counting(micro_batch, "values"):
            shared = SharedContext(*forward_for_loss(self.backend.model, tensors, loss))
        return torch.stack([shared.values(), shared.values(after=True)], dim=-1)

    def _estimate(self, macro: MacroBatch, values: Columns) -> tuple[Columns, Columns]:
        """Advantages and returns, [A] for each row, from values [A, 2]. Rows of an episode follow
        each other by their step; with `bootstrap`, an episode that did not terminate goes on with
        the value after its last token. The reward of a step belongs to its last token, of one
        without tokens (`macro.dropped`) to the last token before it."""
        every = [*macro.items, *macro.dropped]
        keys = [(item.meta.get("rollout_id", ("row", row)), item.meta.get("agent_id")) for row, item in enumerate(every)]
        rewards = [np.zeros(len(each)) for each in values]
        order: list[int] = []
        lengths: list[int] = []
        last: list[float] = []
        for steps in rows_by_key(keys):
            steps.sort(key=lambda row: every[row].meta.get("step_index", 0))
            own: list[int] = []
            for row in steps:
                own += [row] if row < len(values) else []
                if own:
                    rewards[own[-1]][-1] += every[row].weight
            if own:
                order += own
                lengths.append(sum(len(values[row]) for row in own))
                goes_on = self.settings.bootstrap and not every[steps[-1]].meta.get("terminated", True)
                last.append(float(values[own[-1]][-1, 1]) if goes_on else 0.0)
        estimated = _core.gae(
            np.concatenate([rewards[row] for row in order]),
            np.concatenate([values[row][:, 0] for row in order]),
            np.array(lengths, dtype=np.int64),
            np.array(last, dtype=np.float64),
            gamma=self.settings.gamma,
            lam=self.settings.lam,
        )
        ends = np.cumsum([len(values[row]) for row in order])[:-1]
        parts = [dict(zip(order, np.split(each, ends), strict=True)) for each in estimated]
        advantages, returns = ([part[row] for row in range(len(values))] for part in parts)
        return advantages, returns

    async def _train(self, macro: MacroBatch, step: int) -> dict[str, float]:
        """Take the critic's optimizer steps; returns its statistics over all ranks."""
        kind = TreeMiniBatch if self.trees else MiniBatch
        loss = clipped = tokens = 0.0
        norms: list[float] = []
        for epoch in range(self.cfg.epochs_per_batch):
            for rows in macro.divide(self.cfg.minibatches_per_batch, seed=self.cfg.seed, step=step, epoch=epoch):
                batch = kind(macro, rows, self.cfg)
                if not len(batch):
                    continue
                result = await self._compute(partial(self.backend.forward_backward, batch, totals=batch.totals))
                stepped = await self._compute(self.backend.optim_step)
                norms.append(stepped["grad_norm"])
                loss += float(result.loss)
                clipped += sum(float(stats["clipped_tokens"]) for stats in result.micro_stats)
                tokens += sum(float(stats["tokens"]) for stats in result.micro_stats)
        loss, clipped, tokens = ranks.sum_over_ranks([loss, clipped, tokens], self.cfg.model_device)
        return {
            "critic/loss": loss / max(len(norms), 1),
            "critic/clip_frac": clipped / max(tokens, 1.0),
            "critic/grad_norm": float(np.mean(norms)) if norms else 0.0,
        }

    async def _compute(self, operation: Callable[[], TrainFuture[T]]) -> T:
        future = await asyncio.to_thread(operation) if self.in_thread else operation()
        return await future.result()


def _check_critic(model: nn.Module, policy: nn.Module) -> None:
    inner, name = unwrap_transformer(model), type(unwrap_transformer(model)).__name__
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    outputs = getattr(head, "out_features", None)
    if is_classifier(model) or outputs != 1:
        raise ConfigError(f"the critic ({name}) must have one output for each token, not {outputs}; use as_value_model(model)")
    known, own = (each.get_input_embeddings().num_embeddings for each in (inner, unwrap_transformer(policy)))
    if known < own:
        raise ConfigError(
            f"the critic's vocabulary ({known} tokens) must be the policy's ({own}); make it from a model with the same tokenizer"
        )


def _measure(
    macro: MacroBatch, advantages: Columns, returns: Columns, values: Columns, device: str
) -> tuple[dict[str, float], tuple[float, float]]:
    """Statistics over the action tokens of all ranks, and mean and standard deviation of the
    advantages. Of equal returns no variance can be explained: there is no `explained_variance`."""
    advantage, target, value = (np.concatenate(each) for each in (advantages, returns, values))
    columns = (advantage, target, value, target - value)
    count, *sums = macro.sum_over_ranks([float(len(target)), *(float(each.sum()) for each in columns)], device)
    means = [each / count for each in sums]
    squares = macro.sum_over_ranks([float(((each - mean) ** 2).sum()) for each, mean in zip(columns, means, strict=True)], device)
    stats = {"critic/return": means[1], "critic/value": means[2]}
    if squares[1] > 0:
        stats["critic/explained_variance"] = 1.0 - squares[3] / squares[1]
    return stats, (means[0], math.sqrt(squares[0] / count))
