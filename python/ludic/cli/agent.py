"""`ludic agent try` and `ludic agent serve`: how the calls of a program look to the trainer, before
a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ludic.cli.settings import read_recipe_with_model
from ludic.errors import ConfigError, LudicError
from ludic.event_loop import describe_error
from ludic.recipes.agent_section import has_agent
from ludic.recipes.compose import compose
from ludic.runs.console import quiet_libraries, run_with_console
from ludic.types import Step, stored

if TYPE_CHECKING:
    from ludic.recipes.schema import Recipe

SHOWN = 60
"""Characters of an answer in the table."""


def try_command(arguments: Sequence[str], *, json_only: bool) -> int:
    """Play one episode of the recipe's agent, and show its calls."""
    recipe = read_recipe_with_model(arguments)
    if not has_agent(recipe.agent):
        raise ConfigError("there is no agent to try; set agent.function=module:function, agent.command=[...] or agent.preset")

    def work(console: Console) -> tuple[int, str]:
        rows, agent, line = asyncio.run(_try(recipe, console))
        _show(console, rows)
        console.print(f"Agent: {line}", markup=False, emoji=False)
        console.print(f"Answer: {agent['output']!r:.200}; reward {agent['reward']:g}", markup=False, emoji=False)
        failed = agent["status"] != "ended"
        return int(failed), json.dumps({"calls": rows, "agent": {**agent, "told": line}}, indent=2) + "\n"

    return run_with_console(work, json_only=json_only)


def solve_command(arguments: Sequence[str], *, json_only: bool) -> int:
    """Play the solution of each task folder, and nothing. Returns 1 unless all are right."""
    from ludic.recipes.build import build_episodic_task
    from ludic.tasks.harbor import Harbor

    task = build_episodic_task(compose(arguments))
    if not isinstance(task, Harbor):
        raise ConfigError("--solution is for task folders; give data=FOLDER, of which each has a task.toml")

    def work(console: Console) -> tuple[int, str]:
        rewards, num_right = dict[str, dict[str, Any]](), 0
        for name in sorted(str(problem["id"]) for problem in task.suites()["all"]):
            try:
                nothing, solution = asyncio.run(task.try_solution(name))
                rewards[name] = {"nothing": nothing, "solution": solution}
            except (LudicError, TimeoutError) as error:
                rewards[name] = {"error": describe_error(error)}
            is_right = rewards[name] == {"nothing": 0.0, "solution": 1.0}
            num_right += is_right
            told = rewards[name].get("error") or f"solution {solution:g}, nothing done {nothing:g}"
            console.print(f"{'right' if is_right else 'WRONG'}  {name}: {told}", markup=False, emoji=False)
        console.print(f"{num_right} of {len(rewards)} tasks are right: solution 1, nothing done 0")
        return int(num_right < len(rewards)), json.dumps(rewards, indent=2) + "\n"

    return run_with_console(work, json_only=json_only)


def serve_command(arguments: Sequence[str], *, port: int) -> int:
    """Serve the model at an address until Ctrl-C, and show the calls."""
    is_given = any(each.startswith(("agent=", "agent.function", "agent.command", "agent.preset")) for each in arguments)
    # Other settings of the section need an agent: here it is started by hand.
    recipe = read_recipe_with_model([*arguments, *([] if is_given else ["agent.function=started:by_hand"])])

    def work(console: Console) -> tuple[int, str]:
        rows: list[dict[str, Any]] = []
        with suppress(KeyboardInterrupt):
            asyncio.run(_serve(recipe, port, rows, console))
        _show(console, rows)
        return 0, json.dumps(rows, indent=2) + "\n"

    return run_with_console(work, json_only=False)


async def _try(recipe: Recipe, console: Console) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    from ludic.interaction.agent_program import describe_agent
    from ludic.models.loading import locate_model
    from ludic.runs.reinforce import RLRun
    from ludic.runs.rollouts import make_engine, make_training_requests
    from ludic.runs.sampler import open_sampler

    note = partial(console.print, markup=False)
    quiet_libraries()
    parts = RLRun.build(recipe, note)
    parts.model.to(parts.trainer_cfg.model_device)
    folder = Path(locate_model(str(recipe.model)))
    log = Path(f"{recipe.output}/agent.server.log")
    opened = open_sampler(recipe, parts.model, parts.tokenizer, folder, log=log, note=note, pushes=False)
    async with aclosing(parts.task), opened as sampler:
        engine = make_engine(
            parts.task, sampler.client, model_name=sampler.model_name, system_prompt=recipe.rollout.system_prompt
        )
        requests = make_training_requests(parts.task, recipe.rollout, seed=recipe.seed).list_problems(0)[:1]
        [rollout] = await engine.generate_rollouts(requests, max_steps=1)
    agent = {**rollout.meta["agent"], "reward": rollout.total_reward}
    return [_row(step) for step in rollout.steps], agent, describe_agent(rollout)


def _row(step: Step) -> dict[str, Any]:
    """One call, in tokens."""
    prompt, sampled = (len(stored(step.trace, name)) for name in ("prompt_token_ids", "completion_token_ids"))
    place = {"call": step.info["call"], "continues": step.info["parent"], "reason": step.info["reason"]}
    counts = {"prompt": prompt, "new": prompt - step.info["shared"], "sampled": sampled}
    return {**place, **counts, "end": step.info["finish_reason"], "answer": step.action}


async def _serve(recipe: Recipe, port: int, rows: list[dict[str, Any]], console: Console) -> None:
    from ludic.inference.gateway.gateway import Gateway
    from ludic.inference.gateway.session import Limits
    from ludic.inference.request import make_sampling
    from ludic.interaction.agent_program import make_step
    from ludic.models.loading import locate_model
    from ludic.recipes.model import build_policy
    from ludic.runs.sampler import open_sampler

    note, section = partial(console.print, markup=False), recipe.agent
    model, tokenizer = build_policy(recipe)
    model.to(recipe.trainer.model_device)
    folder, log = Path(locate_model(str(recipe.model))), Path(f"{recipe.output}/agent.server.log")
    async with open_sampler(recipe, model, tokenizer, folder, log=log, note=note, pushes=False) as sampler:
        settings = {"history": section.history, "sampling": section.sampling, "unsupported": section.unsupported}
        client: Any = sampler.client
        with Gateway(client, tokenizer, port=port, **settings) as gateway:
            session = gateway.open(
                sampling=make_sampling(recipe.rollout, max_tokens=recipe.rollout.max_new_tokens or 1024),
                seed=recipe.seed,
                limits=Limits(10**9, None, section.context),
            )
            note("Ctrl-C ends it and shows the calls. For a program that OpenAI's or Anthropic's library serves:")
            for name, value in session.environment().items():
                print(f"export {name}={value}", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                counted = await gateway.close_session(session)
                if counted.ignored:
                    note(f"ignored: {', '.join(f'{name}={value}' for name, value in counted.ignored.items())}")
                rows += [_row(make_step(call.number, call, 0, session.calls)) for call in session.calls]


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Calls of the model")
    names = ("call", "continues", "reason", "prompt", "new", "sampled", "end", "answer")
    for name in names:
        table.add_column(name, justify="left" if name in ("reason", "end", "answer") else "right")
    for row in rows:
        text = " ".join(str(row["answer"]).split())
        shown = {**row, "answer": text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."}
        table.add_row(*("" if shown[name] is None else str(shown[name]) for name in names))
    if rows:
        console.print(table)
