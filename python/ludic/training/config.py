"""`TrainerConfig`: all settings of the trainer, checked in the constructor.

Each field is documented under it; `trainer` and `backend` use them. An error names the value, the
rule and the remedy.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, Literal, TypeVar, Unpack, cast, dataclass_transform, get_args

from ludic.errors import BudgetError, ConfigError, Rules, check_value, did_you_mean

Packing = Literal["optimal", "greedy", "padding_free"]
LogitsPath = Literal["auto", "full", "chunked"]
PrefixSharing = Literal["auto", "off", "tree"]
SchedulerType = Literal["cosine", "linear", "wsd", "constant", "constant_with_warmup"]

SCHEDULER_TYPES: tuple[str, ...] = get_args(SchedulerType)
OPTIMIZERS = ("adamw", "muon", "adafactor", "adamw8bit")
CHOICES = {
    "packing": get_args(Packing),
    "logits": get_args(LogitsPath),
    "prefix_sharing": get_args(PrefixSharing),
    "lr_scheduler_type": SCHEDULER_TYPES,
    "mixed_precision_dtype": ("bf16", "fp16"),
    "early_stopping_mode": ("auto", "min", "max"),
}
LEAST = {
    **dict.fromkeys(("pad_token_id", "overhead_tokens", "seed", "max_lag", "warmup_steps", "sync_every_steps"), 0),
    **dict.fromkeys(("max_seq_len", "micro_token_budget", "minibatches_per_batch", "epochs_per_batch", "max_empty_batches"), 1),
    "image_patch_budget": 1,
    **dict.fromkeys(("early_stopping_patience", "log_every", "eval_concurrency", "eval_max_steps", "eval_every_n_steps"), 1),
}
"""The least values of settings that are whole numbers."""

_SIZES_REMEDY = "micro-batches are now sized by tokens: set max_seq_len and micro_token_budget"
_REMOVED_SETTINGS = {
    "grad_accum_steps": _SIZES_REMEDY,
    "gradient_accumulation_steps": _SIZES_REMEDY,
    "micro_batch_size": _SIZES_REMEDY,
    "batch_size": "the batch source decides how many samples a batch has",
    "num_rollouts": "the batch source decides; its name in batch metadata is target_rollouts",
    "max_steps": "pass num_steps to train(); the limit of an episode is max_steps of the batch source",
    "total_training_steps": "pass it to Trainer",
    "gradient_checkpointing": "pass enable_gradient_checkpointing=True to Trainer",
    "output_dir": "pass CheckpointConfig(output_dir=...) to Trainer",
}

C = TypeVar("C", bound=type[Any])


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass_transform(field_specifiers=(field,))
def config_dataclass(cls: C) -> C:
    """Make `cls` a dataclass with a constructor that explains unknown and removed names, and that
    records which fields were passed (`TrainerConfig.was_set`)."""
    decorated = dataclass(cls)
    init: Callable[..., None] = decorated.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in signature.parameters:
                known = list(signature.parameters)[1:]
                removed = f": {_REMOVED_SETTINGS[name]}" if name in _REMOVED_SETTINGS else ""
                remedy = removed or did_you_mean(name, known, "it has " + ", ".join(known))
                raise ConfigError(f"{type(self).__name__} has no {name}{remedy}")
        arguments = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        rate = arguments.get("learning_rate")
        if rate is not None and arguments.get("lr", rate) != rate:
            raise ConfigError(f"lr ({arguments['lr']}) and learning_rate ({rate}) are two names of one setting; give one of them")
        init(self, *args, **kwargs)
        self._explicit = frozenset(arguments) - {"self"}
        defaults = {item.name: item.default for item in fields(self)}
        if self._explicit >= defaults.keys():  # as `dataclasses.replace` passes them: those that differ from the default are set
            self._explicit = frozenset(name for name in defaults if getattr(self, name) != defaults[name])

    decorated.__init__ = __init__
    return cast(C, decorated)


@config_dataclass
class TrainerConfig:
    """Settings of `Trainer`.

    >>> cfg = TrainerConfig(lr=1e-5, max_seq_len=2048, micro_token_budget=16384, pad_token_id=0)
    """

    model_device: str = field(default_factory=_default_device)
    """Device of the model in training: by default "cuda" if available, else "cpu". A sharded model
    is not moved. `auto` in the settings of a run: the default, on the machine that trains."""
    runtime_device: str | None = None
    """Device that published weights are moved to; None leaves them on `model_device`."""
    offload: bool | None = None
    """Move weights, optimizer, critic and reference to host memory while batches are sampled, so
    that a server on the same device has its memory. None means False, and in a run with
    `inference.colocate` True."""
    optimizer: str = "adamw"
    """adamw, muon, adafactor, adamw8bit (of bitsandbytes, the extra `qlora`), or your own, as
    `module:factory`. The factory gets the trained parameters, a list of (name, parameter), and
    this config, and returns a torch optimizer; the groups are then its own."""
    lr: float = 1e-5
    """Learning rate, before the schedule. Muon takes the rates of AdamW; for adafactor the rate is
    relative to the size of the weights, such as 1e-3."""
    weight_decay: float = 0.01
    """Weight decay, decoupled as in AdamW: a step subtracts lr * weight_decay * weight."""
    decay_biases_and_norms: bool = True
    """False: no weight decay for parameters of fewer than two dimensions."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of adamw and adamw8bit, and of what muon leaves to AdamW."""
    eps: float = 1e-8
    """Epsilon, as `betas`."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient to this L2 norm. None means no clipping."""
    max_seq_len: int = 1024
    """Maximum tokens of a sample. Longer samples are cut on the right, and their metadata records
    it."""
    micro_token_budget: int = 8192
    """Maximum tokens of a micro-batch, padding included: `longest * rows`; for `padding_free` the
    sum of the lengths. At least `max_seq_len`."""
    image_patch_budget: int | None = None
    """Maximum patches of one pass of the vision tower, and so of one image. None means four for
    each token of `micro_token_budget`."""
    sync_every_steps: int = 1
    """Publish the weights after every this many steps; 0: never."""
    master_weights: bool = True
    """Step bfloat16 and float16 parameters as float32 copies and round them back: most updates are
    too small to change a bfloat16 weight. False: step them in bfloat16, which saves 10 bytes per
    parameter but leaves most parameters unchanged. Float32 parameters are always stepped
    directly."""
    mixed_precision_dtype: str | None = None
    """"bf16" or "fp16": run the forward passes of a float32 model under autocast. None means to
    compute in the model's dtype. Weights and optimizer state keep the dtype that the model was
    loaded in. float16 scales the loss (`backend.precision.LossScale`)."""
    temperature: float = 1.0
    """The policy is softmax(logits / temperature). Set it to the sampling temperature if the
    sampler returns log-probabilities after temperature scaling (vLLM's `processed_logprobs`)."""
    cast_logits_to_fp32: bool = True
    """Compute log-probabilities in float32 for models of any dtype."""
    logits: LogitsPath = "auto"
    """full: compute the logits [B, T, V] of a micro-batch. chunked: compute the logits of action
    tokens alone, for some tokens of the vocabulary at a time, and once more in the backward pass;
    the loss and the gradient are the same up to rounding. It needs a loss with `reads_shared_only`
    and a model whose output layer is known and whole; otherwise a warning says why all are
    computed. auto: chunked if `micro_token_budget` times the vocabulary is at least 2^26."""
    max_lag: int | None = None
    """Drop samples of a policy that is more than this many versions old (`loop.staleness`). None
    means never."""
    reduce_stats_across_ranks: bool = False
    """Log statistics over all ranks instead of rank 0 alone. Shared batches always have them over
    all ranks."""
    profile_memory: bool = False
    """Log peak memory of forward and backward passes (CUDA)."""
    peak_tflops: float | None = None
    """Peak of one device in 10^12 FLOPs per second, for `perf/mfu`. None means the vendor's, if the
    device is known (`training.loop.profiler`)."""
    log_every: int = 1
    """Compute and log statistics every this many steps."""
    pad_token_id: int = 0
    """Fills padding positions. You can pass a tokenizer; its `pad_token_id` is used."""
    eval_at_start: bool = False
    """Evaluate before the first step."""
    eval_every_n_steps: int | None = None
    """Evaluate every this many steps. None means no evaluation during training."""
    eval_concurrency: int = 32
    """Maximum concurrent episodes of an evaluation."""
    eval_max_steps: int = 1
    """Maximum turns of an episode in an evaluation."""
    eval_timeout_s: float | None = None
    """Time limit of a model call in an evaluation, in seconds. None means no limit. This and the
    two fields above are passed to the evaluator only if they were set; otherwise it uses its own
    settings."""
    lr_scheduler_type: SchedulerType | None = None
    """Shape of the learning-rate schedule. `constant`, as in transformers, has no warm-up. None
    means constant, and settings of a warm-up are refused."""
    warmup_steps: int = 0
    """Number of steps in which the learning rate rises to `lr`."""
    warmup_ratio: float | None = None
    """`warmup_steps` as a fraction of all steps; used if `warmup_steps` is 0."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without improvement. None means never."""
    early_stopping_metric: str = "eval_loss"
    """The metric that decides which evaluation is best. After an early stop the model has the
    weights of the best evaluation (`Trainer.restore_best`)."""
    early_stopping_mode: Literal["auto", "min", "max"] = "auto"
    """Whether a lower (min) or higher (max) metric is better. auto: by the metric's name, for
    example min for `eval_loss` and max for `eval_accuracy`."""
    early_stopping_min_delta: float = 0.0
    """Only a change larger than this counts as an improvement."""
    packing: Packing = "optimal"
    """How samples are packed into micro-batches. It does not change the gradient."""
    overhead_tokens: int = 256
    """Fixed cost of a micro-batch, in tokens, that `optimal` assumes."""
    minibatches_per_batch: int = 1
    """Number of mini-batches, and of optimizer steps, in one pass over a batch. A group is never
    divided."""
    epochs_per_batch: int = 1
    """Number of passes over each batch."""
    max_empty_batches: int = 100
    """Raise an error after this many batches in a row without a sample to train on."""
    lr_min_ratio: float = 0.0
    """Final learning rate of `cosine`, `linear` and `wsd`, as a fraction of `lr`."""
    decay_ratio: float = 0.1
    """The last part of all steps, in which `wsd` decays, linearly."""
    skip_zero_weight: bool = True
    """Skip the forward pass of samples with weight 0 if the loss gives them no gradient. They still
    count in the denominators."""
    merge_turns: bool = True
    """Run turns of an episode as one row if each prompt continues the previous turn, token by
    token. The gradient is the same as with one row per turn. Applies only to a loss that reads
    logits exclusively through its shared context (`Loss.reads_shared_only`)."""
    prefix_sharing: PrefixSharing = "auto"
    """auto: where that saves at least a tenth of a mini-batch's tokens, compute the tokens that
    samples begin with in common once, in rows that hold a tree. The gradient equals the gradient of
    separate rows. It needs a transformers model with sdpa that keeps the branches apart, and a loss
    with `reads_shared_only` and `reads_actions_only`, or for a reward model `reads_scores_only`;
    otherwise one line says why not. tree: always, and a warning says why not. off: never."""
    replay_routing: bool = False
    """Of a mixture of experts: the policy's passes take the experts that the sampler chose, which
    samples bring with them (`LocalChatClient(keep_routes=True)`), and compute the gates themselves
    (R3, Ma et al. 2025). A token without recorded ones has the router's own choice. A reference, a
    teacher and a critic route as they do."""
    router_aux_coef: float = 0.0
    """Times this, the load-balancing loss of a mixture of experts is added to the loss, as the
    model's own class defines it (Fedus et al. 2022), over all tokens of the mini-batch
    (docs/training.md). Above 0, mini-batches of several micro-batches take one more forward
    pass."""
    seed: int = 0
    """Seed of the order of samples in mini-batches."""
    learning_rate: InitVar[float | None] = None
    """Alias of `lr`."""

    def __post_init__(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            self.lr = learning_rate
        tokenizer: Any = self.pad_token_id
        if hasattr(tokenizer, "pad_token_id"):  # padding is masked, so an end token is as good
            self.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
            if self.pad_token_id is None:
                raise ConfigError("the tokenizer has neither a padding token nor an end token; pass an id as pad_token_id")
        if len(self.betas) == 2:
            self.betas = (self.betas[0], self.betas[1])
        self.validate()

    def was_set(self, name: str) -> bool:
        """Whether the field was passed to the constructor."""
        return name in self._explicit  # type: ignore[attr-defined]

    @property
    def patch_budget(self) -> int:
        """`image_patch_budget`, or its default."""
        return 4 * self.micro_token_budget if self.image_patch_budget is None else self.image_patch_budget

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation is due after `step` steps."""
        if step == 0:
            return self.eval_at_start
        return self.eval_every_n_steps is not None and step % self.eval_every_n_steps == 0

    def eval_limits(self, *, max_steps: int | None, timeout_s: float | None, concurrency: int | None) -> dict[str, Any]:
        """Return the keyword arguments for an evaluator: these arguments if not None, else the
        `eval_*` fields that were set, else None."""
        limits = {"max_steps": max_steps, "timeout_s": timeout_s, "concurrency": concurrency}
        for name, limit in limits.items():
            if limit is None and self.was_set(f"eval_{name}"):
                limits[name] = getattr(self, f"eval_{name}")
        return limits

    def validate(self) -> None:
        """Raise `ConfigError` for an invalid value or combination. The trainer calls this
        again."""
        if self.pad_token_id is None:
            raise ConfigError("pad_token_id is None; pass tokenizer.pad_token_id, or its eos_token_id if it has no pad token")
        for name, least in LEAST.items():
            self._check(name, whole=True, least=least)
        for name, choices in CHOICES.items():
            self._check(name, choices=choices)
        if ":" not in self.optimizer:
            self._check("optimizer", "or module:factory, your own", choices=OPTIMIZERS)
        for name in ("lr", "weight_decay", "router_aux_coef"):
            self._check(name, least=0, below=math.inf)
        self._check("eps", above=0, below=math.inf)
        if len(self.betas) != 2:
            raise ConfigError(f"betas ({self.betas}) must be two numbers")
        for beta in self.betas:
            check_value("betas", beta, least=0, below=1)
        self._check("max_grad_norm", "None turns clipping off", optional=True, above=0)
        self._check("peak_tflops", "989 for an H100; None looks it up", above=0, below=math.inf)
        self._check("temperature", "1 leaves the policy unchanged", above=0, below=math.inf)
        self._check("eval_timeout_s", "None means no limit", above=0)
        for name in ("warmup_ratio", "lr_min_ratio", "decay_ratio"):
            self._check(name, least=0, most=1)
        self._check("early_stopping_min_delta", least=0)
        check_budget(self.micro_token_budget, self.max_seq_len)
        if self.lr_scheduler_type is None and (self.warmup_steps or self.warmup_ratio):
            raise ConfigError('warmup_steps and warmup_ratio need lr_scheduler_type, for example "constant_with_warmup"')

    def _check(self, name: str, hint: str = "", **rules: Unpack[Rules]) -> None:
        rules.setdefault("optional", getattr(TrainerConfig, name) is None)
        value = getattr(self, name)
        if "choices" not in rules and not isinstance(value, int | float | None):  # what the settings in a checkpoint can be
            raise ConfigError(f"{name} ({value!r}) must be a number, not a {type(value).__name__}")
        check_value(name, value, hint, **rules)


def check_budget(micro_token_budget: int, max_seq_len: int) -> None:
    """Raise `BudgetError` unless a sample of `max_seq_len` tokens fits into the budget."""
    if micro_token_budget < max_seq_len:
        raise BudgetError(f"micro_token_budget ({micro_token_budget}) must be >= max_seq_len ({max_seq_len}); raise the budget")
