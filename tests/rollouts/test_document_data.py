"""The calls of the `rollouts.training` quick reference that need no backend and no engine, under
its own import paths. Only placeholders, names of models and data, and step counts are filled in.

Here: Sample, RolloutBatch, the three configurations, the manager, the generator, the buffer, data
sets, the logger, filters, and the `generate_fn` of an agent.
"""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from chat_tokenizers import CHATML, chat_tokenizer

import ludic.rollouts.alias  # noqa: F401  # binds the name rollouts
from ludic.errors import DataError


@dataclass
class Answer:
    text: str
    correct: bool


class ScriptedAgent:
    async def rollout(self, prompt):
        await asyncio.sleep(0)
        return Answer("4", "2+2" in prompt)


agent, tokenizer = ScriptedAgent(), chat_tokenizer(CHATML)


def my_generate_fn(prompts):
    from rollouts.training import Sample

    return [Sample(prompt=prompt, response="4", tokens=[53, 55], loss_mask=[0.0, 1.0]) for prompt in prompts]


def test_sample():
    from rollouts.training.types import Sample

    sample = Sample(
        prompt="What is 2+2?",
        response="4",
        tokens=[53, 46, 55, 2],
        loss_mask=[0.0, 0.0, 1.0, 1.0],
        reward=1.0,
        metadata={"correct": True},
    )
    assert sample.status is Sample.Status.PENDING


def test_rollout_batch():
    from rollouts.training.types import RolloutBatch

    batch = RolloutBatch(
        tokens=[[1, 2, 3, 4, 5], [1, 2, 3]],
        loss_masks=[[1.0] * 5, [1.0] * 3],
        rewards=[1.0, 0.0],
        response_lengths=[5, 3],
        metadata={},
    )
    assert batch.samples == []


def test_configurations():
    from rollouts.training.types import RLTrainingConfig, RolloutConfig, SFTTrainingConfig

    sft = SFTTrainingConfig(num_steps=1000, batch_size=4, log_every=100, checkpoint_every=500)
    rl = RLTrainingConfig(num_steps=1000, sync_every=10, baseline=0.0, log_every=10, checkpoint_every=100)
    config = RolloutConfig(
        batch_size=32,
        n_samples_per_prompt=1,
        over_sampling_factor=1.5,
        generate_fn=my_generate_fn,
        reward_fn=None,
        filter_fn=None,
    )
    assert (sft.batch_size, rl.sync_every, config.batch_size) == (4, 10, 32)


def test_async_rollout_manager():
    from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig

    def my_reward_fn(sample):
        return float(sample.response == "4")

    async def main():
        buffer = DataBuffer(prompts=["What is 2+2?", "Calculate 5*7"])
        config = RolloutConfig(batch_size=32, generate_fn=my_generate_fn)
        manager = AsyncRolloutManager(buffer, config)

        async with manager:
            batch = await manager.generate_batch(reward_fn=my_reward_fn)
            return batch.tokens, batch.loss_masks, batch.rewards

    tokens, loss_masks, rewards = asyncio.run(main())
    assert (len(tokens), len(loss_masks), rewards) == (32, 32, [1.0] * 32)


def test_pure_function_generation():
    from rollouts.training import DataBuffer, RolloutConfig
    from rollouts.training.rollout_gen import generate_rollout_batches

    buffer = DataBuffer(prompts=["What is 2+2?"] * 64, epochs=1)
    config = RolloutConfig(batch_size=32, generate_fn=my_generate_fn)
    batches = generate_rollout_batches(buffer, config)

    sizes = []
    for batch in batches:
        sizes.append(len(batch.tokens))  # noqa: PERF401  # the document's loop
    assert sizes == [32, 32]


def test_data_buffer():
    from rollouts.training.datasets import DataBuffer

    buffer = DataBuffer(prompts=["What is 2+2?", "Calculate 5*7"], seed=42)
    batch = buffer.get_prompts(32)
    assert sorted(set(batch)) == ["Calculate 5*7", "What is 2+2?"]
    state = buffer.save_state()
    buffer.load_state(state)
    assert buffer.epoch_id == 16


def test_sft_dataset(tmp_path, monkeypatch):
    """The columns are those of gsm8k; `subset` names a part of a data set of the hub."""
    from rollouts.training.datasets import load_sft_dataset

    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i} + {i}?", "answer": f"{i} and {i} is {2 * i}\n#### {2 * i}"} for i in range(3)]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = load_sft_dataset(
        "gsm8k.jsonl",
        tokenizer=tokenizer,
        split="train",
        subset="main",
        max_samples=1000,
        max_length=2048,
    )
    assert [sample.response for sample in samples] == [row["answer"] for row in rows]
    assert all(len(sample.tokens) == len(sample.loss_mask) for sample in samples)


def test_logger(tmp_path, monkeypatch):
    from rollouts.training.metrics import JSONLLogger

    monkeypatch.chdir(tmp_path)
    logger = JSONLLogger(Path("logs/experiment_001"))
    logger.log({"loss": 0.5, "reward": 1.0, "step": 42}, step=42)
    logger.finish()
    assert os.listdir("logs/experiment_001") == ["metrics.jsonl"]


def test_filters():
    from rollouts.training import RolloutConfig, Sample
    from rollouts.training.filters import (
        check_min_reward,
        check_quality_and_diversity,
        check_response_diversity,
        check_reward_nonzero_std,
    )

    def my_filter(samples: list[Sample]) -> bool:
        return all([check_min_reward(samples, threshold=0.5), check_response_diversity(samples)])

    config = RolloutConfig(batch_size=32, generate_fn=my_generate_fn, filter_fn=my_filter)
    group = [Sample("p", "4", reward=1.0), Sample("p", "5", reward=0.0)]
    assert config.filter_fn(group)
    assert check_reward_nonzero_std(group)
    assert check_quality_and_diversity(group)


def test_generate_fn_of_an_agent():
    """The document's own lines give tokens of the answer and a mask of prompt and answer, which is
    an error that says so; with the prompt's tokens in front, they run."""
    from rollouts.agents import Agent  # noqa: F401
    from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample

    with_prompt = False

    async def generate_fn(prompts):
        samples = []
        for prompt in prompts:
            response = await agent.rollout(prompt)
            prompt_tokens, response_tokens = tokenizer.encode(prompt), tokenizer.encode(response.text)
            sample = Sample(
                prompt=prompt,
                response=response.text,
                tokens=(prompt_tokens if with_prompt else []) + tokenizer.encode(response.text),
                loss_mask=[0] * len(prompt_tokens) + [1] * len(response_tokens),
                metadata={"correct": response.correct},
            )
            samples.append(sample)
        return samples

    manager = AsyncRolloutManager(
        DataBuffer(["What is 2+2?", "Calculate 5*7"]), RolloutConfig(batch_size=2, generate_fn=generate_fn)
    )
    with pytest.raises(DataError, match=r"tokens and a loss_mask of \d+; both must cover"):
        asyncio.run(manager.generate_batch())
    with_prompt = True
    batch = asyncio.run(manager.generate_batch())
    assert batch.metadata["sample_correct"] == [True, False]
