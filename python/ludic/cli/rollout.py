"""`ludic rollout`: plays episodes of a recipe's task with a model and writes those that satisfy a
condition to a file.

Conditions that select episodes: `reward > 0 and length <= 4`.

    condition  = comparison { "and" comparison }
    comparison = key ( ">" | ">=" | "<" | "<=" | "==" | "!=" ) number

A key is `reward`, `length` or `completion_tokens`, or a number or boolean of the last step's info
or of the rollout's meta; `a.b` reads a key of an object. The condition is parsed, never evaluated
as code.
"""

from __future__ import annotations

import asyncio
import json
import math
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ludic.cli.settings import read_recipe_with_model
from ludic.errors import ConfigError, DataError
from ludic.images.store import ImageStore, use_store
from ludic.recipes.schema import Recipe
from ludic.runs.console import INTERRUPTED, quiet_libraries, run_with_console
from ludic.types import Rollout, stored


@dataclass
class Tally:
    """Counts of the episodes that were played and written."""

    out: str
    keep: str | None
    episodes: int = 0
    kept: int = 0
    failed: int = 0
    """Episodes that raised or timed out, and the other episodes of their groups."""
    reward: float = 0.0
    """Mean reward of the episodes that were played."""
    wall_s: float = 0.0

    def add(self, played: Sequence[Rollout], kept: Sequence[Rollout], requested: int) -> None:
        before = self.reward * self.episodes
        self.episodes += len(played)
        self.kept += len(kept)
        self.failed += requested - len(played)
        self.reward = (before + sum(rollout.total_reward for rollout in played)) / max(1, self.episodes)


def rollout_command(arguments: Sequence[str], *, episodes: int, keep: str | None, out: Path, json_only: bool) -> int:
    """Run the command and return the exit status: 0, or 130 after Ctrl-C, which keeps the batches
    written so far."""
    started = time.perf_counter()
    recipe = read_recipe_with_model(arguments)
    parsed = None if keep is None else Keep.parse(keep)
    if out.exists():
        raise ConfigError(f"--out {out} exists already; choose another name, or delete it")
    counts = Tally(str(out), keep)

    def work(console: Console) -> tuple[int, str]:
        code = 0
        try:
            _play(recipe, parsed, episodes, out, counts, console)
        except KeyboardInterrupt:
            console.print("Stopped; the batches written so far are kept.")
            code = INTERRUPTED
        counts.wall_s = round(time.perf_counter() - started, 2)
        condition = "" if keep is None else f" with {keep}"
        failed = f"; {counts.failed} failed and were left out" if counts.failed else ""
        console.print(
            f"{counts.kept} of {counts.episodes} episodes{condition} written to {out} (mean reward of all {counts.reward:.3f}{failed})",
            markup=False,
        )
        return code, json.dumps(vars(counts), indent=2) + "\n"

    return run_with_console(work, json_only=json_only)


def _play(recipe: Recipe, keep: Keep | None, episodes: int, out: Path, counts: Tally, console: Console) -> None:
    from ludic.models.loading import locate_model
    from ludic.runs.reinforce import RLRun
    from ludic.runs.rollouts import make_engine, make_training_requests
    from ludic.runs.sampler import open_sampler
    from ludic.training.rollouts.log import append_rollouts

    quiet_libraries()
    rollout, note = recipe.rollout, partial(console.print, markup=False)
    parts = RLRun.build(recipe, note)
    task, group_size = parts.task, rollout.group_size
    out.parent.mkdir(parents=True, exist_ok=True)
    parts.model.to(parts.trainer_cfg.model_device)
    folder, log = Path(locate_model(str(recipe.model))), out.with_name(f"{out.name}.server.log")

    async def play() -> None:
        opened = open_sampler(recipe, parts.model, parts.tokenizer, folder, log=log, note=note, pushes=False)
        async with aclosing(task), opened as sampler:
            engine = make_engine(task, sampler.client, model_name=sampler.model_name, system_prompt=rollout.system_prompt)
            requests = make_training_requests(task, rollout, seed=recipe.seed)
            while (remaining := episodes - counts.episodes - counts.failed) > 0:
                batch = requests()[: -(-remaining // group_size) * group_size]  # rounded up to whole groups
                played = await engine.generate_rollouts(batch, max_steps=task.max_turns, concurrency=rollout.concurrency)
                kept = played if keep is None else [episode for episode in played if keep(episode)]
                append_rollouts(out, kept)
                counts.add(played, kept, len(batch))
                note(f"{counts.episodes} of {episodes} episodes, {counts.kept} kept, mean reward {counts.reward:.3f}")

    with use_store(ImageStore(out.parent / "images")):
        asyncio.run(play())


_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISON = re.compile(
    r"\s*(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*(?P<operator>>=|<=|==|!=|>|<)\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"(?![\w.])\s*"
)
_AND = re.compile(r"and\b", re.IGNORECASE)
_OWN: dict[str, Callable[[Rollout], float]] = {
    "reward": lambda rollout: rollout.total_reward,
    "total_reward": lambda rollout: rollout.total_reward,
    "length": lambda rollout: float(rollout.length),
    "completion_tokens": lambda rollout: float(
        sum(len(stored(step.trace, "completion_token_ids")) for step in rollout.steps if step.trace is not None)
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Compares the number under one key with a constant."""

    key: str
    symbol: str
    number: float

    def holds(self, rollout: Rollout) -> bool:
        return _OPERATORS[self.symbol](read_number(rollout, self.key), self.number)


@dataclass(frozen=True)
class Keep:
    """A condition on rollouts.

    >>> keep = Keep.parse("reward > 0 and length <= 4")
    >>> good = [rollout for rollout in rollouts if keep(rollout)]
    """

    comparisons: tuple[Comparison, ...]

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Raises ConfigError, with the position, for anything outside the grammar above."""
        comparisons, at = [], 0
        while True:
            match = _COMPARISON.match(text, at)
            if match is None:
                raise _syntax_error(text, at, "a comparison such as reward>0")
            number = float(match["number"])
            if not math.isfinite(number):
                raise _syntax_error(text, match.start("number"), "a finite number")
            comparisons.append(Comparison(match["key"], match["operator"], number))
            if match.end() == len(text):
                return cls(tuple(comparisons))
            conjunction = _AND.match(text, match.end())
            if conjunction is None:
                raise _syntax_error(text, match.end(), '"and" or the end')
            at = conjunction.end()

    def __call__(self, rollout: Rollout) -> bool:
        return all(comparison.holds(rollout) for comparison in self.comparisons)


def read_number(rollout: Rollout, key: str) -> float:
    """The number under `key`; True is 1. Raises DataError, with the available keys, if the rollout
    has no number under `key`."""
    if key in _OWN:
        return _OWN[key](rollout)
    info = rollout.steps[-1].info if rollout.steps else {}
    for source in (info, rollout.meta):
        value: Any = source
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, bool | int | float):
            return float(value)
    available = [
        *_OWN,
        *(name for source in (info, rollout.meta) for name, value in source.items() if isinstance(value, bool | int | float)),
    ]
    raise DataError(f"--keep: rollout {rollout.id} has no number {key!r}; it has {', '.join(dict.fromkeys(available))}")


def _syntax_error(text: str, at: int, expected: str) -> ConfigError:
    return ConfigError(
        f"--keep {text!r}: expected {expected} at character {at + 1} ({text[at : at + 20]!r}); a condition is KEY > NUMBER, with >, >=, <, "
        '<=, == or !=, joined by "and"'
    )
