"""`controller_state.json`: tau, beta and the state of their controllers, to read and to copy into
another run.

A resumed run does not need it: `trainer_state.json` of a checkpoint has the same numbers. The keys
tau, beta, tau_log and tau_entropy_ema are used by other implementations of MaxEnt-GRPO, whose files
load, too.

Example: {"schema_version": 1, "step": 200, "tau": 0.31, "beta": 0.1, "tau_log": -1.17,
"tau_entropy_ema": 1.58, "controllers": {"entropy": {"tau": 0.31, "log_tau": -1.17, "ema": 1.58}}}
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import CheckpointError, LudicError
from ludic.files.atomic import read_json, write_json
from ludic.training.coefficients import Coefficient
from ludic.training.controllers.entropy import LARGEST_LOG
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
    """Write the file, or replace it atomically. `step`: number of training steps taken."""
    write_json(Path(path), controller_state(controllers, coefficients, step=step))


def load_controller_state(path: str | Path, controllers: Sequence[Controller], coefficients: Mapping[str, Coefficient]) -> None:
    """Set the coefficients and the controllers to what the file has.

    A coefficient that the file lacks stays as it is, with a warning, and a controller whose state
    it lacks begins anew from its coefficient. Where log tau and tau differ, tau counts.
    Settings are not loaded. Raises CheckpointError, and changes nothing, for a file that is not an
    object of finite numbers, or lacks a part of a controller's state.
    """
    content = read_json(Path(path))
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{path} has schema_version {version}; this version of ludic reads {SCHEMA_VERSION}")
    values = {name: _number(content[name], name, path) for name in coefficients if name in content}
    if not isinstance(content.get("controllers", {}), dict):
        raise CheckpointError(f"controllers in {path} must be an object, got {content['controllers']!r}")
    states = {controller.name: _state_of(controller, content, values, path) for controller in controllers}
    if missing := sorted(coefficients.keys() - values.keys()):
        logger.warning("%s lacks %s, which keeps its present value", path, " and ".join(missing))
    present = [controller.state_dict() for controller in controllers]
    numbers = {name: float(coefficient) for name, coefficient in coefficients.items()}
    loading = ""
    try:
        for name, value in values.items():
            coefficients[name].set(value)
        for controller in controllers:
            loading = controller.name
            controller.load_state_dict(states[loading])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, LudicError) as error:
        for controller, state in zip(controllers, present, strict=True):
            controller.load_state_dict(state)
        for name, value in numbers.items():
            coefficients[name].set(value)
        what = f"lacks {error}" if isinstance(error, KeyError) else f"is invalid: {error}"
        raise CheckpointError(f"the state of the controller {loading!r} in {path} {what}") from error


def _state_of(
    controller: Controller, content: Mapping[str, Any], values: Mapping[str, float], path: str | Path
) -> dict[str, Any]:
    """The controller's state in the file; without one, a state made of the coefficients and the
    keys that other implementations write."""
    present = {
        name: min(max(values.get(name, float(each)), each.least), math.inf if each.most is None else each.most)
        for name, each in controller.coefficients.items()
    }
    saved = content.get("controllers", {}).get(controller.name)
    if saved is not None:
        _check_numbers(saved, controller.state_dict(), f"controllers.{controller.name}", path)
        state = {**saved, **present}
    elif controller.name == "entropy":
        ema = content.get("tau_entropy_ema")
        missing = ema is None or (isinstance(ema, float) and math.isnan(ema))
        state = {**present, "ema": None if missing else _number(ema, "tau_entropy_ema", path)}
        if "tau_log" in content:
            state["log_tau"] = _number(content["tau_log"], "tau_log", path)
    else:
        state = present
    if controller.name == "entropy":
        tau, log_tau = state["tau"], state.get("log_tau")
        if not tau > 0:
            raise CheckpointError(f"tau in {path} must be above 0, since the entropy controller changes its log, got {tau}")
        # The two may differ in a file that was edited.
        if log_tau is None or not math.isclose(math.exp(min(log_tau, LARGEST_LOG)), tau, rel_tol=1e-9):
            state["log_tau"] = math.log(tau)
    return state


def _check_numbers(saved: object, present: object, name: str, path: str | Path) -> None:
    """Raise CheckpointError unless `saved` has objects and finite numbers where the controller has
    them at present. A number may be null, and a part may be missing: the controller decides."""
    if isinstance(saved, Mapping) and (present is None or isinstance(present, Mapping)):
        for key, value in saved.items():
            _check_numbers(value, (present or {}).get(key), f"{name}.{key}", path)
    elif isinstance(present, Mapping):
        raise CheckpointError(f"{name} in {path} must be an object, got {saved!r}")
    elif saved is not None and not isinstance(present, bool | str | list):
        _number(saved, name, path)


def _number(value: object, name: str, path: str | Path) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise CheckpointError(f"{name} in {path} must be a finite number, got {value!r}")
