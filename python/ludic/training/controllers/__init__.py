"""Controllers: each sets coefficients of an algorithm, once a training step, from what the step
showed. Plain float64 arithmetic without torch."""

from ludic.training.controllers.entropy import EntropyController, EntropySchedule
from ludic.training.controllers.kl import KLController
from ludic.training.controllers.meta import MetaController
from ludic.training.controllers.protocol import Controller, Observation
from ludic.training.controllers.saved_state import load_controller_state, save_controller_state

__all__ = [
    "Controller",
    "EntropyController",
    "EntropySchedule",
    "KLController",
    "MetaController",
    "Observation",
    "load_controller_state",
    "save_controller_state",
]
