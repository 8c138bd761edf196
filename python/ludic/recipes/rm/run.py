"""One reward-model run: read the pairs, train, measure. The steps and the measurements are `RMTrainer`'s."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ludic.errors import ConfigError
from ludic.eval.preference_picture import draw_margins, draw_reliability
from ludic.recipes.build import build_config
from ludic.recipes.compose import to_yaml
from ludic.recipes.model import keep_base, plain_place, save_policy, tokenizer_of
from ludic.recipes.rm.data import RMData
from ludic.recipes.rm.model import reward_model_of, with_own_padding
from ludic.recipes.rm.schema import RMRecipe
from ludic.recipes.run import latest_checkpoint
from ludic.recipes.run_directory import Progress, RunDirectory, new_folder, write_text
from ludic.recipes.screen import Screen
from ludic.recipes.watch import Interrupted, PhaseLogger, StoppableSource, StopRequest, Stopwatch
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.batching.requests_from_dataset import RequestsExhausted
from ludic.training.checkpoint import CheckpointConfig
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.loggers import JSONLLogger, TeeLogger
from ludic.training.presets import make_bradley_terry
from ludic.training.rm_trainer import RMTrainer, RMTrainerConfig

PHASE, DONE = "rm", "done"
KEYS = ["train/loss", "train/accuracy", "train/margin", "train/grad_norm"]


class RMDirectory(RunDirectory):
    """The folder of a reward-model run."""

    command = "train-rm"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.picture = path / "training.png"
        self.reliability = path / "reliability.png"
        self.margins = path / "margins.png"
        self.pairs = path / "data.jsonl"
        self.heldout_pairs = path / "heldout.jsonl"

    @classmethod
    def begin(cls, recipe: RMRecipe) -> RMDirectory:
        """A new folder, named by the data and the seed unless the recipe has a name."""
        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else Path(recipe.data).stem
        directory = cls(new_folder(recipe.output, recipe.name, f"rm-{data}-seed{recipe.seed}"))
        write_text(directory.config, to_yaml(recipe))
        directory.write_progress(Progress(phase=PHASE, command=cls.command))
        return directory


@dataclass
class RMParts:
    """The objects of a run. They are built before anything is written, so that a wrong setting or pair costs nothing."""

    model: Any
    tokenizer: Any
    data: RMData
    algorithm: RLAlgorithm
    cfg: RMTrainerConfig
    steps: int
    """Batches of the whole run."""

    @classmethod
    def build(cls, recipe: RMRecipe, *, note: Callable[[str], None]) -> RMParts:
        """Seeds every generator, so that two runs of one recipe are the same. `note` is told what is not as it was asked for."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        random.seed(recipe.seed)
        torch.manual_seed(recipe.seed)
        tokenizer = with_own_padding(tokenizer_of(recipe))
        algorithm = make_bradley_terry(**vars(recipe.loss))
        cfg = build_config(RMTrainerConfig, recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        data = RMData.read(recipe, tokenizer, note=note)
        if not data.heldout and (cfg.eval_every_n_steps or cfg.eval_at_start):
            raise ConfigError(
                "trainer.eval_every_n_steps needs held-out pairs; raise heldout, or give heldout_data or heldout_split"
            )
        model = reward_model_of(recipe, pad_token_id=tokenizer.pad_token_id).to(cfg.model_device)
        steps = recipe.epochs * _source(data, recipe).num_batches_per_epoch if recipe.steps is None else recipe.steps
        return cls(model, tokenizer, data, algorithm, cfg, steps)


class RMRun:
    """A recipe on its way, in its folder."""

    def __init__(self, recipe: RMRecipe, parts: RMParts, directory: RMDirectory, screen: Screen, stop: StopRequest) -> None:
        self.recipe, self.parts, self.directory, self.screen, self.stop = recipe, parts, directory, screen, stop
        self.progress = directory.read_progress()
        self.watch = Stopwatch(self.progress.seconds)

    async def play(self) -> None:
        """What is left to do. Raises `Interrupted` after a stop."""
        if self.progress.phase == DONE:
            return
        if self.recipe.data is None and not self.directory.pairs.is_file():
            self.parts.data.write_rows(self.directory.pairs, self.directory.heldout_pairs)
        keep_base(self.parts.model, self.recipe.model, self.directory.base)
        self.progress.after = self._measure(await self._train())
        self.progress.phase = DONE
        self.directory.write_progress(self.progress)

    async def _train(self) -> RMTrainer:
        """All steps that are left, or those until a stop; the model is kept."""
        recipe, steps = self.recipe, self.parts.steps
        if not self.parts.data.heldout:
            self.screen.note("No pairs are held out; only training pairs are measured")
        self.screen.note(f"Training on {len(self.parts.data.train) // 2:,} pairs: {steps} steps of {recipe.batch_size}")
        with (
            JSONLLogger(self.directory.metrics) as written,
            self.screen.logger(PHASE, keys=KEYS, spark_key="loss", last_step=steps) as shown,
            self.watch.measure("train"),
        ):
            trainer = self._trainer(TeeLogger(PhaseLogger(written, PHASE), shown))
            try:
                await trainer.train(steps - trainer.current_step)
            except RequestsExhausted:
                trainer.save_checkpoint()
        self.progress.steps = trainer.current_step
        save_policy(self.parts.model, self.parts.tokenizer, self.directory.model, base=plain_place(recipe.model))
        if self.stop and trainer.current_step < steps:
            self.directory.write_progress(self.progress)
            raise Interrupted
        return trainer

    def _trainer(self, logger: TeeLogger) -> RMTrainer:
        """The public trainer; it goes on from the last checkpoint, if there is one."""
        checkpoints, section = self.directory.checkpoints, self.recipe.checkpoint
        return RMTrainer(
            model=self.parts.model,
            algo=self.parts.algorithm,
            batch_source=StoppableSource(_source(self.parts.data, self.recipe), self.stop),
            cfg=self.parts.cfg,
            eval_items=self.parts.data.heldout or None,
            enable_gradient_checkpointing=self.recipe.gradient_checkpointing,
            checkpoint_config=CheckpointConfig(checkpoints, every_n_steps=section.every_n_steps, max_to_keep=section.max_to_keep),
            resume_from=latest_checkpoint(checkpoints),
            train_logger=logger,
            total_training_steps=max(1, self.parts.steps),
        )

    def _measure(self, trainer: RMTrainer) -> dict[str, float]:
        """The `eval_` metrics on the held-out pairs, drawn as well, and the accuracy on training pairs."""
        with self.watch.measure("evaluate"):
            sample = trainer.evaluate(self.parts.data.sample(self.recipe.train_sample))
            measured = trainer.evaluate() if self.parts.data.heldout else {}
        if measured:
            self._draw(trainer.evaluator.metrics)  # type: ignore[union-attr]
            accuracy, pairs = measured["eval_pairwise_accuracy"], measured["eval_num_pairs"]
            self.screen.note(f"Held-out accuracy {accuracy:.4f} on {pairs:,.0f} pairs")
        return {**measured, "train_pairwise_accuracy": sample["eval_pairwise_accuracy"]}

    def _draw(self, metrics: PreferenceMetrics) -> None:
        title = f"{self.directory.path.name}, held-out pairs"
        draw_reliability(self.directory.reliability, metrics, title=title)
        draw_margins(self.directory.margins, metrics, title=title)


def _source(data: RMData, recipe: RMRecipe) -> ItemBatchSource:
    return preference_batches(data.train, batch_size=recipe.batch_size, seed=recipe.seed)
