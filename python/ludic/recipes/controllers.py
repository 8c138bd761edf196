"""Builds the controllers of a recipe, which change the coefficients of its algorithm."""

from __future__ import annotations

from ludic.errors import ConfigError
from ludic.recipes.controllers_section import ControllersSection, EntropyControllerSection
from ludic.training.algorithm import RLAlgorithm
from ludic.training.coefficients import Coefficient
from ludic.training.controllers import Controller, EntropyController, EntropySchedule, KLController, MetaController
from ludic.training.controllers.entropy import check_reachable


def build_controllers(section: ControllersSection, algorithm: RLAlgorithm, *, group_size: int) -> list[Controller]:
    """The controllers of a recipe. Raises `ConfigError` for settings that do not fit the
    algorithm."""
    schedule = _schedule(section.entropy)
    if schedule is not None:
        check_reachable(schedule, group_size)
    if section.meta.method is not None:
        return [_build_meta(section, schedule, algorithm)]
    controllers: list[Controller] = []
    kl, entropy = section.kl, section.entropy
    if kl.target and kl.horizon and kl.step_size:
        beta = _require(algorithm, "beta", "controllers.kl")
        controllers.append(KLController(beta, target=kl.target, horizon=kl.horizon, step_size=kl.step_size))
    if schedule is not None and entropy.lr:
        controllers.append(
            EntropyController(
                _require(algorithm, "tau", "controllers.entropy"),
                target=schedule,
                lr=entropy.lr,
                least=entropy.least,
                most=entropy.most,
                warmup_steps=entropy.warmup_steps,
            )
        )
    return controllers


def _schedule(section: EntropyControllerSection) -> EntropySchedule | None:
    if section.target is None and section.start is None and section.final is None:
        return None
    return EntropySchedule(section.target, section.start, section.final, section.horizon)


def _build_meta(section: ControllersSection, schedule: EntropySchedule | None, algorithm: RLAlgorithm) -> MetaController:
    meta = section.meta
    if schedule is None and not section.kl.target:
        raise ConfigError(
            f"controllers.meta.method ({meta.method}) has nothing to aim at; set controllers.entropy.target, controllers.kl.target or both"
        )
    if schedule is not None:
        _require(algorithm, "tau", "controllers.entropy.target")
    if section.kl.target:
        _require(algorithm, "beta", "controllers.kl.target")
    return MetaController(
        algorithm.coefficients.get("tau"),
        algorithm.coefficients.get("beta"),
        entropy_target=schedule,
        kl_target=section.kl.target or None,
        method=str(meta.method),
        lr=meta.lr,
        tau_lr=meta.tau_lr,
        beta_lr=meta.beta_lr,
        beta_grad_clip=meta.beta_grad_clip,
        optimizer=meta.optimizer,
        update_interval=meta.update_interval,
        truncation_steps=meta.truncation_steps,
        use_hessian=meta.use_hessian,
        inner_lr=meta.inner_lr,
        kl_signal=meta.kl_signal,
        tau_least=section.entropy.least,
        tau_most=section.entropy.most,
        beta_most=meta.beta_most,
    )


def _require(algorithm: RLAlgorithm, name: str, setting: str) -> Coefficient:
    if name not in algorithm.coefficients:
        remedy = {
            "tau": "it belongs to algorithm=maxent_grpo",
            "beta": "set algorithm_args.beta (maxent_grpo) or algorithm_args.reference_kl above 0",
        }
        raise ConfigError(
            f"{setting} controls {name}, which {algorithm.name} does not have; {remedy[name]}, or leave the setting out"
        )
    return algorithm.coefficients[name]
