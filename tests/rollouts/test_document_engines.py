"""The calls of the `rollouts.training` quick reference that give weights to inference engines,
under its own import paths, against stubs of the servers. `test_document_training` lists which test
runs which block of it."""

import contextlib
import random
from pathlib import Path

import pytest
import torch
from document_samples import make_sample, make_samples
from safetensors.torch import load_file
from stub_sglang import StubSGLang
from stub_weight_server import StubWeightServer, same
from training_samples import TOKENIZER, tiny_model

import ludic.rollouts.alias  # noqa: F401  # binds the name rollouts
from ludic.errors import ConfigError, PublishError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def policy():
    """A model, and the folder that servers were started with."""
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained("model")
    return model


@pytest.fixture
def servers(policy, tmp_path):
    """An SGLang stub and a vLLM stub that serve `policy`."""
    with contextlib.ExitStack() as stack:
        sglang = stack.enter_context(StubSGLang(Path("model")))
        vllm = stack.enter_context(StubWeightServer(tmp_path / "vllm", first=load_file("model/model.safetensors")))
        yield sglang, vllm


async def my_generate_fn(prompts):
    return [make_sample(prompt, 0) for prompt in prompts]


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights_in(checkpoint):
    return load_file(f"{checkpoint}/model.safetensors")


async def test_rl_training(policy, servers):
    from rollouts.training import (
        AsyncRolloutManager,
        DataBuffer,
        PyTorchTrainingBackend,
        RLTrainingConfig,
        RolloutConfig,
        run_rl_training,
    )
    from rollouts.training.rl_losses import grpo_loss
    from rollouts.training.weight_sync import SGLangEngine, sync_weights_to_engines

    model, optimizer, server = policy, make_optimizer(policy), servers[0]

    # Setup
    buffer = DataBuffer(prompts=[f"question {number}" for number in range(40)])
    rollout_config = RolloutConfig(batch_size=32, generate_fn=my_generate_fn)
    rollout_manager = AsyncRolloutManager(buffer, rollout_config)
    engines = [SGLangEngine(server.url)]
    backend = PyTorchTrainingBackend(model, optimizer, grpo_loss, "checkpoints")
    config = RLTrainingConfig(num_steps=3, sync_every=2)

    # Run
    metrics = await run_rl_training(backend, buffer, rollout_manager, engines, config)

    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(0 < line["mean_reward"] < 1 and line["grad_norm"] > 0 for line in metrics)
    loads = [body["weight_version"] for path, body in server.calls if path == "/update_weights_from_disk"]
    assert loads == ["step_000002", "step_000003"]
    assert same(server.served, weights_in("checkpoints/step_000003"))
    await sync_weights_to_engines(engines, "checkpoints/step_000003")  # again, by hand
    assert server.version == "step_000003"


async def test_sync(policy, servers):
    from rollouts.training import PyTorchTrainingBackend
    from rollouts.training.rl_losses import sft_loss
    from rollouts.training.weight_sync import SGLangEngine, VLLMEngine, sync_weights_to_engines

    sglang, vllm = servers
    backend = PyTorchTrainingBackend(policy, make_optimizer(policy), sft_loss, "checkpoints")
    metrics = await backend.forward_backward({"input_ids": torch.tensor([[5, 6, 7]]), "loss_mask": torch.tensor([[0, 1, 1]])})
    await backend.optim_step()
    step = 1

    engines = [
        SGLangEngine(sglang.url),
        VLLMEngine(vllm.url),
    ]

    # After save_checkpoint()
    ckpt_path = await backend.save_checkpoint(step, metrics)

    # Sync in parallel
    responses = await sync_weights_to_engines(engines, str(ckpt_path))

    assert [(response["success"], response["version"]) for response in responses] == [(True, "step_000001")] * 2
    trained = weights_in(ckpt_path)
    assert not same(trained, weights_in("model"))
    assert same(sglang.served, trained)
    assert same(vllm.served, trained)


