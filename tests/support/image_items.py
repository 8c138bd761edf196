"""Training samples whose prompts have images."""

import random

import numpy as np
import torch
from image_samples import make_sample
from tiny_vision import make_picture

from ludic.training import ActorTokenLogps, SampleAttachments, SAWItem, collate_saw_items
from ludic.training.loss import BatchTotals


def add_pictures(processor, sizes):
    """The digests of pictures of (width, height) pixels."""
    return [processor.store.add(make_picture(*size, seed=seed)) for seed, size in enumerate(sizes)]


def image_item(processor, parts, answer, *, index=0, group=0, weight=1.0, logps=None):
    """A sample whose prompt has `parts`, texts and digests, and what transformers reads of it."""
    sample = make_sample(processor, parts, answer)
    start = len(sample.ids) - len(answer)
    item = SAWItem(
        input_ids=sample.ids,
        attention_mask=[1] * len(sample.ids),
        action_mask=[0] * start + [1] * len(answer),
        weight=weight,
        meta={"rollout_id": f"i{index}", "step_index": 0, "total_reward": weight, "request_meta": {"group_id": group}},
        attachments=SampleAttachments(ActorTokenLogps(logps or [-5.0] * len(answer))),
        images=sample.spans,
    )
    return item, sample.inputs


def image_groups(processor, digests, *, size=8, seed=0, text="say:"):
    """[(item, inputs)] of one group of `size` answers for each image."""
    draw = random.Random(seed)
    made = []
    for group, digest in enumerate(digests):
        for _ in range(size):
            answer = [draw.randint(97, 122) for _ in range(draw.randint(2, 6))]
            logps = [-4.0 - draw.random() for _ in answer]
            weight = draw.choice([-1.0, 0.5, 1.5])
            parts = ["look ", digest, text]
            made.append(image_item(processor, parts, answer, index=len(made), group=group, weight=weight, logps=logps))
    return made


class OneAnswer(torch.nn.Module):
    """The model as transformers runs it: `pixel_values` of one sample, through the tower."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model, self.inputs = model, {name: value for name, value in inputs.items() if name != "text_replacement_offsets"}

    def forward(self, input_ids, attention_mask):
        assert torch.equal(input_ids, self.inputs["input_ids"])
        return self.model(**self.inputs, use_cache=False)


def once_an_answer(model, made, algo):
    """(gradients, loss) of the mini-batch of [(item, inputs)], each answer alone."""
    counts = np.array([sum(item.action_mask[1:]) for item, _ in made])
    totals = BatchTotals.from_columns(np.array([item.weight for item, _ in made]), counts)
    model.zero_grad(set_to_none=True)
    whole = 0.0
    for item, inputs in made:
        batch = collate_saw_items([item], pad_token_id=0, device="cpu")
        batch.pop("images", None)
        loss, _ = algo.compute_loss(OneAnswer(model, inputs), batch, totals=totals)
        loss.backward()
        whole += loss.item()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}, whole
