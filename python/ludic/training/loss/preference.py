"""The Bradley-Terry loss of preference pairs. Shapes: B samples, P pairs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludic.errors import ConfigError, DataError, check_value
from ludic.training.loss.base import Loss, ScoreType
from ludic.training.loss.batch import Batch, Stats, num_rows
from ludic.training.loss.context import SharedContext

logger = logging.getLogger(__name__)

RegularizationType = Literal["l2", "l1"]
ScoreRegularization = Literal["squares", "squared_sum"]

SQUARED_MARGINS = "squared_margins"


@dataclass
class BradleyTerryLoss(Loss):
    """L = mean_p -[y log sigma(z) + (1 - y) log sigma(-z)] + lambda |s_c - s_r| + lambda_s mean_p
    (s_c^2 + s_r^2), or (s_c + s_r)^2, with z = beta (s_c - s_r) and y = label (1 - eps) + eps / 2.

    Bradley and Terry 1952; as a loss of reward models Ouyang et al. 2022 (arXiv:2203.02155), eq. 1.
    s_c and s_r are the scores of the chosen and the rejected sample: the model's single logit, or
    with `score_type="logprob"` the summed log-probability of the action. The second term is a norm
    over all P pairs of the mini-batch, not a mean: it grows with sqrt(P) for l2 and with P for l1.
    The gradient of the l2 norm needs the scores of all pairs, so with several micro-batches the
    model runs twice, the first time without gradient. Nothing is detached.

    The batch needs `meta` with `pair_id`, `role` and `label`. Samples of incomplete pairs are
    ignored.
    """

    beta: float = 1.0
    """Scale of the score difference; the inverse of a temperature."""
    score_type: ScoreType = "reward"
    """`reward`: the scores are logits [B] or [B, 1]. `logprob`: they are sums of log-probabilities
    from logits [B, T, V]."""
    regularization_lambda: float = 0.0
    """Weight of the norm of the score differences."""
    regularization_type: RegularizationType = "l2"
    label_smoothing: float = 0.0
    """eps: 0.1 turns labels of 1 and 0 into 0.95 and 0.05."""
    compile: bool | None = None
    """Accepted for compatibility; has no effect."""
    score_regularization_lambda: float = 0.0
    """Weight of the squared scores. Without it, both scores can drift by a common offset."""
    score_regularization_type: ScoreRegularization = "squares"
    """`squares`: s_c^2 + s_r^2, which draws each score to 0 and so holds the margin, too.
    `squared_sum`: (s_c + s_r)^2, which centres a pair and leaves its margin free (Eisenstein et al.
    2023, arXiv:2312.09244, eq. 2), as `center_rewards_coefficient` of TRL."""

    normalizer = "pairs"

    def __post_init__(self) -> None:
        check_value("score_type", self.score_type, choices=get_args(ScoreType))
        check_value("beta", self.beta, above=0)
        for name in ("regularization_lambda", "score_regularization_lambda"):
            check_value(name, getattr(self, name), least=0)
        check_value("regularization_type", self.regularization_type, choices=get_args(RegularizationType))
        check_value("score_regularization_type", self.score_regularization_type, choices=get_args(ScoreRegularization))
        check_value("label_smoothing", self.label_smoothing, least=0, most=1)

    @property
    def reads_shared_only(self) -> bool:  # type: ignore[override]  # follows from the settings
        """True for `logprob`; for `reward` the loss reads the logits themselves."""
        return self.score_type == "logprob"

    @property
    def reads_actions_only(self) -> bool:  # type: ignore[override]
        """True for `logprob`, the log-probability of the action."""
        return self.score_type == "logprob"

    @property
    def reads_scores_only(self) -> bool:  # type: ignore[override]
        """True for `reward`."""
        return self.score_type == "reward"

    @property
    def needs_first_pass(self) -> bool:  # type: ignore[override]
        """True for an l2 norm: the root of a sum over all pairs is not a sum over micro-batches."""
        return self.regularization_lambda > 0 and self.regularization_type == "l2"

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the sum of the squared score differences."""
        chosen, rejected, _ = self._pair_scores(SharedContext(logits, batch))
        return {SQUARED_MARGINS: (chosen - rejected).square().sum()}

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        chosen, rejected, label = self._pair_scores(shared)
        if not len(label):
            names = ["loss", "accuracy", "chosen_score", "rejected_score", "margin", "num_pairs"]
            names += ["score_reg"] if self.score_regularization_lambda > 0 else []
            return shared.zero(), dict.fromkeys(names, chosen.new_zeros(()))
        margin = self.beta * (chosen - rejected)
        target = label * (1 - self.label_smoothing) + self.label_smoothing / 2
        loss = -(target * logsigmoid(margin) + (1 - target) * logsigmoid(-margin)).mean()
        if self.regularization_lambda > 0:
            loss = loss + self.regularization_lambda * self._norm(chosen - rejected, shared)
        centres = self.score_regularization_type == "squared_sum"
        squares = ((chosen + rejected).square() if centres else chosen.square() + rejected.square()).mean()
        if self.score_regularization_lambda > 0:
            loss = loss + self.score_regularization_lambda * squares
        stats: Stats = {
            "loss": loss.detach(),
            "accuracy": torch.where(target > 0.5, margin > 0, margin < 0).float().mean(),  # a tie is wrong
            "chosen_score": chosen.detach().mean(),
            "rejected_score": rejected.detach().mean(),
            "margin": margin.detach().mean(),
            "num_pairs": loss.new_tensor(float(len(label))).detach(),
        }
        if self.score_regularization_lambda > 0:
            stats["score_reg"] = self.score_regularization_lambda * squares.detach()
        return loss, stats

    def _pair_scores(self, shared: SharedContext) -> tuple[Tensor, Tensor, Tensor]:
        """[P] scores of the chosen samples, [P] of the rejected ones, [P] labels."""
        scores = preference_scores(shared, self.score_type)
        chosen, rejected, labels = find_pairs(shared.batch)
        return scores[chosen], scores[rejected], scores.new_tensor(labels)

    def _norm(self, difference: Tensor, shared: SharedContext) -> Tensor:
        """Return this micro-batch's part of the norm over the mini-batch, divided by the share that
        the loss is multiplied by later.

        l1, sum_i |d_i|: the part is the sum over this micro-batch. l2, n = sqrt(sum_i d_i^2): the
        part is sum_k d_k^2 / n with the gradient d_k / n.

        Example: differences 3 and 4 in two micro-batches have n = 5 and the parts 9/5 and 16/5,
        which add up to 5, with gradients 3/5 and 4/5.
        """
        share = shared.mini_batch_share(self.normalizer)
        if self.regularization_type == "l1":
            return difference.abs().sum() / share
        squares = difference.square().sum()
        totals, pairs = shared.totals, len(difference)
        if SQUARED_MARGINS not in totals.measured and totals.num_pairs > pairs:
            raise ConfigError(
                f"the l2 norm needs {SQUARED_MARGINS} of all {totals.num_pairs:.0f} pairs, not {pairs}; set regularization_type='l1'"
            )
        total = totals.measured.get(SQUARED_MARGINS, squares.detach()).to(squares)
        norm = total.sqrt().clamp(min=torch.finfo(squares.dtype).tiny)
        return (squares + squares.detach()) / (2 * norm) / share


