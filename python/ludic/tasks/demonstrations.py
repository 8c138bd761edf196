"""A batch source of demonstrations: what the supervised warm-up trains on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from ludic.context import GivenDialog
from ludic.inference.prompts.template import ChatTemplate
from ludic.tasks.adapters import as_episodic
from ludic.tasks.base import Task
from ludic.tasks.episodic import EpisodicTask, Turn
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import Message


class DemonstrationSource:
    """Draws the teacher's episodes without end. Batch `k` depends on the seed and `k` only, so that
    a resumed run sees what it would have seen.

    An episode is one sample: observations, and after each the teacher's action with the end token;
    the loss is on actions and ends. Where the tokenizer's template rewrites what was said before,
    so that a prompt does not begin with the tokens so far, the sample ends there and another
    begins, as it does in rollouts.
    """

    def __init__(
        self, task: Task | EpisodicTask, tokenizer: Any, *, batch_size: int, seed: int, system_prompt: str | None = None
    ) -> None:
        self._task, self._tokenizer = as_episodic(task), tokenizer
        self._system_prompt = system_prompt or self._task.system_prompt
        self._batch_size, self._seed = batch_size, seed
        self._batches = 0

    async def next_batch(self) -> SAWBatch:
        rng = Random(f"demonstrations {self._seed} {self._batches}")
        episodes = self._task.demonstrations(self._batch_size, rng)
        dialogues = [messages for episode in episodes for messages in _asked(episode, self._system_prompt)]
        prompts = iter(ChatTemplate(self._tokenizer).render_all(dialogues))
        texts = [[(next(prompts), turn.action) for turn in episode] for episode in episodes]
        ids = self._encoded(text for episode in texts for turn in episode for text in turn)
        first, items = self._batches * self._batch_size, []
        for number, episode_texts in enumerate(texts, first):
            turns = [(ids[prompt], [*ids[action], self._tokenizer.eos_token_id]) for prompt, action in episode_texts]
            items += _items(f"demonstration {number}", turns)
        self._batches += 1
        return SAWBatch(items=items, meta={"target_rollouts": len(episodes), "num_samples": len(items)})

    def _encoded(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """The ids of each different text."""
        different = list(dict.fromkeys(texts))
        return dict(zip(different, self._tokenizer(different, add_special_tokens=False)["input_ids"], strict=True))

    def state_dict(self) -> dict[str, int]:
        """Batches given so far."""
        return {"batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = int(state["batches"])


def _asked(episode: Sequence[Turn], system_prompt: str | None) -> list[list[Message]]:
    """What the policy is asked with at each turn."""
    messages, asked = list[Message](), list[list[Message]]()
    for turn in episode:
        messages = [*messages, {"role": "user", "content": turn.observation}] if asked else _opening(turn, system_prompt)
        asked.append(messages)
        messages = [*messages, {"role": "assistant", "content": turn.action}]
    return asked


def _items(name: str, turns: Sequence[tuple[list[int], list[int]]]) -> list[SAWItem]:
    """One sample of all turns whose prompts extend one another; `turns` are the ids of (prompt,
    action)."""
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, action in turns:
        ids, mask = rows[-1] if rows else ([], [])
        if rows and prompt[: len(ids)] == ids:
            mask += [0] * (len(prompt) - len(ids))
            ids += prompt[len(ids) :]
        else:
            ids, mask = list(prompt), [0] * len(prompt)
            rows.append((ids, mask))
        ids += action
        mask += [1] * len(action)
    return [
        SAWItem(
            input_ids=ids,
            attention_mask=[1] * len(ids),
            action_mask=mask,
            weight=1.0,
            meta={
                "rollout_id": name,
                "step_index": index,
                "prompt_length": len(ids) - sum(mask),
                "completion_length": sum(mask),
            },
        )
        for index, (ids, mask) in enumerate(rows)
    ]


def prompt_text(tokenizer: Any, question: str, system_prompt: str | None) -> str:
    """The first prompt of an episode."""
    return ChatTemplate(tokenizer).render(_opening(Turn(question, ""), system_prompt))


def _opening(turn: Turn, system_prompt: str | None) -> list[Message]:
    """The messages before the first action, as the context of the rollouts has them."""
    context = GivenDialog(system_prompt)
    context.on_env_reset(turn.observation, {} if turn.messages is None else {"messages": list(turn.messages)})
    return list(context.on_before_act())
