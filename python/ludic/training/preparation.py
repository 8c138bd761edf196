"""What a training step computes on the whole macro-batch before it is divided: log-probabilities of
other policies, and the weights of a batch credit.

Weights that compare samples with each other must be computed here: computed micro-batch by
micro-batch they would depend on the split. Log-probabilities take one forward pass over all
samples, and each token keeps its value in any layout:

- `proximal_logps`: under the weights at the start of the step. In the first optimizer step of a
  batch these are the current ones. From the second on (`minibatches_per_batch`,
  `epochs_per_batch`) the ratio of policy to sampler includes the updates since then, and a
  correction must not correct for these. A correction with a bound (`M2PO`) reads them too.
- `reference_logps`: under a reference that does not change during training.
- `actor_logps`: the sampled ones, where some are replaced (`RLAlgorithm.rescores`).
- `token_weight`: the weights of tokens that a teacher's log-probabilities make
  (`RLAlgorithm.distillation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import DataError, DataKeyError
from ludic.training import ranks
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.token_columns import refuse_columns
from ludic.training.credit_assignment import group_key
from ludic.training.info_seed.seed_tags import SEED_ID
from ludic.training.info_seed.weight_entropies import sum_weight_entropies
from ludic.training.loop.state import TrainerState
from ludic.training.loss.base import adapted_loss
from ludic.training.loss.batch import LOG_RATIO_BOUND
from ludic.training.loss.context import SAMPLE_LOGPS
from ludic.training.reference import computes_trees
from ludic.training.scoring import add_token_column, own_forward, reference_forward, score_rows
from ludic.training.types import TOKEN_WEIGHT, BatchCredit, CandidateGroups, Candidates, SAWItem, Weighed
from ludic.types import stored

if TYPE_CHECKING:
    from ludic.training.distillation import Distillation, Teachers


@dataclass(frozen=True)
class Prepared:
    """A macro-batch that can be divided."""

    macro: MacroBatch
    stats: Mapping[str, float] = field(default_factory=dict)
    """Statistics over all ranks, by the keys of docs/metrics.md."""
    groups: CandidateGroups | None = None
    """The groups of the batch credit, for controllers."""
    trains_policy: bool = True
    """False while only a critic is trained."""


def skips_zero_weight(run: TrainerState) -> bool:
    """Whether samples of weight 0 need no forward pass."""
    return run.cfg.skip_zero_weight and adapted_loss(run.algo).zero_weight_is_zero_gradient


async def prepare(run: TrainerState, macro: MacroBatch, batch_number: int | None = None) -> Prepared:
    """Replace the log-probabilities of samples that were drawn with another prompt, score the
    samples with the reference if something reads it and not all of them bring its
    log-probabilities, then weigh them, then add the log-probabilities that the step begins with if
    a correction needs them later. Those are logged too, of the batches that the log is for. Raises
    DataError for a batch to replay in which no sample has routes."""
    if run.cfg.replay_routing and macro.items and macro.routed is None:
        raise DataError("no sample has routes; sample with keep_routes, or leave trainer.replay_routing off")
    stats: dict[str, float] = {}
    if run.algo.rescores is not None:
        macro = await _rescore(run, macro, run.algo.rescores)
    if run.algo.reads_reference:
        logps = _read_attached(run, macro)
        scored = float(len(macro.items)) if logps is None else 0.0
        logps = await _score_reference(run, macro) if logps is None else logps
        macro = replace(macro, token_columns={**macro.token_columns, "reference_logps": logps})
        stats["reference/scored"] = macro.sum_over_ranks([scored], run.cfg.model_device)[0]
    groups = None
    if run.algo.batch_credit is not None:
        weighed = _weigh(run, run.algo.batch_credit, macro)
        macro = replace(
            macro, table=macro.table.with_weights(weighed.weights), sample_columns={**macro.sample_columns, **weighed.columns}
        )
        stats |= weighed.stats
        groups = weighed.groups
    if run.critic is not None:
        run.critic.in_thread = run.source.overlaps
        rows, trees = np.arange(len(macro.items)), run.critic.trees
        scored_rows = await score_rows(macro, rows, run.critic.cfg, run.critic.values, trees=trees, width=(2,))
        macro, measured = await run.critic.weigh(macro, scored_rows, step=run.current_step)
        stats |= measured
    if run.algo.sample_columns:
        facts = {name: np.array([read(item) for item in macro.items]) for name, read in run.algo.sample_columns.items()}
        macro = replace(macro, sample_columns={**macro.sample_columns, **facts})
        stats |= _measure_seeds(run, macro)
    bound, distills = getattr(run.algo.correction, "bound", None), run.algo.distillation is not None
    several = run.cfg.minibatches_per_batch * run.cfg.epochs_per_batch > 1
    if bound is not None or (run.algo.correction is not None and (distills or several)):
        skips = bound is None and not distills and skips_zero_weight(run)
        trees = computes_trees(run.backend)
        macro = await add_token_column(macro, "proximal_logps", run.cfg, own_forward(run), skip_zero_weight=skips, trees=trees)
        if bound is not None:
            bounds = np.full(len(macro.items), bound(_gather_log_ratios(run, macro)))
            macro = replace(macro, sample_columns={**macro.sample_columns, LOG_RATIO_BOUND: bounds})
    if run.algo.distillation is not None:
        macro = _distil(run, macro, run.algo.distillation)
    await _log_tokens(run, macro, run.current_step if batch_number is None else batch_number)
    trains_policy = run.critic is None or run.current_step >= run.critic.settings.warmup_steps
    return Prepared(macro, stats, groups, trains_policy)


def _measure_seeds(run: TrainerState, macro: MacroBatch) -> dict[str, float]:
    """Statistics of InfoSeed over all ranks: the share of the samples with a seed, and with
    listwise weights how the weights of plain and of seeded answers are spread."""
    if SEED_ID not in macro.sample_columns:
        return {}
    seeds = macro.sample_columns[SEED_ID]
    seeded, total = macro.sum_over_ranks([float((seeds >= 1).sum()), float(len(seeds))], run.cfg.model_device)
    stats = {"seed/seeded_frac": seeded / max(total, 1.0)}
    weights = macro.sample_columns.get("listwise_weight")
    if weights is not None:
        groups = _number(_read_groups(macro))
        plain, tagged, count = macro.sum_over_ranks(list(sum_weight_entropies(weights, groups, seeds)), run.cfg.model_device)
        if count:
            stats["seed/plain_entropy"], stats["seed/seeded_entropy"] = plain / count, tagged / count
            stats["seed/entropy_gap"] = (plain - tagged) / count
    return stats


def _read_attached(run: TrainerState, macro: MacroBatch) -> dict[int, Tensor] | None:
    """Row -> [A] log-probabilities of the reference that the samples bring; None unless all of them
    do, on all ranks. Raises DataError for another number than the sample has action tokens."""
    logps = [item.attachments.reference_logps for item in macro.items]
    missing = float(any(each is None for each in logps))
    if (missing if macro.share is not None else ranks.max_over_ranks([missing], run.cfg.model_device)[0]) > 0:
        return None
    found = {}
    for row, (item, each) in enumerate(zip(macro.items, logps, strict=True)):
        actions = int(np.count_nonzero(stored(item, "action_mask")))
        if each is None or len(each) != actions:
            raise DataError(f"{macro.name(row)} has {len(each or ())} reference_logps for {actions} action tokens")
        found[row] = _as_column(item, each, run)
    return found


def _predicted(item: SAWItem, logps: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
    """[A] log-probabilities of the predicted action tokens: the first token of a sample has no
    prediction."""
    return np.asarray(logps, dtype=np.float64)[int(stored(item, "action_mask")[0] == 1) :]


def _as_column(item: SAWItem, logps: Sequence[float] | NDArray[Any], run: TrainerState) -> Tensor:
    """[A] float32, `_predicted` on the device of the model."""
    return torch.from_numpy(_predicted(item, logps).astype(np.float32)).to(run.cfg.model_device)


def _sampled(run: TrainerState, macro: MacroBatch) -> Mapping[int, Tensor]:
    """Row -> [A] sampled log-probabilities. Raises DataKeyError for a sample without them."""
    if "actor_logps" in macro.token_columns:
        return macro.token_columns["actor_logps"]
    found = {}
    for row, item in enumerate(macro.items):
        if item.attachments.actor_logps is None:
            raise DataKeyError(f"{macro.name(row)} has no actor_logps; {SAMPLE_LOGPS}")
        found[row] = _as_column(item, stored(item.attachments.actor_logps, "token_logps"), run)
    return found


def _gather_log_ratios(run: TrainerState, macro: MacroBatch) -> Tensor:
    """[N] proximal_logps - actor_logps of the action tokens of all ranks, as losses compute it."""
    own = macro.token_columns["proximal_logps"]
    with ranks.agree("reading the sampled log-probabilities"):
        sampled = _sampled(run, macro)
    ratios = torch.cat([torch.zeros(0), *(own[row].float().cpu() - sampled[row].cpu() for row in sampled)])
    if macro.share is not None:
        return ratios
    everyone = torch.cat(ranks.gather_padded(ratios.to(run.cfg.model_device), math.nan)).cpu()
    return everyone[~everyone.isnan()]


async def _rescore(run: TrainerState, macro: MacroBatch, rescores: Callable[[SAWItem], bool]) -> MacroBatch:
    """The batch, with the trainer's own log-probabilities in place of those that the sampler
    reported for samples which `rescores` names."""
    has_logps = macro.table.has_actor_logps
    rows = np.flatnonzero([has_logps and rescores(item) for item in macro.items])
    if not macro.sum_over_ranks([float(len(rows))], run.cfg.model_device)[0]:
        return macro
    own = await score_rows(macro, rows, run.cfg, own_forward(run), trees=computes_trees(run.backend))
    if not has_logps:  # other ranks' samples have
        return macro
    logps = {**_sampled(run, macro), **{int(row): own[int(row)] for row in rows}}
    facts = {**macro.sample_columns, "old_logp_action": _sum_rows(logps, macro)}
    return replace(macro, token_columns={**macro.token_columns, "actor_logps": logps}, sample_columns=facts)


def _distil(run: TrainerState, macro: MacroBatch, distillation: Distillation) -> MacroBatch:
    """The batch with the weights of tokens. The weight of a sample is their mean."""
    counts, known = macro.table.target_counts, macro.token_columns
    old = known.get("proximal_logps") or _sampled(run, macro)
    teacher, policy = _join_rows(known["reference_logps"], macro), _join_rows(old, macro)
    credit = np.concatenate([_credit(item, count) for item, count in zip(macro.items, counts, strict=True)])
    weights = distillation.weigh(credit, teacher, policy, counts)
    return macro.with_token_weights(np.split(weights, counts.cumsum()[:-1]), run.cfg.model_device)


def _credit(item: SAWItem, count: int) -> NDArray[np.float64]:
    """[A] the weights of the predicted action tokens, of which there are `count`."""
    values = item.attachments.token_columns.get(TOKEN_WEIGHT)
    return np.full(count, item.weight) if values is None else _predicted(item, values)


async def _score_reference(run: TrainerState, macro: MacroBatch) -> dict[int, Tensor]:
    """Row -> [A] log-probabilities of the reference, or of each sample's teacher."""
    reference = run.reference
    assert reference is not None  # resolve_reference gave one, or raised
    if run.algo.distillation is not None:
        from ludic.training.distillation import Teachers

        if isinstance(reference, Teachers):
            return await _ask_teachers(run, macro, reference)
    rows = np.arange(len(macro.items))
    return await score_rows(macro, rows, run.cfg, reference_forward(run, reference), trees=computes_trees(reference))


