"""The tree of a recipe: every field that a recipe file or the command line can set.

Values come from the built-in recipes (`builtin/*.yaml`) and, for the two `trainer` sections, from
`TrainerConfig`; the classes here give names, types and meanings only.
"""

from __future__ import annotations

import types
from dataclasses import MISSING as NO_DEFAULT, Field, dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from ludic.recipes.inference_section import InferenceSection
from ludic.training.config import TrainerConfig


@dataclass
class TaskSection:
    """Which problems, which teacher, which verifier."""

    kind: str = MISSING
    """`sort`, `addition`, `tictactoe`, `tools`, `data` (with `data` and `reward`), or a class of
    your own as `package.module:Class`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task."""


@dataclass
class NetworkSection:
    """The small model that is made when `model` is null."""

    hidden_size: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    intermediate_size: int = MISSING
    max_positions: int = MISSING
    initializer_range: float = 0.02
    """Standard deviation of the first weights."""
    end_of_turn: str = "eos"
    """`eos`: an end token of its own. `newline`: the newline ends a turn, so that a dialogue is
    lines of text."""


@dataclass
class LoraSection:
    """Low-rank adapters instead of training every weight. A small model that is made is warmed
    up whole, and gets them afterwards."""

    rank: int = 0
    """0: every weight is trained."""
    alpha: Optional[float] = None  # noqa: UP045
    """The adapters' part is scaled by `alpha / rank`; null: twice the rank."""
    dropout: float = 0.0
    """Of the adapters' input."""
    target_modules: Any = None
    """List of the last parts of layer names; null: attention and feed-forward layers, by
    architecture."""


@dataclass
class WarmupSection:
    """Supervised fine-tuning on the teacher's demonstrations."""

    steps: int = MISSING
    """0 leaves the warm-up out."""
    batch_size: int = MISSING
    """Demonstrations a step."""
    trainer: Any = MISSING
    """Fields of `TrainerConfig`."""


@dataclass
class RolloutSection:
    """What is sampled for one step of reinforcement."""

    prompts: int = MISSING
    """Problems a step."""
    group_size: int = MISSING
    """Answers to each problem."""
    temperature: float = MISSING
    top_p: float = MISSING
    max_new_tokens: Optional[int] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """Of a turn. Null: what the task asks for."""
    concurrency: int = MISSING
    """Episodes in flight, which is also the largest batch of the in-process engine."""
    system_prompt: Optional[str] = MISSING  # noqa: UP045
    """Put before every question; null: that of the task, if it has one."""
    log_every: int = MISSING
    """Every how many steps the rollouts are written to rollouts.jsonl; 0: never."""


@dataclass
class EvaluationSection:
    """Held-out measurement, before and after reinforcement."""

    prompts: int = MISSING
    """Held-out problems, of each kind that the task measures; one greedy answer to each of the
    first kind."""
    samples_per_prompt: int = MISSING
    """Answers sampled to each at the rollout's temperature."""
    solved_at: Optional[float] = None  # noqa: UP045
    """An answer is right from this total reward on; null: from what the task calls a success.
    Where the reward functions are yours that is 1, as long as every reward is 0 or 1; with other
    rewards there is no accuracy until this says what is right."""


@dataclass
class CheckpointSection:
    """Where a killed run resumes: in either phase."""

    every_n_steps: int = MISSING
    """0: only at the end, or when interrupted."""
    max_to_keep: int = MISSING


@dataclass
class Recipe:
    """One run: a policy, a task, a supervised warm-up, reinforcement, and a measurement before
    and after it."""

    recipe: str = MISSING
    """The built-in recipe that the other values start from."""
    name: Optional[str] = MISSING  # noqa: UP045
    """The run's folder is `output/name`; null: recipe, algorithm and seed, and the time if that
    exists."""
    output: str = MISSING
    """Folder of all runs."""
    seed: int = MISSING
    """Of weights, demonstrations, problems and sampling. The held-out problems do not depend on
    it."""
    threads: Optional[int] = MISSING  # noqa: UP045
    """Threads of torch; null: as many as torch takes. Results depend on it in the last digits,
    and so do runs."""
    model: Optional[str] = MISSING  # noqa: UP045
    """Folder in Hugging Face layout, or hub id; null: a small model made from `network`."""
    tokenizer: Optional[str] = MISSING  # noqa: UP045
    """Null: that of `model`, or the byte tokenizer."""
    dtype: str = MISSING
    """Of the weights: float32, bfloat16, or auto: as a loaded model has them. float16 is for
    weights that are not trained."""
    data: Optional[str] = None  # noqa: UP045
    """Your own problems: a JSONL, JSON, CSV or parquet file with a column `prompt`, a folder, or
    an id of the hub."""
    reward: Any = None
    """What rewards the answers to them: `module:function`, `gsm8k`, `math`, or a list of these."""
    reward_weights: Any = None
    """A number for each reward function; null: 1."""
    reward_model: Optional[str] = None  # noqa: UP045
    """Folder of a reward model, such as a `ludic train-rm` run: its score rewards the answers in
    training, in the place of the task's own reward, which held-out measurement keeps."""
    reward_model_args: dict[str, Any] = field(default_factory=dict)
    """mode (replace, add, multiply, weighted, bonus), rm_coeff, alpha, unfinished_penalty (10:
    off the score of an answer that ran into the token limit), normalize, dtype,
    micro_token_budget, batch_size, timeout_s."""
    algorithm: str = MISSING
    """A name of `ludic.training.presets.registry`, such as grpo; `ludic train --help` lists them."""
    algorithm_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the algorithm's `make_` function."""
    steps: int = MISSING
    """Batches of reinforcement."""
    log_every: int = MISSING
    """Without a terminal, a line is printed every so many steps. metrics.jsonl has every step."""
    report_to: Any = None
    """Trackers that are told every step as well: wandb, tensorboard, trackio, or a list of
    these; null: none."""
    task: TaskSection = field(default_factory=TaskSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    lora: LoraSection = field(default_factory=LoraSection)
    warmup: WarmupSection = field(default_factory=WarmupSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    trainer: Any = MISSING
    """Fields of `TrainerConfig`, for reinforcement."""
    inference: InferenceSection = field(default_factory=InferenceSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)


DERIVED = ("pad_token_id", "seed", "temperature")
"""Fields of `TrainerConfig` that follow from the recipe: from its tokenizer, its seed and its
sampling."""


@cache
def trainer_section(config: type[TrainerConfig] = TrainerConfig) -> type[Any]:
    """`config` as OmegaConf can hold it: the same fields and defaults, without the derived,
    literals as plain types."""
    hints = get_type_hints(config)
    chosen = [item for item in fields(config) if item.init and item.name not in DERIVED]
    made = [(item.name, _plain(hints[item.name]), _copied(item)) for item in chosen]
    return make_dataclass("TrainerSection", made, namespace={"made_of": config})


def _plain(hint: Any) -> Any:
    """The nearest annotation that OmegaConf supports."""
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        members = {_plain(member) for member in get_args(hint) if member is not type(None)}
        return Optional[members.pop()] if len(members) == 1 and type(None) in get_args(hint) else Any  # noqa: UP045
    return hint if hint in (int, float, str, bool) or get_origin(hint) is tuple else Any


def _copied(item: Field[Any]) -> Field[Any]:
    if item.default_factory is not NO_DEFAULT:
        return field(default_factory=item.default_factory)
    return field(default=item.default)
