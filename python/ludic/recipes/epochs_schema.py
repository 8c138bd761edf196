"""The settings of `ludic sft`, `train-rm` and `dpo`: what they have in common, how they are
resolved, and the schema of each, whose values come from `defaults/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, TypeVar, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from ludic.data.formats import AUTO, FORMATS
from ludic.errors import ConfigError
from ludic.recipes.compose import (
    LOADED_MODEL,
    flatten,
    list_builtin_recipes,
    read_builtin,
    read_defaults,
    read_yaml,
    resolve_layers,
    split_arguments,
)
from ludic.recipes.overrides import Override, parse_flags
from ludic.recipes.processes import RanksSection, TrainersSection, check_place
from ludic.recipes.rules import check_settings, setting
from ludic.recipes.schema import CommonSettings, LoraSection, NetworkSection, TaskSection, make_trainer_section
from ludic.recipes.sections import (
    CallbacksSection,
    CheckpointSection,
    ProfileSection,
    QuantizationSection,
    ShardingSection,
    check_checkpoints,
    parse_steps,
)
from ludic.training.rm_config import DPOTrainerConfig, RMTrainerConfig
from ludic.training.samples.conversations import ASSISTANT_TURNS

_PER_LOSS = "per_loss"  # a key of the defaults, whose content replaces the section `loss`


@dataclass
class EpochsRecipe(CommonSettings):
    """A run over a fixed set of samples: data, a model, and `epochs` passes over the data."""

    name: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """The run's folder is `output/name`; null: named by data and seed, with the time appended if
    that exists."""
    seed: int = setting(least=0)
    """Seed of the weights of a small model or a new head, of the order of the data, and of
    generated data."""
    data: Any = MISSING
    """Training data; null: `task` generates it."""
    image_folder: Optional[str] = None  # noqa: UP045
    """What paths of images in rows are relative to, and may not leave; null: the folder of each
    data file."""
    heldout: float = setting(least=0, below=1)
    """Share of the data that is held out from training and measured. The choice of rows does not
    depend on the seed."""
    epochs: int = setting(least=1)
    """Passes over the data."""
    steps: Optional[int] = setting(least=0)  # noqa: UP045
    """Training steps; null: as many as `epochs` have batches."""
    batch_size: int = setting(least=1)
    """Samples or pairs per step, packed into micro-batches by `trainer.packing` and
    `trainer.micro_token_budget`."""
    task: TaskSection = field(default_factory=TaskSection)
    """The task that generates data if `data` is null."""
    network: NetworkSection = field(default_factory=NetworkSection)
    lora: LoraSection = field(default_factory=LoraSection)
    quantization: QuantizationSection = field(default_factory=QuantizationSection)
    trainer: Any = MISSING
    """Fields of the trainer's config."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    callbacks: CallbacksSection = field(default_factory=CallbacksSection)
    profile: ProfileSection = field(default_factory=ProfileSection)
    place: TrainersSection = field(default_factory=TrainersSection)
    ranks: RanksSection = field(default_factory=RanksSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)


R = TypeVar("R", bound=EpochsRecipe)


def compose_epochs(recipe: type[R], arguments: Sequence[str | Override], *, command: str, trainer: type[Any]) -> R:
    """Resolve a recipe. `arguments` are at most one YAML file or name of a built-in recipe of
    `command`, and any number of `key=value`.

    Later values win, in this order: the defaults of `command`, its values for a loaded model and
    for the loss, the file or the built-in recipe, the command line. `trainer` is the trainer's
    config, from `make_trainer_section`."""
    source, overrides = split_arguments(arguments)
    tree = cast(DictConfig, OmegaConf.structured(recipe))
    tree.trainer = OmegaConf.structured(trainer)
    resolved = cast(R, resolve_layers(tree, _read_layers(command, source, overrides), overrides))
    check_settings(resolved)
    check_checkpoints(resolved.checkpoint)
    parse_steps(resolved.profile)
    check_place(resolved.place)
    return resolved


def _read_layers(command: str, source: str | None, overrides: Sequence[Override]) -> Iterator[tuple[str, DictConfig]]:
    base = read_defaults(command)
    user = _read_source(command, source) if source else OmegaConf.create({})
    given, by_loss = flatten(overrides), base.pop(_PER_LOSS, {})
    model, loss = given.get("model", user.get("model", base.model)), user.get("loss", {})
    loss = given.get("loss.loss_type", loss if isinstance(loss, str) else loss.get("loss_type"))
    for where, layer in (("defaults", base), (str(source), user)):
        loaded = layer.pop(LOADED_MODEL, OmegaConf.create({}))
        yield where, layer
        if model is not None:
            yield f"{where}, {LOADED_MODEL}", loaded
        if where == "defaults" and loss in by_loss:
            yield f"{where}, {_PER_LOSS}.{loss}", OmegaConf.create({"loss": by_loss[loss]})


