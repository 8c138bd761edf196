"""Batches of recorded rollouts, for supervised fine-tuning, rejection sampling and offline RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ludic.errors import DataError, check_value
from ludic.inference.prompts.template import find_turn_end, read_template_kwargs
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.rollouts.log import read_rollouts
from ludic.training.rollouts.to_samples import read_weight, step_facts
from ludic.training.samples.conversations import apply_template
from ludic.training.types import CreditAssigner, SampleFilter, SAWItem
from ludic.types import TRACE_KEYS, Rollout, Step

StepToItem = Callable[[Rollout, Step, float], SAWItem]
"""(rollout, step, weight) -> sample. `rollouts.to_samples.sample_from_step` uses the token
trace, so no text is tokenised again."""


@dataclass
class OfflineBatchSource(ItemBatchSource):
    """Returns batches of the steps of recorded rollouts, pass after pass.

    >>> credit = ConstantCredit(1.0)
    >>> source = OfflineBatchSource(["good.jsonl"], sample_from_step, credit, batch_size=64)

    `RolloutEngine` writes such files. They are read in the constructor, and only the samples stay
    in memory. The state is the position: a resumed run continues with the next sample, and other
    data is an error. With several ranks, the samples of a pass are divided among them.
    """

    jsonl_paths: Sequence[str | Path] | str | Path
    """One file or several."""
    step_to_item: StepToItem
    credit_assigner: CreditAssigner
    """Called once with all rollouts. A step without a weight gets weight 1."""
    batch_size: int = 32
    """Samples per batch on each rank; in `SharedBatches`, on all ranks together."""
    shuffle: bool = True
    """Draw a new order for every pass, from `seed` and the number of the pass."""
    sample_filter: SampleFilter | None = None
    seed: int = 42
    num_workers: int = 0
    """Accepted for compatibility; has no effect, since the constructor makes all samples."""
    drop_last: bool = False
    """Leave out the last batch of a pass unless it is full."""
    num_rollouts: int = field(init=False)
    """Number of rollouts read."""
    num_samples_filtered: int = field(init=False)
    """Number of samples that `sample_filter` dropped."""

    def __post_init__(self) -> None:
        if isinstance(self.jsonl_paths, str | Path):
            self.jsonl_paths = [self.jsonl_paths]
        check_value("num_workers", self.num_workers, least=0)
        rollouts = make_ids_unique([rollout for path in self.jsonl_paths for rollout in read_rollouts(path)])
        if not rollouts:
            raise DataError(f"there are no rollouts in {', '.join(map(str, self.jsonl_paths)) or 'jsonl_paths, which is empty'}")
        weights = self.credit_assigner.compute(rollouts)
        items = []
        for rollout in rollouts:
            for step in rollout.steps:
                weight, columns = read_weight(weights.get((rollout.id, step.index), 1.0), rollout, step)
                items.append(self.step_to_item(rollout, step, weight))
                items[-1].attachments.token_columns.update(columns)
        retained = items if self.sample_filter is None else [item for item in items if self.sample_filter(item)]
        if not retained:
            raise DataError(f"sample_filter dropped all {len(items)} samples of {len(rollouts)} rollouts")
        self.num_rollouts, self.num_samples_filtered = len(rollouts), len(items) - len(retained)
        super().__init__(retained, batch_size=self.batch_size, shuffle=self.shuffle, seed=self.seed, drop_last=self.drop_last)

    @property
    def target_rollouts(self) -> int:
        """`batch_size`. The exact number of rollouts of a batch is in its meta."""
        return self.batch_size


def make_ids_unique(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts with distinct ids, since weights are assigned by id. Example: ids a, b, a
    become a, b, a#2."""
    seen: dict[str, int] = {}
    result = []
    for rollout in rollouts:
        seen[rollout.id] = count = seen.get(rollout.id, 0) + 1
        result.append(rollout if count == 1 else replace(rollout, id=f"{rollout.id}#{count}"))
    return result


def make_chat_template_step_to_item(tokenizer: Any) -> StepToItem:
    """Return a function that makes samples from messages, for rollouts without token traces. The
    chat template renders the prompt alone and the prompt with the answer; the additional tokens up
    to the end token are the action.

    Example: the prompt renders to [1, 2, 3], and with the answer to [1, 2, 3, 7, 0, 9], where 0 is
    the end token and 9 a line break: the action mask is [0, 0, 0, 1, 1, 0].

    The messages are `info["chat_prompt_messages"]` and `info["chat_completion"]`; without the
    latter, the step's action is the assistant's message. Raises DataError if the former is missing,
    if the prompt is not a prefix of the whole on token ids, and if the completion is empty.
    """

    def step_to_item(rollout: Rollout, step: Step, weight: float) -> SAWItem:
        where = f"rollout {rollout.id}, step {step.index}"
        messages = step.info.get("chat_prompt_messages")
        if not messages:
            raise DataError(f"{where} has no chat_prompt_messages in its info; record them, or use step_to_item=sample_from_step")
        answer = step.info.get("chat_completion") or {"role": "assistant", "content": step.action}
        arguments = read_template_kwargs(step.info, where)
        prompt = apply_template(tokenizer, messages, prompt=True, where=where, **arguments)
        full = apply_template(tokenizer, [*messages, answer], prompt=False, where=where, **arguments)
        if full[: len(prompt)] != prompt:
            raise DataError(f"{where}: the prompt is not a prefix of prompt and completion; use step_to_item=sample_from_step")
        end = find_turn_end(tokenizer).find(full, len(prompt))
        if end == len(prompt):
            raise DataError(f"{where} has an empty completion: the template adds no token to the prompt")
        num_actions = end - len(prompt)
        return SAWItem(
            input_ids=full,
            attention_mask=[1] * len(full),
            action_mask=[0] * len(prompt) + [1] * num_actions + [0] * (len(full) - end),
            weight=weight,
            meta={  # later ones take precedence
                **{key: value for key, value in step.info.items() if key not in TRACE_KEYS},
                **step_facts(rollout, step),
                "completion_length": num_actions,
                "prompt_length": len(prompt),
                **rollout.meta,
            },
        )

    return step_to_item
