"""`ludic rollout`: plays episodes of a recipe's task with a model and writes those that satisfy a
condition to a file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.cli.console import INTERRUPTED, quiet_libraries, run_with_console
from ludic.cli.keep_condition import Keep
from ludic.cli.run_folder import expand_run_folder
from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.recipes.devices import choose_devices

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.schema import Recipe
    from ludic.runs.reinforce_parts import RLParts
    from ludic.runs.sampler import Sampler
    from ludic.types import Rollout


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
    recipe = compose([part for argument in arguments for part in expand_run_folder(argument)])
    choose_devices(recipe)
    condition = None if keep is None else Keep.parse(keep)
    _check(recipe, out)
    counts = Tally(str(out), keep)

    def work(console: Console) -> tuple[int, str]:
        code = 0
        try:
            _play(recipe, condition, episodes, out, counts, console)
        except KeyboardInterrupt:
            console.print("Stopped; the batches written so far are kept.", highlight=False)
            code = INTERRUPTED
        counts.wall_s = round(time.perf_counter() - started, 2)
        _show(counts, console)
        return code, json.dumps(vars(counts), indent=2) + "\n"

    return run_with_console(work, json_only=json_only)


def _check(recipe: Recipe, out: Path) -> None:
    if recipe.model is None:
        raise ConfigError("there is no model to play with; give model=DIRECTORY, such as the model/ of a run")
    if out.exists():
        raise ConfigError(f"--out {out} exists already; choose another name, or delete it")


def _play(recipe: Recipe, keep: Keep | None, episodes: int, out: Path, counts: Tally, console: Console) -> None:
    from ludic.runs.reinforce_parts import RLParts

    quiet_libraries()
    parts = RLParts.build(recipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(_play_batches(recipe, parts, keep, episodes, out, counts, console))


async def _play_batches(
    recipe: Recipe, parts: RLParts, keep: Keep | None, episodes: int, out: Path, counts: Tally, console: Console
) -> None:
    from ludic.models.loading import locate_model
    from ludic.runs.sampler import open_sampler

    parts.model.to(parts.trainer_cfg.model_device)
    log = out.with_name(f"{out.name}.server.log")
    note = partial(console.print, highlight=False, markup=False)
    folder = Path(locate_model(str(recipe.model)))
    opened = open_sampler(recipe, parts.model, parts.tokenizer, folder, log=log, note=note, pushes=False)
    async with aclosing(parts.task), opened as sampler:
        await _play_with(sampler, recipe, parts, keep, episodes, out, counts, console)


async def _play_with(
    sampler: Sampler,
    recipe: Recipe,
    parts: RLParts,
    keep: Keep | None,
    episodes: int,
    out: Path,
    counts: Tally,
    console: Console,
) -> None:
    from ludic.runs.rollouts import make_engine, make_training_requests
    from ludic.training.rollouts.log import append_rollouts

    engine = make_engine(parts.task, sampler.client, model_name=sampler.model_name, system_prompt=recipe.rollout.system_prompt)
    requests = make_training_requests(parts.task, recipe.rollout, seed=recipe.seed)
    while (remaining := episodes - counts.episodes - counts.failed) > 0:
        batch = requests()[: _round_up_to_groups(remaining, recipe.rollout.group_size)]
        played = await engine.generate_rollouts(batch, max_steps=parts.task.max_turns, concurrency=recipe.rollout.concurrency)
        kept = played if keep is None else [rollout for rollout in played if keep(rollout)]
        append_rollouts(out, kept)
        counts.add(played, kept, len(batch))
        console.print(
            f"{counts.episodes} of {episodes} episodes, {counts.kept} kept, mean reward {counts.reward:.3f}", highlight=False
        )


def _round_up_to_groups(episodes: int, group_size: int) -> int:
    """`episodes`, rounded up to whole groups. Example: 5 episodes in groups of 4 are 8."""
    return -(-episodes // group_size) * group_size


def _show(counts: Tally, console: Console) -> None:
    condition = "" if counts.keep is None else f" with {counts.keep}"
    failed = f"; {counts.failed} failed and were left out" if counts.failed else ""
    console.print(
        f"{counts.kept} of {counts.episodes} episodes{condition} written to {counts.out} (mean reward of all {counts.reward:.3f}{failed})",
        highlight=False,
        markup=False,
    )