def _read_source(command: str, source: str) -> DictConfig:
    """A settings file, or a built-in recipe. Raises ConfigError for anything else."""
    if source.endswith((".yaml", ".yml")):
        return read_yaml(Path(source).expanduser())
    if Path(source).suffix or "/" in source:
        recipes = ", ".join(list_builtin_recipes(command))
        raise ConfigError(f"{source!r} is no setting; write data={source} for a data file, FILE.yaml, or a recipe: {recipes}")
    return deepcopy(read_builtin(source, command))


@dataclass
class ColumnsSection:
    """The columns of the data, if they have other names."""

    prompt: Optional[str] = None  # noqa: UP045
    """The column of the prompt; null: the one of the row's format."""
    chosen: Optional[str] = None  # noqa: UP045
    """The column of the better response; null: the one of the row's format."""
    rejected: Optional[str] = None  # noqa: UP045
    """The column of the other response; null: the one of the row's format."""
    completion: Optional[str] = None  # noqa: UP045
    """The column of the answer, in rows without a pair; null: `completion`."""
    label: Optional[str] = None  # noqa: UP045
    """The probability that the chosen response is better; null: 1 for every pair. In rows without a
    pair, whether the answer is desirable; null: `label`."""


@dataclass
class PairsRecipe(EpochsRecipe):
    """A run over preference pairs, of data or of a built-in task."""

    data: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """JSONL, JSON, CSV or parquet file, folder, or hub id; null: `pairs` pairs drawn by `task`:
    `digits`, or a class of your own as `package.module:Class`."""
    data_config: Optional[str] = MISSING  # noqa: UP045
    """The configuration of a hub id."""
    split: str = MISSING
    """The split of a hub id or folder to train on."""
    limit: Optional[int] = setting(least=1)  # noqa: UP045
    """Rows to read at most, drawn at random by `seed`; null: all."""
    heldout_data: Optional[str] = MISSING  # noqa: UP045
    """File, folder or hub id to measure on instead of a share of the data."""
    heldout_split: Optional[str] = MISSING  # noqa: UP045
    """Split of `heldout_data`, or of `data`, to measure on. Files have no splits."""
    heldout_limit: Optional[int] = setting(least=1)  # noqa: UP045
    """Held-out rows at most, the same in every run; null: all."""
    columns: ColumnsSection = field(default_factory=ColumnsSection)
    chat_template: Any = MISSING
    """false: the tokenizer's chat template for conversations alone. true: for prompts and answers
    in plain text, too. A file with a Jinja template, or its text: as true, with that template,
    which is saved with the tokenizer."""
    system_prompt: Optional[str] = MISSING  # noqa: UP045
    """System prompt of every conversation."""
    pairs: int = setting(least=1)
    """Pairs to generate if `data` is null."""


@dataclass
class SFTRecipe(EpochsRecipe):
    """A run of `ludic sft`: rows of a file become samples, a model is trained on them, and its
    held-out loss is measured before and after."""

    data: Any = MISSING
    """JSONL file, or a list of them; null: `rows` demonstrations of `task`, which are written to
    the run's folder."""
    heldout_data: Any = MISSING
    """JSONL file, or a list of them, to measure on instead of a share of `data`."""
    data_format: str = setting(choices=(AUTO, *FORMATS))
    """Format of the rows: messages, prompt_completion, alpaca, sharegpt, text, rollout, tokens, or
    auto, by the columns of each file."""
    streaming: bool = False
    """Read `data` while training instead of all before it: JSONL and parquet files, folders of
    such, and ids of the hub, of any size."""
    shuffle_buffer: int = setting(10_000, least=1)
    """Rows that are in memory with `streaming`: each such block is shuffled by itself. The share
    `heldout` is taken from the first block."""
    assistant_turns: str = setting(choices=ASSISTANT_TURNS)
    """The messages of the assistant that are trained in a conversation: all, last, or each in a
    sample of its own."""
    rows: int = setting(least=2)
    """Demonstrations to generate if `data` is null."""


def compose_sft(arguments: Sequence[str] = ()) -> SFTRecipe:
    """`arguments`: at most one YAML file, and any number of `key=value`, as for `ludic train`."""
    return compose_epochs(SFTRecipe, arguments, command="sft", trainer=make_trainer_section())


def list_data_files(setting: Any, name: str) -> list[Path]:
    """The files that `data` or `heldout_data` names."""
    paths = [setting] if isinstance(setting, str) else setting
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"{name} ({setting}) must be the path of a file, or a list of paths: {name}=[a.jsonl,b.parquet]")
    return [Path(path).expanduser() for path in paths]


