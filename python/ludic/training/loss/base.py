"""`Loss`, the base class of all losses, and how the losses of micro-batches add up to that of the
unsplit mini-batch.

A loss is the mean over the samples (or tokens, or pairs) of the batch that it is called on. The
trainer calls it on micro-batches and multiplies each result by the micro-batch's **share** of the
mini-batch. The shares add up to 1, so the gradients add up to that of the unsplit batch.
Statistics over "the batch", such as a baseline, come from `BatchTotals` for the same reason.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ludic.errors import ConfigError, ConfigTypeError
from ludic.training.loss.batch import Batch, Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.functional import mask_values

ScoreType = Literal["reward", "logprob"]
"""What scores a sample of a preference pair: the model's one logit, or the summed log-probability
of the action."""


class Loss:
    """One formula. A subclass sets the flags that differ and overrides one method:

    - `compute_from(shared)`, for a loss that needs log-probabilities, weights and masks alone; all
      losses of this package do so;
    - or `compute(logits, batch)`, with `shared=None` as a keyword if it wants the context.

    Either returns (the loss, statistics): a scalar tensor with gradient and detached scalars by
    name. `loss` among the statistics is the detached loss; another number under that name is
    logged as `reported_loss`.

    An object that is no `Loss` but has `compute`, or a plain function `(logits, batch)`, works too,
    and may have any of these flags: `adapted_loss` wraps the loss of an algorithm or a term.
    """

    normalizer: Normalizer = "samples"
    """What the loss is a mean over."""
    zero_weight_is_zero_gradient: bool = False
    """A sample of weight 0 adds nothing to the gradient, so its forward pass can be skipped."""
    reads_shared_only: bool = False
    """The logits are read through `shared` alone. Their memory is then reused in the backward pass,
    and samples may share a row. Set it to False on an instance to keep the logits."""
    reads_entropy: bool = False
    """`shared.entropy` is read, so it is computed together with the log-probabilities. Reading it
    without this flag costs the memory of two more gradients."""
    needs_first_pass: bool = False
    """The loss must see every sample of the mini-batch before it can be computed on any: the model
    runs twice, first without gradient for `first_pass`."""
    scales_itself: bool = False
    """The result is multiplied by the micro-batch's share already (`CompositeLoss`)."""
    score_type: ScoreType = "reward"
    """How `RMTrainer` scores samples when it evaluates a model trained with this loss."""
    beta: float = 1.0
    """`RMTrainer` takes sigma(beta * margin) as the probability that the chosen response wins."""

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        """The loss and its statistics on a batch: logits [B, T, V] of a padded batch, [1, S, V] of
        a padding-free one. Without `shared` it computes log-probabilities of its own."""
        return self.compute_from(shared or SharedContext(logits, batch, with_entropy=self.reads_entropy))

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        """The loss and its statistics from the shared context."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_from(shared) or compute(logits, batch)")

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over the samples of a micro-batch. Their totals over all micro-batches and ranks are
        in `BatchTotals.measured` when the loss is computed. Called only with `needs_first_pass`."""
        raise NotImplementedError(f"{type(self).__name__} has needs_first_pass and must define first_pass(logits, batch)")


FLAGS = tuple(name for name in Loss.__annotations__)


class AdaptedLoss(Loss):
    """A `Loss` around a user's object or function. Flags are read from that object, with the
    defaults of `Loss`."""

    def __init__(self, inner: Any, compute: Callable[..., object], *, takes_shared: bool) -> None:
        self.inner = inner
        self._compute, self._takes_shared = compute, takes_shared

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        keywords: dict[str, Any] = {"shared": shared} if self._takes_shared else {}
        result: Any = self._compute(logits, batch, **keywords)  # compute_and_check refuses what is no pair
        return result

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = self.inner.first_pass(logits, batch)
        return sums


def _flag_of_inner(flag: str) -> property:
    return property(lambda self: getattr(self.inner, flag, getattr(Loss, flag)))


for _flag in FLAGS:
    setattr(AdaptedLoss, _flag, _flag_of_inner(_flag))


