"""`ludic eval`: measures a model, in this process or on a server, on the held-out problems of a
task; writes records, a table and a plot.

Its settings are a recipe with overrides, as in `ludic train`, and settings that only an evaluation
has.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import Progress

from ludic.agents.tool_calls import describe_failing
from ludic.cli.settings import expand_run_folder
from ludic.errors import ConfigError, check_value, escape_controls
from ludic.files.atomic import write_text
from ludic.images.store import ImageStore, use_store
from ludic.models.places import check_place
from ludic.recipes.compose import choose_devices, compose, config_hash, list_builtin_recipes, to_yaml
from ludic.recipes.environments import choose_environment
from ludic.recipes.overrides import Override, parse_override
from ludic.recipes.rules import check_settings, setting
from ludic.recipes.schema import Recipe
from ludic.runs.console import quiet_libraries, run_with_console
from ludic.runs.directory import make_run_folder
from ludic.runs.report.summary import make_table, show_files
from ludic.types import Rollout, stored

if TYPE_CHECKING:
    from ludic.eval import Interval, Measurement, ProblemEvaluator
    from ludic.inference import ChatClient
    from ludic.inference.local.client import LocalChatClient
    from ludic.tasks import Episode, EpisodicTask
    from ludic.tasks.episodic import Shown
    from ludic.tasks.rewards import Success
    from ludic.training.rollouts.engine import RolloutEngine


def eval_command(arguments: Sequence[str], *, json_only: bool, print_config: bool) -> int:
    """Run the command and return the exit status. User errors are raised as `LudicError`."""
    recipe, settings = resolve(arguments)
    if print_config:
        from ludic.cli.settings import add_help_texts, format_recipe

        own = OmegaConf.to_yaml(OmegaConf.create(asdict(settings)))
        print(format_recipe(recipe) + add_help_texts(own, EvalSettings), end="")
        return 0
    return run_with_console(
        lambda console: (0, asyncio.run(_evaluate(recipe, settings, console))),
        json_only=json_only,
        stopped="Stopped; nothing was measured.",
    )


async def _evaluate(recipe: Recipe, settings: EvalSettings, console: Console) -> str:
    """Play the episodes, measure, write and show; returns the summary as JSON. All settings are
    checked before the folder is made."""
    if settings.base_url is None:
        if recipe.model is None:
            raise ConfigError("there is no model to evaluate; give model=FOLDER or a hub id, a run's folder, or base_url=URL")
        check_place(recipe.model)
    from ludic.recipes.build import build_episodic_task
    from ludic.runs.rollouts import make_engine
    from ludic.tasks.rewards import success_of

    started = time.perf_counter()
    own_task = build_episodic_task(recipe)
    problems = _choose_problems(recipe, settings, own_task, console)
    async with aclosing(own_task), _open_client(recipe, settings, own_task, problems) as (client, model_name, where, task):
        of_run = Path(model_name).name in ("model", "adapter")
        label = Path(model_name).parent.name if of_run else Path(model_name).name
        measured = f"{BENCHMARK}{recipe.recipe.removeprefix(BENCHMARK)}"
        folder = make_run_folder(recipe.output, recipe.name, f"{measured}-{label}-seed{recipe.seed}")
        write_text(folder / "config.yaml", to_yaml(recipe))
        success = success_of(task, recipe.evaluation.solved_at)
        episodes = len(problems) * recipe.evaluation.samples_per_prompt
        console.print(f"{model_name}: {episodes} episodes on {where}, writing to {folder}/", markup=False)
        images = use_store(ImageStore(folder / "images"))
        with images, Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
            shown = bar.add_task("episodes", total=episodes)
            engine = make_engine(
                task,
                client,
                model_name=model_name,
                system_prompt=recipe.rollout.system_prompt,
                jsonl_path=folder / "rollouts.jsonl",
                max_retries=settings.episode_retries,
                episode_timeout_s=settings.episode_timeout_s,
                on_episode=lambda: bar.advance(shown),
            )
            evaluator = _make_evaluator(recipe, settings, task, engine, problems, success.reward)
            rollouts, measurement = await evaluator.play()
    solved_at = success.holds_for(reward for problem in measurement.problems for reward in problem.rewards)
    result = EvaluationResult(measurement, rollouts, problems, task, success, solved_at)
    facts = {
        "recipe": recipe.recipe,
        "task": recipe.task.kind,
        "model": model_name,
        "reward_model": recipe.reward_model,
        "base_url": settings.base_url,
        "temperature": recipe.rollout.temperature,
        "top_p": recipe.rollout.top_p,
        "max_tokens": recipe.rollout.max_new_tokens or task.max_new_tokens,
        "seed": recipe.seed,
        "suite": settings.suite,
        "config_hash": config_hash(recipe),
        "solved_at": solved_at,
        "wall_s": round(time.perf_counter() - started, 2),
    }
    title = f"{recipe.recipe}, {model_name}, temperature {recipe.rollout.temperature:g}"
    summary = write(folder, result, facts, title=title)
    show(console, result, folder)
    return summary


def _make_evaluator(
    recipe: Recipe,
    settings: EvalSettings,
    task: EpisodicTask,
    engine: RolloutEngine,
    problems: Sequence[Episode],
    solved_at: float | None,
) -> ProblemEvaluator:
    from ludic.runs.held_out import make_evaluator
    from ludic.training.reward_scorer import TASK_REWARD_INFO

    numbers = [name for name in task.measures if name != TASK_REWARD_INFO]  # the reward is measured anyway

    return make_evaluator(
        engine,
        task,
        {problem["id"]: problem for problem in problems},
        recipe.rollout,
        k=recipe.evaluation.samples_per_prompt,
        seed=recipe.seed,
        timeout_s=settings.timeout_s if settings.base_url is None else None,  # a server's client has its own deadline
        solved_at=1.0 if solved_at is None else solved_at,  # unused and not reported without a way to tell right answers
        confidence=settings.confidence,
        also={
            **{name: _read_fact(name) for name in task.facts},
            **{name: _read_number(name) for name in numbers},
            "cut_off": lambda rollout: any(step.info.get("finish_reason") == "length" for step in rollout.steps),
            "answer_tokens": _count_answer_tokens,
        },
    )


def _choose_problems(recipe: Recipe, settings: EvalSettings, task: EpisodicTask, console: Console) -> list[Episode]:
    """The held-out problems to play. Problems with the same id that differ by their seed, such as
    games, are numbered."""
    suites = task.suites()
    check_value("suite", settings.suite, choices=suites, optional=True)
    requested, available = recipe.evaluation.prompts, suites[settings.suite or next(iter(suites))]
    if len(available) < requested:
        more = "; task.args.num_heldout=N holds out more of your own" if recipe.data is not None else ""
        console.print(f"The task has only {len(available)} held-out problems, not {requested}{more}")
    problems = available[:requested]
    repeated = Counter(problem["id"] for problem in problems)
    return [
        {**problem, "id": f"{problem['id']}, {i}"} if repeated[problem["id"]] > 1 else problem
        for i, problem in enumerate(problems)
    ]


@asynccontextmanager
async def _open_client(
    recipe: Recipe, settings: EvalSettings, task: EpisodicTask, problems: Sequence[Episode]
) -> AsyncIterator[tuple[ChatClient, str, str, EpisodicTask]]:
    """Yields (client, name of the model, where it is, task). If the recipe has a reward model, it
    scores the task's answers."""
    if settings.base_url is None:
        from ludic.models.loading import describe_device
        from ludic.recipes.build import add_reward_model
        from ludic.runs.trial import check_dialogues

        local = _make_local_client(recipe)
        check_dialogues(task, problems, local.tokenizer)
        scored = add_reward_model(recipe, task, local.tokenizer)
        yield local, str(recipe.model), describe_device(local.model), scored
        return
    if recipe.reward_model is not None:  # it scores token ids of the policy's tokenizer
        raise ConfigError(f"reward_model ({recipe.reward_model}) needs a model in this process; give model=FOLDER, not base_url")
    variable = settings.api_key_env
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"api_key_env ({variable}) is not set in the environment; export it, or leave api_key_env out")
    from ludic.inference import OpenAIChatClient

    client = OpenAIChatClient(
        settings.base_url,
        api_key="none" if variable is None else os.environ[variable],
        timeout_s=settings.timeout_s,
        returns_token_ids=settings.returns_token_ids,
        chat_template_kwargs=recipe.chat_template_kwargs,
    )
    async with client:
        models = [recipe.model] if recipe.model else await client.models()
        if len(models) != 1:
            raise ConfigError(f"{client.base_url} has {len(models)} models ({', '.join(models[:5])}); choose with model=NAME")
        yield client, models[0], settings.base_url, task


