"""The controller of tau: keeps the entropy of the groups' weights at a target."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError, check_value
from ludic.training.coefficients import Coefficient
from ludic.training.controllers.protocol import Observation

LARGEST_LOG = math.log(sys.float_info.max)
"""The largest number whose exponential is finite in float64."""


@dataclass(frozen=True)
class EntropySchedule:
    """A target of entropy that is constant, or changes linearly over `horizon` steps.

    With neither `start` nor `final` it is `target`; with one of them, `target` stands in for the
    other. With `horizon` 0 it is `final` from the start.

    Example: from 1.2 to 2.2 over 2000 steps is 1.7 at step 1000 and 2.2 from step 2000 on.
    """

    target: float | None
    """In nats."""
    start: float | None = None
    final: float | None = None
    horizon: int = 0
    """Training steps."""

    def __post_init__(self) -> None:
        if self.target is None and (self.start is None or self.final is None):
            raise ConfigError("an entropy schedule needs target, or both start and final")
        for setting in ("target", "start", "final"):
            check_value(setting, getattr(self, setting), "an entropy, in nats", optional=True, least=0, below=math.inf)
        check_value("horizon", self.horizon, "the steps of an entropy schedule", least=0)

    @property
    def highest(self) -> float:
        """The largest target of all steps."""
        return max(self._ends) if self.horizon else self._ends[1]

    @property
    def _ends(self) -> tuple[float, float]:
        start = self.target if self.start is None else self.start
        final = self.target if self.final is None else self.final
        assert start is not None
        assert final is not None
        return start, final

    def at(self, step: int) -> float:
        """The target of `step`, counted from 0."""
        start, final = self._ends
        if self.horizon == 0:
            return final
        return start + (final - start) * min(max(step, 0), self.horizon) / self.horizon


def as_schedule(target: float | EntropySchedule) -> EntropySchedule:
    """Return a number as a constant schedule; a schedule is returned as it is."""
    return target if isinstance(target, EntropySchedule) else EntropySchedule(target)


def check_reachable(target: EntropySchedule, group_size: int) -> None:
    """Raise ConfigError for a target above log(group_size), the entropy of equal weights."""
    hint = f"log(group_size) = log({group_size}), the entropy of equal weights"
    check_value("the entropy target", target.highest, hint, most=math.log(group_size))


class EntropyController:
    """log tau <- log tau + lr lr_factor (H* - ema), where ema is the moving average of the mean
    entropy of the weights: more tau makes them more equal.

    tau is clipped to [least, most], and log tau is set to the log of the clipped value. So tau
    leaves a bound immediately when the error changes its sign, however long it was there.

    Nothing happens, and no entropy enters the average, while step <= `warmup_steps`; -1 is the
    warm-up of the learning rate. A step whose entropy is unknown or not finite is left out, too.

    Example: tau 0.3, ema 1, H = 1.2, H* = 1.3, lr 0.01: ema 1.02, tau 0.3 exp(0.0028) = 0.30084118.
    """

    name = "entropy"
    reads_kl = False

    def __init__(
        self,
        tau: Coefficient,
        *,
        target: float | EntropySchedule,
        lr: float,
        least: float = 1e-6,
        most: float | None = None,
        warmup_steps: int = -1,
        ema_decay: float = 0.9,
    ) -> None:
        """`most` None or 0: no upper bound. Raises ConfigError for invalid values."""
        self.tau, self.lr = tau, lr
        self.entropy_target = as_schedule(target)
        self.least, self.most = least, most or sys.float_info.max
        self.warmup_steps, self.ema_decay = warmup_steps, ema_decay
        check_value("lr", lr, "leave the entropy controller out to keep tau fixed", above=0, below=math.inf)
        check_value("most", self.most, "0 or None sets no bound", below=math.inf)
        check_value("least", least, "log tau changes, not tau, up to most", above=0, most=self.most)
        check_value("tau", float(tau), "it begins within the controller's bounds", least=least, most=self.most)
        check_value("warmup_steps", warmup_steps, "-1 is the warm-up of the learning rate", least=-1)
        check_value("ema_decay", ema_decay, least=0, below=1)
        self._log_tau = math.log(float(tau))
        self._ema: float | None = None

    @property
    def coefficients(self) -> Mapping[str, Coefficient]:
        """What it sets, by name."""
        return {"tau": self.tau}

    def update(self, seen: Observation) -> dict[str, float]:
        """Set tau. Returns the moving average and its distance from the target."""
        warmup = seen.warmup_steps if self.warmup_steps == -1 else self.warmup_steps
        if seen.step <= warmup or seen.entropy is None or not math.isfinite(seen.entropy):
            return {}
        decay = 0.0 if self._ema is None else self.ema_decay
        self._ema = decay * (self._ema or 0.0) + (1 - decay) * seen.entropy
        error = self.entropy_target.at(seen.step) - self._ema
        log_tau = self._log_tau + self.lr * seen.lr_factor * error
        tau = math.exp(min(log_tau, LARGEST_LOG))
        self.tau.set(min(max(tau, self.least), self.most))
        self._log_tau = log_tau if float(self.tau) == tau else math.log(float(self.tau))
        return {"weight_entropy_ema": self._ema, "weight_entropy_error": error}

    def state_dict(self) -> dict[str, Any]:
        return {"tau": float(self.tau), "log_tau": self._log_tau, "ema": self._ema}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        tau, log_tau = float(state["tau"]), float(state["log_tau"])
        ema = None if state["ema"] is None else float(state["ema"])
        self.tau.set(tau)
        self._log_tau, self._ema = log_tau, ema
