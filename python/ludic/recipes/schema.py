"""The schema of a recipe: every setting of a recipe file or the command line.

Values come from `defaults/train.yaml`, the built-in recipes (`builtin/*.yaml`) and, for the two
`trainer` sections, from `TrainerConfig`. The classes here only give names, types and help texts.
"""

from __future__ import annotations

import math
import types
from dataclasses import MISSING as NO_DEFAULT, dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from ludic.agents.tool_agent import MALFORMED
from ludic.data.formats import FORMATS
from ludic.recipes.agent_section import AgentSection
from ludic.recipes.processes import InferenceSection, McpSection, PlaceSection, QueueSection, RanksSection
from ludic.recipes.rules import setting
from ludic.recipes.sections import (
    CheckpointSection,
    ControllersSection,
    CriticSection,
    CurriculumSection,
    ImagesSection,
    InfoSeedSection,
    ProfileSection,
    QuantizationSection,
    ReferenceSection,
    RLCallbacksSection,
    ShardingSection,
    TeacherSection,
)
from ludic.training.config import TrainerConfig
from ludic.training.judge import JudgeSettings

MODES = ("sft", "rl", "sft+rl")
_POOL = "rollout.over_sampling_factor or rollout.group_filter"
_WHOLE_BATCHES = "actors and batches ahead sample whole batches, of which no problem is replaced"
AUTO = "auto"
"""The default of `trainer.model_device`: "cuda" if available, else "cpu"."""


@dataclass
class TaskSection:
    """The problems, their teacher and their verifier."""

    kind: str = MISSING
    """`sort`, `addition`, `rising`, `code`, `tictactoe`, `tools`, `errand`, `terminal`, `shapes`,
    `reasoning_gym`, `data` (with `data` and `reward`), `harbor` (with a folder of tasks as `data`),
    or a class of your own as `package.module:Class`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task."""


@dataclass
class NetworkSection:
    """The small model that is made when `model` is null."""

    kind: str = setting("qwen2", choices=("qwen2", "qwen2_vl"))
    """`qwen2` reads text. `qwen2_vl` sees images too; it needs the extra `images`."""
    hidden_size: int = setting(relation="a multiple of network.num_heads")
    """Width of the hidden states."""
    num_layers: int = MISSING
    """Decoder layers."""
    num_heads: int = setting(least=1, relation="a multiple of network.num_kv_heads")
    """Attention heads of a layer, each of `hidden_size / num_heads` dimensions."""
    num_kv_heads: int = setting(least=1)
    """Heads of keys and values, which the attention heads share (grouped-query attention)."""
    intermediate_size: int = MISSING
    """Width of the feed-forward layers."""
    max_positions: int = MISSING
    """Tokens of the longest sequence, prompt and answer together."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    end_of_turn: str = setting("eos", choices=("eos", "newline"))
    """`eos`: a special token ends a turn. `newline`: the newline ends a turn, so that a dialogue
    is lines of text."""


@dataclass
class LoraSection:
    """Low-rank adapters (LoRA) instead of training every weight. A small model that is made is
    warmed up without them and gets them afterwards."""

    rank: int = 0
    """0: no adapters, every weight is trained."""
    alpha: Optional[float] = setting(None, needs="lora.rank")  # noqa: UP045
    """The adapters' output is scaled by `alpha / rank`; null: alpha is twice the rank."""
    dropout: float = setting(0.0, needs="lora.rank")
    """Dropout on the adapters' input."""
    target_modules: Any = field(default=None, metadata={"needs": "lora.rank"})
    """List of the last parts of layer names, such as [q_proj,v_proj]; null: all attention and
    feed-forward projections."""


@dataclass
class PublishedLoraSection(LoraSection):
    """Low-rank adapters (LoRA), and how servers get them."""

    publish: str = setting("auto", choices=("auto", "adapter", "merged"), needs="lora.rank")
    """What servers get: `adapter`, the adapters alone; `merged`, all weights with the adapters
    merged; `auto`, adapter if they take these adapters and have the base model."""


@dataclass
class WarmupSection:
    """Supervised fine-tuning before reinforcement, on the teacher's demonstrations or on rows."""

    steps: int = setting(least=0)
    """0: no warm-up, or with `data` one pass over it."""
    data: Any = None
    """Rows as `ludic sft` takes them: a file, or a list of files; null: demonstrations of the
    task."""
    data_format: str = setting(AUTO, choices=(AUTO, *FORMATS))
    """Format of the rows of `data`, as for `ludic sft`."""
    epochs: Optional[int] = setting(None, least=1, needs="warmup.data")  # noqa: UP045
    """Passes over `data`, instead of `steps`."""
    batch_size: int = setting(least=1)
    """Demonstrations or samples per step."""
    trainer: Any = MISSING
    """Fields of `TrainerConfig`."""


