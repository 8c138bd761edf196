"""Sections of settings that the commands have in common: sharding, quantisation, checkpoints,
callbacks, profile; and sections of `ludic train`: the reference, InfoSeed, controllers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING

from ludic.errors import ConfigError
from ludic.files.checkpoints import LAYOUTS
from ludic.recipes.rules import setting
from ludic.training.info_seed.seed_tags import InfoSeed

_SHARDED = "sharding.kind=full or sharding.kind=hybrid"
_DTYPES = ("float32", "bfloat16")
_SEEDED = "info_seed.num_seeds"


@dataclass
class ShardingSection:
    """A model that several ranks share out (FSDP2), so that each has a part of its weights,
    gradients and optimizer. Needs several ranks: `ranks=N`, torchrun or srun."""

    kind: str = setting("none", choices=("none", "full", "hybrid"))
    """`none`: each rank has the whole model. `full`: each has one part of every weight. `hybrid`:
    each group of `shards` ranks has a copy, shared out over its ranks."""
    shards: Optional[int] = setting(  # noqa: UP045  OmegaConf reads this annotation at run time
        None, least=1, needs="sharding.kind=hybrid"
    )
    """Ranks that share one copy of a hybrid model; null: the ranks of one machine."""
    param_dtype: Optional[str] = setting(None, choices=_DTYPES, needs=_SHARDED)  # noqa: UP045
    """bfloat16 or float32: type of forward and backward passes, over weights that are stored and
    stepped in float32; null: `dtype`. One process computes in bfloat16 by autocast."""
    reduce_dtype: str = setting("float32", choices=_DTYPES, needs=_SHARDED)
    """Type in which gradients are summed over ranks: float32 or bfloat16."""
    context: int = setting(1, least=1)
    """Ranks that compute the same rows, each a slice of their tokens (context parallelism): for
    long samples. Divides the number of ranks and the model's heads; one process computes all."""
    cpu_offload: bool = setting(False, needs=_SHARDED)
    """Keep weights, gradients and optimizer in the memory of the CPU. Needs GPUs."""
    activation_checkpointing: bool = False
    """Another name of `gradient_checkpointing`."""


def check_sharding(section: ShardingSection, *, world_size: int) -> None:
    """Raise `ConfigError` for settings that this number of processes cannot follow."""
    if section.shards is not None and world_size % section.shards:
        raise ConfigError(f"sharding.shards ({section.shards}) must divide the number of ranks ({world_size})")
    if world_size == 1 and section.cpu_offload:
        raise ConfigError("sharding.cpu_offload needs several processes; set ranks=N, or sharding.cpu_offload=false")


@dataclass
class QuantizationSection:
    """Frozen weights of linear layers in 4 or 8 bits, under adapters (QLoRA); needs `lora.rank`.
    `quantization=nf4` is short for `quantization.kind=nf4`."""

    kind: Optional[str] = setting(  # noqa: UP045
        None, needs="lora.rank", excludes="sharding.kind", hint="quantised weights are neither trained nor sharded"
    )
    """nf4, fp4 (both need the extra `qlora`) or int8; null: none."""
    double: bool = setting(False, needs="quantization.kind")
    """Store the scales of nf4 and fp4 in 8 bits too, which saves 0.37 bits a weight."""
    compute_dtype: Optional[str] = setting(  # noqa: UP045
        None, choices=("float32", "bfloat16", "float16"), needs="quantization.kind"
    )
    """What weights are dequantised to for a product: float32, bfloat16 or float16; null:
    `dtype`."""


@dataclass
class ImagesSection:
    """Of a model that sees images."""

    tower: str = setting(
        "frozen", choices=("frozen", "projector", "trained"), excludes="lora.rank", hint="adapters are trained alone"
    )
    """Which weights behind the features of images are trained. `frozen`: none, and each image is
    encoded once. `projector`: those between the vision tower and the language model. `trained`:
    all."""
    max_pixels: Optional[int] = setting(None, least=1)  # noqa: UP045
    """Width times height to which larger images are scaled down; null: as the processor says."""
    min_pixels: Optional[int] = setting(None, least=1)  # noqa: UP045
    """The same to which smaller images are scaled up."""


