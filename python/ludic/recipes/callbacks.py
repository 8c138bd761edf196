"""Builds the callbacks of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludic.errors import ConfigError
from ludic.recipes.callbacks_section import CallbacksSection, RLCallbacksSection
from ludic.training.callbacks import Callback, CompletionTable, KeepBest, PushToHub, StopOnMetric
from ludic.training.config import TrainerConfig
from ludic.training.loop.callbacks import check_watched
from ludic.training.loop.metric_names import bare_name
from ludic.user_objects import import_named


def build_callbacks(section: CallbacksSection, *, console: Any = None) -> list[Callback]:
    """The callbacks that the settings name; tables are printed on `console`. Raises ConfigError for
    settings that contradict each other, MissingExtraError without huggingface_hub."""
    built: list[Callback] = []
    if section.keep_best is not None:
        built.append(KeepBest(section.keep_best, mode=section.keep_best_mode))  # type: ignore[arg-type]
    if stop := _build_stop(section):
        built.append(stop)
    if section.push_to_hub is not None:
        built.append(PushToHub(section.push_to_hub, private=section.private))
    if isinstance(section, RLCallbacksSection) and section.completions_every:
        built.append(CompletionTable(every=section.completions_every, rows=section.completions, console=console))
    return [*built, *(_import_callback(path) for path in _list_own(section.own))]


def check_callbacks(section: CallbacksSection, cfg: TrainerConfig, *, measured: Sequence[str] | None = None) -> None:
    """Raise ConfigError for callbacks that could never act: a metric of evaluations that do not
    take place or, if they are known, do not measure it."""
    built = build_callbacks(section)
    for setting, name in (("callbacks.keep_best", section.keep_best), ("callbacks.stop.metric", section.stop.metric)):
        if name is None or name.startswith("train/"):
            continue
        if cfg.eval_every_n_steps is None:
            raise ConfigError(
                f"{setting} ({name}) is a metric of evaluations, and there are none; set trainer.eval_every_n_steps"
            )
        if measured is not None and bare_name(name) not in measured:
            raise ConfigError(f"{setting} ({name}) is not measured by this run, which measures {', '.join(measured)}")
    check_watched(built, cfg.eval_every_n_steps, measured=measured)


def _build_stop(section: CallbacksSection) -> StopOnMetric | None:
    stop = section.stop
    if stop.metric is None:
        if stop.at is not None or stop.patience is not None:
            raise ConfigError("callbacks.stop.at and callbacks.stop.patience are of a metric; set callbacks.stop.metric")
        return None
    return StopOnMetric(stop.metric, at=stop.at, patience=stop.patience, min_delta=stop.min_delta, mode=stop.mode)  # type: ignore[arg-type]


def _list_own(own: Any) -> list[str]:
    listed = [own] if isinstance(own, str) else own or []
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise ConfigError(f"callbacks.own ({own}) must be package.module:name, or a list of these")
    return listed


def _import_callback(path: str) -> Callback:
    found = import_named(path, "callbacks.own")
    made = found
    if callable(found) and not isinstance(found, Callback):
        try:
            made = found()
        except TypeError as error:
            raise ConfigError(f"callbacks.own ({path}) cannot be called without arguments: {error}") from error
    if not isinstance(made, Callback):
        raise ConfigError(f"callbacks.own ({path}) is {type(made).__name__}; it must be a ludic.training.Callback or make one")
    return made