@dataclass
class RolloutSection:
    """Sampling for one step of reinforcement."""

    prompts: int = setting(least=1)
    """Problems per step."""
    group_size: int = setting(least=1)
    """Answers per problem."""
    temperature: float = MISSING
    """Logits are divided by it before sampling; the trainer divides its own, too. 0: greedy."""
    top_p: float = MISSING
    """Sample among the likeliest tokens that have this probability together; 1: among all."""
    top_k: int = 0
    """Sample among this number of the likeliest tokens; 0: among all."""
    min_p: float = 0.0
    """Sample among the tokens that are at least this many times as likely as the likeliest."""
    keep_candidates: bool = setting(
        False,
        excludes="inference.kind=vllm or inference.url or inference.python or rollout.repetition_penalty or teacher.url",
        hint="the in-process engine keeps candidates",
    )
    """The tokens that `top_p`, `top_k` and `min_p` left at each position are kept with a sample:
    the trained policy is softmax over them, at `temperature`. Needs `trainer.logits=full`."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the prompt or the answer has already become less likely. With it, and
    with `top_p`, `top_k` or `min_p` but without `keep_candidates`, the trained policy is
    softmax(logits), at temperature 1."""
    stop: Any = None
    """Text that ends an answer, or a list of texts, in addition to the end token. The tokens of the
    text are trained."""
    max_new_tokens: Optional[int] = setting(least=1)  # noqa: UP045  OmegaConf reads this annotation at run time
    """Token limit of one turn, and of each call of tools; null: the limit of the task."""
    concurrency: int = setting(least=1)
    """Concurrent episodes; also the largest batch of the in-process engine."""
    system_prompt: Optional[str] = MISSING  # noqa: UP045
    """System prompt of every conversation; null: the task's, if it has one."""
    max_tool_turns: int = setting(4, least=1)
    """Of `tools`: model calls of an answer in which it may call them. The one after them offers no
    tools, and is the answer."""
    tool_timeout_s: Optional[float] = 30.0  # noqa: UP045
    """Seconds after which a call of a tool is given up, and its result is an error; null: never."""
    malformed_tool_calls: str = setting("error", choices=MALFORMED)
    """A text between the tags of a call that is no call, such as broken JSON. `error`: a failed
    call, and the model is told the fault. `answer`: the text is the answer."""
    mask_truncated: bool = False
    """Answers that the token limit cuts off are not trained; their rewards count in their group."""
    log_every: int = setting(least=0)
    """Rollouts are written to rollouts.jsonl every this many steps; 0: never."""
    over_sampling_factor: float = setting(
        1.0,
        least=1,
        below=math.inf,
        excludes="place.actors or queue.url or inference.batches_ahead",
        hint=_WHOLE_BATCHES,
    )
    """Problems in the air, as a multiple of `prompts`. With 1.5 a step trains those that are
    answered first, and the slower third goes on into later steps; nothing is thrown away. Answers
    are then up to ceil(factor - 1) policy versions old. 1: a step waits for its slowest answer."""
    group_filter: Optional[str] = setting(  # noqa: UP045
        None, excludes="place.actors or queue.url or inference.batches_ahead", hint=_WHOLE_BATCHES
    )
    """Problems whose answers are not worth training are replaced by the next one before the step:
    `nonzero_std` (rewards must differ, DAPO's dynamic sampling), `any_success`,
    `response_diversity`, `quality_and_diversity`, or a function of your own as
    `package.module:name`, from the answers of a problem to bool. Null: none is replaced."""
    order: str = setting("arrival", choices=("arrival", "submission"), needs=_POOL)
    """Of over-sampling. `arrival`: a step has the problems that are answered first. `submission`:
    always the oldest problems, so that the prompts of a step do not depend on timing."""
    max_lag: Optional[int] = setting(None, needs=_POOL)  # noqa: UP045
    """Of over-sampling: steps after which a problem is trained at the latest. More lets slow
    answers take longer. Null: the least, ceil(over_sampling_factor - 1)."""
    patience: int = setting(10, least=1, needs=_POOL)
    """The run ends with an error if `group_filter` rejects more than `patience` * `prompts`
    problems for one step."""
    outage_patience_s: float = setting(15.0, least=0, below=math.inf, needs=_POOL)
    """Of over-sampling and `group_filter`: how many seconds no problem at all can be answered,
    because a server is away, before problems are given up. Meanwhile each is tried again after 1,
    2, 4, 8, 8 ... s."""