@pytest.mark.parametrize("fails", [False, True])
async def test_custom_engine(policy, servers, fails):
    """Beside one of ours; when it fails, both serve what they served before."""
    from rollouts.training import PyTorchTrainingBackend, SFTTrainingConfig, run_sft_training
    from rollouts.training.rl_losses import sft_loss
    from rollouts.training.weight_sync import SGLangEngine, sync_weights_to_engines

    loaded = []

    class MyEngine:
        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict:
            loaded.append(Path(checkpoint_path).name)
            return {"success": not (fails and loaded[-1] == "step_000002")}

    # Just add to engines list
    engines = [SGLangEngine(servers[0].url), MyEngine()]

    backend = PyTorchTrainingBackend(policy, make_optimizer(policy), sft_loss, "checkpoints")
    await run_sft_training(backend, make_samples(4), SFTTrainingConfig(num_steps=2, batch_size=2, checkpoint_every=1))
    await sync_weights_to_engines(engines, "checkpoints/step_000001")
    if fails:
        with pytest.raises(PublishError, match="MyEngine"):
            await sync_weights_to_engines(engines, "checkpoints/step_000002", retries=0)
    else:
        responses = await sync_weights_to_engines(engines, "checkpoints/step_000002")
        assert [response["success"] for response in responses] == [True, True]
        assert loaded == ["step_000001", "step_000002"]
    served = "step_000001" if fails else "step_000002"
    assert servers[0].version == served
    assert same(servers[0].served, weights_in(f"checkpoints/{served}"))


class Answer:
    def __init__(self, text):
        self.text, self.correct = text, text == "4"


class DrawingAgent:
    """Answers with a digit."""

    def __init__(self):
        self._draw = random.Random(0)

    async def rollout(self, prompt):
        return Answer(self._draw.choice("345"))


async def test_rl_with_sglang(policy, servers):
    """The document's configuration samples each prompt once and compares the answers to it, which
    is an error that says so. Its `generate_fn` is mended as in `test_document_data`."""
    from rollouts.agents import Agent  # noqa: F401  # the document's ellipsis
    from rollouts.training import (
        AsyncRolloutManager,
        DataBuffer,
        PyTorchTrainingBackend,
        RLTrainingConfig,
        RolloutConfig,
        Sample,
        check_quality_and_diversity,
        run_rl_training,
    )
    from rollouts.training.rl_losses import grpo_loss
    from rollouts.training.weight_sync import SGLangEngine

    agent, tokenizer, server = DrawingAgent(), TOKENIZER, servers[0]
    buffer = DataBuffer([f"1+{number}" for number in range(8)])
    backend = PyTorchTrainingBackend(policy, make_optimizer(policy), grpo_loss, "checkpoints")
    rl_config = RLTrainingConfig(num_steps=2, sync_every=1)

    async def generate_fn(prompts):
        """User-provided: prompts -> samples"""
        samples = []
        for prompt in prompts:
            response = await agent.rollout(prompt)
            prompt_tokens, response_tokens = tokenizer.encode(prompt), tokenizer.encode(response.text)
            sample = Sample(
                prompt=prompt,
                response=response.text,
                tokens=prompt_tokens + response_tokens,
                loss_mask=[0] * len(prompt_tokens) + [1] * len(response_tokens),
                metadata={"correct": response.correct},
            )
            samples.append(sample)
        return samples

    # Setup
    with pytest.raises(ConfigError, match=r"n_samples_per_prompt \(1\) to be at least 2"):
        RolloutConfig(
            batch_size=32,
            generate_fn=generate_fn,
            filter_fn=check_quality_and_diversity,
        )
    rollout_config = RolloutConfig(
        batch_size=32,
        n_samples_per_prompt=4,
        generate_fn=generate_fn,
        filter_fn=check_quality_and_diversity,
    )

    manager = AsyncRolloutManager(buffer, rollout_config)
    engines = [SGLangEngine(server.url)]

    metrics = await run_rl_training(backend, buffer, manager, engines, rl_config)

    assert [line["step"] for line in metrics] == [1, 2]
    assert all(0.25 <= line["mean_reward"] <= 0.75 for line in metrics)  # 1 to 3 right answers in every group of 4
    assert manager.counts.rejected > 0
    assert same(server.served, weights_in("checkpoints/step_000002"))