async def _ask_teachers(run: TrainerState, macro: MacroBatch, teachers: Teachers) -> dict[int, Tensor]:
    """The log-probabilities of each sample's teacher. All ranks ask each in turn."""
    logps: dict[int, Tensor] = {}
    with ranks.agree("choosing the teachers of a batch"):
        parts = list(teachers.divide(macro.items, run.cfg.max_seq_len))
    for teacher, rows, items in parts:
        forward = own_forward(run) if teacher.policy is None else reference_forward(run, teacher.policy)
        seen = macro if teacher.prompt is None else replace(MacroBatch.ingest(items, run.cfg.max_seq_len), share=macro.share)
        scored = await score_rows(seen, np.array(rows, dtype=np.int64), run.cfg, forward)
        logps |= {row: scored[row] for row in rows}
    return logps


def _weigh(run: TrainerState, credit: BatchCredit, macro: MacroBatch) -> Weighed:
    """The result of `credit`. If it fails on one rank, all raise, before the first sum over ranks:
    the others would wait in it."""
    agreed = False

    def meet(error: Exception | None = None) -> None:
        nonlocal agreed
        if not agreed:
            agreed = True
            with ranks.agree("weighing a batch"):
                if error is not None:
                    raise error

    def add(values: list[float]) -> list[float]:
        meet()
        return macro.sum_over_ranks(values, run.cfg.model_device)

    def largest(values: list[float]) -> list[float]:
        meet()
        return values if macro.share is not None else ranks.max_over_ranks(values, run.cfg.model_device)

    try:
        weighed = credit.weigh(replace(candidates_of(macro), sum_over_ranks=add, max_over_ranks=largest))
    except Exception as error:
        meet(error)
        raise
    meet()
    return weighed


