"""Batches of rollouts that were recorded: supervised fine-tuning, rejection sampling, offline
reinforcement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, DataError
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.source import BatchSourceBase
from ludic.training.rollouts.log import read_rollouts
from ludic.training.rollouts.to_samples import step_facts
from ludic.training.samples.conversations import apply_template, end_of_turn
from ludic.training.types import CreditAssigner, SampleFilter, SAWBatch, SAWItem
from ludic.types import TRACE_KEYS, Rollout, Step

StepToItem = Callable[[Rollout, Step, float], SAWItem]
"""(rollout, step, weight) -> sample. `samples.sample_from_step` takes the tokens of the trace;
text is not tokenised again."""


@dataclass
class OfflineBatchSource(BatchSourceBase):
    """Goes through the steps of recorded rollouts again and again.

    >>> source = OfflineBatchSource(["good.jsonl"], sample_from_step, ConstantCredit(1.0), batch_size=64)

    The files are those that `RolloutEngine` writes. They are read when the source is made; of the
    rollouts only the samples stay in memory. Its state is its position: a resumed run goes on with
    the sample after the last one, and refuses other data. Over several ranks each takes its share
    of every pass.
    """

    shards_across_ranks = True

    jsonl_paths: Sequence[str | Path] | str | Path
    """One file or several."""
    step_to_item: StepToItem
    credit_assigner: CreditAssigner
    """Over all rollouts at once. A step to which it gives no weight has weight 1."""
    batch_size: int = 32
    """Samples a batch, on each rank."""
    shuffle: bool = True
    """A new order for every pass, which follows from `seed` and the number of the pass."""
    sample_filter: SampleFilter | None = None
    seed: int = 42
    num_workers: int = 0
    """Accepted and without effect: the samples are made when the source is."""
    drop_last: bool = False
    """Leave out the last batch of a pass where it is not full."""
    num_rollouts: int = field(init=False)
    """Rollouts read."""
    num_samples_filtered: int = field(init=False)
    """Samples that `sample_filter` refused."""

    def __post_init__(self) -> None:
        if isinstance(self.jsonl_paths, str | Path):
            self.jsonl_paths = [self.jsonl_paths]
        if self.num_workers < 0:
            raise ConfigError(f"num_workers ({self.num_workers}) must be >= 0")
        rollouts = with_ids_of_their_own([rollout for path in self.jsonl_paths for rollout in read_rollouts(path)])
        if not rollouts:
            raise DataError(f"there are no rollouts in {', '.join(map(str, self.jsonl_paths)) or 'jsonl_paths, which is empty'}")
        weights = self.credit_assigner.compute(rollouts)
        items = [
            self.step_to_item(rollout, step, _checked_weight(weights.get((rollout.id, step.index), 1.0), rollout, step))
            for rollout in rollouts
            for step in rollout.steps
        ]
        kept = items if self.sample_filter is None else [item for item in items if self.sample_filter(item)]
        if not kept:
            raise DataError(
                f"sample_filter refused all {len(items)} samples of {len(rollouts)} rollouts; there is nothing to train on"
            )
        self.num_rollouts, self.num_samples_filtered = len(rollouts), len(items) - len(kept)
        self._source = ItemBatchSource(
            kept, batch_size=self.batch_size, shuffle=self.shuffle, seed=self.seed, drop_last=self.drop_last
        )

    async def next_batch(self) -> SAWBatch:
        """The next batch; after the last of a pass comes the first of the next."""
        return await self._source.next_batch()

    def iter_epoch(self) -> Iterator[SAWBatch]:
        """What is left of the present pass, batch by batch."""
        return self._source.iter_epoch()

    def __len__(self) -> int:
        """Samples."""
        return len(self._source)

    @property
    def num_batches_per_epoch(self) -> int:
        return self._source.num_batches_per_epoch

    @property
    def epoch(self) -> int:
        """The pass that the next batch belongs to, from 0."""
        return self._source.epoch

    @property
    def target_rollouts(self) -> int:
        """`batch_size`. The batches say how many rollouts are in them."""
        return self.batch_size

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where data or settings are not those of `state`."""
        self._source.load_state_dict(state)


def with_ids_of_their_own(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts, a second one of an id under `id#2` and so on: credit is given by id."""
    seen: dict[str, int] = {}
    result = []
    for rollout in rollouts:
        seen[rollout.id] = count = seen.get(rollout.id, 0) + 1
        result.append(rollout if count == 1 else replace(rollout, id=f"{rollout.id}#{count}"))
    return result


def make_chat_template_step_to_item(tokenizer: Any) -> StepToItem:
    """Samples from messages, for rollouts without token traces: the chat template renders the
    prompt and the whole, and the loss is on what the whole has more, up to the end token.

    The messages are `info["chat_prompt_messages"]` and `info["chat_completion"]`, or for the latter
    the step's action as an assistant's message. Raises DataError where the first is missing, where
    the prompt is no prefix of the whole on token ids, and where nothing is left to train on.
    """

    def step_to_item(rollout: Rollout, step: Step, weight: float) -> SAWItem:
        where = f"rollout {rollout.id}, step {step.index}"
        messages = step.info.get("chat_prompt_messages")
        if not messages:
            raise DataError(
                f"{where} has no chat_prompt_messages in its info; record them with the rollout, or train on its token trace "
                "(step_to_item=sample_from_step)"
            )
        answer = step.info.get("chat_completion") or {"role": "assistant", "content": step.action}
        prompt = apply_template(tokenizer, messages, prompt=True, where=where)
        full = apply_template(tokenizer, [*messages, answer], prompt=False, where=where)
        if full[: len(prompt)] != prompt:
            raise DataError(
                f"{where}: the rendered prompt is not a prefix of prompt and completion on token ids, so that no mask is right; train on "
                "the token trace (step_to_item=sample_from_step), or use a template that does not rewrite the prompt"
            )
        end = end_of_turn(tokenizer, full, len(prompt))
        if end == len(prompt):
            raise DataError(f"{where} has an empty completion: the template adds no token to the prompt")
        actions = end - len(prompt)
        return SAWItem(
            input_ids=full,
            attention_mask=[1] * len(full),
            action_mask=[0] * len(prompt) + [1] * actions + [0] * (len(full) - end),
            weight=weight,
            meta=_meta(rollout, step, prompt_length=len(prompt), completion_length=actions),
        )

    return step_to_item


def _meta(rollout: Rollout, step: Step, *, prompt_length: int, completion_length: int) -> dict[str, Any]:
    """The step's facts and the rollout's; the step's info where neither has the key."""
    return {
        **{key: value for key, value in step.info.items() if key not in TRACE_KEYS},
        **step_facts(rollout, step),
        "completion_length": completion_length,
        "prompt_length": prompt_length,
        **rollout.meta,
    }


def _checked_weight(weight: float, rollout: Rollout, step: Step) -> float:
    if not math.isfinite(weight):
        raise DataError(f"the weight of rollout {rollout.id}, step {step.index} is {weight}; weights must be finite")
    return float(weight)
