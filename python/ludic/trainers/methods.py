"""The objects: reinforcement learning, supervised fine-tuning, DPO, and a reward model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ludic.errors import ConfigError
from ludic.runs.directory import DPODirectory, RMDirectory, SFTDirectory
from ludic.trainers.base import RecipeTrainer, settings_of, with_short_errors, without_trl_names
from ludic.trainers.inputs import (
    Rewards,
    Rows,
    TaskSetting,
    Tools,
    as_plain,
    environments_of,
    name_agent,
    name_rewards,
    name_tools,
    source_of,
    take_judge,
    task_of,
)

if TYPE_CHECKING:
    from ludic.training.callbacks import Callback

ROWS = ".rows"
"""Folder of rows that were given as Python objects, in the folder of all runs."""


class GRPO(RecipeTrainer):
    """`ludic train` on your own problem: rows and reward functions, or a task with environments.

    >>> GRPO("path/to/model", reward, rows, steps=100, trainer={"lr": 1e-5}).train()
    >>> GRPO("path/to/model", task=MyTask, warmup={"steps": 0}, steps=100).train()
    >>> GRPO("path/to/model", reward, rows, tools=[look_up, add], steps=100).train()
    >>> GRPO("path/to/model", reward, rows, agent=my_agent, steps=100).train()
    >>> both = {"sums": {"data": rows, "reward": reward}, "game": {"task": MyTask, "weight": 2}}
    >>> GRPO("path/to/model", environments=both, steps=100).train()

    `settings` are settings of `ludic train`: by name, sections as mappings or with dots
    (`**{"trainer.lr": 1e-5}`). `algorithm="rloo"` is one of the others.
    """

    @with_short_errors
    @without_trl_names
    def __init__(
        self,
        model: str | Path | None,
        reward_functions: Rewards | None = None,
        dataset: Rows | None = None,
        *,
        tools: Tools | None = None,
        agent: str | Callable[..., Any] | Sequence[str] | Mapping[str, Any] | None = None,
        task: TaskSetting | None = None,
        eval_dataset: Rows | None = None,
        reward_weights: float | Sequence[float] | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        """`model`: a folder or a hub id. None means a small new one. `reward_functions`: as in TRL,
        `reward(prompts, completions, **columns) -> list of floats`; the columns come from
        `dataset`, whose column `prompt` is text or messages; or a `Judge`. None means that only
        `reward_model=` judges. `tools`: functions with type hints and docstrings that the model may
        call before it answers, in training and in every measurement; the reward functions get the
        answer. `agent`: a function of a session that solves a problem by calling the model through
        a URL, and returns the answer (docs/agents.md); or a list, a command; or the section
        `agent`. `eval_dataset`: held out instead of a tenth of the prompts. `task`: instead of
        both, a class with the members of `ludic.tasks.EpisodicTask` or `Task`; it is
        `task.kind=module:Class` of `ludic train`, so its demonstrations warm the model up unless
        `warmup={"steps": 0}`; `recipe="tools"` has the settings for several turns. A mapping has
        the section `task`. `environments=`, instead of both, has several problems by name
        (docs/mixtures.md).
        Raises ConfigError without rows and task, and for a tool without docstring or type hints."""
        rows = _folder_of_rows(settings)
        environments, of_environments = environments_of(settings.pop("environments", None), rows)
        has_problems = bool(environments) and dataset is None and task is None
        task_section, own_task = ({}, {}) if has_problems else task_of(task, dataset, reward_functions)
        given: dict[str, Any]
        reward_functions, given = take_judge(reward_functions)
        given["reward"], own = (None, {}) if reward_functions is None else name_rewards(reward_functions)
        if dataset is not None:
            given["data"] = source_of(dataset, rows, rewards=reward_functions or ())
        if reward_weights is not None:
            weights = as_plain(reward_weights)
            given["reward_weights"] = weights if isinstance(weights, list) else [weights]
        if eval_dataset is not None:
            judging = None if settings.get("eval_reward") is not None else reward_functions
            given["task.args.heldout_data"] = source_of(eval_dataset, rows, rewards=judging or ())
        given["tools"], own_tools = (None, {}) if tools is None else name_tools(tools)
        own_agent: dict[str, Any] = {}
        if isinstance(agent, Mapping):
            function = agent.get("function")
            named, own_agent = name_agent(function) if function is not None else (None, own_agent)
            settings["agent"] = {**agent, **({"function": named} if named else {})}
        elif isinstance(agent, str) or callable(agent):
            given["agent.function"], own_agent = name_agent(agent)
        elif agent is not None:
            given["agent.command"] = as_plain(agent)
        if environments:
            given["environments"] = environments
        functions: dict[str, Mapping[str, Any]] = {"reward": own, "tool": own_tools, "task": own_task, "agent": own_agent}
        functions |= {kind: {**functions[kind], **found} for kind, found in of_environments.items()}
        super().__init__(settings_of(model, {**task_section, **settings}, **given), callbacks, functions)


class PPO(GRPO):
    """`GRPO` with `algorithm="ppo"`: a critic estimates the advantage of each token.

    >>> PPO("path/to/model", reward, rows, critic={"model": "policy"}, steps=100).train()

    `settings` may have `algorithm_args`, the arguments of `make_ppo`, and `critic.model`.
    """

    @with_short_errors
    def __init__(
        self, model: str | Path | None, reward_functions: Rewards | None = None, dataset: Rows | None = None, **settings: Any
    ) -> None:
        """The arguments of `GRPO` but for `algorithm`, which is a ConfigError."""
        if "algorithm" in settings:
            raise ConfigError(f"algorithm ({settings['algorithm']}) of PPO is ppo; leave it out, or use GRPO")
        super().__init__(model, reward_functions, dataset, algorithm="ppo", **settings)


class _RowsTrainer(RecipeTrainer):
    """Trains on rows with the settings of a command alone."""

    @with_short_errors
    @without_trl_names
    def __init__(
        self,
        model: str | Path | None,
        dataset: Rows,
        *,
        eval_dataset: Rows | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        """`eval_dataset`: measured instead of a share of `dataset` (`heldout=`). `settings` are
        settings of the command."""
        super().__init__(_over_rows(model, dataset, eval_dataset, settings), callbacks)


class SFT(_RowsTrainer):
    """`ludic sft` on your own rows: conversations (`messages`), `prompt` and `completion`, `text`,
    or the columns of Alpaca or ShareGPT. `preview()` shows which tokens of them are trained.

    >>> SFT("path/to/model", rows, epochs=2).train()
    """

    kind = SFTDirectory

    def preview(self, rows: int = 3) -> None:
        """Print the first rows as they would be trained on: after the chat template, with the
        trained tokens marked. Loads the tokenizer and no model."""
        from ludic.recipes.model import build_tokenizer
        from ludic.runs.data.preview import preview

        preview(self.recipe, build_tokenizer(self.recipe), rows).show(Console(soft_wrap=True))


class DPO(RecipeTrainer):
    """`ludic dpo` on your own pairs: `prompt`, `chosen` and `rejected`.

    >>> DPO("path/to/model", rows, loss={"beta": 0.1}).train()
    """

    kind = DPODirectory

    @with_short_errors
    @without_trl_names
    def __init__(
        self,
        model: str | Path | None,
        dataset: Rows,
        *,
        ref_model: str | Path | None = None,
        eval_dataset: Rows | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        """`ref_model`: a folder or a hub id. None means `model` itself, as it is before the first
        step. `eval_dataset`: measured instead of a share of `dataset` (`heldout=`). `settings` are
        settings of `ludic dpo`."""
        given = {"reference.model": None if ref_model is None else str(ref_model)}
        super().__init__(_over_rows(model, dataset, eval_dataset, settings, **given), callbacks)


class RewardModel(_RowsTrainer):
    """`ludic train-rm` on your own pairs: `prompt`, `chosen` and `rejected`.

    >>> RewardModel("path/to/model", rows).train()
    """

    kind = RMDirectory


def _over_rows(
    model: str | Path | None, dataset: Rows, eval_dataset: Rows | None, settings: Mapping[str, Any], **given: Any
) -> Any:
    rows = _folder_of_rows(settings)
    heldout = None if eval_dataset is None else source_of(eval_dataset, rows)
    return settings_of(model, settings, data=source_of(dataset, rows), heldout_data=heldout, **given)


def _folder_of_rows(settings: Mapping[str, Any]) -> Path:
    return Path(str(settings.get("output", "runs"))).expanduser() / ROWS
