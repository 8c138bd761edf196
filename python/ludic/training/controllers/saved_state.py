"""`controller_state.json`: tau, beta and the state of their controllers, to read and to copy into
another run.

A resumed run does not need it: `trainer_state.json` of a checkpoint has the same numbers. The keys
tau, beta, tau_log and tau_entropy_ema are those of other implementations of MaxEnt-GRPO, whose
files load, too.

Example: {"schema_version": 1, "step": 200, "tau": 0.31, "beta": 0.1, "tau_log": -1.17,
"tau_entropy_ema": 1.58, "controllers": {"entropy": {"tau": 0.31, "log_tau": -1.17, "ema": 1.58}}}
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import CheckpointError
from ludic.files.atomic import read_json, write_json
from ludic.training.coefficients import Coefficient
from ludic.training.controllers.protocol import Controller

logger = logging.getLogger(__name__)

FILE_NAME = "controller_state.json"
SCHEMA_VERSION = 1


def controller_state(controllers: Sequence[Controller], coefficients: Mapping[str, Coefficient], *, step: int) -> dict[str, Any]:
    """The content of the file."""
    states = {controller.name: controller.state_dict() for controller in controllers}
    entropy = states.get("entropy")
    of_tau = {"tau_log": entropy["log_tau"], "tau_entropy_ema": entropy["ema"]} if entropy else {}
    values = {name: float(coefficient) for name, coefficient in coefficients.items()}
    return {"schema_version": SCHEMA_VERSION, "step": step, **values, **of_tau, "controllers": states}


def save_controller_state(
    path: str | Path, controllers: Sequence[Controller], coefficients: Mapping[str, Coefficient], *, step: int
) -> None:
    """Write the file, or replace it at once. `step`: number of training steps taken."""
    write_json(Path(path), controller_state(controllers, coefficients, step=step))


def load_controller_state(path: str | Path, controllers: Sequence[Controller], coefficients: Mapping[str, Coefficient]) -> None:
    """Set the coefficients and the controllers to what the file has.

    A coefficient that the file lacks stays as it is, with a warning, and a controller whose state
    it lacks begins anew from its coefficient. Settings are not loaded. Raises CheckpointError, and
    changes nothing, for a file that is not an object of finite numbers.
    """
    content = read_json(Path(path))
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{path} has schema_version {version}; this version of ludic reads {SCHEMA_VERSION}")
    values = {name: _number(content, name, path) for name in coefficients if name in content}
    states = {controller.name: _state_of(controller, content, values, path) for controller in controllers}
    if missing := sorted(coefficients.keys() - values.keys()):
        logger.warning("%s lacks %s, which keeps its present value", path, " and ".join(missing))
    for name, value in values.items():
        coefficients[name].set(value)
    for controller in controllers:
        controller.load_state_dict(states[controller.name])


def _state_of(
    controller: Controller, content: Mapping[str, Any], values: Mapping[str, float], path: str | Path
) -> dict[str, Any]:
    """The controller's state in the file; without one, a state made of the coefficients and the
    keys that other implementations write."""
    present = {name: float(coefficient) for name, coefficient in controller.coefficients.items()}
    present |= {name: value for name, value in values.items() if name in present}
    saved = content.get("controllers", {}).get(controller.name)
    if saved is not None:
        return {**saved, **present}
    if controller.name != "entropy":
        return present
    ema = content.get("tau_entropy_ema")
    known = isinstance(ema, int | float) and math.isfinite(ema)
    log_tau = _number(content, "tau_log", path) if "tau_log" in content else math.log(max(present["tau"], 1e-300))
    return {**present, "log_tau": log_tau, "ema": ema if known else None}


def _number(content: Mapping[str, Any], key: str, path: str | Path) -> float:
    value = content[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{key} in {path} must be a finite number, got {value!r}")
    return float(value)
