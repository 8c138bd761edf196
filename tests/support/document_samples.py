"""Samples, a `generate_fn`, a logger and backends for the loops of `rollouts.training`."""

import random

import torch
from training_samples import tiny_model

from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend
from ludic.rollouts.training.types import Sample


def make_sample(prompt, seed):
    """A prompt of three tokens and an answer of 2 to 6; the reward is 1 for an even first token."""
    draw = random.Random(f"{prompt} {seed}")
    head = random.Random(prompt)
    prompt_ids = [head.randint(3, 60) for _ in range(3)]
    answer = [draw.randint(3, 60) for _ in range(draw.randint(2, 6))]
    return Sample(
        prompt=prompt,
        response=" ".join(map(str, answer)),
        tokens=prompt_ids + answer,
        loss_mask=[0.0] * 3 + [1.0] * len(answer),
        metadata={"correct": answer[0] % 2 == 0},
        rollout_log_probs=[0.0] * 3 + [-1.0 - draw.random() for _ in answer],
        status=Sample.Status.COMPLETED,
    )


def make_samples(count):
    return [make_sample(f"question {number}", number) for number in range(count)]


async def generate(prompts, seeds):
    return [make_sample(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]


def make_backend(folder, loss_fn, *, seed=0, **options):
    model = tiny_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return PyTorchTrainingBackend(model, optimizer, loss_fn, folder, **options)


class ListLogger:
    """Keeps what is logged."""

    def __init__(self):
        self.lines, self.finished = [], 0

    def log(self, metrics, step):
        self.lines.append((step, metrics))

    def finish(self):
        self.finished += 1
