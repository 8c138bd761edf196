"""A run of `run_rl_training` that can be killed and goes on when it is started again:
`python -m benches.python.rollout_loop FOLDER --sampler model|seed [--factor 1.5]`.

`model`: a member is sampled from the model that is trained, a token at a time. `seed`: it follows
from its seed alone, and takes up to 50 ms, so that groups are in the air whenever the run is saved.
Groups of equal rewards are refused, and prompts are trained in their order.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from benches.python.random_models import make_qwen2

PROMPTS = [f"question {n}" for n in range(12)]
VOCABULARY, END, MOST_TOKENS = 64, 2, 6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.rollout_loop", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sampler", choices=["model", "seed"], default="seed")
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    numpy.random.seed(0)
    asyncio.run(train(options))


async def train(options: argparse.Namespace) -> None:
    """Go on from the newest checkpoint of the folder up to the last step."""
    import torch

    from ludic.rollouts.training import (
        AsyncRolloutManager,
        DataBuffer,
        PyTorchTrainingBackend,
        RLTrainingConfig,
        RolloutConfig,
        run_rl_training,
    )
    from ludic.rollouts.training.metrics import JSONLLogger
    from ludic.rollouts.training.rl_losses import ppo_loss
    from ludic.training.rollouts.group_filters import check_reward_nonzero_std

    torch.set_num_threads(1)

    class LoggedManager(AsyncRolloutManager):
        """Writes what it gives to `samples.jsonl`, before it is trained."""

        async def generate_batch(self, *arguments: Any) -> Any:
            batch = await super().generate_batch(*arguments)
            samples = [[sample.index, sample.prompt, digest(sample)] for sample in batch.samples]
            with (options.folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps({"batch": batch.metadata["step_id"], "samples": samples}) + "\n")
            return batch

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backend = PyTorchTrainingBackend(model, optimizer, ppo_loss, options.folder / "checkpoints", in_thread=False)
    config = RolloutConfig(
        batch_size=3,
        n_samples_per_prompt=3,
        over_sampling_factor=options.factor,
        order="submission",
        generate_fn=sample_by_seed if options.sampler == "seed" else sampler_of(model),
        reward_fn=lambda sample: float(sum(sample.tokens) % 2),
        filter_fn=check_reward_nonzero_std,
        patience=100,
    )
    buffer = DataBuffer(PROMPTS)
    settings = RLTrainingConfig(num_steps=options.steps, checkpoint_every=1, log_every=1)
    logger = JSONLLogger(options.folder)
    await run_rl_training(backend, buffer, LoggedManager(buffer, config), None, settings, logger, resume=True)


def make_model() -> Any:
    sizes = {"width": 16, "inner": 32, "layers": 2, "heads": 2, "key_value_heads": 1}
    ids = {"pad_token_id": 0, "eos_token_id": END, "bos_token_id": None}
    return make_qwen2(VOCABULARY, **sizes, max_position_embeddings=32, **ids)


def ids_of(prompt: str) -> list[int]:
    """Three ids that follow from the prompt."""
    draw = random.Random(prompt)
    return [draw.randint(3, VOCABULARY - 1) for _ in range(3)]


def make_sample(prompt: str, answer: list[int], logps: list[float]) -> Any:
    from ludic.rollouts.training import Sample

    ids = ids_of(prompt)
    zeros = [0.0] * len(ids)
    masks = {"loss_mask": zeros + [1.0] * len(answer), "rollout_log_probs": zeros + logps}
    return Sample(prompt, " ".join(map(str, answer)), ids + answer, **masks, status=Sample.Status.COMPLETED)


def digest(sample: Any) -> str:
    """Ids, log-probabilities as they are trained, and reward."""
    logps = numpy.float32(sample.rollout_log_probs).tobytes()
    return hashlib.sha256(json.dumps([sample.tokens, sample.reward]).encode() + logps).hexdigest()[:16]


async def sample_by_seed(prompts: list[str], seeds: list[int]) -> list[Any]:
    samples = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        draw = random.Random(f"{prompt} {seed}")
        await asyncio.sleep(0.05 * draw.random())
        answer = [draw.randint(3, VOCABULARY - 1) for _ in range(draw.randint(2, MOST_TOKENS))]
        samples.append(make_sample(prompt, answer, [-1.0 - draw.random() for _ in answer]))
    return samples


def sampler_of(model: Any) -> Any:
    """A `generate_fn` of the model's present weights. It takes turns with other members after each
    token."""
    import torch

    async def sample_from_model(prompts: list[str], seeds: list[int]) -> list[Any]:
        samples = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            generator, answer, logps = torch.Generator().manual_seed(seed), [], []
            while len(answer) < MOST_TOKENS and END not in answer:
                with torch.no_grad():
                    logits = model(torch.tensor([ids_of(prompt) + answer])).logits[0, -1]
                distribution = torch.log_softmax(logits, dim=-1)
                answer.append(int(torch.multinomial(distribution.exp(), 1, generator=generator)))
                logps.append(float(distribution[answer[-1]]))
                await asyncio.sleep(0)
            samples.append(make_sample(prompt, answer, logps))
        return samples

    return sample_from_model


if __name__ == "__main__":
    main()
