"""The settings that `ludic sft`, `train-rm` and `dpo` have in common, and how they are resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Optional, TypeVar, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from ludic.errors import ConfigError
from ludic.recipes.callbacks_section import CallbacksSection
from ludic.recipes.checkpoint_section import CheckpointSection, check_checkpoints
from ludic.recipes.compose import LOADED_MODEL, check_minimums, read_yaml, resolve_layers, split_arguments
from ludic.recipes.overrides import Override
from ludic.recipes.place_section import TrainersSection, check_place
from ludic.recipes.quantization_section import QuantizationSection
from ludic.recipes.ranks_section import RanksSection, check_ranks
from ludic.recipes.schema import CommonSettings, LoraSection, NetworkSection, TaskSection
from ludic.recipes.sharding_section import ShardingSection


@dataclass
class EpochsRecipe(CommonSettings):
    """A run over a fixed set of samples: data, a model, and `epochs` passes over the data."""

    name: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """The run's folder is `output/name`; null: named by data and seed, with the time appended if
    that exists."""
    output: str = MISSING
    """Folder that all runs are written to."""
    seed: int = MISSING
    """Seed of the weights of a small model or a new head, of the order of the data, and of
    generated data."""
    threads: Optional[int] = MISSING  # noqa: UP045
    """Threads of torch; null: torch's default."""
    data: Any = MISSING
    """Training data; null: `task` generates it."""
    heldout: float = MISSING
    """Share of the data that is held out from training and measured. The choice of rows does not
    depend on the seed."""
    model: Optional[str] = MISSING  # noqa: UP045
    """Folder in Hugging Face layout, or hub id; null: a small model made from `network`."""
    tokenizer: Optional[str] = MISSING  # noqa: UP045
    """Folder or hub id; null: the tokenizer of `model`, or the byte tokenizer."""
    dtype: str = MISSING
    """Type of the weights: float32, bfloat16, or auto, the type in the model's files. float16 is
    only for weights that are not trained."""
    epochs: int = MISSING
    """Passes over the data."""
    steps: Optional[int] = MISSING  # noqa: UP045
    """Training steps; null: as many as `epochs` have batches."""
    batch_size: int = MISSING
    """Samples or pairs per step, packed into micro-batches by `trainer.packing` and
    `trainer.micro_token_budget`."""
    log_every: int = MISSING
    """Without a terminal, one line is printed every so many steps. metrics.jsonl has every step."""
    report_to: Any = None
    """Experiment trackers: wandb, tensorboard, trackio, mlflow, or a list of these; null: none. Its
    short name is `log`: `log=[wandb,mlflow]`."""
    task: TaskSection = field(default_factory=TaskSection)
    """The task that generates data if `data` is null."""
    network: NetworkSection = field(default_factory=NetworkSection)
    lora: LoraSection = field(default_factory=LoraSection)
    quantization: QuantizationSection = field(default_factory=QuantizationSection)
    trainer: Any = MISSING
    """Fields of the trainer's config."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    callbacks: CallbacksSection = field(default_factory=CallbacksSection)
    place: TrainersSection = field(default_factory=TrainersSection)
    ranks: RanksSection = field(default_factory=RanksSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)


R = TypeVar("R", bound=EpochsRecipe)

_LEAST = {"seed": 0, "threads": 1, "epochs": 1, "steps": 0, "batch_size": 1, "log_every": 1}


def compose_epochs(
    recipe: type[R],
    arguments: Sequence[str | Override],
    *,
    package: str,
    trainer: type[Any],
    least: Mapping[str, int],
) -> R:
    """Resolve a recipe. `arguments` are at most one YAML file and any number of `key=value`.

    Later values win, in this order: `defaults.yaml` of `package`, its values for a loaded model,
    the file, the command line. `trainer` is the trainer's config, from `make_trainer_section`.
    `least` has the smallest values of the recipe's own counts."""
    source, overrides = split_arguments(arguments)
    tree = cast(DictConfig, OmegaConf.structured(recipe))
    tree.trainer = OmegaConf.structured(trainer)
    resolved = cast(R, resolve_layers(tree, _read_layers(package, source, overrides), overrides))
    check_minimums(resolved, {**_LEAST, **least})
    check_ranks(resolved.ranks)
    check_checkpoints(resolved.checkpoint)
    check_place(resolved.place)
    if not 0.0 <= resolved.heldout < 1.0:
        raise ConfigError(f"heldout ({resolved.heldout}) must be a share of the data, from 0 to less than 1")
    return resolved


def _read_layers(package: str, source: str | None, overrides: Sequence[Override]) -> Iterator[tuple[str, DictConfig]]:
    if source is not None and not source.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{source!r} is neither a setting nor a settings file; write data={source} for a data file, FILE.yaml for a settings file"
        )
    base = cast(DictConfig, OmegaConf.create((files(package) / "defaults.yaml").read_text(encoding="utf-8")))
    user = read_yaml(Path(source).expanduser()) if source else OmegaConf.create({})
    model = {override.key: override.value for override in overrides}.get("model", user.get("model", base.model))
    for where, layer in (("defaults", base), (str(source), user)):
        loaded = layer.pop(LOADED_MODEL, OmegaConf.create({}))
        yield where, layer
        if model is not None:
            yield f"{where}, {LOADED_MODEL}", loaded