@dataclass
class CheckpointSection:
    """Checkpoints, from which an interrupted run is resumed in either phase."""

    every_n_steps: int = MISSING
    """0: only at the end, and when the run is stopped."""
    max_to_keep: Optional[int] = MISSING  # noqa: UP045
    """This number of the newest checkpoints of a phase is kept, at least 1; `callbacks.keep_best`
    does not count. Null: all."""
    layout: str = setting("full", choices=LAYOUTS)
    """`full`: each checkpoint is a model with its tokenizer, which transformers and vLLM open.
    `shallow`: for resuming alone. Of a sharded model each rank writes the parts that it has, and no
    tokenizer is written. The folder `model` of the run is always full."""
    static_files: Optional[str] = None  # noqa: UP045
    """Folder of a model, whose config, generation config and tokenizer are added to each checkpoint
    that lacks them; null: none."""


def check_checkpoints(section: CheckpointSection) -> None:
    """Raise `ConfigError` for files that are not there."""
    if section.static_files is not None and not Path(section.static_files).is_dir():
        raise ConfigError(f"checkpoint.static_files ({section.static_files}) is no folder; name the folder of a model")


@dataclass
class StopSection:
    """Ends a run by a metric, with the weights of its last step. `trainer.early_stopping_patience`
    ends it with the weights of its best evaluation."""

    metric: Optional[str] = None  # noqa: UP045  OmegaConf reads these annotations at run time
    """A metric of evaluations, such as sampled_reward, or of steps, such as train/loss. Null:
    off."""
    at: Optional[float] = setting(None, needs="callbacks.stop.metric")  # noqa: UP045
    """The run ends when the metric is as good as this."""
    patience: Optional[int] = setting(None, needs="callbacks.stop.metric")  # noqa: UP045
    """It ends after this number of values in a row that are not better than the best."""
    min_delta: float = 0.0
    """A value that is better by no more than this is no improvement."""
    mode: str = "auto"
    """min or max: which is better; auto: as the metric's name says."""


@dataclass
class CallbacksSection:
    """What a run does after steps, evaluations and checkpoints. The warm-up has no callbacks."""

    keep_best: Optional[str] = None  # noqa: UP045
    """A metric of evaluations, such as sampled_reward: the checkpoint of the best evaluation is not
    deleted, and `best.json` next to the checkpoints names it. Null: only the newest are kept."""
    keep_best_mode: str = "auto"
    """min or max: which is better; auto: as the metric's name says."""
    stop: StopSection = field(default_factory=StopSection)
    push_to_hub: Optional[str] = None  # noqa: UP045
    """Repository of the Hugging Face hub, as owner/name, that gets each checkpoint without the
    state of the run. `hf auth login` or HF_TOKEN logs in. Null: nothing is pushed."""
    private: bool = True
    """Whether a repository that is made is private."""
    own: Any = None
    """Your own, as `package.module:name`, or a list of these: each is a `Callback`, or a class or
    function that makes one without arguments."""


@dataclass
class GuardSection:
    """Acts on batches that are too far off-policy, such as old ones."""

    ess: Optional[float] = setting(None, above=0, most=1)  # noqa: UP045
    """The least `mismatch/ess`, the effective share of a batch's tokens. Null: off."""
    action: str = setting("lower", choices=("lower", "skip", "stop"), needs="callbacks.guard.ess")
    """What is done with a batch below it. `lower`: its learning rate is multiplied by
    `mismatch/ess` / `ess`. `skip`: it is not trained on. `stop`: nor is any later one."""
    patience: int = setting(1, least=1, needs="callbacks.guard.action=stop")
    """It ends at this number of such batches in a row."""


@dataclass
class RLCallbacksSection(CallbacksSection):
    """The callbacks of reinforcement, which can show sampled completions too."""

    completions_every: int = 0
    """A table of sampled completions with their rewards is printed every this many steps; 0: never.
    rollouts.jsonl has them in any case."""
    completions: int = 5
    """Rows of that table, from the best reward to the worst."""
    guard: GuardSection = field(default_factory=GuardSection)


@dataclass
class ProfileSection:
    """A trace of some steps: operations of the CPU and the GPU, under the names of the phases."""

    steps: Optional[str] = None  # noqa: UP045
    """`10`, or `10-12` with both ends: the trace of these steps is written into the run's folder
    `profile`, one file for each rank, which https://ui.perfetto.dev opens. Of a run with a warm-up,
    the steps after it. Null: none."""