def _make_local_client(recipe: Recipe) -> LocalChatClient:
    import torch

    from ludic.inference.local.client import LocalChatClient
    from ludic.recipes.build import build_trainer_config
    from ludic.recipes.model import build_policy, choose_threads

    quiet_libraries()
    model, tokenizer = build_policy(recipe)
    torch.set_num_threads(choose_threads(recipe, model))
    device = build_trainer_config(recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed).model_device
    return LocalChatClient(model.to(device).eval(), tokenizer, max_batch_size=recipe.rollout.concurrency)


def _read_fact(name: str) -> Callable[[Rollout], bool | None]:
    return lambda rollout: bool(rollout.steps[-1].info.get(name, False)) if rollout.steps else None


def _read_number(name: str) -> Callable[[Rollout], float | None]:
    return lambda rollout: rollout.steps[-1].info.get(name) if rollout.steps else None


def _count_answer_tokens(rollout: Rollout) -> float | None:
    """Tokens of all answers, from their traces or from the server's usage; None if neither is
    known."""
    counts = [
        len(stored(step.trace, "completion_token_ids"))
        if step.trace is not None
        else (step.info.get("raw_response") or {}).get("usage", {}).get("completion_tokens")
        for step in rollout.steps
    ]
    return None if not counts or None in counts else float(sum(counts))


