"""The tree of a reward-model run: every field that a file or the command line can set. Values are those of `defaults.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from ludic.errors import ConfigError
from ludic.recipes.compose import LOADED_MODEL, Override, fill, parse_override, read_yaml
from ludic.recipes.rm.flags import overrides_of_flags
from ludic.recipes.schema import CheckpointSection, LoraSection, NetworkSection, TaskSection, trainer_section
from ludic.training.rm_trainer import RMTrainerConfig


@dataclass
class LossSection:
    """The Bradley-Terry loss."""

    beta: float = MISSING
    """P(chosen preferred) = sigmoid(beta * margin)."""
    label_smoothing: float = MISSING
    """Every label y becomes y (1 - eps) + eps / 2."""
    regularization_lambda: float = MISSING
    """Weight of the norm of the margins."""
    regularization_type: str = MISSING
    """l2 or l1."""
    score_regularization_lambda: float = MISSING
    """Weight of the mean square of the scores."""


@dataclass
class ColumnsSection:
    """Which column of the data has what, where it has another name."""

    prompt: Optional[str] = None  # noqa: UP045
    chosen: Optional[str] = None  # noqa: UP045
    rejected: Optional[str] = None  # noqa: UP045
    label: Optional[str] = None  # noqa: UP045
    """The probability that the chosen response is the better; null: 1 for every pair."""


@dataclass
class RMRecipe:
    """One run: preference pairs, a model with a scalar head trained on them, and its metrics on pairs that are held out."""

    name: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """The run's folder is `output/name`; null: the data's name and the seed, and the time if that exists."""
    output: str = MISSING
    """Folder of all runs."""
    seed: int = MISSING
    """Of the reward head, of a small model's weights, of the order of the pairs, and of generated pairs."""
    threads: Optional[int] = MISSING  # noqa: UP045
    """Threads of torch; null: as many as torch takes."""
    data: Optional[str] = MISSING  # noqa: UP045
    """JSONL, JSON, CSV or parquet file, folder, or hub id; null: `pairs` pairs drawn by `task`."""
    data_config: Optional[str] = MISSING  # noqa: UP045
    """Of a hub id: the name of its configuration."""
    split: str = MISSING
    """Of a hub id or folder: what is trained on."""
    limit: Optional[int] = MISSING  # noqa: UP045
    """Pairs that are read at most; null: all."""
    heldout: float = MISSING
    """Share of the pairs that are kept out of training and measured; which ones does not depend on the seed. Of data alone."""
    heldout_data: Optional[str] = MISSING  # noqa: UP045
    """File, folder or hub id to measure on instead."""
    heldout_split: Optional[str] = MISSING  # noqa: UP045
    """Split of `heldout_data`, or of `data`, to measure on instead. Files have none."""
    heldout_limit: Optional[int] = MISSING  # noqa: UP045
    """Held-out pairs at most; null: all."""
    columns: ColumnsSection = field(default_factory=ColumnsSection)
    chat_template: bool = MISSING
    """Prompts and answers that are plain text go through the tokenizer's chat template as well; conversations always do."""
    system_prompt: Optional[str] = MISSING  # noqa: UP045
    """Put before every conversation."""
    model: Optional[str] = MISSING  # noqa: UP045
    """Folder in Hugging Face layout, or hub id; null: a small model made from `network`."""
    tokenizer: Optional[str] = MISSING  # noqa: UP045
    """Null: that of `model`, or the byte tokenizer."""
    dtype: str = MISSING
    """Of the weights: float32, bfloat16, float16, or auto: as a loaded model has them."""
    epochs: int = MISSING
    """Passes over the pairs."""
    steps: Optional[int] = MISSING  # noqa: UP045
    """Batches; null: as many as `epochs` have."""
    batch_size: int = MISSING
    """Pairs a step, packed into micro-batches by `trainer.micro_token_budget`; a pair is never split."""
    log_every: int = MISSING
    """Without a terminal, a line is printed every so many steps. metrics.jsonl has every step."""
    train_sample: int = MISSING
    """Training pairs on which `train_pairwise_accuracy` is measured, at most."""
    pairs: int = MISSING
    """Pairs to draw where there is no `data`."""
    task: TaskSection = field(default_factory=TaskSection)
    """Whose preferences: `digits`, or a class of your own as `package.module:Class`."""
    loss: LossSection = field(default_factory=LossSection)
    lora: LoraSection = field(default_factory=LoraSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    gradient_checkpointing: bool = MISSING
    """Activations are computed again in the backward pass: less memory, more time."""
    trainer: Any = MISSING
    """Fields of `RMTrainerConfig`."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)


_LEAST = {
    **dict.fromkeys(("threads", "limit", "heldout_limit", "epochs", "batch_size", "log_every", "train_sample", "pairs"), 1),
    **dict.fromkeys(("seed", "steps"), 0),
}


def compose_rm(arguments: Sequence[str] = ()) -> RMRecipe:
    """`arguments`: at most one YAML file, any number of `key=value`, as for `ludic train`, and the flags of `flags.py`. Later wins:
    defaults, those for a loaded model, the file, the command line in its order."""
    source, overrides = _split(arguments)
    tree = cast(DictConfig, OmegaConf.structured(RMRecipe))
    tree.trainer = OmegaConf.structured(trainer_section(RMTrainerConfig))
    recipe = cast(RMRecipe, fill(tree, _layers(source, overrides), overrides))
    _check(recipe)
    return recipe


def _split(arguments: Sequence[str]) -> tuple[str | None, list[Override]]:
    """(file, overrides)."""
    sources: list[str] = []
    overrides: list[Override] = []
    for argument in overrides_of_flags(arguments):
        if isinstance(argument, Override):
            overrides.append(argument)
        elif "=" in argument and not Path(argument).is_file():
            overrides.append(parse_override(argument))
        else:
            sources.append(argument)
    if len(sources) > 1:
        raise ConfigError(f"one file of settings at a time, not {' and '.join(sources)}; a setting is written key=value")
    return (sources[0] if sources else None), overrides


def _layers(source: str | None, overrides: Sequence[Override]) -> Iterator[tuple[str, DictConfig]]:
    if source is not None and not source.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{source!r} is no setting and no file of settings; write data={source} for a data file, FILE.yaml for one of settings"
        )
    base = cast(DictConfig, OmegaConf.create((files("ludic.recipes.rm") / "defaults.yaml").read_text(encoding="utf-8")))
    user = read_yaml(Path(source).expanduser()) if source else OmegaConf.create({})
    model = {override.key: override.value for override in overrides}.get("model", user.get("model", base.model))
    for where, layer in (("defaults", base), (str(source), user)):
        loaded = layer.pop(LOADED_MODEL, OmegaConf.create({}))
        yield where, layer
        if model is not None:
            yield f"{where}, {LOADED_MODEL}", loaded


def _check(recipe: RMRecipe) -> None:
    for name, least in _LEAST.items():
        value = getattr(recipe, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} ({value}) must be at least {least}")
    if not 0.0 <= recipe.heldout < 1.0:
        raise ConfigError(f"heldout ({recipe.heldout}) must be a share of the pairs, from 0 to less than 1")