def parse_steps(section: ProfileSection) -> tuple[int, int] | None:
    """First and last step, both included: `10-12` is (10, 12), `10` is (10, 10). None without
    steps. Raises ConfigError for anything else."""
    if section.steps is None:
        return None
    match = re.fullmatch(r"([0-9]{1,12})(?:-([0-9]{1,12}))?", section.steps)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"profile.steps ({section.steps}) must be a step from 1 on, or a range: write 10, or 10-12 for three steps"
        )
    return first, last


@dataclass
class ReferenceSection:
    """What an algorithm with `beta` or `reference_kl` above 0 is held to. Others read none."""

    source: str = setting(
        "auto",
        choices=("auto", "model", "adapters_off"),
        hint="in Python, samples may bring SampleAttachments.reference_logps, with Trainer(reference=AttachedReference())",
    )
    """`model`: a frozen copy, in memory in addition to the policy. `adapters_off`: the policy with
    its adapters switched off (`lora.rank`). `auto`: adapters off if the policy has some and
    `reference.model` is null, else a frozen copy."""
    model: Optional[str] = setting(None, excludes="reference.source=adapters_off")  # noqa: UP045
    """Folder in Hugging Face layout, or hub id, with the policy's tokenizer; null: the policy as it
    is when reinforcement begins, which the run keeps in its folder `reference`."""


@dataclass
class TeacherSection:
    """Whom the policy learns from, with `algorithm=opd`."""

    model: Any = None
    """Folder in Hugging Face layout, of a run, or hub id, in which each of the policy's tokens has
    the same id. A frozen copy of it is in memory in addition to the policy. Or several, by name:
    `{maths: FOLDER, code: FOLDER}`."""
    url: Any = field(default=None, metadata={"excludes": "teacher.model"})
    """A vLLM server of such a model, such as http://127.0.0.1:8000, or a list of them. Or several
    such models, by name."""
    column: str = setting("teacher", needs="teacher.model or teacher.url")
    """Of several, the column of the data that names the one of a row."""
    timeout_s: float = setting(120.0, above=0, needs="teacher.url")
    """Seconds in which a server must answer for a micro-batch, retries included."""

    @property
    def by_name(self) -> dict[str, Any]:
        """Name -> its folder or servers; a single teacher has the name ""."""
        source = self.url if self.model is None else self.model
        return source if isinstance(source, dict) else {} if source is None else {"": source}


def check_reference(section: ReferenceSection, *, has_adapters: bool) -> None:
    """Raise `ConfigError` for a source that this run does not have."""
    if section.source == "adapters_off" and not has_adapters:
        raise ConfigError("reference.source=adapters_off needs adapters to switch off; set lora.rank, or reference.source=model")


def switches_adapters_off(section: ReferenceSection, *, has_adapters: bool) -> bool:
    """Whether the reference is the policy without its adapters."""
    return section.source == "adapters_off" or (section.source == "auto" and has_adapters and section.model is None)


@dataclass
class CriticSection:
    """The model of values that `algorithm=ppo` trains next to the policy."""

    model: Optional[str] = None  # noqa: UP045
    """`policy`: a copy of the policy as it is when reinforcement begins, with adapters of its own
    if `lora.rank` is set. Or a folder in Hugging Face layout, or hub id, with the policy's
    tokenizer. Its output layer becomes one value for each token. Null: a value head, a linear layer
    on the last hidden states of the policy, which it does not change."""


@dataclass
class InfoSeedSection:
    """Answers whose prompt names a seed, and a loss by which the seed can be told from the answer.
    For tasks of one turn."""

    num_seeds: int = setting(
        0,
        excludes="place.actors or queue.url or rollout.over_sampling_factor or rollout.group_filter",
        hint="seeded answers need whole groups of this process",
    )
    """Seeded answers to each problem, in addition to `rollout.group_size` plain ones; 0: no
    InfoSeed."""
    coeff: float = setting(0.01, needs=_SEEDED)
    """Factor of the loss."""
    temperature: float = setting(0.1, needs=_SEEDED)
    """Of the cosines."""
    loss: str = setting("infonce", needs=_SEEDED)
    """`infonce`: pairs of answers with one seed. `ce`: classes, with fixed directions."""
    pooling: str = setting("mean", needs=_SEEDED)
    """What represents an answer: the `mean` of its hidden states, or the `last` of them."""
    template: str = setting("\n[seed={seed}]", needs=_SEEDED)
    """Appended to the prompt; with `{prompt}` in place of it."""
    eval_samples: int = setting(1, least=0, needs=_SEEDED)
    """Answers to each held-out problem and seed, for the metrics `eval_seed/*`; 0: none."""


