"""The controllers of a run: what they see of each step, their statistics, and their state in
checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ludic.errors import CheckpointError, ConfigError
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.coefficients import Coefficient
from ludic.training.controllers import EntropyController, MetaController
from ludic.training.controllers.entropy import check_reachable
from ludic.training.controllers.protocol import Controller, Observation
from ludic.training.controllers.saved_state import FILE_NAME, controller_state
from ludic.training.loop.schedule import RunSchedule
from ludic.training.loss.composite import CompositeLoss
from ludic.training.loss.reference_kl import ReferenceKLLoss
from ludic.training.maxent.credit import ListwiseCredit
from ludic.training.preparation import Prepared

logger = logging.getLogger(__name__)

ENTROPY = "weight_entropy"
"""The statistic of a step that controllers see, in addition to the KL."""


class Control:
    """Updates the controllers once a training step."""

    def __init__(self, controllers: Sequence[Controller], algo: RLAlgorithm) -> None:
        """Raises ConfigError for controllers that do not fit the algorithm or each other."""
        self.controllers, self.coefficients = tuple(controllers), algo.coefficients
        # The KL to the reference that the loss penalises: with kl_level="sequence", of answers.
        parts = [term.loss for term in algo.loss.terms] if isinstance(algo.loss, CompositeLoss) else [algo.loss]
        levels = {part.level for part in parts if isinstance(part, ReferenceKLLoss)}
        self._kl = "reference/sequence_kl" if levels == {"sequence"} else "reference/kl"
        check_controllers(self.controllers, self.coefficients)
        reading = [controller.name for controller in self.controllers if controller.reads_kl]
        if reading and not algo.reads_reference:
            raise ConfigError(f"the controller {reading[0]!r} reads the KL and {algo.name} has none; set beta or reference_kl")
        if isinstance(algo.batch_credit, ListwiseCredit):
            for controller in self.controllers:
                if isinstance(controller, EntropyController | MetaController) and controller.entropy_target is not None:
                    check_reachable(controller.entropy_target, algo.batch_credit.group_size)

    def update(
        self, stats: Mapping[str, float], prepared: Prepared, schedule: RunSchedule, device: torch.device | str, *, step: int
    ) -> dict[str, float]:
        """Show the controllers a step, the first is 0, and let them set the coefficients of the
        next one. `stats` are over all ranks; sums over ranks travel on `device`. Returns what
        the step used (`tau`), by how much it changed (`delta_tau`), and the statistics of the
        controllers."""
        seen = Observation(
            step=step,
            lr_factor=schedule.factor(step),
            warmup_steps=schedule.warmup_steps,
            entropy=stats.get(ENTROPY),
            kl=stats.get(self._kl),
            groups=prepared.groups,
            sum_over_ranks=tuple if prepared.macro.share is not None else lambda sums: ranks.sum_over_ranks(sums, device),
        )
        used = self.values()
        shown = {key: value for controller in self.controllers for key, value in controller.update(seen).items()}
        return {**shown, **used, **{f"delta_{name}": float(self.coefficients[name]) - value for name, value in used.items()}}

    def values(self) -> dict[str, float]:
        """The coefficients at present, by name."""
        return {name: float(coefficient) for name, coefficient in self.coefficients.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each controller, by name."""
        return {controller.name: controller.state_dict() for controller in self.controllers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. A controller that the state lacks begins anew, with a
        warning."""
        missing = [controller.name for controller in self.controllers if controller.name not in state]
        if missing:
            logger.warning("the checkpoint has no state of the controllers %s, which begin anew", ", ".join(missing))
        for controller in self.controllers:
            if controller.name in state:
                try:
                    controller.load_state_dict(state[controller.name])
                except (KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(f"the controller {controller.name!r} in the checkpoint is invalid: {error}") from error

    def files(self, step: int) -> dict[str, Any]:
        """The argument `files` of `CheckpointManager.save_backend` after `step` steps:
        `controller_state.json`, if there are controllers."""
        if not self.controllers:
            return {}
        return {"files": {FILE_NAME: controller_state(self.controllers, self.coefficients, step=step)}}


def check_controllers(controllers: Sequence[Controller], coefficients: Mapping[str, Coefficient]) -> None:
    """Raise ConfigError for two controllers of one name, for a controller of a coefficient that the
    algorithm does not have, and for two controllers of one coefficient."""
    names = [controller.name for controller in controllers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two controllers have the name {name!r}, under which a checkpoint has their state")
    taken: dict[str, str] = {}
    for controller in controllers:
        for role, coefficient in controller.coefficients.items():
            found = next((known for known in coefficients if coefficients[known] is coefficient), None)
            if found is None:
                allowed = ", ".join(coefficients) or "none"
                raise ConfigError(f"controller {controller.name!r} sets a {role} not in algo.coefficients, which are: {allowed}")
            if found in taken:
                raise ConfigError(f"the controllers {taken[found]!r} and {controller.name!r} both set {found}; keep one of them")
            taken[found] = controller.name
