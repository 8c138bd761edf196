"""`DPOTrainer`: trains a policy on preference pairs, without a reward model.

It overrides the ingestion, splitting and collation of `Trainer` (`batching.pair_batches`), has the
log-probabilities of the reference computed before the first step (`training.reference`), and
evaluates implicit rewards (`evaluators.held_out`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from ludic.training.reference import PrecomputedReference, computes_trees
from ludic.training.rm_config import DPOTrainerConfig as DPOTrainerConfig
from ludic.training.trainer import Trainer
from ludic.training.types import BatchSource, ReferencePolicy, SAWItem

if TYPE_CHECKING:
    from peft import LoraConfig


class DPOTrainer(Trainer):
    """Trains a policy on preference pairs with DPO or IPO.

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
    after that, so give the model that the run began with.
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
        if not isinstance(loss, DPOLoss):
            raise ConfigError(f"DPOTrainer needs DPOLoss, and {algo.name} has {loss_name(loss)}; use make_dpo() or RMTrainer")
        self._loss = loss
        if lora_config is not None:
            model = apply_lora(require_model(model), lora_config)
        if model is not None and not is_sharded(model):
            model.to(cfg.model_device)
        passes = as_forward_passes(backend or require_model(model), cfg)
        batches = [_ingest(part, cfg) for part in (_list_pairs(pairs, batch_source), eval_items or ()) if part]
        known = _open_reference(reference, batches, cfg, passes, model, reference_file)
        self.reference_logps = known
        """The log-probabilities of the reference."""
        if eval_items:
            options["evaluator"] = ImplicitRewardEvaluator(passes, eval_items, cfg, loss=self._loss, reference=known)
        super().__init__(model=model, algo=algo, batch_source=batch_source, cfg=cfg, reference=known, backend=backend, **options)

    def _ingest(self, items: Sequence[SAWItem]) -> MacroBatch:
        return _ingest(items, self.cfg)

    def _make_mini_batch(self, macro: MacroBatch, rows: Rows) -> MiniBatch:
        assert isinstance(macro, PreferenceMacroBatch)
        kind = PairTreeMiniBatch if with_defaults(self.backend).shares_prefixes else PreferenceMiniBatch
        return kind(macro, rows, self.cfg)

    def evaluate(self, items: Sequence[SAWItem] | None = None) -> dict[str, float]:
        """Measure the pairs of `items`, which the reference has scored, or of `eval_items`:
        `eval_loss`, `eval_rewards/accuracies` and so on (`ImplicitRewardEvaluator`)."""
        evaluator = self.evaluator
        if items is not None:
            evaluator = ImplicitRewardEvaluator(self.backend, items, self.cfg, loss=self._loss, reference=self.reference_logps)
        if not isinstance(evaluator, ImplicitRewardEvaluator):
            raise ConfigError("there are no pairs to evaluate; pass them, or eval_items= to DPOTrainer")
        return {f"eval_{name}": value for name, value in evaluator.measure().items()}


def _ingest(items: Sequence[SAWItem], cfg: DPOTrainerConfig) -> PreferenceMacroBatch:
    return PreferenceMacroBatch.ingest_pairs(items, cfg.max_seq_len)


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