SUMMARY, PICTURE, PROBLEMS = "summary.json", "accuracy.png", "problems.jsonl"
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class EvaluationResult:
    """Everything that the report uses."""

    measurement: Measurement
    rollouts: Sequence[Rollout]
    """The rollouts that were measured."""
    problems: Sequence[Episode]
    task: EpisodicTask
    success: Success
    solved_at: float | None
    """The reward from which an answer counts as right; None if the reward does not say so."""


def write(folder: Path, result: EvaluationResult, facts: Mapping[str, Any], *, title: str) -> str:
    """Write summary.json with the `facts` and all numbers, problems.jsonl with one line for each
    problem, and accuracy.png. There is no accuracy if the reward does not say which answers are
    right. Returns the summary."""
    from ludic.eval import write_jsonl
    from ludic.eval.picture import draw_measurements

    write_jsonl(folder / PROBLEMS, _make_problem_lines(result))
    numbers = result.measurement.to_dict()
    if result.solved_at is None:
        numbers |= {"accuracy": None, "accuracy_bounds": None, "pass_at_k": {}}
    else:
        draw_measurements(folder / PICTURE, {"pass@k": result.measurement}, title=title)
    summary = json.dumps({**facts, **numbers}, indent=2) + "\n"
    write_text(folder / SUMMARY, summary)
    return summary


