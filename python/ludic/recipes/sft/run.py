"""One supervised run: read the data, measure, train, measure again. The steps are the trainer's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ludic.errors import ConfigError
from ludic.recipes.build import build_trainer_config
from ludic.recipes.compose import to_yaml
from ludic.recipes.lora import trained_share, with_adapters
from ludic.recipes.model import keep_base, model_of, plain_place, save_policy, tokenizer_of
from ludic.recipes.run import latest_checkpoint
from ludic.recipes.run_directory import Progress, RunDirectory, new_folder, write_text
from ludic.recipes.screen import Screen
from ludic.recipes.sft.data import SFTData, write_demonstrations
from ludic.recipes.sft.schema import SFTRecipe, paths_of
from ludic.recipes.watch import Interrupted, PhaseLogger, StoppableSource, StopRequest, Stopwatch
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.requests_from_dataset import RequestsExhausted
from ludic.training.checkpoint import CheckpointConfig
from ludic.training.config import TrainerConfig
from ludic.training.heldout_loss import HeldOutLoss
from ludic.training.loggers import JSONLLogger, TeeLogger
from ludic.training.presets import make_sft
from ludic.training.trainer import Trainer

PHASE, DONE = "sft", "done"
KEYS = ["train/loss", "train/grad_norm", "train/seq_len_truncated_rate"]


class SFTDirectory(RunDirectory):
    """The folder of a supervised run."""

    command = "sft"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.picture = path / "loss.png"
        self.demonstrations = path / "data.jsonl"

    @classmethod
    def begin(cls, recipe: SFTRecipe) -> SFTDirectory:
        """A new folder, named by the data and the seed unless the recipe has a name."""
        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else paths_of(recipe.data, "data")[0].stem
        directory = cls(new_folder(recipe.output, recipe.name, f"sft-{data}-seed{recipe.seed}"))
        write_text(directory.config, to_yaml(recipe))
        directory.write_progress(Progress(phase=PHASE, command=cls.command))
        return directory


@dataclass
class SFTParts:
    """The objects of a run. They are built before anything is written, so that a wrong setting or row costs nothing."""

    model: Any
    tokenizer: Any
    data: SFTData
    cfg: TrainerConfig
    steps: int
    """Batches of the whole run."""
    heldout: HeldOutLoss | None

    @classmethod
    def build(cls, recipe: SFTRecipe) -> SFTParts:
        """Seeds every generator, so that two runs of one recipe are the same."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        random.seed(recipe.seed)
        torch.manual_seed(recipe.seed)
        tokenizer = _tokenizer(recipe)
        data = SFTData.read(recipe, tokenizer)
        cfg = build_trainer_config(recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        model = with_adapters(model_of(recipe).to(cfg.model_device), recipe.lora, seed=recipe.seed)
        steps = recipe.epochs * _source(data, recipe).num_batches_per_epoch if recipe.steps is None else recipe.steps
        heldout = HeldOutLoss(model, data.heldout, cfg) if data.heldout else None
        if heldout is None and (cfg.eval_every_n_steps or cfg.eval_at_start):
            raise ConfigError("trainer.eval_every_n_steps needs held-out rows; raise heldout or give heldout_data")
        return cls(model, tokenizer, data, cfg, steps, heldout)


class SFTRun:
    """A recipe on its way, in its folder."""

    def __init__(self, recipe: SFTRecipe, parts: SFTParts, directory: SFTDirectory, screen: Screen, stop: StopRequest) -> None:
        self.recipe, self.parts, self.directory, self.screen, self.stop = recipe, parts, directory, screen, stop
        self.progress = directory.read_progress()
        self.watch = Stopwatch(self.progress.seconds)
        keep_base(parts.model, recipe.model, directory.base)

    async def play(self) -> None:
        """What is left to do. Raises `Interrupted` after a stop."""
        if self.progress.phase == DONE:
            return
        if self.recipe.data is None and not self.directory.demonstrations.is_file():
            write_demonstrations(self.recipe, self.parts.tokenizer, self.directory.demonstrations)
        if self.progress.before is None:
            self.progress.before = self._measure()
            self.directory.write_progress(self.progress)
        await self._train()
        self.progress.after = self._measure()
        self.progress.phase = DONE
        self.directory.write_progress(self.progress)

    async def _train(self) -> None:
        """All steps that are left, or those until a stop; the model is kept."""
        recipe, steps = self.recipe, self.parts.steps
        if self.parts.heldout is None:
            self.screen.note("No rows are held out; nothing is measured")
        self.screen.note(f"Training on {len(self.parts.data.train):,} samples: {steps} steps of {recipe.batch_size}")
        if recipe.lora.rank:
            self.screen.note(trained_share(self.parts.model))
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
        self._save_model()
        if self.stop and trainer.current_step < steps:
            self.directory.write_progress(self.progress)
            raise Interrupted

    def _trainer(self, logger: TeeLogger) -> Trainer:
        """The public trainer; it goes on from the last checkpoint, if there is one."""
        checkpoints, section = self.directory.checkpoints, self.recipe.checkpoint
        return Trainer(
            model=self.parts.model,
            algo=make_sft(normalizer="tokens"),
            batch_source=StoppableSource(_source(self.parts.data, self.recipe), self.stop),
            cfg=self.parts.cfg,
            checkpoint_config=CheckpointConfig(checkpoints, every_n_steps=section.every_n_steps, max_to_keep=section.max_to_keep),
            resume_from=latest_checkpoint(checkpoints),
            train_logger=logger,
            evaluator=self.parts.heldout,
            total_training_steps=self.parts.steps,
        )

    def _measure(self) -> dict[str, float] | None:
        if self.parts.heldout is None:
            return None
        with self.watch.measure("evaluate"):
            measured = self.parts.heldout.measure()
        self.screen.note(f"Held-out loss {measured['loss']:.4f} on {len(self.parts.data.heldout):,} samples")
        return measured

    def _save_model(self) -> None:
        """Model and tokenizer, in Hugging Face layout."""
        save_policy(self.parts.model, self.parts.tokenizer, self.directory.model, base=plain_place(self.recipe.model))


def _source(data: SFTData, recipe: SFTRecipe) -> ItemBatchSource:
    return ItemBatchSource(data.train, batch_size=recipe.batch_size, seed=recipe.seed, name="sft")


def _tokenizer(recipe: SFTRecipe) -> Any:
    tokenizer = tokenizer_of(recipe)
    if recipe.chat_template is not None:
        path = Path(recipe.chat_template).expanduser()
        if not path.is_file():
            raise ConfigError(f"chat_template ({path}) does not exist; it is a file with a Jinja template")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer
