"""`TrainerConfig`: every setting of the trainer, checked when it is built.

Errors name the value, the rule and the remedy. What a field does is written under it; where it
acts, see `trainer` and `backend`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast, dataclass_transform

from ludic.errors import BudgetError, ConfigError

Packing = Literal["optimal", "greedy", "padding_free"]
SchedulerType = Literal["cosine", "linear", "constant_with_warmup"]

PACKINGS: tuple[str, ...] = ("optimal", "greedy", "padding_free")
SCHEDULER_TYPES: tuple[str, ...] = ("cosine", "linear", "constant_with_warmup")
MIXED_PRECISION_DTYPES: tuple[str, ...] = ("bf16",)

_SIZES_REMEDY = "micro-batches follow from tokens now: set max_seq_len and micro_token_budget"
_REMOVED_SETTINGS = {
    "grad_accum_steps": _SIZES_REMEDY,
    "gradient_accumulation_steps": _SIZES_REMEDY,
    "micro_batch_size": _SIZES_REMEDY,
    "batch_size": "the batch source decides how many samples a batch has",
    "num_rollouts": "the batch source decides; batch metadata calls it target_rollouts",
    "max_steps": "pass num_steps to train(); an episode's limit is max_steps of the batch source",
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
    """A dataclass whose constructor explains unknown and removed names, and remembers which
    names it was given."""
    decorated = dataclass(cls)
    decorated.__init__ = _with_name_checks(decorated.__init__)
    return cast(C, decorated)


def _with_name_checks(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in signature.parameters:
                raise ConfigError(_describe_unknown_name(type(self).__name__, name, list(signature.parameters)[1:]))
        arguments = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        rate = arguments.get("learning_rate")
        if rate is not None and arguments.get("lr", rate) != rate:
            raise ConfigError(f"lr ({arguments['lr']}) and learning_rate ({rate}) are two names of one setting; give one of them")
        init(self, *args, **kwargs)
        passed = frozenset(arguments) - {"self"}
        # `dataclasses.replace` passes every field: those that differ from a default count as
        # passed.
        everything = passed >= {item.name for item in fields(self)}
        self._explicit = frozenset(filter(functools.partial(_differs_from_default, self), passed)) if everything else passed

    return __init__


def _differs_from_default(config: Any, name: str) -> bool:
    defaults = {item.name: item.default for item in fields(config)}
    return name in defaults and getattr(config, name) != defaults[name]


def _describe_unknown_name(owner: str, name: str, names: list[str]) -> str:
    if name in _REMOVED_SETTINGS:
        return f"{owner} has no {name}: {_REMOVED_SETTINGS[name]}"
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
    return f"{owner} has no {name}; {hint}"


@config_dataclass
class TrainerConfig:
    """Settings of `Trainer`.

    >>> cfg = TrainerConfig(lr=1e-5, max_seq_len=2048, micro_token_budget=16384, pad_token_id=0)
    """

    model_device: str = field(default_factory=_default_device)
    """Where the model is trained; "cuda" where there is one, else "cpu". A sharded model stays
    where it is."""
    runtime_device: str | None = None
    """Where published weights are put; None leaves them on `model_device`."""
    lr: float = 1e-5
    """AdamW's learning rate, before the schedule."""
    weight_decay: float = 0.01
    decay_biases_and_norms: bool = True
    """Off: weight decay leaves parameters of fewer than two dimensions alone."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: float | None = 1.0
    """The gradient is scaled down to this L2 norm; None: never."""
    max_seq_len: int = 1024
    """Longer samples are cut on the right; their metadata says so."""
    micro_token_budget: int = 8192
    """`longest * rows` of a micro-batch, at most; for `padding_free` the sum of lengths. Not
    below `max_seq_len`."""
    sync_every_steps: int = 1
    """Publish the weights every this many steps; 0: never."""
    master_weights: bool = True
    """Parameters in bfloat16 are stepped as float32 copies and rounded back: most updates are
    too small to change a bfloat16 weight. Off: they are stepped in bfloat16, which saves 10
    bytes a parameter and leaves most of them unchanged. Parameters in float32 are always stepped
    directly."""
    mixed_precision_dtype: str | None = None
    """"bf16" runs the forward passes of a float32 model under autocast; None computes in the
    model's own dtype. Weights and optimizer keep the dtype that the model was loaded in."""
    temperature: float = 1.0
    """The policy is that of logits / temperature. Set it to the temperature that is sampled
    with, where the sampler returns the log-probabilities of the distribution drawn from (vLLM's
    `processed_logprobs`)."""
    cast_logits_to_fp32: bool = True
    """Log-probabilities in float32, whatever the model computes in."""
    max_lag: int | None = None
    """Samples of a policy more than this many versions old are dropped; None: never."""
    reduce_stats_across_ranks: bool = False
    """Logged statistics are those of all ranks."""
    profile_memory: bool = False
    """Log memory peaks of forward and backward passes (CUDA)."""
    log_every: int = 1
    """Statistics are computed and logged every this many steps."""
    pad_token_id: int = 0
    """Fills padded columns. A tokenizer is accepted too, and stands for its `pad_token_id`."""
    eval_at_start: bool = False
    eval_every_n_steps: int | None = None
    """None: no evaluation while training."""
    eval_concurrency: int = 32
    eval_max_steps: int = 1
    eval_timeout_s: float | None = None
    """The three are passed to the evaluator if they were set; otherwise its own settings hold."""
    lr_scheduler_type: SchedulerType | None = None
    """Shape of the learning rate over the run; None: constant."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to `lr`."""
    warmup_ratio: float | None = None
    """The same as a share of all steps; used if `warmup_steps` is 0."""
    early_stopping_patience: int | None = None
    """End after this many evaluations without improvement; None: never."""
    early_stopping_metric: str = "eval_loss"
    """The metric that evaluations are compared by. At the end, the trained weights are those of
    the best evaluation (`Trainer.restore_best`)."""
    early_stopping_mode: Literal["auto", "min", "max"] = "auto"
    """Whether the metric is better when small (min) or large (max); auto: as its name implies,
    `eval_loss` min, `eval_accuracy` max."""
    early_stopping_min_delta: float = 0.0
    """An improvement must be larger than this."""
    packing: Packing = "optimal"
    """How samples are put into micro-batches; none of them changes the gradient."""
    overhead_tokens: int = 256
    """What a micro-batch costs besides its tokens, in tokens, for `optimal`."""
    minibatches_per_batch: int = 1
    """Optimizer steps over one pass of a batch; groups are kept whole."""
    epochs_per_batch: int = 1
    """Passes over each batch."""
    max_empty_batches: int = 100
    """This many batches in a row without a sample to train on are an error."""
    lr_min_ratio: float = 0.0
    """Where `cosine` and `linear` end, as a share of `lr`."""
    skip_zero_weight: bool = True
    """Leave samples of weight zero out of the forward pass where they add nothing to the
    gradient; they stay in the totals."""
    merge_turns: bool = True
    """Turns of an episode whose prompts continue each other, token by token, go through the
    model as one row. The gradient is that of one row a turn. Only with a loss that reads the
    logits through its shared context alone."""
    seed: int = 0
    """Seed of the order of samples in mini-batches."""
    learning_rate: InitVar[float | None] = None
    """Another name of `lr`."""

    def __post_init__(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            self.lr = learning_rate
        if hasattr(self.pad_token_id, "pad_token_id"):
            self.pad_token_id = _read_pad_token(self.pad_token_id)
        if len(self.betas) == 2:
            self.betas = (self.betas[0], self.betas[1])
        self.validate()

    def was_set(self, name: str) -> bool:
        """Whether the field was passed to the constructor."""
        return name in self._explicit  # type: ignore[attr-defined]

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation is due after `step` steps."""
        if step == 0:
            return self.eval_at_start
        return self.eval_every_n_steps is not None and step % self.eval_every_n_steps == 0

    def eval_limits(self, *, max_steps: int | None, timeout_s: float | None, concurrency: int | None) -> dict[str, Any]:
        """What an evaluator is told: these arguments, else the `eval_*` fields that were passed to
        the constructor, else None."""
        return {
            "max_steps": self.eval_max_steps if max_steps is None and self.was_set("eval_max_steps") else max_steps,
            "timeout_s": self.eval_timeout_s if timeout_s is None and self.was_set("eval_timeout_s") else timeout_s,
            "concurrency": self.eval_concurrency if concurrency is None and self.was_set("eval_concurrency") else concurrency,
        }

    def validate(self) -> None:
        """Raise `ConfigError` where a value or a combination is wrong. The trainer calls it
        again."""
        self._check_optimizer()
        self._check_batching()
        self._check_schedule()
        self._check_cadence()

    def _check_optimizer(self) -> None:
        _require(_is_finite(self.lr) and self.lr >= 0, "lr", self.lr, "be a finite number >= 0")
        _require(_is_finite(self.weight_decay) and self.weight_decay >= 0, "weight_decay", self.weight_decay, "be >= 0")
        _require(_is_finite(self.eps) and self.eps > 0, "eps", self.eps, "be > 0")
        sound = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _require(sound, "betas", self.betas, "be two numbers in [0, 1)")
        if self.max_grad_norm is not None:
            _require(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "be > 0; None turns clipping off")
        sound = _is_finite(self.temperature) and self.temperature > 0
        _require(sound, "temperature", self.temperature, "be a finite number > 0; 1 is the policy as it is")
        is_known = self.mixed_precision_dtype is None or self.mixed_precision_dtype in MIXED_PRECISION_DTYPES
        _require(is_known, "mixed_precision_dtype", self.mixed_precision_dtype, 'be "bf16", or None for the model\'s own dtype')

    def _check_batching(self) -> None:
        if self.pad_token_id is None:
            raise ConfigError("pad_token_id is None; pass tokenizer.pad_token_id, or its eos_token_id if it has no pad token")
        _require_int("pad_token_id", self.pad_token_id, 0)
        _require_int("max_seq_len", self.max_seq_len, 1)
        _require_int("micro_token_budget", self.micro_token_budget, 1)
        check_budget(self.micro_token_budget, self.max_seq_len)
        _require(self.packing in PACKINGS, "packing", self.packing, f"be one of {', '.join(PACKINGS)}")
        _require_int("overhead_tokens", self.overhead_tokens, 0)
        _require_int("minibatches_per_batch", self.minibatches_per_batch, 1)
        _require_int("epochs_per_batch", self.epochs_per_batch, 1)
        _require_int("max_empty_batches", self.max_empty_batches, 1)
        _require_int("seed", self.seed, 0)
        if self.max_lag is not None:
            _require_int("max_lag", self.max_lag, 0)

    def _check_schedule(self) -> None:
        if self.lr_scheduler_type is not None:
            is_known = self.lr_scheduler_type in SCHEDULER_TYPES
            rule = f"be one of {', '.join(SCHEDULER_TYPES)}, or None for a constant rate"
            _require(is_known, "lr_scheduler_type", self.lr_scheduler_type, rule)
        _require_int("warmup_steps", self.warmup_steps, 0)
        if self.warmup_ratio is not None:
            _require(0 <= self.warmup_ratio <= 1, "warmup_ratio", self.warmup_ratio, "be in [0, 1]")
        if self.lr_scheduler_type is None and (self.warmup_steps or self.warmup_ratio):
            raise ConfigError('a warm-up needs lr_scheduler_type; "constant_with_warmup" keeps the rate constant after it')
        _require(0 <= self.lr_min_ratio <= 1, "lr_min_ratio", self.lr_min_ratio, "be in [0, 1]: a share of lr")
        if self.early_stopping_patience is not None:
            _require_int("early_stopping_patience", self.early_stopping_patience, 1)
        mode = self.early_stopping_mode
        _require(mode in ("auto", "min", "max"), "early_stopping_mode", mode, "be auto, min or max")
        delta = self.early_stopping_min_delta
        _require(delta >= 0, "early_stopping_min_delta", delta, "be >= 0")

    def _check_cadence(self) -> None:
        _require_int("sync_every_steps", self.sync_every_steps, 0)
        _require_int("log_every", self.log_every, 1)
        _require_int("eval_concurrency", self.eval_concurrency, 1)
        _require_int("eval_max_steps", self.eval_max_steps, 1)
        if self.eval_every_n_steps is not None:
            _require_int("eval_every_n_steps", self.eval_every_n_steps, 1)
        if self.eval_timeout_s is not None:
            _require(self.eval_timeout_s > 0, "eval_timeout_s", self.eval_timeout_s, "be > 0, or None for no limit")


def config_values(cfg: TrainerConfig) -> dict[str, Any]:
    """The fields as plain values, for a log or a file."""
    return {item.name: getattr(cfg, item.name) for item in fields(cfg)}


def check_budget(micro_token_budget: int, max_seq_len: int) -> None:
    """Raise `BudgetError` unless one sample of full length fits."""
    if micro_token_budget < max_seq_len:
        raise BudgetError(
            f"micro_token_budget ({micro_token_budget}) must be >= max_seq_len ({max_seq_len}); "
            "raise the budget or lower max_seq_len"
        )


def _read_pad_token(tokenizer: Any) -> int:
    """Its padding token, or else its end token: what stands there is masked."""
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise ConfigError("the tokenizer has neither a pad nor an end token; pass an id")
    return int(pad_token_id)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} ({value}) must {rule}")


def _require_int(name: str, value: object, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(whole and value >= least, name, value, f"be a whole number >= {least}")  # type: ignore[operator]