def _make_problem_lines(result: EvaluationResult) -> Iterator[dict[str, Any]]:
    """For each problem its question, the data's reference answer, the answers in the order of their
    rewards, and the counts."""
    of_problem = {str(problem["id"]): problem for problem in result.problems}
    shown: dict[str, list[Shown]] = {}
    for rollout in result.rollouts:
        key = str(rollout.meta["problem_id"])
        shown.setdefault(key, []).append(result.task.show(of_problem[key], rollout))
    for counted in result.measurement.problems:
        problem, texts = of_problem[counted.problem_id], shown.get(counted.problem_id, [])
        question = texts[0].question if texts else str(problem.get("question", problem["id"]))
        counts = counted.to_dict()
        if result.solved_at is None:
            del counts["right"]
        yield {
            "question": question,
            "reference": texts[0].expected if texts else None,
            "texts": [s.text for s in texts],
            **({"calls": [s.calls for s in texts]} if any(s.calls for s in texts) else {}),
            **counts,
        }


def show(console: Console, result: EvaluationResult, folder: Path) -> None:
    """Print a table of numbers with intervals, the failures, and the files."""
    console.print(_make_table(result))
    if result.solved_at is None:
        console.print(result.success.why_unknown("solved_at"), markup=False)
    for line in _describe_failures(result.measurement, has_accuracy=result.solved_at is not None):
        console.print(line, markup=False, style="red")
    for line in describe_failing(step.info for rollout in result.rollouts for step in rollout.steps):
        console.print(escape_controls(line), markup=False, style="yellow")
    right = "" if result.solved_at is None else f" An answer is right if its reward is at least {result.solved_at:g}."
    console.print(f"[bold]Rewarded part[/]: the reward sees {result.task.reward_sees}.{right}")
    files = {
        folder / SUMMARY: "these numbers, for programs",
        folder / PICTURE: "accuracy with intervals, and the pass@k curve",
        folder / PROBLEMS: "questions, answers, rewards and failures by problem",
        folder / "rollouts.jsonl": "every complete episode",
        folder / "config.yaml": "the resolved recipe",
    }
    show_files(console, folder, files)


def _make_table(result: EvaluationResult) -> Any:
    measurement = result.measurement
    size = f"{len(measurement.problems)} problems x {measurement.samples_per_problem}"
    columns = ("mean", f"{measurement.confidence:.0%} interval", "problems")
    table = make_table(f"Held-out problems: {size}", ("", *columns), right=columns)
    k = measurement.samples_per_problem
    rows: dict[str, Interval] = {}
    if result.solved_at is not None:
        rows[f"accuracy (avg@{k})" if k > 1 else "accuracy"] = measurement.accuracy
        rows |= {f"pass@{k}": interval for k, interval in measurement.pass_at_k.items() if k > 1}
    rows["score as rewarded" if result.task.reward_is_score else "reward"] = measurement.reward
    labels = {
        **result.task.facts,
        **result.task.measures,
        "cut_off": "reached the token limit",
        "answer_tokens": "tokens of an answer",
    }
    rows |= {labels.get(name, name): interval for name, interval in measurement.also.items()}
    for label, interval in rows.items():
        unknown = interval.low is None or interval.high is None
        span = "unknown" if unknown else f"{interval.low:.3f} to {interval.high:.3f}"
        table.add_row(label, f"{interval.value:.3f}", span, str(interval.num_problems))
    return table


def _describe_failures(measurement: Measurement, *, has_accuracy: bool) -> list[str]:
    """Empty if nothing failed."""
    if not measurement.num_failed_episodes:
        return []
    low, high = measurement.accuracy_bounds
    bounds = f"; if all were wrong the accuracy would be {low:.3f}, if all were right {high:.3f}" if has_accuracy else ""
    lines = [
        f"{measurement.num_failed_episodes} of {measurement.num_episodes} episodes failed and are excluded from all means{bounds}."
    ]
    if measurement.num_unanswered_problems:
        lines.append(f"{measurement.num_unanswered_problems} problems have no answer.")
    shown = list(measurement.errors.items())[:SHOWN_ERRORS]
    return lines + [f"  {count} x {error[:200]}" for error, count in shown]


BENCHMARK = "eval-"
"""Prefix of the built-in recipes that hold out every problem. The command finds them without it."""
SHORT_NAMES = {
    "k": "evaluation.samples_per_prompt",
    "problems": "evaluation.prompts",
    "solved_at": "evaluation.solved_at",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "max_tokens": "rollout.max_new_tokens",
    "concurrency": "rollout.concurrency",
    "system_prompt": "rollout.system_prompt",
    "device": "trainer.model_device",
}
"""Short name in `ludic eval` -> field of the recipe."""


