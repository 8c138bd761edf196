"""What judges a policy, holds it back and steers its coefficients: the critic, the reference and
the controllers of a run.

The reference of a run: the policy that its reinforcement began with, which the run keeps, or
another model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ludic.errors import CheckpointError, ConfigError
from ludic.files.checkpoints import check_model_folder
from ludic.files.manifest import replace_with_manifest
from ludic.models.loading import load_model
from ludic.models.lora import save_merged
from ludic.models.saving import save_tokenizer
from ludic.models.sharded_loading import load_skeleton
from ludic.models.state_files import holds_whole_weights
from ludic.models.wrappers import has_adapters
from ludic.recipes.build import build_controllers
from ludic.recipes.epochs_schema import EpochsRecipe
from ludic.recipes.model import add_adapters, check_vocabulary, has_no_weights, is_shared_out, limit_pixels
from ludic.recipes.schema import Recipe
from ludic.recipes.sections import check_reference, switches_adapters_off
from ludic.runs.base import RunParts, has_checkpoint
from ludic.runs.directory import RunDirectory
from ludic.runs.shared_model import SharedModel
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.coefficients import Coefficient
from ludic.training.config import TrainerConfig
from ludic.training.controllers import Controller, save_controller_state
from ludic.training.controllers.saved_state import FILE_NAME
from ludic.training.loggers import TeeLogger, TrainingLogger
from ludic.training.loop.step_record import TokenLog
from ludic.training.reference import FrozenModel

POLICY = "policy"
"""`critic.model` for a copy of the policy."""


def check_control(recipe: Recipe, algorithm: RLAlgorithm) -> None:
    """Raise `ConfigError` for wrong settings of `reference`, `teacher` and `controllers`."""
    check_reference(recipe.reference, has_adapters=bool(recipe.lora.rank))
    teachers, name = recipe.teacher.by_name, f"algorithm ({recipe.algorithm})"
    shown = ", ".join(map(str, teachers.values()))
    if algorithm.reads_teacher and not teachers:
        raise ConfigError(f"{name} learns from a teacher, and there is none; set teacher.model=FOLDER, or teacher.url=URL")
    if teachers and not algorithm.reads_teacher:
        raise ConfigError(f"teacher ({shown}) is not read by {name}; set algorithm=opd")
    if not algorithm.reads_reference and (recipe.teacher.model is None or "" not in teachers) and teachers:
        raise ConfigError(f"a divergence reads the logits of one model, not of teacher ({shown}); set teacher.model=FOLDER")
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
    phase. An algorithm without coefficients, as in the warm-up, has no controllers."""
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


def check_critic(recipe: Recipe, algorithm: RLAlgorithm, tokenizer: Any) -> None:
    """Raise `ConfigError` for a `critic.model` that the run cannot have."""
    source = recipe.critic.model
    if source is not None and algorithm.critic is None:
        raise ConfigError(f"critic.model ({source}) needs an algorithm with a critic, not {algorithm.name}; set algorithm=ppo")
    if source not in (None, POLICY):
        check_vocabulary("critic.model", source, tokenizer)


def open_critic(recipe: Recipe, algorithm: RLAlgorithm, policy: Any) -> nn.Module | None:
    """The model of values of a phase; None for a value head, and if the algorithm has no critic.
    Its trained weights are in the checkpoints."""
    source = recipe.critic.model
    if algorithm.critic is None or source is None:
        return None
    from ludic.training.critic import as_value_model

    if source != POLICY:
        load = load_skeleton if has_no_weights(recipe.sharding) else load_model
        model = limit_pixels(load(source, recipe.dtype), recipe)
    else:
        model = copy.deepcopy(policy)
        model = model.unload() if has_adapters(model) else model  # without the adapters, which change nothing yet
    device = recipe.trainer.model_device
    whole: nn.Module = add_adapters(as_value_model(model), recipe, seed=recipe.seed, device=device)
    return SharedModel(recipe.sharding, device).shard(whole) if is_shared_out(recipe.sharding) else whole