async def _log_tokens(run: TrainerState, macro: MacroBatch, number: int) -> None:
    """Log the log-probabilities with which the step of batch `number` begins, on rank 0."""
    if run.token_log is None or not run.token_log.is_due(number):
        return
    rows, trees = np.arange(len(macro.items)), computes_trees(run.backend)
    logps = await score_rows(macro, rows, run.cfg, own_forward(run), trees=trees)
    with ranks.agree("logging the tokens of a batch"):
        if ranks.rank() == 0:
            run.token_log.write(macro, logps)


def candidates_of(macro: MacroBatch) -> Candidates:
    """The samples as columns. Raises DataError for a sample without a group, and for tokens that
    count in part or have credit of their own."""
    refuse_columns(macro.items, "a batch credit compares whole answers")
    groups = _read_groups(macro)
    rollouts = [item.meta.get("rollout_id", ("row", row)) for row, item in enumerate(macro.items)]
    reference = macro.token_columns.get("reference_logps")
    return Candidates(
        utility=np.array([item.weight for item in macro.items], dtype=np.float64),
        group=_number(groups),
        rollout=_number(list(zip(groups, rollouts, strict=True))),
        token_count=macro.table.target_counts.astype(np.int64),
        reference_logp=None if reference is None else _sum_rows(reference, macro),
        behaviour_logp=_behaviour(macro),
    )


