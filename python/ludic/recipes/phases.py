"""Which phases a run of `ludic train` has: `mode` says it in one word, and the recipe then says the
same in steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError
from ludic.recipes.schema import Recipe

_EXCLUDED: dict[str | None, Sequence[str]] = {
    "sft": ("steps",),
    "rl": ("warmup.steps", "warmup.data", "warmup.epochs"),
    "sft+rl": (),
}
"""Mode -> the settings of the phase that it leaves out."""


def has_warmup(recipe: Recipe) -> bool:
    return bool(recipe.warmup.steps or recipe.warmup.data)


def choose_phases(recipe: Recipe, said: Sequence[Mapping[str, Any]]) -> None:
    """Leave out the phase that `mode` leaves out. `said` are the settings of the user, first of the
    file and then of the command line. A setting that the mode leaves out is an error, unless it is
    in the file and the mode on the command line.

    Example: `steps: 120` in a file and `mode=sft` on the command line give `steps=0`; `mode: sft`
    in a file and `steps=120` on the command line are an error.
    """
    mode = recipe.mode
    for place in said:
        is_last = place is said[-1]
        for key in _EXCLUDED.get(mode, ()):
            if (is_last or place.get("mode") is not None) and place.get(key):
                raise ConfigError(
                    f"mode={mode} leaves out what {key}={place[key]} asks for; drop one of them, or use mode=sft+rl"
                )
    if mode == "sft":
        recipe.steps = 0
    if mode == "rl":
        recipe.warmup.steps, recipe.warmup.data, recipe.warmup.epochs = 0, None, None
    if mode in ("sft", "sft+rl") and not has_warmup(recipe):
        raise ConfigError(
            f"mode={mode} begins with supervised training, and there is nothing to train on; set warmup.data=FILE, rows as `ludic sft` "
            "takes them, or warmup.steps=N for demonstrations of the task"
        )
    if mode in ("rl", "sft+rl") and not recipe.steps:
        raise ConfigError(f"mode={mode} needs steps of reinforcement; set steps=N, or mode=sft")
    if recipe.warmup.epochs is not None:  # passes replace the steps of a built-in recipe
        if recipe.warmup.steps and any(place.get("warmup.steps") for place in said):
            raise ConfigError(
                f"warmup.epochs={recipe.warmup.epochs} and warmup.steps={recipe.warmup.steps} both say how long the warm-up is; drop "
                "one of them, or set warmup.steps=0 or warmup.epochs=null"
            )
        recipe.warmup.steps = 0
