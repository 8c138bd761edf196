"""`RLAlgorithm`: credit assignment, preprocessing of batches, and the loss. `presets` has the
named algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, DataError, DataTypeError, shorten_names
from ludic.models.context_parallel import ModelRow
from ludic.models.heads import captured_head, find_padding, select_scores
from ludic.models.images.rows import IMAGES, RowImages
from ludic.models.output_layer import OutputLayer
from ludic.models.packed_attention import first_position, get_attention, make_packed_keywords
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.models.sharding import gather_tensor, is_sharded, unshard
from ludic.models.wrappers import find_text_config, is_classifier, unwrap_transformer
from ludic.training.coefficients import Coefficient
from ludic.training.loss.base import Loss as Loss, adapted_loss, loss_name, scaled_loss
from ludic.training.loss.batch import CANDIDATES, Batch as Batch, BatchTotals, Correction, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.statistics import sum_mismatch, sum_reference
from ludic.training.loss.token_scores import TOKEN_SCORES, LogitScores, TokenScores
from ludic.training.types import TOKEN_WEIGHT, BatchCredit, CreditAssigner, ReferencePolicy, SAWBatch, SAWItem, is_float_array
from ludic.types import group_of, is_list_of, stored

if TYPE_CHECKING:
    from ludic.training.distillation import Distillation
    from ludic.training.loss.value import CriticSettings

PreprocessFn = Callable[[SAWBatch], SAWBatch]
"""Filters or checks a macro-batch before training."""


@dataclass
class RLAlgorithm:
    """Credit assignment, preprocessing, loss and correction under one name.

    The life of a batch:

    1. `RolloutEngine` plays the requests. A scorer (`RewardFunctions`, `RewardModelReward`,
       `RewardModelScorer`) rewards or scores the finished rollouts.
    2. The batch source calls `credit_assigner.compute(rollouts)`, which gives each step one weight,
       and turns the steps into samples (`SAWItem`).
    3. The trainer calls `preprocess(batch)` once per macro-batch, to drop or check samples. With
       `batch_credit`, the weights so far are utilities, and `weigh` makes weights of them; a
       reference scores the samples before, if something reads it.
    4. The trainer packs the samples of each optimizer step into micro-batches. `compute_loss` runs
       the model on one micro-batch and returns the loss times the micro-batch's share of the
       mini-batch. `correction` weights the gradient of each token.
    5. The backend accumulates the gradients of the micro-batches and takes the optimizer step. The
       publisher sends the new weights to the samplers.

    Three numbers are easily confused:

    - A **score** is the output of a reward model for a rollout (`reward_scorer`).
    - A **reward** is what the environment or a reward function gave a step (`reward_functions`). A
      score can be used as a reward.
    - **Credit** is the weight of a step in the loss. `credit_assignment` computes it from rewards
      and scores.
    """

    name: str
    credit_assigner: CreditAssigner
    loss: Loss
    preprocess: PreprocessFn | None = None
    correction: Correction | None = None
    """Corrects for samples drawn by another engine or an older policy; see `loss.correction`. Needs
    a loss with `reads_shared_only`."""
    batch_credit: BatchCredit | None = None
    """Computes the weights from the utilities of a whole macro-batch, before it is divided."""
    critic: CriticSettings | None = None
    """A model of values computes the advantage of each token from the rewards (PPO): the weights so
    far are rewards, each earned by the last token of its step."""
    coefficients: Mapping[str, Coefficient] = field(default_factory=dict)
    """The numbers that controllers may change, by name: `tau`, `beta`."""
    sample_columns: Mapping[str, Callable[[SAWItem], float]] = field(default_factory=dict)
    """Columns of the batch that the loss reads, by name: what the function says of each sample.
    Example: `{"seed_id": lambda item: item.meta["seed_id"]}` gives `batch["seed_id"]` [B]."""
    rescores: Callable[[SAWItem], bool] | None = None
    """Whether a sample's reported log-probabilities belong to another prompt than it is trained on.
    They are replaced by the trainer's own, under the weights that the step begins with."""
    greedy_baseline: bool = False
    """Whether each group has one more answer, the greedy one (`GRPORequestStrategy(greedy=True)`),
    for the credit; `preprocess` leaves it out."""
    distillation: Distillation | None = None
    """Computes the weights of tokens from the credit and the teacher's log-probabilities."""
    teacher: ReferencePolicy | None = None
    """The reference of an algorithm that learns from a teacher. It may be set later, before the
    trainer is made."""

    def __post_init__(self) -> None:
        loss = adapted_loss(self, required=type(self).compute_loss is RLAlgorithm.compute_loss)
        if self.correction is not None and not loss.reads_shared_only:
            raise ConfigError(f"{loss_name(loss)} must read `shared` for a correction ({type(self.correction).__name__})")

    @property
    def reads_reference(self) -> bool:
        """Whether the loss, the batch credit or the distillation reads the log-probabilities of a
        reference."""
        credit = self.batch_credit
        reads = self.distillation is not None or adapted_loss(self).reads_reference
        return reads or (credit is not None and credit.reads_reference)

    @property
    def reads_teacher(self) -> bool:
        """Whether it learns from a teacher."""
        return self.distillation is not None or adapted_loss(self).reads_teacher

    def compute_loss(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        cast_logits_to_fp32: bool = True,
        totals: BatchTotals | None = None,
        temperature: float = 1.0,
        chunked_logits: bool = False,
    ) -> tuple[Tensor, Stats]:
        """Run one forward pass. Returns the loss of the collated batch times its share of `totals`
        (1 without `totals`), and statistics.

        `cast_logits_to_fp32`: compute log-probabilities in float32, chunk by chunk; otherwise in
        the dtype of the logits. `temperature`: the policy is softmax(logits / temperature).
        `chunked_logits`: compute the logits of some tokens of the vocabulary at a time, if the loss
        has `reads_shared_only`. The statistics include the sums of `sum_mismatch` if the batch has
        sampled log-probabilities and the loss computed the current ones.
        """
        formula = adapted_loss(self)
        if formula.reads_teacher:
            batch = {**batch, "teacher_logits": self.teacher.logits(batch)}  # type: ignore[union-attr]  # resolve_reference made sure
        logits, batch = forward_for_loss(
            model, batch, formula, chunked_logits=chunked_logits, temperature=temperature, wide=cast_logits_to_fp32
        )
        shared = SharedContext(
            logits,
            batch,
            totals=totals,
            consume_logits=formula.reads_shared_only,
            wide=cast_logits_to_fp32,
            with_entropy=formula.reads_entropy,
            temperature=temperature,
            correction=self.correction,
        )
        loss, stats = scaled_loss(formula, logits, batch, shared)
        return loss, {**stats, **sum_mismatch(shared), **sum_reference(shared)}


