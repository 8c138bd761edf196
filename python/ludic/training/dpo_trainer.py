"""`DPOTrainer`: trains a policy on preference pairs or on rated answers, without a reward model.

It overrides the ingestion, splitting and collation of `Trainer` (`batching.pair_batches`), has the
log-probabilities of the reference computed before the first step (`training.reference`), estimates
the KL divergence of KTO, and evaluates implicit rewards (`evaluators.held_out`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, ConfigTypeError
from ludic.event_loop import TrainFuture
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.sharding import is_sharded
from ludic.models.wrappers import has_adapters, unwrap_model
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.forward import as_forward_passes, forward_action_logprobs
from ludic.training.backend.protocol import ForwardPasses, TrainingBackend, with_defaults
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import MicroBatch, Rows
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.tree_batches import PairTreeMiniBatch
from ludic.training.evaluators.held_out import ImplicitRewardEvaluator
from ludic.training.loop.setup_checks import require_model
from ludic.training.loss.base import adapted_loss, loss_name
from ludic.training.loss.dpo import DPOLoss
from ludic.training.loss.kto import KTOLoss
from ludic.training.preparation import Prepared
from ludic.training.reference import PrecomputedReference, computes_trees, item_key
from ludic.training.rm_config import DPOTrainerConfig as DPOTrainerConfig
from ludic.training.scoring import own_forward, score_rows
from ludic.training.trainer import Trainer
from ludic.training.types import BatchSource, ReferencePolicy, SAWItem
from ludic.types import cut_spans

if TYPE_CHECKING:
    from peft import LoraConfig


class DPOTrainer(Trainer):
    """Trains a policy on preference pairs with DPO, IPO, KTO, CPO, SimPO or ORPO; with KTO also on
    samples without a partner, whose role is `chosen` if they are desirable.

    >>> trainer = DPOTrainer(
    ...     model=AutoModelForCausalLM.from_pretrained(folder),
    ...     algo=make_dpo(beta=0.1),
    ...     batch_source=preference_batches(train_items, batch_size=32),
    ...     cfg=DPOTrainerConfig(lr=1e-6),
    ...     eval_items=test_items,
    ... )
    >>> trainer.train_sync(1000)
    >>> trainer.evaluate()["eval_rewards/accuracies"]

    The reference scores all pairs once, before the first step, and is not kept. By default it is
    the model as it is given, with its adapters switched off. A checkpoint that is resumed is loaded
    after that, so give the model that the run began with. CPO, SimPO and ORPO have no reference.
    """

    cfg: DPOTrainerConfig

    def __init__(
        self,
        *,
        model: nn.Module | None,
        algo: RLAlgorithm,
        batch_source: BatchSource,
        cfg: DPOTrainerConfig | None = None,
        pairs: Sequence[SAWItem] | None = None,
        eval_items: Sequence[SAWItem] | None = None,
        reference: ReferencePolicy | None = None,
        reference_file: Path | None = None,
        lora_config: LoraSettings | LoraConfig | None = None,
        backend: TrainingBackend | None = None,
        **options: Any,
    ) -> None:
        """`pairs`: all samples that `batch_source` gives. None means the samples of a
        `preference_batches`. `eval_items`: the pairs for `evaluate` and `eval_every_n_steps`.
        `reference`: another policy, such as `FrozenModel.from_pretrained(folder, cfg)`.
        `reference_file`: read if it exists, else written. `lora_config` adds adapters. `options`:
        other arguments of `Trainer`."""
        cfg = DPOTrainerConfig() if cfg is None else cfg
        if not isinstance(cfg, DPOTrainerConfig):
            raise ConfigTypeError(f"DPOTrainer needs a DPOTrainerConfig, which has room for pairs, not a {type(cfg).__name__}")
        if eval_items and options.get("evaluator") is not None:
            raise ConfigError("evaluator and eval_items both say what to evaluate; give one of them")
        loss = adapted_loss(algo)
        if not isinstance(loss, DPOLoss | KTOLoss):
            raise ConfigError(
                f"DPOTrainer needs DPOLoss or KTOLoss, and {algo.name} has {loss_name(loss)}; use make_dpo() or RMTrainer"
            )
        self.cfg, self._loss = cfg, loss
        if lora_config is not None:
            model = apply_lora(require_model(model), lora_config)
        if model is not None and not is_sharded(model):
            model.to(cfg.model_device)
        passes = as_forward_passes(backend or require_model(model), cfg)
        self._mismatched: dict[bytes, SAWItem] = {}
        """`item_key` of a sample -> its prompt with another answer, for KTO."""
        self.reference_logps: PrecomputedReference | None = None
        """The log-probabilities of the reference; None if the loss reads none."""
        if loss.reads_reference:
            parts = (_list_pairs(pairs, batch_source), eval_items or ())
            batches: list[MacroBatch] = [self._ingest(part) for part in parts if part]
            if isinstance(loss, KTOLoss):
                for batch in batches:
                    self._mismatched |= mismatch_answers(batch, cfg.max_seq_len)
                batches.append(MacroBatch.ingest(list(self._mismatched.values()), cfg.max_seq_len))
            reference = self.reference_logps = _open_reference(reference, batches, cfg, passes, model, reference_file)
        if eval_items:
            options["evaluator"] = self._make_evaluator(passes, eval_items)
        super().__init__(
            model=model, algo=algo, batch_source=batch_source, cfg=cfg, reference=reference, backend=backend, **options
        )

    def _make_evaluator(self, passes: ForwardPasses, items: Sequence[SAWItem]) -> ImplicitRewardEvaluator:
        known, mismatched = self.reference_logps, self._mismatched
        return ImplicitRewardEvaluator(passes, items, self.cfg, loss=self._loss, reference=known, mismatched=mismatched)

    def _ingest(self, items: Sequence[SAWItem]) -> MacroBatch:
        require_complete = isinstance(self._loss, DPOLoss)
        return PreferenceMacroBatch.ingest_pairs(items, self.cfg.max_seq_len, require_complete=require_complete)

    async def _prepare(self, macro: MacroBatch, batch_number: int | None) -> Prepared:
        prepared = await super()._prepare(macro, batch_number)
        if not self._mismatched:
            return prepared
        kl = np.full(len(macro.items), await self._estimate_kl(macro))
        return replace(prepared, macro=replace(prepared.macro, sample_columns={**prepared.macro.sample_columns, "kl": kl}))

    async def _estimate_kl(self, macro: MacroBatch) -> float:
        """z_0 of KTO: the mean log-ratio of the mismatched answers of all ranks, at least 0."""
        reference = self.reference_logps
        assert reference is not None
        items = [self._mismatched[item_key(item)] for item in macro.items]
        batch = replace(MacroBatch.ingest(items, self.cfg.max_seq_len), share=macro.share)
        rows = np.arange(len(batch.items))
        own = await score_rows(batch, rows, self.cfg, own_forward(self), trees=computes_trees(self.backend))
        known = torch.cat([reference.of_item(item) for item in batch.items])
        sums = [float((torch.cat([own[int(row)] for row in rows]).cpu().double() - known.double()).sum()), float(len(rows))]
        total, count = macro.sum_over_ranks(sums, self.cfg.model_device)
        return max(0.0, total / count)

    def _make_mini_batch(self, macro: MacroBatch, rows: Rows) -> MiniBatch:
        assert isinstance(macro, PreferenceMacroBatch)
        kind = PairTreeMiniBatch if with_defaults(self.backend).shares_prefixes else PreferenceMiniBatch
        return kind(macro, rows, self.cfg)

    def evaluate(self, items: Sequence[SAWItem] | None = None) -> dict[str, float]:
        """Measure the pairs of `items`, which the reference has scored, or of `eval_items`:
        `eval_loss`, `eval_rewards/accuracies` and so on (`ImplicitRewardEvaluator`)."""
        evaluator = self.evaluator
        if items is not None:
            evaluator = self._make_evaluator(self.backend, items)
        if not isinstance(evaluator, ImplicitRewardEvaluator):
            raise ConfigError("there are no pairs to evaluate; pass them, or eval_items= to DPOTrainer")
        return {f"eval_{name}": value for name, value in evaluator.measure().items()}


def mismatch_answers(batch: MacroBatch, max_seq_len: int) -> dict[bytes, SAWItem]:
    """`item_key` of each sample -> its prompt, cut at its start to leave room, with the answer of
    the sample before it. Samples of pairs are in TRL's order: all chosen ones come first.

    Example: samples x1 y1, x2 y2, x3 y3 become x1 y3, x2 y1, x3 y2.
    """
    paired = len({item.meta["pair_id"] for item in batch.items}) < len(batch.items)
    items = sorted(batch.items, key=lambda item: paired and item.meta["role"] == "rejected")
    starts = [int(np.argmax(item.action_mask)) for item in items]
    mismatched = {}
    for item, start, other, begin in zip(items, starts, [items[-1], *items[:-1]], [starts[-1], *starts[:-1]], strict=True):
        ids, mask = [*item.input_ids[:start], *other.input_ids[begin:]], [*[0] * start, *other.action_mask[begin:]]
        spans = (*cut_spans(item.images, 0, end=start), *cut_spans(other.images, begin, to=start))
        cut = max(0, len(ids) - max_seq_len)
        cut = max([cut, *(span.start + span.length for span in spans if span.start < cut)])  # no part of an image stays
        mismatched[item_key(item)] = SAWItem(
            ids[cut:], [1] * (len(ids) - cut), mask[cut:], 1.0, item.meta, images=cut_spans(spans, cut)
        )
    return mismatched


def _list_pairs(pairs: Sequence[SAWItem] | None, source: BatchSource) -> Sequence[SAWItem]:
    if pairs is not None:
        return pairs
    if isinstance(source, ItemBatchSource):
        return source.items
    raise ConfigError(f"DPOTrainer cannot list the pairs of {type(source).__name__} for the reference; pass them as pairs=")


def _open_reference(
    reference: ReferencePolicy | None,
    batches: Sequence[MacroBatch],
    cfg: DPOTrainerConfig,
    passes: ForwardPasses,
    model: nn.Module | None,
    file: Path | None,
) -> PrecomputedReference:
    """The log-probabilities of all samples: the given ones, the ones of the file, or computed
    now."""
    if isinstance(reference, PrecomputedReference):
        return reference
    if file is not None and ranks.ask_rank_0("looking for the reference log-probabilities", file.is_file):
        with ranks.agree("reading the reference log-probabilities"):
            return PrecomputedReference.load(file)
    adapted = model is not None and has_adapters(unwrap_model(model))

    def forward(batch: MicroBatch) -> Tensor:
        if reference is not None:
            return _wait(reference.logps(batch))
        return forward_action_logprobs(passes, batch, adapters=not adapted).wait()

    trees = computes_trees(passes if reference is None else reference)
    known = PrecomputedReference.score(batches, cfg, forward, trees=trees)
    if file is not None:
        ranks.ask_rank_0("keeping the reference log-probabilities", lambda: known.save(file))
    return known


def _wait(scored: Any) -> Tensor:
    if isinstance(scored, TrainFuture):
        scored = scored.wait()
    if not isinstance(scored, Tensor):
        if inspect.iscoroutine(scored):
            scored.close()
        raise ConfigTypeError(f"reference.logps returned {type(scored).__name__}; it must return a tensor or a TrainFuture")
    return scored
