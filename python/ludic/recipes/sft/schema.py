"""The tree of a supervised run: every field that a file or the command line can set. Values are those of `defaults.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from ludic.errors import ConfigError
from ludic.recipes.compose import LOADED_MODEL, Override, fill, read_yaml, split_arguments
from ludic.recipes.schema import CheckpointSection, LoraSection, NetworkSection, TaskSection, trainer_section
from ludic.training.batching.chat_template import ASSISTANT_TURNS


@dataclass
class SFTRecipe:
    """One run: rows of a file become samples, a model is trained on them, its held-out loss is measured before and after."""

    name: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """The run's folder is `output/name`; null: the data's name and the seed, and the time if that exists."""
    output: str = MISSING
    """Folder of all runs."""
    seed: int = MISSING
    """Of a small model's weights, of the order of the rows, and of demonstrations."""
    threads: Optional[int] = MISSING  # noqa: UP045
    """Threads of torch; null: as many as torch takes."""
    data: Any = MISSING
    """JSONL file, or a list of them; null: `rows` demonstrations of `task`, written to the run's folder."""
    heldout: float = MISSING
    """Share of the rows that are kept out of training and measured; which ones does not depend on the seed."""
    heldout_data: Any = MISSING
    """JSONL file, or a list of them, to measure on instead."""
    assistant_turns: str = MISSING
    """Of conversations, which messages of the assistant are trained: all, last, or each in a sample of its own."""
    model: Optional[str] = MISSING  # noqa: UP045
    """Folder in Hugging Face layout, or hub id; null: a small model made from `network`."""
    tokenizer: Optional[str] = MISSING  # noqa: UP045
    """Null: that of `model`, or the byte tokenizer."""
    chat_template: Optional[str] = MISSING  # noqa: UP045
    """File with a Jinja template that replaces the tokenizer's and is saved with it; null: the tokenizer's own."""
    dtype: str = MISSING
    """Of the weights: float32, bfloat16, float16, or auto: as a loaded model has them."""
    epochs: int = MISSING
    """Passes over the data."""
    steps: Optional[int] = MISSING  # noqa: UP045
    """Batches; null: as many as `epochs` have."""
    batch_size: int = MISSING
    """Samples a step, packed into micro-batches by `trainer.packing` and `trainer.micro_token_budget`."""
    log_every: int = MISSING
    """Without a terminal, a line is printed every so many steps. metrics.jsonl has every step."""
    rows: int = MISSING
    """Demonstrations to write where there is no `data`."""
    task: TaskSection = field(default_factory=TaskSection)
    """Whose demonstrations."""
    network: NetworkSection = field(default_factory=NetworkSection)
    lora: LoraSection = field(default_factory=LoraSection)
    trainer: Any = MISSING
    """Fields of `TrainerConfig`."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)


_LEAST = {"seed": 0, "threads": 1, "epochs": 1, "steps": 0, "batch_size": 1, "log_every": 1, "rows": 2}


def compose_sft(arguments: Sequence[str] = ()) -> SFTRecipe:
    """`arguments`: at most one YAML file, and any number of `key=value`, as for `ludic train`. Later wins: defaults, those for a loaded
    model, the file, the command line."""
    source, overrides = split_arguments(arguments)
    tree = cast(DictConfig, OmegaConf.structured(SFTRecipe))
    tree.trainer = OmegaConf.structured(trainer_section())
    recipe = cast(SFTRecipe, fill(tree, _layers(source, overrides), overrides))
    _check(recipe)
    return recipe


def _layers(source: str | None, overrides: Sequence[Override]) -> Iterator[tuple[str, DictConfig]]:
    if source is not None and not source.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{source!r} is no setting and no file; write data={source} for a data file, FILE.yaml for one of settings"
        )
    base = cast(DictConfig, OmegaConf.create((files("ludic.recipes.sft") / "defaults.yaml").read_text(encoding="utf-8")))
    user = read_yaml(Path(source).expanduser()) if source else OmegaConf.create({})
    model = {override.key: override.value for override in overrides}.get("model", user.get("model", base.model))
    for where, layer in (("defaults", base), (str(source), user)):
        loaded = layer.pop(LOADED_MODEL, OmegaConf.create({}))
        yield where, layer
        if model is not None:
            yield f"{where}, {LOADED_MODEL}", loaded


def _check(recipe: SFTRecipe) -> None:
    for name, least in _LEAST.items():
        value = getattr(recipe, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} ({value}) must be at least {least}")
    if not 0.0 <= recipe.heldout < 1.0:
        raise ConfigError(f"heldout ({recipe.heldout}) must be a share of the rows, from 0 to less than 1")
    if recipe.assistant_turns not in ASSISTANT_TURNS:
        raise ConfigError(f"assistant_turns ({recipe.assistant_turns}) must be one of {', '.join(ASSISTANT_TURNS)}")


def paths_of(setting: Any, name: str) -> list[Path]:
    """The files of `data` or `heldout_data`."""
    given = [setting] if isinstance(setting, str) else setting
    if not isinstance(given, list) or not given or not all(isinstance(path, str) for path in given):
        raise ConfigError(f"{name} ({setting}) must be the path of a file, or a list of paths: {name}=[a.jsonl,b.parquet]")
    return [Path(path).expanduser() for path in given]