@dataclass
class DPOLossSection:
    """The loss, also in one word: `loss=simpo`. A setting that the loss does not have is null."""

    loss_type: str = MISSING
    """sigmoid (DPO), ipo, robust, kto, or without a reference cpo, simpo, orpo."""
    beta: float = MISSING
    """How much the policy is held to the reference: less moves it further. For ipo it is tau. For
    cpo and simpo the scale of a difference, for orpo the weight of the odds ratio."""
    label_smoothing: Optional[float] = MISSING  # noqa: UP045
    """The probability that a label is wrong, in [0, 0.5). Not for kto and orpo."""
    length_normalize: Optional[bool] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """Divide the log-ratios by the number of answer tokens; null: for ipo alone, as in TRL."""
    nll_coeff: Optional[float] = MISSING  # noqa: UP045
    """Weight of the negative log-likelihood of the chosen answers, per token; 0: without it. For
    sigmoid, ipo and robust."""
    cpo_alpha: Optional[float] = None  # noqa: UP045
    """The same for cpo and simpo, as a mean over the tokens of a batch."""
    simpo_gamma: Optional[float] = None  # noqa: UP045
    """The margin of simpo."""
    desirable_weight: Optional[float] = None  # noqa: UP045
    """Weight of the desirable answers of kto, and of the chosen ones of pairs."""
    undesirable_weight: Optional[float] = None  # noqa: UP045
    """Weight of the others."""


@dataclass
class DPOWarmupSection:
    """Supervised fine-tuning on the answers of the pairs, before the reference is fixed: for a
    model that does not answer such prompts yet."""

    steps: int = setting(least=0)
    """0: no warm-up."""
    batch_size: int = setting(least=1)
    """Answers per step."""
    lr: float = MISSING
    """Its learning rate; the other settings are taken from `trainer`."""
    answers: str = setting(choices=("chosen", "both"))
    """The answers to learn: `chosen`, as in the DPO paper, or `both` of each pair."""


@dataclass
class DPOReferenceSection:
    """What the policy is held to. It scores all pairs once, before the first step."""

    model: Optional[str] = None  # noqa: UP045
    """Folder in Hugging Face layout, or hub id, with the policy's tokenizer; null: the policy as it
    is after the warm-up, with its adapters off."""


@dataclass
class DPORecipe(PairsRecipe):
    """A run of `ludic dpo`: a policy, preference pairs or single answers, and for some losses a
    reference. Held-out pairs are measured after it, sampled answers before and after."""

    reference: DPOReferenceSection = field(default_factory=DPOReferenceSection)
    warmup: DPOWarmupSection = field(default_factory=DPOWarmupSection)
    loss: DPOLossSection = field(default_factory=DPOLossSection)
    answers: int = setting(least=0)
    """Answers that are sampled before and after, to held-out prompts at temperature 1; 0: none."""
    max_new_tokens: int = setting(least=1)
    """Token limit of such an answer."""


def compose_dpo(arguments: Sequence[str] = ()) -> DPORecipe:
    """Resolve a recipe. `arguments` are at most one YAML file and any number of `key=value`."""
    return compose_epochs(DPORecipe, arguments, command="dpo", trainer=make_trainer_section(DPOTrainerConfig))


@dataclass
class LossSection:
    """The Bradley-Terry loss."""

    beta: float = MISSING
    """P(chosen is preferred) = sigmoid(beta * margin)."""
    label_smoothing: float = MISSING
    """Label smoothing eps: every label y becomes y (1 - eps) + eps / 2."""
    regularization_lambda: float = MISSING
    """Weight of a penalty on the norm of the margins."""
    regularization_type: str = MISSING
    """Norm of that penalty: l2 or l1."""
    score_regularization_lambda: float = MISSING
    """Weight of a penalty on the scores."""
    score_regularization_type: str = MISSING
    """`squares`: of each score. `squared_sum`: of the sum of a pair's scores, as TRL's
    `center_rewards_coefficient`."""


@dataclass
class RMRecipe(PairsRecipe):
    """A run of `ludic train-rm`: a model with a scalar head, trained on preference pairs and
    measured on held-out pairs."""

    train_sample: int = setting(least=1)
    """Training pairs at most on which `train_pairwise_accuracy` is measured."""
    loss: LossSection = field(default_factory=LossSection)


def compose_rm(arguments: Sequence[str] = ()) -> RMRecipe:
    """Resolve a recipe. `arguments` are at most one YAML file, any number of `key=value`, and
    the flags of `overrides.FLAGS`."""
    trainer = make_trainer_section(RMTrainerConfig)
    return compose_epochs(RMRecipe, list(parse_flags(arguments)), command="train-rm", trainer=trainer)
