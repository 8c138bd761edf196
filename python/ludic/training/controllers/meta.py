"""The meta-controller: gradient descent on tau and beta together, in place of the two laws.

Gradient descent on single numbers: SGD, Adam and AdamW with PyTorch's defaults.

Adam: arXiv:1412.6980, algorithm 1. AdamW: arXiv:1711.05101, algorithm 2, with weight decay 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ludic.errors import ConfigError, check_value
from ludic.training.coefficients import Coefficient
from ludic.training.controllers.entropy import EntropySchedule, as_schedule
from ludic.training.controllers.meta_gradient import MetaGradient, potential_gradient, tracking_gradient
from ludic.training.controllers.protocol import Observation

METHODS = {
    **dict.fromkeys(("analytic", "analytic_grad", "potential"), "analytic"),
    "first_order": "first_order",
    **dict.fromkeys(("truncated_backprop", "truncated", "backprop"), "truncated_backprop"),
}
"""Name or alias -> method."""

_RUNTIME = ("update_interval", "truncation_steps", "use_hessian")


@dataclass
class Moments:
    """Moving averages of a gradient and of its square."""

    first: float = 0.0
    second: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        """Raises TypeError for a value that is not a number, and ValueError for one that no
        gradient has."""
        if not (math.isfinite(self.first) and 0 <= self.second < math.inf and self.steps >= 0) or self.steps != int(self.steps):
            raise ValueError(
                f"first ({self.first}) must be finite, second ({self.second}) finite and >= 0, steps ({self.steps}) whole and >= 0"
            )

    def add(self, gradient: float) -> float:
        """Add a gradient. Returns the direction of Adam's step."""
        self.first = DECAY_FIRST * self.first + (1 - DECAY_FIRST) * gradient
        self.second = DECAY_SECOND * self.second + (1 - DECAY_SECOND) * gradient**2
        self.steps += 1
        mean = self.first / (1 - DECAY_FIRST**self.steps)
        deviation = (self.second / (1 - DECAY_SECOND**self.steps)) ** 0.5
        return float(mean / (deviation + EPSILON))


@dataclass
class _Parameter:
    """A coefficient that is descended on, and where it may go."""

    coefficient: Coefficient
    lr: float
    least: float
    most: float
    moments: Moments = field(default_factory=Moments)
    last_gradient: float = 0.0

    def step(self, optimizer: str, gradient: float, lr_factor: float) -> bool:
        """Take a step and project it onto the bounds. Returns whether a bound held the value back.

        At a bound, a gradient that leads outwards counts as 0 and clears the moments: the value
        leaves the bound as soon as the gradient turns.
        """
        value = float(self.coefficient)
        if (value <= self.least and gradient > 0) or (value >= self.most and gradient < 0):
            self.moments = Moments()
            return True
        wanted = descend(optimizer, self.moments, value, gradient, self.lr * lr_factor)
        self.coefficient.set(min(max(wanted, self.least), self.most))
        return not self.least <= wanted <= self.most