class ControllerStateLogger:
    """Writes `controller_state.json` at each step that is logged."""

    def __init__(self, path: Path, controllers: Sequence[Controller], coefficients: Mapping[str, Coefficient]) -> None:
        self._path, self._controllers, self._coefficients = path, controllers, coefficients

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        save_controller_state(self._path, self._controllers, self._coefficients, step=step)


def open_reference(
    recipe: Recipe, algorithm: RLAlgorithm, parts: RunParts, directory: RunDirectory, phase: str, cfg: TrainerConfig
) -> FrozenModel | None:
    """The reference of a phase; None if the algorithm reads none, for the adapters of the policy,
    which the trainer switches off itself, and for a teacher, which the algorithm gets.

    Before the first step the model of `parts` is written to the folder `reference`, on rank 0. A
    resumed run reads that: its own weights have been trained since. Raises CheckpointError if the
    run has been reinforced and the folder is gone.
    """
    section = recipe.reference
    if algorithm.reads_teacher:
        algorithm.teacher = open_teacher(recipe, parts.tokenizer, cfg)
        return None
    if not algorithm.reads_reference or switches_adapters_off(section, has_adapters=bool(recipe.lora.rank)):
        return None
    if section.model is not None:
        return load_frozen(section.model, recipe, cfg)
    is_trained = has_checkpoint(directory.checkpoints / phase)  # asks on all ranks
    ranks.ask_rank_0("keeping the reference", lambda: _keep(parts, directory, is_trained=is_trained))
    return FrozenModel.from_pretrained(str(directory.reference), cfg)


def load_frozen(source: str, recipe: Recipe | EpochsRecipe, cfg: TrainerConfig, *, dtype: str = "auto") -> FrozenModel:
    """`FrozenModel.from_pretrained`, with the recipe's limits of pixels."""
    frozen = FrozenModel.from_pretrained(source, cfg, dtype=dtype)
    limit_pixels(frozen.model, recipe)
    return frozen


def check_teacher(recipe: Recipe, tokenizer: Any, cfg: TrainerConfig) -> None:
    """Raise `ConfigError` unless each teacher has the vocabulary of the policy's `tokenizer`; for a
    server that is away, too."""
    section = recipe.teacher
    if section.url is not None:
        open_teacher(recipe, tokenizer, cfg)
        return
    for folder in section.by_name.values():
        check_vocabulary("teacher.model", folder, tokenizer)


def open_teacher(recipe: Recipe, tokenizer: Any, cfg: TrainerConfig) -> Any:
    """The teachers of a recipe that `check_teacher` passes, or the only one."""
    from ludic.training.distillation import Teachers, TeacherServer

    section, opened = recipe.teacher, dict[str, Any]()
    for name, source in section.by_name.items():
        if section.url is None:
            opened[name] = load_frozen(source, recipe, cfg)
        else:
            opened[name] = TeacherServer(source, tokenizer, cfg, name="teacher.url", timeout_s=section.timeout_s)
    return opened.get("") or Teachers(opened, section.column)


def _keep(parts: RunParts, directory: RunDirectory, *, is_trained: bool) -> None:
    remedy = "give the model that it began with as reference.model=FOLDER"
    if directory.reference.is_dir():
        check_model_folder(directory.reference, remedy)
    if holds_whole_weights(directory.reference):
        return
    if is_trained or directory.read_progress().steps:
        raise CheckpointError(f"{directory.reference}, the reference of this trained policy, is gone; {remedy}")
    with replace_with_manifest(directory.reference) as aside:
        save_tokenizer(parts.tokenizer, aside, parts.model)
        if has_adapters(parts.model):
            save_merged(parts.model, aside)  # adapters change nothing yet
        else:
            parts.model.save_pretrained(aside)
