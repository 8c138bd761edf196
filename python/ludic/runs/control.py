"""What holds a policy back and steers its coefficients: the reference and the controllers of a
run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.recipes.controllers import build_controllers
from ludic.recipes.reference_section import check_reference
from ludic.recipes.schema import Recipe
from ludic.runs.base import RunParts
from ludic.runs.directory import RunDirectory
from ludic.runs.reference import open_reference
from ludic.training.algorithm import RLAlgorithm
from ludic.training.coefficients import Coefficient
from ludic.training.config import TrainerConfig
from ludic.training.controllers import Controller, save_controller_state
from ludic.training.controllers.saved_state import FILE_NAME
from ludic.training.loggers import TeeLogger, TrainingLogger
from ludic.training.loop.token_log import TokenLog


def check_control(recipe: Recipe, algorithm: RLAlgorithm) -> None:
    """Raise `ConfigError` for wrong settings of `reference` and `controllers`."""
    check_reference(recipe.reference, has_adapters=bool(recipe.lora.rank))
    build_controllers(recipe.controllers, algorithm, group_size=_answers(recipe))


def open_control(
    recipe: Recipe,
    algorithm: RLAlgorithm,
    parts: RunParts,
    directory: RunDirectory,
    phase: str,
    cfg: TrainerConfig,
    logger: TrainingLogger | None,
) -> dict[str, Any]:
    """The arguments `reference`, `controllers`, `train_logger` and `token_log` of the trainer of a
    phase. An algorithm without coefficients, as that of the warm-up, has no controllers."""
    controllers: list[Controller] = []
    if algorithm.coefficients:
        controllers = build_controllers(recipe.controllers, algorithm, group_size=_answers(recipe))
    if controllers and logger is not None:
        logger = TeeLogger(logger, ControllerStateLogger(directory.path / FILE_NAME, controllers, algorithm.coefficients))
    reference = open_reference(recipe, algorithm, parts, directory, phase, cfg)
    return {
        "reference": reference,
        "controllers": controllers,
        "train_logger": logger,
        "token_log": TokenLog(directory.token_logps, recipe.rollout.log_every) if phase == directory.last_phase else None,
    }


def _answers(recipe: Recipe) -> int:
    """The answers to a problem, with the seeded ones of InfoSeed."""
    return recipe.rollout.group_size + recipe.info_seed.num_seeds


class ControllerStateLogger:
    """Writes `controller_state.json` at each step that is logged."""

    def __init__(self, path: Path, controllers: Sequence[Controller], coefficients: Mapping[str, Coefficient]) -> None:
        self._path, self._controllers, self._coefficients = path, controllers, coefficients

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        save_controller_state(self._path, self._controllers, self._coefficients, step=step)
