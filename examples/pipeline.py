"""Actors and a trainer in processes of their own, with a queue on a Redis server between them. No
download; about 20 s of processor time.

A small model learns to write digits. The actors sample from the newest weights in a folder that all
processes see, and send samples; the trainer trains on what comes and writes new weights. Any of
them may be killed and started again: the trainer goes on from its checkpoint, and samples that came
after it are still in the queue.

    make redis
    target/redis/redis-server --bind 127.0.0.1 --appendonly yes &
    python examples/pipeline.py actor &
    python examples/pipeline.py actor &
    python examples/pipeline.py trainer

The queue is at `LUDIC_QUEUE_URL`, or else at redis://127.0.0.1:6379.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.inference.client import Publisher
from ludic.interaction import SingleAgentProtocol
from ludic.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from ludic.parsers import ParseResult
from ludic.training import (
    CheckpointConfig,
    EnvSpec,
    GroupNormalizedReturn,
    PipelineBatchSource,
    ProtocolSpec,
    RolloutEngine,
    RolloutRequest,
    Trainer,
    TrainerConfig,
    make_grpo,
    run_pipeline_actor,
)
from ludic.training.batching import GRPORequestStrategy
from ludic.types import StepOutcome

URL = os.environ.get("LUDIC_QUEUE_URL", "redis://127.0.0.1:6379")
GROUP, PROMPTS = 8, 4
SAMPLED = InferenceSpec(SamplingParams(temperature=1.0, max_tokens=4), ReturnSpec.for_rl())


class Digits(SingleAgentEnv):
    """The reward is the share of digits in an answer of four letters."""

    def env_reset(self, *, seed: int | None = None):
        return "digits:", {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", sum(letter in "0123456789" for letter in action) / 4, truncated=False, terminated=True)

    def env_current_obs(self) -> str:
        return "digits:"


def make_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    return Qwen2ForCausalLM(config)


class WeightFolder(Publisher):
    """Writes each version of the weights to a folder: `version_7.safetensors`."""

    def __init__(self, folder: Path, keep: int = 4) -> None:
        self.folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, state_dict: Mapping[str, Tensor], version: str | int | None = None) -> None:
        unfinished = self.folder / "unfinished"
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, unfinished)
        unfinished.rename(self.folder / f"version_{version}.safetensors")
        for old in self.versions()[: -self._keep]:
            self.path(old).unlink()

    def versions(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("version_")) for path in self.folder.glob("version_*"))

    def path(self, version: int) -> Path:
        return self.folder / f"version_{version}.safetensors"


class Actor:
    """Plays with the newest weights of the folder."""

    def __init__(self, weights: WeightFolder) -> None:
        self._weights, self._loaded = weights, -1
        self.client = LocalChatClient(make_model(), make_byte_tokenizer())
        self.engine = RolloutEngine(env_registry={"digits": Digits}, protocol_registry={"single": self._make_protocol})

    def _make_protocol(self) -> SingleAgentProtocol:
        agent = Agent(
            client=self.client,
            model="small",
            ctx=FullDialog(),
            parser=lambda text: ParseResult(text, 0.0, None),
            reject_incomplete_completions=False,  # four letters are the whole answer
        )
        return SingleAgentProtocol(agent)

    async def requests(self) -> list[RolloutRequest]:
        """The requests of the next batch, once there are weights to play them with."""
        while not (versions := self._weights.versions()):
            await asyncio.sleep(0.1)
        if versions[-1] != self._loaded:
            self.client.sync_weights(load_file(self._weights.path(versions[-1])), version=versions[-1])
            self._loaded = versions[-1]
        request = RolloutRequest(EnvSpec("digits"), ProtocolSpec("single"), inference=SAMPLED)
        return GRPORequestStrategy(GROUP).expand([request] * PROMPTS)

    async def run(self) -> None:
        credit = GroupNormalizedReturn(GROUP)
        await run_pipeline_actor(
            self.engine, self.requests, credit, URL, max_steps=1, concurrency=64, client=self.client, max_entries=2 * PROMPTS
        )


async def train(folder: Path, steps: int) -> list[float]:
    """Train from the last checkpoint to step `steps`; returns the mean reward of each step."""
    torch.manual_seed(0)
    source = PipelineBatchSource(URL, batch_size=GROUP * PROMPTS)
    saved = sorted((folder / "checkpoints").glob("step_*"))
    weights = WeightFolder(folder / "weights")
    trainer = Trainer(
        model=make_model(),
        algo=make_grpo(group_size=GROUP),
        batch_source=source,
        publisher=weights,
        cfg=TrainerConfig(lr=3e-3, model_device="cpu", pad_token_id=PAD_ID, max_seq_len=64, micro_token_budget=4096, max_lag=8),
        checkpoint_config=CheckpointConfig(output_dir=folder / "checkpoints", every_n_steps=10),
        resume_from=int(saved[-1].name.removeprefix("step_")) if saved else None,
    )
    if not weights.versions():
        weights.publish(dict(trainer.model.named_parameters()), version=0)
    rewards: list[float] = []

    def show(stats: Mapping[str, float]) -> None:
        rewards.append(stats["train/avg_total_reward"])
        print(f"step {stats['train/step']:.0f}  reward {rewards[-1]:.2f}  policy lag {stats.get('train/policy_lag', 0):.1f}")

    await trainer.train(steps - trainer.current_step, log_fn=show)
    await source.aclose()
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("role", choices=["actor", "trainer"])
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/pipeline"), help="weights and checkpoints; all processes see it"
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.role == "actor":
        asyncio.run(Actor(WeightFolder(options.folder / "weights")).run())
    else:
        asyncio.run(train(options.folder, options.steps))
