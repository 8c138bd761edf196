"""A batch source of demonstrations: what the supervised warm-up trains on."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from ludic.context import GivenDialog
from ludic.envs.tasks import Task
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import Message


class DemonstrationSource:
    """Draws problems and the teacher's answers without end. Batch `k` depends on the seed and `k` only, so that a resumed run
    sees what it would have seen.

    Each sample is prompt, answer and the end token; the loss is on the answer and the end.
    """

    def __init__(self, task: Task, tokenizer: Any, *, batch_size: int, seed: int, system_prompt: str | None = None) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._system_prompt = system_prompt or getattr(task, "system_prompt", None)
        self._batch_size, self._seed = batch_size, seed
        self._batches = 0

    async def next_batch(self) -> SAWBatch:
        rng = Random(f"demonstrations {self._seed} {self._batches}")
        problems = [self._task.draw(rng) for _ in range(self._batch_size)]
        answers = [self._task.demonstrate(problem, rng) for problem in problems]
        prompts = [prompt_text(self._tokenizer, _prompt_of(problem), self._system_prompt) for problem in problems]
        ids = self._tokenizer([*prompts, *answers], add_special_tokens=False)["input_ids"]
        first = self._batches * self._batch_size
        items = [
            self._item(f"demonstration {first + row}", ids[row], ids[self._batch_size + row]) for row in range(self._batch_size)
        ]
        self._batches += 1
        return SAWBatch(items=items, meta={"target_rollouts": len(items), "num_samples": len(items)})

    def state_dict(self) -> dict[str, int]:
        """Batches given so far."""
        return {"batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = int(state["batches"])

    def _item(self, name: str, prompt: list[int], answer: list[int]) -> SAWItem:
        action = [*answer, self._tokenizer.eos_token_id]
        return SAWItem(
            input_ids=[*prompt, *action],
            attention_mask=[1] * (len(prompt) + len(action)),
            action_mask=[0] * len(prompt) + [1] * len(action),
            weight=1.0,
            meta={"rollout_id": name, "step_index": 0, "prompt_length": len(prompt), "completion_length": len(action)},
        )


def _prompt_of(problem: Any) -> str | list[Message]:
    """The question, or the messages of a row of conversations."""
    prompt: str | list[Message] = problem["row"]["prompt"] if "row" in problem else problem["question"]
    return prompt


def prompt_text(tokenizer: Any, question: str | list[Message], system_prompt: str | None) -> str:
    """The prompt as `LocalChatClient` renders it: the tokenizer's chat template, or without one the plain contents."""
    context = GivenDialog(system_prompt)
    context.on_env_reset(
        question if isinstance(question, str) else "", {} if isinstance(question, str) else {"messages": question}
    )
    messages = context.on_before_act()
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return "".join(message.get("content") or "" for message in messages)
