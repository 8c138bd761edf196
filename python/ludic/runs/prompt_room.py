"""Whether a tokenizer can render what a task shows a model, and whether the prompts of a data set
leave room for an answer, before a run begins."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from ludic.context import GivenDialog
from ludic.errors import ConfigError
from ludic.inference.prompts.template import ChatTemplate, read_template, read_template_kwargs
from ludic.inference.prompts.tokens import Dialogue, PromptTokens
from ludic.recipes.schema import Recipe
from ludic.tasks import Episode, EpisodicTask
from ludic.tasks.adapters import prompt_messages

logger = logging.getLogger(__name__)

MODEL = "the context of the model"
MEASURED = 1000
"""Prompts that are measured for the warning, in the order of the data."""


def check_dialogues(task: EpisodicTask, problems: Iterable[Episode], tokenizer: Any) -> None:
    """Raise `ConfigError` if the tokenizer has no chat template, and the task shows the model a
    dialogue: in a later turn, or as a prompt of messages. Raise it, too, if its template cannot
    show the task's tools."""
    _check_tools(task, tokenizer)
    if read_template(tokenizer):
        return
    shown = f"episodes of up to {task.max_turns} turns" if task.max_turns > 1 else None
    if shown is None:
        prompts = (prompt_messages(problem) or () for problem in problems)
        longest = max(([str(message.get("role")) for message in prompt] for prompt in prompts), key=len, default=[])
        if longest:
            shown = f"prompts of up to {len(longest)} messages ({', '.join(longest)})"
    if shown is not None:
        raise ConfigError(
            f"the task has {shown}, and the tokenizer has no chat template to render a dialogue with; set "
            "chat_template=FILE, or tokenizer=FOLDER or a hub id whose tokenizer has one, such as the instruct version of the model"
        )


def _check_tools(task: EpisodicTask, tokenizer: Any) -> None:
    if task.tool_use is None:
        return
    try:
        ChatTemplate(tokenizer).check_tools(task.tool_use.schemas)
    except ConfigError as error:
        names = ", ".join(function.__name__ for function in task.tool_use.functions)
        raise ConfigError(
            f"the model cannot be shown its tools ({names}): {error}. Take a tokenizer that can, with tokenizer=FOLDER or a hub id, "
            "such as the instruct version of the model, or set chat_template=FILE"
        ) from error


def check_prompts(recipe: Recipe, task: EpisodicTask, tokenizer: Any, model: Any) -> None:
    """Raise `ConfigError` if the tokenizer cannot render the prompts of a task, or if no prompt
    leaves room for an answer. Log a warning, with numbers, if some leave less room than an answer
    may take."""
    problems = task.problem_list
    check_dialogues(task, () if problems is None else problems.training, tokenizer)
    if problems is None or recipe.steps == 0:
        return
    system_prompt = recipe.rollout.system_prompt or task.system_prompt
    tokens, tools = PromptTokens(tokenizer), [] if task.tool_use is None else task.tool_use.schemas

    def length(problem: Episode, *, system_prompt: str | None = system_prompt) -> int:
        context = GivenDialog(system_prompt)
        first = task.make_env(problem).env_reset()
        observation, info = asyncio.run(first) if inspect.iscoroutine(first) else first
        context.on_env_reset(observation, info)
        arguments = read_template_kwargs(info, f"problem {problem['id']}")
        return len(tokens.encode(Dialogue(context.on_before_act(), tools, arguments)))

    first_chat = next((problem for problem in problems.training if prompt_messages(problem) is not None), None)
    if first_chat is not None:
        length(first_chat)
    _require_room(problems.training, length, recipe.trainer.max_seq_len)
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    limits = {"trainer.max_seq_len": recipe.trainer.max_seq_len, MODEL: context}
    setting, limit = min(((name, size) for name, size in limits.items() if size), key=lambda pair: pair[1])
    answer = recipe.rollout.max_new_tokens or task.max_new_tokens
    measured = [(length(problem), problem) for problem in islice(problems.training, MEASURED)]
    tight = [used for used, _ in measured if used + answer > limit]
    if not tight:
        return
    longest, problem = max(measured, key=lambda pair: pair[0])
    added = longest - length(problem, system_prompt=None) if system_prompt else 0
    logger.warning(
        "%d of the first %d prompts leave less than the %d tokens that an answer may have (rollout.max_new_tokens): %s is %d tokens, and "
        "the longest prompt has %d%s. What does not fit is cut off; %s",
        *(len(tight), len(measured), answer, setting, limit, longest),
        f", {added} of them from the system prompt" if added > 0 else "",
        "shorten prompts or answers" if setting == MODEL else f"raise {setting}, or shorten prompts or answers",
    )


def _require_room(problems: Sequence[Episode], length: Callable[[Episode], int], limit: int) -> None:
    shortest = 0
    for problem in problems:
        used = length(problem)
        if used < limit:
            return
        shortest = min(shortest or used, used)
    raise ConfigError(
        f"trainer.max_seq_len ({limit}) leaves no room for an answer to any of {len(problems)} prompts: the shortest has "
        f"{shortest} tokens; raise it"
    )
