"""The settings of controllers, which change the coefficients of the algorithm during a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


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
    """Training steps from `start` to `final`; 0: `final` at once."""
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