@dataclass
class EvaluationSection:
    """Held-out measurement, before and after reinforcement."""

    prompts: int = setting(least=1)
    """Held-out problems of each suite of the task. The problems of the first suite are also
    answered greedily."""
    samples_per_prompt: int = setting(least=1)
    """Answers sampled per problem, at the temperature of `rollout`."""
    on: str = "trainer"
    """Who answers: `trainer`, the model in the trainer's process, or `servers`, those that sample
    for training. Only numbers of one of them can be compared."""
    solved_at: Optional[float] = None  # noqa: UP045
    """An answer counts as right from this total reward on; null: the task's own definition of
    success. With reward functions of your own that is 1 as long as every reward is 0 or 1; with
    other rewards there is no accuracy unless this is set."""


@dataclass
class CommonSettings:
    """What all commands have: how the model is loaded and run, how conversations are rendered, and
    what ends an answer."""

    output: str = MISSING
    """Folder that all runs are written to."""
    threads: Optional[int] = setting(least=1)  # noqa: UP045  OmegaConf reads this annotation at run time
    """Threads of torch; null: one for a model of fewer than 10 million parameters, else torch's
    default. The last digits of results depend on it, so that runs with other values differ."""
    model: Optional[str] = MISSING  # noqa: UP045
    """Folder in Hugging Face layout, or hub id; null: a small model made from `network`."""
    tokenizer: Optional[str] = MISSING  # noqa: UP045
    """Folder or hub id; null: the tokenizer of `model`, or the byte tokenizer."""
    dtype: str = MISSING
    """Type of the weights: float32, bfloat16, float16, or auto, the type in the model's files."""
    model_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """How `model` is loaded: `{revision: BRANCH, attn_implementation: flash_attention_2}`; also
    experts_implementation, subfolder and variant."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    chat_template: Optional[str] = None  # noqa: UP045
    """File with a Jinja template, or its text, that replaces the tokenizer's and is saved with it;
    null: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`, which are saved with it.
    A row's column `chat_template_kwargs` goes before them."""
    eos_token: Optional[str] = None  # noqa: UP045
    """The end token, a token of the vocabulary; null: the tokenizer's. The token that ends a turn
    in the chat template always ends an answer, too."""
    log_every: int = setting(least=1)
    """Without a terminal, one line is printed every this many steps. metrics.jsonl has every
    step."""
    report_to: Any = None
    """Experiment trackers: wandb, tensorboard, trackio, mlflow, or a list of these; null: none. Its
    short name is `log`: `log=[wandb,mlflow]`."""
    images: ImagesSection = field(default_factory=ImagesSection)


@dataclass
class Recipe(CommonSettings):
    """A run of `ludic train`: a policy, a task, a supervised warm-up, reinforcement, and
    held-out measurement before and after it."""

    recipe: str = MISSING
    """The built-in recipe that gives all values that are not set."""
    name: Optional[str] = MISSING  # noqa: UP045
    """The run's folder is `output/name`; null: named by recipe, algorithm and seed, with the
    time appended if that exists."""
    seed: int = setting(least=0)
    """Seed of initial weights, demonstrations, problems and sampling. The held-out problems do
    not depend on it."""
    data: Any = None
    """Your own problems: a JSONL, JSON, CSV or parquet file with a column `prompt`, a folder, or
    a hub id; or a mixture of these, as `{datasets: [{id: FILE, weight: 0.5}, {id: FILE}], seed:
    0}`. A weight up to 1 takes that share of the rows, a higher one repeats rows."""
    streaming: bool = False
    """Leave the rows of `data` on disk, of any size: they are checked once, and each is read again
    when its problem is played. Trains on the same batches as without."""
    reward: Any = None
    """Reward functions for `data`: `module:function`, `gsm8k`, `math`, `pure_accuracy_math` (an
    answer between `<answer>` tags), `judge` (a language model), or a list of these."""
    reward_weights: Any = None
    """One weight per reward function; null: 1 each."""
    reward_normalize: str = setting("sum", choices=("sum", "each"), needs="reward", excludes="reward_model")
    """`sum`: weighted sums of rewards are normalised. `each`: every reward in its group, and the
    weighted sum of these over the batch (GDPO)."""
    eval_reward: Any = None
    """Reward functions of the held-out answers; null: `reward`, with `is_eval` true."""
    eval_reward_weights: Any = None
    """One weight per function of `eval_reward`; null: 1 each."""
    tools: Any = None
    """Functions that the model may call before it answers: `module:function`, or a list of these.
    It is told their names, docstrings and type hints. `mcp:COMMAND` or `mcp:URL`: all tools of a
    server of the Model Context Protocol. Null: none."""
    reward_model: Optional[str] = None  # noqa: UP045
    """Folder of a reward model, such as a `ludic train-rm` run. Its score replaces the task's
    reward in training; held-out measurement keeps the task's reward."""
    reward_model_args: dict[str, Any] = field(default_factory=dict, metadata={"needs": "reward_model"})
    """mode (replace, add, multiply, weighted, bonus), rm_coeff, alpha, unfinished_penalty (10;
    subtracted from the score of an answer that hit the token limit), step_end (text or token id:
    each step that it ends gets a score), normalize, dtype, micro_token_budget, batch_size,
    timeout_s."""
    process_reward: dict[str, Any] = field(default_factory=dict)
    """Credit of tokens, in place of the algorithm's, from rewards of places in an answer: mode
    (returns, as_is), gamma, normalize (group, index, none). Empty: the algorithm's own credit."""
    algorithm: str = MISSING
    """A name of `ludic.training.presets.registry`, such as grpo; `ludic train --help` lists them.
    Or `package.module:function` of your own, which returns an `RLAlgorithm`."""
    algorithm_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the algorithm's `make_` function."""
    steps: int = setting(least=0)
    """Steps of reinforcement, one batch each."""
    mode: Optional[str] = setting(None, choices=MODES)  # noqa: UP045
    """`sft`: only the warm-up. `rl`: only reinforcement. `sft+rl`: both. null: what `warmup.steps`,
    `warmup.data` and `steps` say."""
    report_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `wandb.init`, such as project, entity, group and name."""
    report_header: bool = False
    """Add `run/git_sha`, `run/git_dirty` and `run/recipe_path` to every line of metrics.jsonl."""
    report_aliases: bool = False
    """Add the names that MaxEnt-GRPO has for some metrics, such as `train/kl_coeff` for
    `train/beta`, to metrics.jsonl and the trackers."""
    environments: dict[str, Any] = field(default_factory=dict)
    """Several problems in one run, by name: `{sort: {task: {kind: sort}, weight: 2}, sums: {data:
    FILE, reward: math}}`. Each may set `weight` (its share of the problems; by step, `{0: 1, 200:
    3}`) and, of its own, task, data, reward, tools, reward_model, some of rollout and evaluation,
    and the credit's algorithm_args; what it leaves out is the recipe's. docs/mixtures.md."""
    task: TaskSection = field(default_factory=TaskSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    lora: PublishedLoraSection = field(default_factory=PublishedLoraSection)
    quantization: QuantizationSection = field(default_factory=QuantizationSection)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    agent: AgentSection = field(default_factory=AgentSection)
    mcp: McpSection = field(default_factory=McpSection)
    warmup: WarmupSection = field(default_factory=WarmupSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    trainer: Any = MISSING
    """Fields of `TrainerConfig`, for reinforcement."""
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    critic: CriticSection = field(default_factory=CriticSection)
    controllers: ControllersSection = field(default_factory=ControllersSection)
    info_seed: InfoSeedSection = field(default_factory=InfoSeedSection)
    inference: InferenceSection = field(default_factory=InferenceSection)
    place: PlaceSection = field(default_factory=PlaceSection)
    queue: QueueSection = field(default_factory=QueueSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    callbacks: RLCallbacksSection = field(default_factory=RLCallbacksSection)
    profile: ProfileSection = field(default_factory=ProfileSection)
    ranks: RanksSection = field(default_factory=RanksSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)


DERIVED = ("pad_token_id", "seed", "temperature")
"""Fields of `TrainerConfig` that are derived from the recipe: its tokenizer, seed and sampling."""
NULL_UNLESS_SET = ("eval_concurrency", "eval_max_steps")
"""Fields that override the evaluator's own settings if they are set. They are null in a recipe by
default, so that a value equal to the default of `TrainerConfig` counts as set."""


@cache
def make_trainer_section(config: type[TrainerConfig] = TrainerConfig) -> type[Any]:
    """`config` as a dataclass for OmegaConf: the same fields and defaults, with plain types for
    literals. `DERIVED` are left out, `NULL_UNLESS_SET` are null, and the device is `auto`."""
    hints = get_type_hints(config) | dict.fromkeys(NULL_UNLESS_SET, Optional[int])  # noqa: UP045
    replaced = dict.fromkeys(NULL_UNLESS_SET) | {"model_device": AUTO}
    made: list[tuple[str, Any, Any]] = []
    for item in fields(config):
        if item.init and item.name not in DERIVED:
            copied: Any = field(default=replaced.get(item.name, item.default))
            if item.default_factory is not NO_DEFAULT and item.name not in replaced:
                copied = field(default_factory=item.default_factory)
            made.append((item.name, _simplify_type(hints[item.name]), copied))
    return make_dataclass("TrainerSection", made, namespace={"config_class": config})


def _simplify_type(hint: Any) -> Any:
    """The nearest annotation that OmegaConf supports."""
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        members = {_simplify_type(member) for member in get_args(hint) if member is not type(None)}
        return Optional[members.pop()] if len(members) == 1 and type(None) in get_args(hint) else Any  # noqa: UP045
    return hint if hint in (int, float, str, bool) or get_origin(hint) is tuple else Any
