"""Gradient descent on single numbers: SGD, Adam and AdamW with PyTorch's defaults.

Adam: arXiv:1412.6980, algorithm 1. AdamW: arXiv:1711.05101, algorithm 2, with weight decay 0.01.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

OPTIMIZERS = ("sgd", "adam", "adamw")
DECAY_FIRST, DECAY_SECOND, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01


@dataclass
class Moments:
    """Moving averages of a gradient and of its square."""

    first: float = 0.0
    second: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        """Raises TypeError for what is not a number, and ValueError for what no gradients give."""
        if not (math.isfinite(self.first) and 0 <= self.second < math.inf and self.steps >= 0) or self.steps != int(self.steps):
            raise ValueError(
                f"first ({self.first}) must be finite, second ({self.second}) finite and >= 0, and steps ({self.steps}) a whole "
                "number of at least 0"
            )

    def add(self, gradient: float) -> float:
        """Add a gradient. Returns the direction of Adam's step."""
        self.first = DECAY_FIRST * self.first + (1 - DECAY_FIRST) * gradient
        self.second = DECAY_SECOND * self.second + (1 - DECAY_SECOND) * gradient**2
        self.steps += 1
        mean = self.first / (1 - DECAY_FIRST**self.steps)
        deviation = (self.second / (1 - DECAY_SECOND**self.steps)) ** 0.5
        return float(mean / (deviation + EPSILON))


def descend(optimizer: str, moments: Moments, value: float, gradient: float, lr: float) -> float:
    """Return `value` after one step of rate `lr`, and add the gradient to `moments`, which SGD does
    not use."""
    if optimizer == "sgd":
        return value - lr * gradient
    decay = WEIGHT_DECAY if optimizer == "adamw" else 0.0
    return value * (1 - lr * decay) - lr * moments.add(gradient)
