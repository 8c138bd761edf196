"""The controller of beta: keeps the KL between policy and reference at a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ludic.errors import ConfigError, check_value
from ludic.training.coefficients import Coefficient
from ludic.training.controllers.protocol import Observation


class KLController:
    """beta <- beta (1 + err / horizon), err = clip(KL / target - 1, -step_size, step_size)
    (arXiv:1909.08593, section 2.2).

    beta follows exponentially: while KL is twice the target, it doubles in 0.69 `horizon` steps. A
    step whose KL is unknown or not finite changes nothing. The factor is at least 1e-6.

    Example: beta 0.1, KL 0.14, target 0.07, horizon 500: err = 1, beta becomes 0.1002.
    """

    name = "kl"

    def __init__(self, beta: Coefficient, *, target: float, horizon: float, step_size: float = 1.0) -> None:
        """`target` in nats, `horizon` in training steps. If one of the three is 0, beta stays as
        it is. Raises ConfigError for a negative one, and for beta = 0, which no factor changes."""
        for setting, value in (("target", target), ("horizon", horizon), ("step_size", step_size)):
            check_value(setting, value, "with 0 the KL controller keeps beta fixed", least=0, below=math.inf)
        self.beta, self.target, self.horizon, self.step_size = beta, target, horizon, step_size
        if self.reads_kl and not float(beta) > 0:
            raise ConfigError("beta (0) cannot leave 0 by a factor; begin above 0, or leave the KL controller out")

    @property
    def coefficients(self) -> Mapping[str, Coefficient]:
        """What it sets, by name."""
        return {"beta": self.beta}

    @property
    def reads_kl(self) -> bool:
        """Whether it changes beta, for which it needs the KL of the step."""
        return bool(self.target and self.horizon and self.step_size)

    def update(self, seen: Observation) -> dict[str, float]:
        """Set beta. Returns no statistics."""
        if self.reads_kl and seen.kl is not None and math.isfinite(seen.kl):
            error = min(max(seen.kl / self.target - 1, -self.step_size), self.step_size)
            self.beta.set(float(self.beta) * max(1 + error / self.horizon, 1e-6))
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"beta": float(self.beta)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.beta.set(float(state["beta"]))
