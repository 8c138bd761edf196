"""`Loss`, the base class of all losses. It also scales the loss of each micro-batch, so that the
sum over micro-batches is the loss of the mini-batch.

A loss is a mean over the samples (or tokens, or pairs) of the micro-batch that it is called on. The
trainer multiplies it by the micro-batch's **share**: the fraction of the mini-batch's samples (or
tokens, or pairs) in this micro-batch. Shares add up to 1, so the sum of the gradients does not
depend on how the mini-batch was split. For the same reason, statistics of the whole mini-batch,
such as a baseline, come from `BatchTotals`.

Example: micro-batches of 3 samples and 1 sample with mean losses 2 and 6 have shares 3/4 and 1/4;
2 * 3/4 + 6 * 1/4 = 3 is the mean over the 4 samples.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ludic.errors import ConfigError, ConfigTypeError, check_value
from ludic.training.loss.batch import Batch, Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import weigh_values
from ludic.user_objects import forward_members

ScoreType = Literal["reward", "logprob"]
"""The score of a sample in a preference pair: the model's single logit (`reward`), or the summed
log-probability of the action (`logprob`)."""


class Loss:
    """A loss function. A subclass sets the flags that differ and overrides one method:

    - `compute_from(shared)`, for a loss that needs only log-probabilities, weights and masks. All
      losses of this package override this one.
    - or `compute(logits, batch)`, with the keyword `shared=None` if it reads the shared context.

    Both return (loss, statistics): a scalar tensor with gradient, and detached scalars by name. The
    statistic `loss` is the detached loss; a different number under that name is logged as
    `reported_loss`.

    Another object with `compute`, or a plain function `(logits, batch)`, works too and can have any
    of these flags; `adapted_loss` wraps it.
    """

    normalizer: Normalizer = "samples"
    """What the loss is a mean over."""
    zero_weight_is_zero_gradient: bool = False
    """Samples with weight 0 have no gradient, so their forward pass can be skipped."""
    reads_shared_only: bool = False
    """The loss reads logits only through `shared`. The backward pass then reuses their memory, and
    samples may share a row; `logits` may be nan without memory (`TrainerConfig.logits`). Set it to
    False on an instance to keep the logits."""
    reads_actions_only: bool = False
    """Of log-probabilities and entropies, the loss reads action tokens alone: others may be 0."""
    reads_scores_only: bool = False
    """Of a reward model's batch, the loss reads the logits [B, 1], one score per sample, `meta` and
    `weight`, and nothing that has a value per token: samples may be concatenated in one row."""
    reads_entropy: bool = False
    """The loss reads `shared.entropy`, which is then computed together with the log-probabilities.
    Without this flag, reading it costs the memory of two more gradients."""
    reads_reference: bool = False
    """The loss reads `shared.reference_logp`: the trainer then scores each macro-batch with its
    reference before it is divided."""
    reads_teacher: bool = False
    """The loss reads `batch["teacher_logits"]`, the logits of the algorithm's teacher."""
    reads_hidden: bool = False
    """The loss reads `batch["hidden"]`, the inputs of the model's output layer, in the layout of
    `input_ids` with one more dimension: [B, T, D] or [1, S, D]."""
    weighs_answers: bool = False
    """The loss weighs whole answers (`shared.weight`), so that their tokens cannot have credit of
    their own."""
    needs_first_pass: bool = False
    """The loss needs sums over all samples of the mini-batch (`first_pass`) before the first
    gradient: the model runs twice, the first time without gradient."""
    gathers: tuple[str, ...] = ()
    """Names under which `first_pass` returns a row for each sample, [B, ...], instead of a sum.
    `BatchTotals.measured` has the rows of all N samples, [N, ...], and `batch["position"]` [B] the
    index of the batch's samples in them."""
    scales_itself: bool = False
    """The result is already multiplied by the micro-batch's share (`CompositeLoss`)."""
    score_type: ScoreType = "reward"
    """How `RMTrainer` scores samples when it evaluates a model trained with this loss."""
    beta: float = 1.0
    """In `RMTrainer`, the probability that the chosen response wins is sigmoid(beta * margin)."""

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        """Return the loss and its statistics. logits: [B, T, V] of a padded batch, [1, S, V] of a
        padding-free batch. Without `shared`, a new context computes the log-probabilities."""
        return self.compute_from(shared or SharedContext(logits, batch, with_entropy=self.reads_entropy))

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        """Return the loss and its statistics from the shared context."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_from(shared) or compute(logits, batch)")

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the samples of a micro-batch, by name. They are added up over all
        micro-batches and ranks, and `BatchTotals.measured` has the totals when the loss is
        computed. Called only with `needs_first_pass`."""
        raise NotImplementedError(f"{type(self).__name__} has needs_first_pass and must define first_pass(logits, batch)")


class ActionLoss(Loss):
    """Base class of losses that read, through the shared context, the action tokens alone."""

    reads_shared_only = True
    reads_actions_only = True


FLAGS = tuple(Loss.__annotations__)


