"""Controllers: each sets coefficients of an algorithm, once a training step, from what the step
showed."""

from ludic.training.controllers.protocol import Controller, Observation

__all__ = ["Controller", "Observation"]
