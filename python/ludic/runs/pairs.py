"""What `ludic train-rm` and `ludic dpo` have in common: a run over preference pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ludic.errors import ConfigError
from ludic.eval.picture import draw_margins, draw_reliability
from ludic.recipes.epochs_schema import PairsRecipe
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import PairsDirectory
from ludic.runs.epochs import EpochsRun
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.config import TrainerConfig

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)


@dataclass
class PairsParts(Generic[ConfigT]):
    """The objects of a run. They are built before anything is written, so that a wrong setting
    or pair leaves no folder behind."""

    model: Any
    tokenizer: Any
    data: PairData
    algorithm: RLAlgorithm
    cfg: ConfigT
    steps: int
    """Batches of pairs in the whole run."""


RecipeT = TypeVar("RecipeT", bound=PairsRecipe)
PartsT = TypeVar("PartsT", bound=PairsParts[Any])
DirectoryT = TypeVar("DirectoryT", bound=PairsDirectory)


class PairsRun(EpochsRun[RecipeT, PartsT, DirectoryT]):
    """A run whose last phase goes over preference pairs."""

    def write_pairs(self) -> None:
        """Write the pairs that a task drew, on rank 0; data of the user's are where they are."""
        if self.recipe.data is None:
            self.parts.data.write_missing_rows(self.directory.pairs, self.directory.heldout_pairs)

    def make_source(self) -> ItemBatchSource:
        """Batches of training pairs, shuffled by the seed and shared by all ranks."""
        return make_source(self.parts.data, self.recipe)

    def note_heldout(self) -> None:
        """Say so if no pairs are held out."""
        if not self.parts.data.heldout:
            self.screen.note("No pairs are held out; only training pairs are measured")

    def draw_heldout(self, metrics: PreferenceMetrics) -> None:
        """Draw the reliability and the margins of the held-out pairs."""
        title = f"{self.directory.path.name}, held-out pairs"
        draw_reliability(self.directory.reliability, metrics, title=title)
        draw_margins(self.directory.margins, metrics, title=title)


def make_source(data: PairData, recipe: PairsRecipe) -> ItemBatchSource:
    """Batches of `batch_size` training pairs, shuffled by the seed and shared by all ranks."""
    source = preference_batches(data.train, batch_size=recipe.batch_size, seed=recipe.seed)
    source.unshard()  # all ranks share its batches
    return source


def count_steps(data: PairData, recipe: PairsRecipe) -> int:
    """Batches of the whole run: `steps`, or as many as `epochs` have."""
    return recipe.epochs * make_source(data, recipe).num_batches_per_epoch if recipe.steps is None else recipe.steps


def check_heldout(data: PairData, cfg: TrainerConfig) -> None:
    """Raise `ConfigError` for evaluations during training without pairs to measure on."""
    if not data.heldout and (cfg.eval_every_n_steps or cfg.eval_at_start):
        raise ConfigError("trainer.eval_every_n_steps needs held-out pairs; raise heldout, or give heldout_data or heldout_split")
