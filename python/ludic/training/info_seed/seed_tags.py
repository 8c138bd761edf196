"""The settings of InfoSeed, the tag that names a seed in a prompt, and the samples without it:
seeded completions are trained under the plain prompt, so that the seed shows in the completion."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ludic.errors import ConfigError, DataError, check_value
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import ImageSpan, cut_spans, group_of

SEED_ID = "seed_id"
"""Key of a seeded request's meta."""
WITHOUT_PLAIN = "seed/without_plain"
"""Key of the batch's meta: number of seeded samples that were dropped."""


@dataclass(frozen=True)
class InfoSeed:
    """Completions whose prompt names a seed, and a loss by which the seed can be told from the
    completion alone: the policy learns as many ways to answer as there are seeds.

    Example: `InfoSeed(4)` tags the prompt `2+2=` of seed 3 as `2+2=\\n[seed=3]`.
    """

    num_seeds: int
    """Seeded completions of each prompt, with the seeds 1..num_seeds."""
    coeff: float = 0.01
    """Factor of the loss."""
    temperature: float = 0.1
    """Of the cosines, in both losses."""
    loss: Literal["infonce", "ce"] = "infonce"
    """`infonce`: `SeedContrastiveLoss`; `ce`: `SeedClassificationLoss`, with a fixed head
    (`FixedSeedHead`)."""
    pooling: Literal["mean", "last"] = "mean"
    """What represents a completion: the mean of its tokens' hidden states, or the last of them."""
    template: str = "\n[seed={seed}]"
    """Appended to the prompt. With `{prompt}` it replaces the prompt."""

    def __post_init__(self) -> None:
        check_value("num_seeds", self.num_seeds, "leave InfoSeed out for none", least=1)
        check_value("coeff", self.coeff, least=0)
        check_value("temperature", self.temperature, above=0)
        check_value("loss", self.loss, choices=("infonce", "ce"))
        check_value("pooling", self.pooling, choices=("mean", "last"))
        check_template(self.template)

    def tag(self, prompt: str, seed_id: int) -> str:
        """The prompt with its seed."""
        return tag_prompt(prompt, seed_id, self.template)


def tag_prompt(prompt: Any, seed_id: int, template: str) -> Any:
    """`template` after the prompt, in place of it if it contains `{prompt}`. Of content with images
    its last part is the text that is tagged, or one more."""
    if isinstance(prompt, list):
        *before, last = prompt if prompt[-1]["type"] == "text" else [*prompt, {"type": "text", "text": ""}]
        return [*before, {**last, "text": tag_prompt(last["text"], seed_id, template)}]
    tag = template.format(prompt=prompt, seed=seed_id)
    return tag if "{prompt}" in template else prompt + tag


def check_template(template: str) -> None:
    """Raise ConfigError for a template without `{seed}`, or with other fields than `{seed}` and
    `{prompt}`."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ConfigError(f"template ({template!r}) is not a format string: {error}; write a brace as two") from error
    if "seed" not in fields or fields - {"seed", "prompt"}:
        raise ConfigError(f"template ({template!r}) must contain {{seed}}, and no other field but {{prompt}}")


def seed_of(meta: dict[str, Any]) -> int:
    """The seed of a rollout or a sample, read from its meta; 0 if it has none."""
    return int((meta.get("request_meta") or {}).get(SEED_ID) or 0)


def without_tags(batch: SAWBatch) -> SAWBatch:
    """Replace the prompt of each seeded sample by the prompt of a plain sample of its group.
    Nothing is tokenized: the ids are copied. Changes `batch.items`.

    A seeded sample whose group has no plain sample left is dropped. Their number is
    `batch.meta["seed/without_plain"]`, which the trainer logs. Raises DataError for samples of
    several turns.

    Example: plain [p q | a], seeded [p q s | b c] becomes [p q | b c].
    """
    prompts: dict[Any, tuple[list[int], tuple[ImageSpan, ...]]] = {}
    for item in batch.items:
        if item.meta.get("step_index"):
            raise DataError(f"InfoSeed needs rollouts of one turn; {item.meta.get('rollout_id')} has several")
        if not seed_of(item.meta):
            end = _prompt_length(item.action_mask)
            prompts.setdefault(group_of(item.meta), (list(item.input_ids[:end]), cut_spans(item.images, 0, end=end)))
    items = [
        with_prompt(item, *prompts[group_of(item.meta)]) if seed_of(item.meta) else item
        for item in batch.items
        if not seed_of(item.meta) or group_of(item.meta) in prompts
    ]
    batch.meta[WITHOUT_PLAIN] = len(batch.items) - len(items)
    batch.items = items
    return batch


def _prompt_length(action_mask: Sequence[int]) -> int:
    return next((index for index, acts in enumerate(action_mask) if acts), len(action_mask))


def with_prompt(item: SAWItem, prompt: list[int], images: Sequence[ImageSpan] = ()) -> SAWItem:
    """The sample with other tokens, which have `images`, before its first action token. The sampler
    chose no experts for it: it has no routes."""
    start = _prompt_length(item.action_mask)
    completion = list(item.input_ids[start:])
    meta = {**item.meta, "prompt_length": len(prompt)} if "prompt_length" in item.meta else item.meta
    return replace(
        item,
        input_ids=prompt + completion,
        attention_mask=[1] * (len(prompt) + len(completion)),
        action_mask=[0] * len(prompt) + list(item.action_mask[start:]),
        meta=meta,
        attachments=replace(item.attachments, routes=None),
        images=(*images, *cut_spans(item.images, start, to=len(prompt))),
    )