def _read_groups(macro: MacroBatch) -> list[tuple[object, object]]:
    """[N] the group of each sample."""
    return [group_key(item.meta, f"sample {macro.name(row)}") for row, item in enumerate(macro.items)]


def _number(keys: list[tuple[object, object]]) -> NDArray[np.int64]:
    """[N] numbers of the keys, in order of first appearance. Example: b a b are [0, 1, 0]."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _join_rows(by_row: Mapping[int, Tensor], macro: MacroBatch) -> NDArray[np.float64]:
    """[S] the rows' values, which are copied to the host in one call. Raises DataError for a value
    that is not finite."""
    values: NDArray[np.float64] = torch.cat([by_row[row] for row in range(len(macro.items))]).cpu().double().numpy()
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        row = int(np.searchsorted(macro.table.target_counts.cumsum(), wrong[0], side="right"))
        raise DataError(f"log-probabilities of {macro.name(row)} are not all finite; check the policy and reference")
    return values


def _sum_rows(by_row: Mapping[int, Tensor], macro: MacroBatch) -> NDArray[np.float64]:
    """[N] sums of the rows' values. Raises DataError for a value that is not finite."""
    starts = np.concatenate([[0], macro.table.target_counts[:-1].cumsum()])
    sums: NDArray[np.float64] = np.add.reduceat(_join_rows(by_row, macro), starts)
    return sums


def _behaviour(macro: MacroBatch) -> NDArray[np.float64] | None:
    """[N] sums of the sampled log-probabilities of the predicted tokens; None if a sample has
    none."""
    if "actor_logps" in macro.token_columns:
        return _sum_rows(macro.token_columns["actor_logps"], macro)
    sums = []
    for item in macro.items:
        attached = item.attachments.actor_logps
        if attached is None:
            return None
        sums.append(float(_predicted(item, stored(attached, "token_logps")).sum()))
    return np.array(sums, dtype=np.float64)