def build_info_seed(section: InfoSeedSection) -> InfoSeed | None:
    """The settings; None without seeds."""
    values = {item.name: getattr(section, item.name) for item in fields(section) if item.name != "eval_samples"}
    return InfoSeed(**values) if section.num_seeds else None


@dataclass
class CurriculumSection:
    """Which problems of a list are played, by the rewards of their groups so far, in place of
    passes over all. `curriculum=pools` is short for `curriculum.kind=pools`."""

    kind: Optional[str] = setting(  # noqa: UP045
        None, excludes="place.actors or queue.url", hint="actors do not see each other's rewards"
    )
    """`pools`: from pools of easy, fit and hard problems; or a class of your own as
    `package.module:Class`. Null: passes."""
    args: dict[str, Any] = field(default_factory=dict, metadata={"needs": "curriculum.kind"})
    """Of `pools`: easy (1.0) and hard (0.0), the group means from and up to which a problem is
    easy or hard; shares ({easy: 0.1, fit: 0.8, hard: 0.1}) of a batch; retire_after (2) such groups
    in a row, null never; readmit_after (20) steps, null never."""


@dataclass
class KLControllerSection:
    """Keeps `reference/kl`, or `reference/sequence_kl` with `kl_level=sequence`, at a target:
    changes `beta`, or the coefficient of `reference_kl`. Off while one of the three is 0."""

    target: float = 0.0
    """KL between policy and reference, in nats per token."""
    horizon: float = 0.0
    """Training steps in which the coefficient about doubles while the KL is twice the target."""
    step_size: float = 1.0
    """Largest relative error that counts."""


@dataclass
class EntropyControllerSection:
    """Keeps `train/weight_entropy` at a target: changes `tau` of `maxent_grpo`. Off without a
    target, or with `lr` 0."""

    target: Optional[float] = None  # noqa: UP045  OmegaConf reads these annotations at run time
    """Nats; at most log(rollout.group_size)."""
    start: Optional[float] = None  # noqa: UP045
    """The target moves from here ..."""
    final: Optional[float] = None  # noqa: UP045
    """... to here, linearly over `horizon` steps; null: `target`."""
    horizon: int = 0
    """Training steps from `start` to `final`; 0: `final` from the first step."""
    lr: float = 0.0
    """Change of log tau per nat of error and step, times the learning-rate schedule."""
    least: float = 1e-6
    """Bounds of tau."""
    most: Optional[float] = None  # noqa: UP045
    """null or 0: none."""
    warmup_steps: int = -1
    """Steps without control; -1: the warm-up of the learning rate."""


@dataclass
class MetaControllerSection:
    """Descends on tau and beta together, in place of the other two, towards `controllers.kl.target`
    and the target of `controllers.entropy`; tau has that section's bounds."""

    method: Optional[str] = None  # noqa: UP045
    """`analytic`, `first_order` or `truncated_backprop`; null: off."""
    lr: float = 0.0
    """Learning rate, times the schedule of the policy's."""
    tau_lr: Optional[float] = None  # noqa: UP045
    """null: `lr`; 0 keeps tau fixed."""
    beta_lr: Optional[float] = None  # noqa: UP045
    """null: `lr`; 0 keeps beta fixed."""
    beta_grad_clip: Optional[float] = None  # noqa: UP045
    """Largest gradient of beta; null or 0: none."""
    optimizer: str = "sgd"
    """`sgd`, `adam` or `adamw`."""
    update_interval: int = 1
    """Update every this many steps."""
    truncation_steps: int = 1
    """Inner steps of `truncated_backprop`."""
    use_hessian: bool = False
    """Differentiate through the inner gradients, too."""
    inner_lr: float = 0.5
    """Learning rate of the inner steps."""
    kl_signal: str = "policy"
    """The KL that `analytic` sees: `policy`, as measured, or `weights`."""
    beta_most: Optional[float] = None  # noqa: UP045
    """Upper bound of beta; null or 0: none."""


@dataclass
class ControllersSection:
    """Controllers of `tau` and `beta`. By default there are none, and both are constant."""

    kl: KLControllerSection = field(default_factory=KLControllerSection)
    entropy: EntropyControllerSection = field(default_factory=EntropyControllerSection)
    meta: MetaControllerSection = field(default_factory=MetaControllerSection)