@forward_members("inner", FLAGS)
class AdaptedLoss(Loss):
    """Wraps a user's object or function as a `Loss`. Flags are read from that object; a missing
    flag has the default of `Loss`."""

    def __init__(self, inner: Any, compute: Callable[..., object], *, takes_shared: bool) -> None:
        self.inner = inner
        self._compute, self._takes_shared = compute, takes_shared

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        keywords: dict[str, Any] = {"shared": shared} if self._takes_shared else {}
        result: Any = self._compute(logits, batch, **keywords)  # compute_and_check raises if it is not a pair
        return result

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = self.inner.first_pass(logits, batch)
        return sums


def adapted_loss(owner: Any, *, required: bool = False) -> Loss:
    """Return `owner.loss` as a `Loss`. `owner.loss` itself remains the user's object, which can be
    read, changed and replaced between steps. The adapter is cached until `owner.loss` is replaced.

    None, for an algorithm that computes its own loss, becomes a `Loss` with default flags. With
    `required` it raises ConfigTypeError.
    """
    cached = vars(owner).get("_adapted_loss")
    if cached is None or cached[0] is not owner.loss:
        loss = Loss() if owner.loss is None and not required else as_loss(owner.loss)
        cached = vars(owner)["_adapted_loss"] = (owner.loss, loss)
    adapted: Loss = cached[1]
    return adapted


def as_loss(loss: Any) -> Loss:
    """Return `loss` if it is a `Loss` that takes `shared`; else wrap the object with `compute`, or
    the function. Raises ConfigTypeError for anything else."""
    compute = loss if not hasattr(loss, "compute") else loss.compute
    if not callable(compute):
        raise ConfigTypeError(f"loss ({type(loss).__name__}) must have compute(logits, batch), or be a function (logits, batch)")
    parameters = inspect.signature(compute).parameters
    takes_shared = "shared" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if isinstance(loss, Loss) and takes_shared:
        return loss
    return AdaptedLoss(loss, compute, takes_shared=takes_shared)


def loss_name(loss: Loss) -> str:
    """Return the class name of the loss; for an adapter, the name of the user's class or
    function."""
    inner = loss.inner if isinstance(loss, AdaptedLoss) else loss
    return inner.__name__ if inspect.isroutine(inner) else type(inner).__name__


def scaled_loss(loss: Loss, logits: Tensor, batch: Batch, shared: SharedContext) -> tuple[Tensor, Stats]:
    """Return the loss of a micro-batch times its share of the mini-batch, and its statistics. The
    sum over all micro-batches is the loss of the mini-batch."""
    value, stats = compute_and_check(loss, logits, batch, shared)
    return (value if loss.scales_itself else value * shared.mini_batch_share(loss.normalizer)), stats


def with_reported_loss(value: Tensor, stats: Stats) -> Stats:
    """Add `reported_loss` if the statistic `loss` is another number than `value`, which the trainer
    differentiates and logs as `loss`. It is the same number if both share their memory."""
    reported = stats.get("loss")
    if reported is None or "reported_loss" in stats or (isinstance(reported, Tensor) and reported.data_ptr() == value.data_ptr()):
        return stats
    return {**stats, "reported_loss": reported}


def compute_and_check(loss: Loss, logits: Tensor, batch: Batch, shared: SharedContext) -> tuple[Tensor, Stats]:
    """Call `loss.compute`, and add `reported_loss` to its statistics if it has one. Raises
    ConfigTypeError if the result is not (loss, statistics)."""
    result: object = loss.compute(logits, batch, shared=shared)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigTypeError(f"compute of {loss_name(loss)} returned {type(result).__name__}; return the loss and statistics")
    value, stats = result
    return value, with_reported_loss(value, stats)


def row_mean(values: Tensor, shared: SharedContext, *, length_normalize: bool, normalizer: Normalizer) -> Tensor:
    """Mean of per-token values [B, T - 1] over the action tokens.

    With `normalizer="samples"`: the sum, or with `length_normalize` the mean, over the tokens of
    each sample, then the mean over samples. With `normalizer="tokens"`: one mean over all action
    tokens of the batch (DAPO, arXiv:2503.14476, eq. 8).

    Example: values [[1, 3], [5, 0]] with mask [[1, 1], [1, 0]] give (4 + 5) / 2 = 4.5; with
    `length_normalize` (2 + 5) / 2 = 3.5; over tokens (1 + 3 + 5) / 3 = 3.
    """
    sums = weigh_values(values, shared.token_mask).sum(dim=1)
    if normalizer == "tokens":
        return sums.sum() / shared.token_mask.sum().clamp(min=1.0)
    return (sums / shared.token_counts if length_normalize else sums).mean()


def check_token_normalizer(normalizer: Normalizer, length_normalize: bool) -> None:
    """Raise ConfigError for an unknown normalizer, and for `length_normalize` with "tokens"."""
    check_value("normalizer", normalizer, choices=("samples", "tokens"))
    if normalizer == "tokens" and length_normalize:
        raise ConfigError("normalizer='tokens' and length_normalize=True exclude each other; set only one of them")


def check_clip(low: float | None, high: float) -> None:
    """Raise ConfigError for a negative bound of a clip range; both bounds are distances from 1."""
    for name, value in (("clip_eps_low", low), ("clip_eps_high", high)):
        if value is not None and not value >= 0:
            raise ConfigError(f"{name} must be non-negative, got {value}")