class MetaController:
    """Descends on tau and beta towards targets of the weights' entropy and of the KL.

    `method`:

    - `analytic`: the convex potential (`potential_gradient`). Its targets are constraints, H >= H*
      and KL <= KL*: tau falls to its bound while H stays above its target.
    - `first_order`: the squared distances from both targets, with the KL after one step of the
      candidates' logits (`tracking_gradient`).
    - `truncated_backprop`: the same after `truncation_steps` steps.

    It runs at steps with (step + 1) % `update_interval` == 0, on the groups of that step. The
    learning rates are multiplied by the factor of the learning-rate schedule. With "adamw" the
    coefficients decay, too.
    """

    name = "meta"

    def __init__(
        self,
        tau: Coefficient | None,
        beta: Coefficient | None,
        *,
        entropy_target: float | EntropySchedule | None = None,
        kl_target: float | None = None,
        method: str = "analytic",
        lr: float = 0.0,
        tau_lr: float | None = None,
        beta_lr: float | None = None,
        beta_grad_clip: float | None = None,
        optimizer: str = "sgd",
        update_interval: int = 1,
        truncation_steps: int = 1,
        use_hessian: bool = False,
        inner_lr: float = 0.5,
        kl_signal: str = "policy",
        tau_most: float | None = None,
        beta_most: float | None = None,
        tau_least: float = 1e-6,
    ) -> None:
        """`tau` or `beta` is None if the algorithm has none. `tau_lr`, `beta_lr`: None means `lr`;
        0 keeps the coefficient fixed. `kl_signal`, of the analytic method: "policy", the KL to the
        reference that the step measured, or "weights", the KL of the weights. `beta_grad_clip`,
        `tau_most`, `beta_most` None or 0: none. Raises ConfigError for invalid values."""
        check_value("method", method, choices=METHODS)
        check_value("optimizer", optimizer, choices=OPTIMIZERS)
        check_value("kl_signal", kl_signal, choices=("policy", "weights"))
        self.method, self.optimizer, self.kl_signal = METHODS[method], optimizer, kl_signal
        self.entropy_target = None if entropy_target is None else as_schedule(entropy_target)
        self.kl_target, self.beta_grad_clip = kl_target, beta_grad_clip or math.inf
        self.update_interval, self.truncation_steps = update_interval, truncation_steps
        self.use_hessian, self.inner_lr = use_hessian, inner_lr
        self._parameters: dict[str, _Parameter] = {}
        if tau is not None and (rate := lr if tau_lr is None else tau_lr):
            self._parameters["tau"] = _bounded(tau, rate, tau_least, tau_most)
        if beta is not None and (rate := lr if beta_lr is None else beta_lr):
            self._parameters["beta"] = _bounded(beta, rate, 0.0, beta_most)
        self._tau, self._beta = tau, beta
        self._check(lr, tau_lr, beta_lr, tau_least)

    @property
    def coefficients(self) -> Mapping[str, Coefficient]:
        """What it sets, by name."""
        return {name: parameter.coefficient for name, parameter in self._parameters.items()}

    @property
    def reads_kl(self) -> bool:
        """Whether it needs the reference: for the KL of the step, or the KL and the slopes of the
        weights."""
        return self.kl_target is not None or (self.method != "analytic" and "beta" in self._parameters)

    def _check(self, lr: float, tau_lr: float | None, beta_lr: float | None, tau_least: float) -> None:
        rates = {"lr": lr, "tau_lr": tau_lr, "beta_lr": beta_lr}
        for setting, value in {**rates, "beta_grad_clip": self.beta_grad_clip, "kl_target": self.kl_target}.items():
            check_value(setting, value, optional=True, least=0)
        for setting, count in (("update_interval", self.update_interval), ("truncation_steps", self.truncation_steps)):
            check_value(setting, count, least=1)
        for setting, value in (("inner_lr", self.inner_lr), ("tau_least", tau_least)):
            check_value(setting, value, above=0)
        if self.entropy_target is None and self.kl_target is None:
            raise ConfigError("the meta-controller has nothing to aim at; set entropy_target, kl_target or both")
        if not self._parameters:
            raise ConfigError("the learning rates of the meta-controller are 0; set lr, tau_lr or beta_lr, or leave it out")
        if self._tau is None and (self.method != "analytic" or self.entropy_target is not None or self.kl_signal != "policy"):
            raise ConfigError("without tau, only beta can be steered: set method='analytic', kl_signal='policy' and kl_target")
        for name, parameter in self._parameters.items():
            start = float(parameter.coefficient)
            check_value(name, start, "it begins within the controller's bounds", least=parameter.least, most=parameter.most)

    def update(self, seen: Observation) -> dict[str, float]:
        """Set tau and beta. Returns loss and gradients, and whether a bound held a value back."""
        if (seen.step + 1) % self.update_interval:
            return {}
        found = self._gradient(seen)
        stats = {"meta/loss": found.loss, "meta/tau_grad": found.tau, "meta/beta_grad": found.beta}
        stats |= {f"meta/{name}": float(getattr(self, name)) for name in _RUNTIME}
        clipped = min(max(found.beta, -self.beta_grad_clip), self.beta_grad_clip)
        for name, gradient in (("tau", found.tau), ("beta", clipped)):
            if name in self._parameters:
                parameter = self._parameters[name]
                stats[f"meta/{name}_lr"] = parameter.lr * seen.lr_factor
                stats[f"meta/{name}_projected"] = float(parameter.step(self.optimizer, gradient, seen.lr_factor))
                parameter.last_gradient = gradient
        return stats

    def _gradient(self, seen: Observation) -> MetaGradient:
        """The gradient of the method. A measured KL that is unknown counts as one on target; an
        entropy that is unknown is computed from the weights before they are shared among the
        best."""
        tau = 0.0 if self._tau is None else float(self._tau)
        beta = 0.0 if self._beta is None else float(self._beta)
        shared: dict[str, Any] = {
            "entropy_target": None if self.entropy_target is None else self.entropy_target.at(seen.step),
            "entropy": seen.entropy if seen.entropy is not None and math.isfinite(seen.entropy) else None,
            "sum_over_ranks": seen.sum_over_ranks,
        }
        if self.method == "analytic":
            measured = seen.kl if seen.kl is not None and math.isfinite(seen.kl) else None
            kl, kl_target = None, self.kl_target
            if self.kl_signal == "policy":
                kl, kl_target = measured, None if measured is None else self.kl_target
            return potential_gradient(seen.groups, tau, beta, kl_target=kl_target, kl=kl, **shared)
        shared |= {"steps": 1 if self.method == "first_order" else self.truncation_steps}
        shared |= {"kl_target": self.kl_target, "inner_lr": self.inner_lr, "use_hessian": self.use_hessian}
        return tracking_gradient(seen.groups, tau, beta, **shared)

    def state_dict(self) -> dict[str, Any]:
        """The state, and for its reader the settings, which a state never changes."""
        rates = {f"{name}_lr": parameter.lr for name, parameter in self._parameters.items()}
        return {
            "settings": {**{name: getattr(self, name) for name in ("method", "optimizer", "kl_target", *_RUNTIME)}, **rates},
            **{name: float(parameter.coefficient) for name, parameter in self._parameters.items()},
            "moments": {name: asdict(parameter.moments) for name, parameter in self._parameters.items()},
            **{f"last_{name}_grad": parameter.last_gradient for name, parameter in self._parameters.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. One without moments, as of a run without a meta-controller, begins
        with none. Raises KeyError, TypeError or ValueError for an invalid one."""
        moments = {name: Moments(**state.get("moments", {}).get(name, {})) for name in self._parameters}
        for name, parameter in self._parameters.items():
            if name in state:
                parameter.coefficient.set(float(state[name]))
            parameter.moments = moments[name]
            parameter.last_gradient = float(state.get(f"last_{name}_grad") or 0.0)


def _bounded(coefficient: Coefficient, lr: float, least: float, most: float | None) -> _Parameter:
    """A parameter within the bounds of the controller and of the coefficient itself."""
    highest = math.inf if coefficient.most is None else coefficient.most
    return _Parameter(coefficient, lr, max(least, coefficient.least), min(most or math.inf, highest))


OPTIMIZERS = ("sgd", "adam", "adamw")
DECAY_FIRST, DECAY_SECOND, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01


def descend(optimizer: str, moments: Moments, value: float, gradient: float, lr: float) -> float:
    """Return `value` after one step of rate `lr`, and add the gradient to `moments`, which SGD does
    not use."""
    if optimizer == "sgd":
        return value - lr * gradient
    decay = WEIGHT_DECAY if optimizer == "adamw" else 0.0
    return value * (1 - lr * decay) - lr * moments.add(gradient)