@dataclass
class EvalSettings:
    """Settings that no recipe has."""

    base_url: Optional[str] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; null: the model runs
    in this process."""
    api_key_env: Optional[str] = None  # noqa: UP045
    """Name of the environment variable with the server's API key; null: none is sent."""
    returns_token_ids: bool = False
    """The server supports vLLM's `return_token_ids`; rollouts then contain the tokens."""
    timeout_s: float = setting(600.0, above=0)
    """Deadline of one model call, in seconds."""
    episode_timeout_s: Optional[float] = setting(None, above=0)  # noqa: UP045
    """Deadline of a whole episode, in seconds; null: none."""
    episode_retries: int = setting(1, least=0)
    """How often a failed episode is retried."""
    suite: Optional[str] = None  # noqa: UP045
    """The set of held-out problems, for tasks with several sets, such as `perfect` of tictactoe;
    null: the first."""
    environment: Optional[str] = None  # noqa: UP045
    """Of a recipe with several `environments`: the one whose problems are answered."""
    confidence: float = setting(0.95, above=0, below=1)
    """Confidence level of all intervals."""


def resolve(arguments: Sequence[str]) -> tuple[Recipe, EvalSettings]:
    """The recipe and settings of the command line. `arguments`: the name of a benchmark or a
    recipe, a YAML file or the folder of a run, and overrides, in any order. Later overrides win."""
    own = {field.name for field in fields(EvalSettings)}
    for_recipe: list[str] = []
    overrides: list[Override] = []
    for argument in arguments:
        if "=" not in argument or Path(argument).exists():
            benchmark = f"{BENCHMARK}{argument}"
            for_recipe[:0] = [benchmark] if benchmark in list_builtin_recipes() else expand_run_folder(argument)
            continue
        override = parse_override(argument)
        if override.key.startswith("inference."):
            raise ConfigError(f"{override.text}: an evaluation queries a server with base_url=URL; `ludic serve` starts one")
        if override.key in own:
            overrides.append(override)
        else:
            name = SHORT_NAMES.get(override.key)
            for_recipe.append(override.text if name is None else name + override.text[override.text.index("=") :])
    settings = _parse_settings(overrides)
    recipe = choose_environment(_compose(for_recipe), settings.environment)
    k = recipe.evaluation.samples_per_prompt
    if recipe.rollout.temperature == 0 and k > 1:
        if any(argument.startswith(f"{SHORT_NAMES['k']}=") for argument in for_recipe):
            raise ConfigError(f"k ({k}) needs a temperature above 0, at which answers differ; leave k out, or set temperature")
        recipe.evaluation.samples_per_prompt = 1
    if recipe.task.kind == "harbor" and any(argument.startswith("data=") for argument in for_recipe):
        settings.suite = settings.suite or "all"  # of tasks that the command names
    return recipe, settings


def _compose(arguments: Sequence[str]) -> Recipe:
    try:
        recipe = compose(arguments)
    except ConfigError as error:
        names = [*SHORT_NAMES, *(field.name for field in fields(EvalSettings))]
        keys = [argument.partition("=")[0] for argument in arguments if "=" in argument]
        near = [match for key in keys if key in str(error) for match in get_close_matches(key, names, n=1)]
        raise ConfigError(f"{error} (of an evaluation: {', '.join(near)})" if near else str(error)) from error
    choose_devices(recipe)
    return recipe


def _parse_settings(overrides: Sequence[Override]) -> EvalSettings:
    tree = OmegaConf.structured(EvalSettings)
    for override in overrides:
        try:
            OmegaConf.update(tree, override.key, override.value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override.text}: {str(error).splitlines()[0]}") from error
    settings = cast(EvalSettings, OmegaConf.to_object(tree))
    check_settings(settings)
    return settings
