"""Direct preference optimization: read the pairs, warm the policy up, fix the reference, train,
measure with `DPOTrainer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ludic.errors import CheckpointError, ConfigError
from ludic.files.checkpoints import check_model_folder
from ludic.files.jsonl import write_jsonl
from ludic.models.adapters import has_adapters
from ludic.models.loading import load_tokenizer
from ludic.models.lora import describe_trained_share
from ludic.models.saving import save_policy
from ludic.models.state_files import holds_whole_weights, read_model
from ludic.recipes.build import build_config, check_callbacks
from ludic.recipes.epochs_schema import DPORecipe
from ludic.recipes.model import (
    add_adapters,
    build_model,
    build_tokenizer,
    check_adapters,
    has_no_weights,
    is_shared_out,
    quantize_base,
)
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import DONE, DPODirectory
from ludic.runs.dpo_answers import Answers, read_answers, sample_answers
from ludic.runs.epochs import PairsParts, PairsRun, check_heldout, count_steps
from ludic.runs.report.dpo import DPOReport
from ludic.runs.screen import Screen
from ludic.runs.seeding import seed_everything
from ludic.runs.shared_model import check_sharding_settings, choose_precision, place_model
from ludic.runs.stop_request import Interrupted
from ludic.training import ranks, watchdog
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.source import STOP_PATIENCE_S
from ludic.training.dpo_trainer import DPOTrainer, DPOTrainerConfig
from ludic.training.evaluators.held_out import MEASURED, ImplicitRewardEvaluator
from ludic.training.presets import make_dpo, make_sft
from ludic.training.reference import FrozenModel
from ludic.training.trainer import Trainer

WARM_UP, DPO = "warm_up", "dpo"
WARM_UP_KEYS = ["train/loss", "train/grad_norm"]
KEYS = ["train/loss", "train/rewards/accuracies", "train/rewards/margins", "train/grad_norm"]


class DPOParts(PairsParts[DPOTrainerConfig]):
    """The objects of a run."""

    @classmethod
    def build(cls, recipe: DPORecipe, *, note: Callable[[str], None]) -> DPOParts:
        """Build the parts from a recipe. Seeds all random generators first (`seed_everything`).
        `note` receives remarks on settings that cannot be followed."""
        check_sharding_settings(recipe.sharding, recipe.trainer.model_device)
        seed_everything(recipe)
        check_adapters(recipe)
        tokenizer = build_tokenizer(recipe)
        algorithm = make_dpo(**vars(recipe.loss))
        cfg = build_config(DPOTrainerConfig, recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        cfg = choose_precision(cfg, recipe.sharding)
        check_callbacks(recipe.callbacks, cfg, measured=MEASURED)
        _check_vocabulary(recipe, tokenizer)
        data = PairData.read(recipe, tokenizer, note=note)
        check_heldout(data, cfg)
        device = "cpu" if is_shared_out(recipe.sharding) else cfg.model_device
        model = build_model(recipe, tokenizer)
        if not recipe.warmup.steps:
            model = quantize_base(model, recipe, device)
        model = place_model(model, recipe.sharding, device)
        if not recipe.warmup.steps:
            model = add_adapters(model, recipe, seed=recipe.seed)
        return cls(model, tokenizer, data, algorithm, cfg, count_steps(data, recipe))


class DPORun(PairsRun[DPORecipe, DPOParts, DPODirectory]):
    """Warm-up, sampled answers, training on pairs, metrics on held-out pairs, and answers again."""

    def __init__(self, recipe: DPORecipe, parts: DPOParts, directory: DPODirectory, screen: Screen) -> None:
        super().__init__(recipe, parts, directory, screen)
        self._answers: list[dict[str, Any]] = []
        if recipe.warmup.steps and self.progress.phase != WARM_UP:
            self._read_warmed_up()

    @classmethod
    def build(cls, recipe: DPORecipe, note: Callable[[str], None]) -> DPOParts:
        return DPOParts.build(recipe, note=note)

    def conclude(self) -> str:
        return DPOReport(self).conclude()

    @property
    def _warmed_up(self) -> Path:
        """The policy that DPO begins with, if there is a warm-up: what adapters adapt, or else the
        reference."""
        return self.directory.base if self.recipe.lora.rank else self.directory.reference

    def _read_warmed_up(self) -> None:
        again = f"start a new run with `ludic dpo {self.directory.config} name=NAME`"
        if self._warmed_up.is_dir():
            check_model_folder(self._warmed_up, again)
        if not holds_whole_weights(self._warmed_up):
            raise CheckpointError(
                f"{self._warmed_up}, the policy after the warm-up, is gone, and a resumed run begins with it; {again}"
            )
        if not has_no_weights(self.recipe.sharding):
            read_model(self.parts.model, self._warmed_up)

    async def play_phases(self) -> None:
        ranks.ask_rank_0("writing the pairs", self.write_pairs)
        if self.progress.phase == WARM_UP:
            if self.recipe.warmup.steps:
                await self._warm_up()
            self.progress.before = await self._ask("before")
            self.end_phase(DPO)
        self._adapt()
        trainer = await self._train()
        after = {**self._measure(trainer), **await self._ask("after")}
        self.progress.after = after
        self.end_phase(DONE)

    @property
    def adapted_base(self) -> str | None:
        """With a warm-up, the adapters adapt what it trained."""
        return None if self.recipe.warmup.steps else super().adapted_base

    async def _warm_up(self) -> None:
        """Supervised fine-tuning on the answers of the pairs, then save the policy."""
        recipe, parts, section = self.recipe, self.parts, self.recipe.warmup
        items = parts.data.train if section.answers == "both" else parts.data.train[::2]
        source = ItemBatchSource(items, batch_size=section.batch_size, seed=recipe.seed, name="warmup")
        source.unshard()  # all ranks share its batches
        self.screen.note(f"Warm-up: {section.steps} steps on {len(items):,} answers of the pairs ({section.answers})")
        cfg = replace(parts.cfg, lr=section.lr, eval_every_n_steps=None, eval_at_start=False, early_stopping_patience=None)
        with (
            self.open_logger(WARM_UP, keys=WARM_UP_KEYS, spark_key="loss", last_step=section.steps) as logger,
            self.timer.phase(WARM_UP),
        ):
            trainer = self.make_trainer(
                WARM_UP,
                Trainer,
                source,
                self.directory.checkpoints / WARM_UP,
                algo=make_sft(normalizer="tokens"),
                cfg=cfg,
                train_logger=logger,
                total_training_steps=section.steps,
            )
            is_done = await self.take_steps(trainer, section.steps)
            if not is_done:
                await trainer.ensure_checkpoint(patience_s=STOP_PATIENCE_S)
            self.end_training()
        if not is_done:
            self.directory.write_progress(self.progress)
            raise Interrupted
        ranks.ask_rank_0("saving the warmed-up policy", lambda: save_policy(parts.model, parts.tokenizer, self._warmed_up))

    def _adapt(self) -> None:
        if self.recipe.lora.rank:
            if not has_adapters(self.parts.model):
                self.parts.model = add_adapters(self.parts.model, self.recipe, seed=self.recipe.seed)
            self.screen.note(describe_trained_share(self.parts.model))

    async def _train(self) -> DPOTrainer:
        recipe, parts = self.recipe, self.parts
        self.note_heldout()
        self.screen.note(
            f"{recipe.loss.loss_type} loss, beta {recipe.loss.beta:g}, on {len(parts.data.train) // 2:,} pairs: {parts.steps} steps of "
            f"{recipe.batch_size}"
        )
        return await self.train(self._make_dpo_trainer, self.make_source(), keys=KEYS)

    def _make_dpo_trainer(self, **options: Any) -> DPOTrainer:
        """The reference is loaded here, so that nothing holds it once it has scored the pairs."""
        return DPOTrainer(
            algo=self.parts.algorithm,
            pairs=self.parts.data.train,
            eval_items=self.parts.data.heldout or None,
            reference=self._load_reference(),
            reference_file=self.directory.reference_logps,
            **options,
        )

    def _load_reference(self) -> FrozenModel | None:
        """The model of `reference.model`, unless its log-probabilities are there already."""
        source, file = self.recipe.reference.model, self.directory.reference_logps
        if source is None or ranks.ask_rank_0("looking for the reference log-probabilities", file.is_file):
            return None
        return FrozenModel.from_pretrained(source, self.parts.cfg, dtype=self.recipe.dtype)

    def _measure(self, trainer: DPOTrainer) -> dict[str, float]:
        """The `eval_` metrics on the held-out pairs, which are also drawn."""
        if not self.parts.data.heldout:
            return {}
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            measured = trainer.evaluate()
        evaluator = trainer.evaluator
        assert isinstance(evaluator, ImplicitRewardEvaluator)
        if not self.directory.is_follower:
            self.draw_heldout(evaluator.metrics)
        accuracy, pairs = measured["eval_rewards/accuracies"], measured["eval_num_pairs"]
        self.screen.note(f"Held-out accuracy of the implicit rewards {accuracy:.4f} on {pairs:,.0f} pairs")
        return measured

    async def _ask(self, when: str) -> dict[str, Any]:
        """What the policy answers, on rank 0. All ranks return the result."""
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"), ranks.rank_0_alone("the answers") as shared:
            if ranks.rank() == 0:
                shared.append((await self._sample(when)).to_dict())
        measured: dict[str, Any] = shared[0]
        return measured

    async def _sample(self, when: str) -> Answers:
        recipe, parts = self.recipe, self.parts
        answers = await sample_answers(
            parts.model,
            parts.tokenizer,
            parts.data.heldout,
            parts.data.task,
            count=recipe.answers,
            max_new_tokens=recipe.max_new_tokens,
            seed=recipe.seed,
        )
        earlier = read_answers(self.directory.answers, before=when)
        write_jsonl(self.directory.answers, [*earlier, *answers.lines(when)])
        return answers


def _check_vocabulary(recipe: DPORecipe, tokenizer: Any) -> None:
    """Raise ConfigError if the reference has other tokens than the policy."""
    source = recipe.reference.model
    if source is not None and load_tokenizer(source).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"reference.model ({source}) has another vocabulary than the policy, so its log-probabilities are of other tokens; give a "
            "model with the policy's tokenizer"
        )
