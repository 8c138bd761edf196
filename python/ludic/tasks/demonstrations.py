"""The batch source of the supervised warm-up: demonstrations of a task's teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from ludic.context import GivenDialog
from ludic.errors import ConfigError
from ludic.images.content import find_message_digests, intern_messages, intern_observation
from ludic.images.store import current_store
from ludic.inference.prompts.images import find_processor
from ludic.inference.prompts.template import ChatTemplate, begin_prompt, find_turn_end
from ludic.tasks.episodic import EpisodicTask, Task, Turn, as_episodic
from ludic.training.samples.conversations import expand_images, find_images
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import ImageSpan, Message


class DemonstrationSource:
    """Returns the teacher's episodes, without end. Batch `k` depends only on the seed and `k`, so a
    resumed run gets the same batches.

    An episode is one sample: observations, each followed by the teacher's action and the end token.
    The loss covers actions and end tokens. If the tokenizer's template rewrites earlier turns, so
    that a prompt does not start with the tokens so far, a new sample starts there, as in rollouts.
    """

    def __init__(
        self, task: Task | EpisodicTask, tokenizer: Any, *, batch_size: int, seed: int, system_prompt: str | None = None
    ) -> None:
        self._task, self._tokenizer = as_episodic(task), tokenizer
        self._system_prompt = system_prompt or self._task.system_prompt
        self._batch_size, self._seed = batch_size, seed
        self._batches = 0

    async def next_batch(self) -> SAWBatch:
        items, num_episodes = await self._make(Random(f"demonstrations {self._seed} {self._batches}"))
        self._batches += 1
        return SAWBatch(items=items, meta={"target_rollouts": num_episodes, "num_samples": len(items)})

    async def _make(self, rng: Random) -> tuple[list[SAWItem], int]:
        """The samples of a batch, and the number of episodes that they are of."""
        episodes = self._task.demonstrations(self._batch_size, rng) or []
        if len(episodes) != self._batch_size or not all(episodes):
            teacher, empty = type(getattr(self._task, "task", self._task)).__name__, sum(not episode for episode in episodes)
            raise ConfigError(
                f"{teacher}.demonstrations returned {len(episodes)} episodes ({empty} empty), not {self._batch_size} with turns"
            )
        dialogues = [messages for episode in episodes for messages in _prompts(episode, self._system_prompt)]
        arguments = [episode[0].chat_template_kwargs or {} for episode in episodes for _ in episode]
        images = find_processor(self._tokenizer)
        template = ChatTemplate(self._tokenizer, "" if images is None else images.marker)
        where = f"a demonstration of {type(self._task).__name__}"
        shown = (
            expand_images(self._tokenizer, text, messages, where) if find_message_digests(messages) else text
            for text, messages in zip(template.render_all(dialogues, arguments), dialogues, strict=True)
        )
        texts = [[(next(shown), turn.action) for turn in episode] for episode in episodes]
        distinct = list(dict.fromkeys(text for episode in texts for turn in episode for text in turn))
        ids = dict(zip(distinct, self._tokenizer(distinct, add_special_tokens=False)["input_ids"], strict=True))
        end = [token for token in [find_turn_end(self._tokenizer).token] if token is not None]
        first, items, seen = self._batches * self._batch_size, [], iter(dialogues)
        for number, episode_texts in enumerate(texts, first):
            turns = [(begin_prompt(self._tokenizer, ids[prompt]), [*ids[action], *end]) for prompt, action in episode_texts]
            spans = [find_images(self._tokenizer, prompt, next(seen)) for prompt, _ in turns]
            items += _items(f"demonstration {number}", turns, spans)
        return items, len(episodes)

    def state_dict(self) -> dict[str, int]:
        """The number of batches so far."""
        return {"batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = int(state["batches"])


def _prompts(episode: Sequence[Turn], system_prompt: str | None) -> list[list[Message]]:
    messages, prompts = list[Message](), list[list[Message]]()
    for turn in episode:
        if prompts:
            messages = [*messages, {"role": "user", "content": intern_observation(turn.observation, current_store())}]
        else:
            messages = _opening(turn, system_prompt)
        prompts.append(messages)
        messages = [*messages, {"role": "assistant", "content": turn.action}]
    return prompts


def _items(name: str, turns: Sequence[tuple[list[int], list[int]]], spans: Sequence[tuple[ImageSpan, ...]]) -> list[SAWItem]:
    """One sample for each run of turns whose prompts extend one another. `turns`: the ids of
    (prompt, action); `spans`: the images of each prompt.

    Example: turns `([1], [2])` and `([1, 2, 3], [4])` are one sample with ids `[1, 2, 3, 4]` and
    mask `[0, 1, 0, 1]`; a second prompt `[9]` would start a new sample.
    """
    rows: list[tuple[list[int], list[int]]] = []
    images: list[tuple[ImageSpan, ...]] = []
    for (prompt, action), seen in zip(turns, spans, strict=True):
        ids, mask = rows[-1] if rows else ([], [])
        if rows and prompt[: len(ids)] == ids and seen[: len(images[-1])] == images[-1]:
            images[-1] = seen
            mask += [0] * (len(prompt) - len(ids))
            ids += prompt[len(ids) :]
        else:
            ids, mask = list(prompt), [0] * len(prompt)
            rows.append((ids, mask))
            images.append(seen)
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
            images=images[index],
        )
        for index, (ids, mask) in enumerate(rows)
    ]


def prompt_text(tokenizer: Any, question: str, system_prompt: str | None) -> str:
    """The first prompt of an episode, as text."""
    return ChatTemplate(tokenizer).render(_opening(Turn(question, ""), system_prompt))


def _opening(turn: Turn, system_prompt: str | None) -> list[Message]:
    context = GivenDialog(system_prompt)
    messages = {} if turn.messages is None else {"messages": intern_messages(turn.messages, current_store())}
    context.on_env_reset(intern_observation(turn.observation, current_store()), messages)
    return list(context.on_before_act())
