"""The documented path of `ludic.training.rollouts.engine`."""

from ludic.training.rollouts.engine import RolloutEngine

__all__ = ["RolloutEngine"]