def forward_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits: [B, T, V] of a padded batch, [1, S, V] of a padding-free batch, in which
    position ids separate the sequences, and [1, U, V] of the row of a batch with prefix trees. Of a
    classifier, the scores [B, 1] of the samples.

    A transformers model is called with `use_cache=False`: with a key-value cache it would not
    separate the sequences. The ranks of `batch["context"]` compute the row together, and join it.
    """
    row = ModelRow.of(batch)
    logits = _forward_own(model, row)
    return logits if row.part is None or logits.ndim == 2 else row.join(logits)


def _forward_own(model: nn.Module, row: ModelRow) -> Tensor:
    """`forward_logits` of the tokens that this rank computes: [1, w, V] of its slice of a row."""
    batch, part = row.batch, row.part
    has_cache_setting = hasattr(find_text_config(model), "use_cache")
    keywords: dict[str, Any] = {"use_cache": False} if has_cache_setting else {}
    trees: PrefixTrees | None = batch.get(PREFIX_TREES)
    if trees is not None:
        keywords |= trees.keywords(get_attention(model))
        keywords["position_ids"] = keywords["position_ids"] + first_position(unwrap_transformer(model))
    elif "cu_seqlens" in batch:
        keywords |= make_packed_keywords(model, batch)
    else:
        keywords |= {"attention_mask": batch["attention_mask"]}
        first = first_position(unwrap_transformer(model))
        if first and not is_classifier(unwrap_transformer(model)):  # of an encoder the model's own, as in its servers
            place = torch.arange(first, first + batch["input_ids"].shape[1], device=batch["input_ids"].device)
            keywords["position_ids"] = place.expand_as(batch["input_ids"])
    images: RowImages | None = batch.get(IMAGES)
    if images is not None:
        keywords |= images.keywords(model, batch)
    ids = batch["input_ids"] if trees is None else trees.input_ids
    if part is not None:
        ids, keywords["position_ids"], keywords["row_slice"] = part.cut(ids), part.cut(keywords["position_ids"]), part
    if "cu_seqlens" in batch and is_classifier(unwrap_transformer(model)):
        with captured_head(model) as seen:
            pooled: Tensor = model(input_ids=ids, **keywords).logits
        own = seen[-1][1]
        scores = select_scores(own if part is None else part.join(own), batch, find_padding(model))
        return scores + 0.0 * pooled.sum()  # wrappers begin the backward pass at the model's own output
    output = model(input_ids=ids, **keywords)
    logits: Tensor = output.logits if hasattr(output, "logits") else output
    return logits


def forward_batch(
    model: nn.Module, batch: Batch, *, with_hidden: bool = False, skip_logits: bool = False
) -> tuple[Tensor, Batch]:
    """`forward_logits` and the batch; `with_hidden` adds to it `hidden`, the inputs of the output
    layer, with gradient. No other layer's states are kept. `skip_logits`: the output layer computes
    nothing, and the logits are empty; for `with_hidden` alone."""
    row = ModelRow.of(batch)
    logits, batch = _forward_batch(model, row, batch, with_hidden=with_hidden, skip_logits=skip_logits)
    return logits if row.part is None or logits.ndim == 2 or skip_logits else row.join(logits), batch


def _forward_batch(
    model: nn.Module, row: ModelRow, batch: Batch, *, with_hidden: bool, skip_logits: bool = False
) -> tuple[Tensor, Batch]:
    """`forward_batch` with the logits of this rank alone."""
    if not with_hidden:
        return _forward_own(model, row), batch
    inner = unwrap_transformer(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None:
        raise ConfigError(f"a loss reads hidden states, and {type(inner).__name__} has no output layer (get_output_embeddings)")
    with OutputLayer(head).captured_inputs(skip=skip_logits) as seen:
        logits = _forward_own(model, row)
    return logits, {**batch, "hidden": row.by_token(seen[0])}


def forward_for_loss(
    model: nn.Module, batch: Batch, loss: Loss, *, chunked_logits: bool = False, temperature: float = 1.0, wide: bool = True
) -> tuple[Tensor, Batch]:
    """`forward_scores` with `chunked_logits`, otherwise `forward_batch`. Logits of prefix trees do
    not belong to the samples' tokens: the batch then has `token_scores` made of them, in float32
    unless not `wide`. So have batches that several ranks compute, if the loss reads no logits."""
    if chunked_logits:
        return forward_scores(model, batch, loss, temperature=temperature)
    row = ModelRow.of(batch)
    logits, batch = _forward_batch(model, row, batch, with_hidden=loss.reads_hidden)
    if (row.part is None and row.places is None) or logits.ndim == 2:  # scores belong to the samples
        return logits, batch
    # A critic's values belong to the tokens.
    if logits.shape[-1] == 1 or (row.part is not None and (CANDIDATES in batch or not loss.reads_shared_only)):
        return row.by_token(logits), batch
    scores = LogitScores(
        logits,
        batch["input_ids"],
        row.places,
        part=row.part,
        mask=batch["action_mask"] if loss.reads_actions_only else None,
        temperature=temperature,
        with_entropy=loss.reads_entropy,
        wide=wide,
    )
    return scores.placeholder, {**batch, TOKEN_SCORES: scores}


def forward_scores(model: nn.Module, batch: Batch, loss: Loss | None = None, *, temperature: float = 1.0) -> tuple[Tensor, Batch]:
    """Run the model without its output layer. Returns nan in place of the logits, and the batch
    with `token_scores`, from which a `SharedContext` computes what `loss` reads; without a loss,
    the log-probabilities of all tokens."""
    layer, row = OutputLayer.of(model), ModelRow.of(batch)
    sharded = is_sharded(model)
    with layer.captured_inputs(skip=True) as seen:
        empty = _forward_own(model, row)
    if sharded:
        unshard(model, layer.module)
    states = gather_tensor(seen[0])
    scores = TokenScores(
        states,
        layer,
        batch["input_ids"],
        mask=batch["action_mask"] if loss is not None and loss.reads_actions_only else None,
        temperature=temperature,
        with_entropy=loss is not None and loss.reads_entropy,
        places=row.places,
        part=row.part,
        anchor=empty if sharded else None,
    )
    hidden = {"hidden": row.by_token(states)} if loss is not None and loss.reads_hidden else {}
    return scores.placeholder, {**batch, TOKEN_SCORES: scores, **hidden}


def compose_preprocess(*fns: PreprocessFn) -> PreprocessFn:
    """Return a function that applies `fns` from left to right."""

    def composed(batch: SAWBatch) -> SAWBatch:
        for fn in fns:
            batch = fn(batch)
        return batch

    return composed


def validate_actor_logps(saw_batch: SAWBatch) -> SAWBatch:
    """Return the batch if every sample has one sampled log-probability per action token, as
    importance ratios need.

    Raises DataError for a sample with a wrong number of them or with none, DataTypeError for values
    that are not numbers.
    """
    missing = []
    for index, item in enumerate(saw_batch.items):
        attached = item.attachments.actor_logps
        if attached is None:
            missing.append(index)
            continue
        logps, actions = stored(attached, "token_logps"), int(np.count_nonzero(stored(item, "action_mask")))
        if len(logps) != actions:
            raise DataError(f"actor_logps length mismatch in sample {index}: {len(logps)} values for {actions} action tokens")
        if not (is_list_of(logps, float, int) or is_float_array(logps)):
            raise DataTypeError(f"actor_logps of sample {index} must be a List[float] or float array, got {type(logps).__name__}")
    if missing:
        names = f"{len(missing)} of {len(saw_batch.items)} samples ({shorten_names(missing, limit=3)})"
        raise DataError(f"{names} have no actor_logps; sample with ReturnSpec.for_rl() or set Sample.rollout_log_probs")
    return saw_batch


def drop_zero_weight_samples(saw_batch: SAWBatch, *, eps: float = 1e-4) -> SAWBatch:
    """Keep only the samples with |weight| > eps, of the sample or of one of its tokens. Changes
    `saw_batch.items`.

    A loss that is a mean over samples then weights the remaining samples more. The trainer's
    `skip_zero_weight` saves the same work without changing the gradient.
    """
    _check_eps(eps)
    saw_batch.items = [item for item in saw_batch.items if item.largest_weight > eps]
    return saw_batch


def filter_zero_variance_groups(saw_batch: SAWBatch, *, eps: float = 1e-6) -> SAWBatch:
    """Drop the groups in which the sample standard deviation of the weights is at most `eps`: they
    have no learning signal.

    Samples with the same `meta["request_meta"]["group_id"]` form a group. Groups of one sample and
    samples without a group are kept. The order does not change.
    `saw_batch.meta["zvp_filter_frac"]` is set to the fraction of groups that were dropped. Changes
    `saw_batch.items`.
    """
    _check_eps(eps)
    weights: dict[Any, list[float]] = {}
    for item in saw_batch.items:
        group = group_of(item.meta)
        if group is not None:
            weights.setdefault(group, []).extend(np.atleast_1d(item.attachments.token_columns.get(TOKEN_WEIGHT, item.weight)))
    if not weights:
        return saw_batch
    dropped = {group for group, values in weights.items() if len(values) > 1 and float(np.std(values, ddof=1)) <= eps}
    saw_batch.items = [item for item in saw_batch.items if group_of(item.meta) not in dropped]
    saw_batch.meta["zvp_filter_frac"] = len(dropped) / len(weights)
    return saw_batch


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ConfigError(f"eps must be >= 0, got {eps}")


def __getattr__(name: str) -> Any:
    """Make the `make_` functions of `presets` importable from this module, too; `presets` imports
    this module, so they are looked up on access."""
    from ludic.training import presets

    if name in {preset.function for preset in presets.PRESETS.values()}:
        return getattr(presets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
