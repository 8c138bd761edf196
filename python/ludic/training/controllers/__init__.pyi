from ludic.training.controllers.entropy import EntropyController as EntropyController, EntropySchedule as EntropySchedule
from ludic.training.controllers.kl import KLController as KLController
from ludic.training.controllers.meta import MetaController as MetaController
from ludic.training.controllers.protocol import Controller as Controller, Observation as Observation
from ludic.training.controllers.saved_state import (
    load_controller_state as load_controller_state,
    save_controller_state as save_controller_state,
)