def preference_scores(shared: SharedContext, score_type: ScoreType) -> Tensor:
    """[B] score of each sample, in float32 or wider. Raises DataError unless the model returns one
    logit per sample."""
    if score_type == "logprob":
        return shared.logp_action()
    logits, rows = shared.logits, num_rows(shared.batch)
    if logits.shape not in ((rows,), (rows, 1)):
        raise DataError(f"logits must be [{rows}] or [{rows}, 1], got {tuple(logits.shape)}; load the model with num_labels=1")
    return logits.reshape(rows).to(torch.promote_types(logits.dtype, torch.float32))


Index = slice | list[int]


def find_pairs(batch: Batch) -> tuple[Index, Index, list[float]]:
    """Return the rows of the chosen samples, the rows of the rejected samples, and the labels of
    the complete pairs.

    Example: pair ids [p, q, p, q] with roles [chosen, chosen, rejected, rejected] give [0, 1],
    [2, 3] and two labels. Pairs in neighbouring rows, chosen first, as in [p, p, q, q], give
    slices.
    """
    meta: Mapping[str, Sequence[Any]] = batch.get("meta") or {}
    rows = num_rows(batch)
    pair_ids, roles, labels = columns = [list(meta.get(key, ())) for key in ("pair_id", "role", "label")]
    for key, column in zip(("pair_id", "role", "label"), columns, strict=True):
        if len(column) != rows:
            entries = f"meta[{key!r}] of the batch has {len(column)} entries for {rows} samples"
            raise DataError(f"{entries}; collate it with collate_preference_items")
    if (
        rows % 2 == 0
        and roles == ["chosen", "rejected"] * (rows // 2)
        and pair_ids[::2] == pair_ids[1::2]
        and labels[::2] == labels[1::2]
        and len(set(pair_ids)) == rows // 2
    ):
        return slice(0, None, 2), slice(1, None, 2), [float(label) for label in labels[::2]]
    rows_by_pair: dict[Any, dict[str, int]] = {}
    for row, (pair_id, role) in enumerate(zip(pair_ids, roles, strict=True)):
        check_value(f"the role of sample {row}", role, error=DataError, choices=("chosen", "rejected"))
        halves = rows_by_pair.setdefault(pair_id, {})
        if role in halves:
            logger.warning("pair %r has two %s samples; the last one counts", pair_id, role)
        halves[role] = row
    for pair_id, halves in rows_by_pair.items():
        pair_labels = {labels[row] for row in halves.values()}
        if len(pair_labels) > 1:
            raise DataError(f"pair {pair_id!r} has conflicting labels {sorted(pair_labels)}; its two samples must have one label")
    complete = [halves for halves in rows_by_pair.values() if len(halves) == 2]
    chosen = [halves["chosen"] for halves in complete]
    return chosen, [halves["rejected"] for halves in complete], [float(labels[row]) for row in chosen]