def adapted_loss(owner: Any) -> Loss:
    """`owner.loss` as a `Loss`. `owner` keeps the user's object under that name, so it can be read,
    changed and replaced between steps; the adapter is remembered until it is replaced."""
    remembered = vars(owner).get("_adapted_loss")
    if remembered is None or remembered[0] is not owner.loss:
        loss = Loss() if owner.loss is None else as_loss(owner.loss)  # None: a subclass computes its own
        remembered = vars(owner)["_adapted_loss"] = (owner.loss, loss)
    adapted: Loss = remembered[1]
    return adapted


def as_loss(loss: Any) -> Loss:
    """`loss` itself if it is a `Loss` that takes `shared`; else the object with `compute`, or the
    function, as one. Raises ConfigTypeError for anything else."""
    compute = loss if not hasattr(loss, "compute") else loss.compute
    if not callable(compute):
        raise ConfigTypeError(f"loss ({type(loss).__name__}) must have compute(logits, batch), or be such a function")
    parameters = inspect.signature(compute).parameters
    takes_shared = "shared" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if isinstance(loss, Loss) and takes_shared:
        return loss
    return AdaptedLoss(loss, compute, takes_shared=takes_shared)


def loss_name(loss: Loss) -> str:
    """The name of the loss's class, or of the user's class or function inside."""
    inner = loss.inner if isinstance(loss, AdaptedLoss) else loss
    return inner.__name__ if inspect.isroutine(inner) else type(inner).__name__


def scaled_loss(loss: Loss, logits: Tensor, batch: Batch, shared: SharedContext) -> tuple[Tensor, Stats]:
    """The loss of a micro-batch times its share of the mini-batch: summed over the micro-batches
    it is the unsplit loss."""
    value, stats = compute_and_check(loss, logits, batch, shared)
    stats = _with_reported_loss(value, stats)
    return (value if loss.scales_itself else value * shared.mini_batch_share(loss.normalizer)), stats


def _with_reported_loss(value: Tensor, stats: Stats) -> Stats:
    """The trainer logs what it differentiates as `loss`. A different number that the loss reports
    under that name is logged as `reported_loss`; the same number shares its memory with `value`."""
    reported = stats.get("loss")
    if reported is None or (isinstance(reported, Tensor) and reported.data_ptr() == value.data_ptr()):
        return stats
    return {**stats, "reported_loss": reported}


def compute_and_check(loss: Loss, logits: Tensor, batch: Batch, shared: SharedContext) -> tuple[Tensor, Stats]:
    """`loss.compute`. Raises ConfigTypeError for a result that is no (loss, statistics)."""
    result: object = loss.compute(logits, batch, shared=shared)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigTypeError(
            f"compute of {loss_name(loss)} returned {type(result).__name__}; it must return the loss and its statistics: "
            '`return loss, {"loss": loss.detach()}`'
        )
    return result


def row_mean(values: Tensor, shared: SharedContext, *, length_normalize: bool, normalizer: Normalizer) -> Tensor:
    """Mean of per-token values [B, T - 1] over the actions.

    By row, the sum or (`length_normalize`) the mean, then the mean over rows. With
    `normalizer="tokens"` one mean over all action tokens of the batch (DAPO, arXiv:2503.14476,
    eq. 8).
    """
    sums = mask_values(values, shared.token_mask).sum(dim=1)
    if normalizer == "tokens":
        return sums.sum() / shared.token_mask.sum().clamp(min=1.0)
    return (sums / shared.token_counts if length_normalize else sums).mean()


def check_token_normalizer(normalizer: Normalizer, length_normalize: bool) -> None:
    """Raise ConfigError for an unknown normalizer, or for two means at once."""
    if normalizer not in ("samples", "tokens"):
        raise ConfigError(f"normalizer ({normalizer!r}) must be 'samples' or 'tokens'")
    if normalizer == "tokens" and length_normalize:
        raise ConfigError("normalizer='tokens' and length_normalize=True exclude each other; choose one mean")


def check_clip(low: float | None, high: float) -> None:
    """Raise ConfigError for a negative side of a clip range; both are distances from 1."""
    for name, value in (("clip_eps_low", low), ("clip_eps_high", high)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} must be non-negative, got {value}")


def check_ratio_clip(ratio_clip: float | None) -> None:
    """Raise ConfigError for a cap on ratios that is not positive."""
    if ratio_clip is not None and ratio_clip <= 0:
        raise ConfigError(f"ratio_clip must be positive, got {ratio_clip}; None turns it off")
