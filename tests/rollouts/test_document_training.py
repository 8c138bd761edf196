"""The calls of the `rollouts.training` quick reference that train, under its own import paths. Only
placeholders, names of models, addresses, devices and numbers of steps are filled in.

The reference has 25 blocks that are marked as Python; all but 1 and 21 are Python as they stand
(`f(a=1, ...)` and `import ...` are not). Each runs in a test of its own: in this module, or in D
(`test_document_data`), E (`test_document_engines`) or P (`training/test_pipeline`).

  1 SFT training            test_sft_training        14 sync of weights      E test_sync
  2 RL training             E test_rl_training       15 custom engine        E test_custom_engine
  3 Sample                  D test_sample            16 DataBuffer           D test_data_buffer
  4 RolloutBatch            D test_rollout_batch     17 data sets            D test_sft_dataset
  5 configurations          D test_configurations    18 SFT, then RL         P test_sft_then_rl
  6 rollout manager         D test_async_rollout...  19 JSONLLogger          D test_logger
  7 pure generation         D test_pure_function...  20 single-GPU SFT       test_single_gpu_sft
  8 TrainingBackend         test_protocol            21 RL with SGLang       E test_rl_with_sglang
  9 PyTorchTrainingBackend  test_pytorch_backend        its generate_fn      D test_generate_fn...
 10 FSDPTrainingBackend     test_fsdp_backend        22 advantages           test_advantages
 11 factory                 test_factory             23 filters              D test_filters
 12 grpo_loss               test_grpo_loss           24 futures              test_futures
 13 ppo_loss                test_ppo_loss            25 loading checkpoints  test_checkpoint_loading

Lines of two others than 1 have to be mended: 18 sorts a path, which is Python's error, and 21 gives
tokens and a filter that do not fit, which are errors that say what to write instead.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from document_samples import make_samples
from training_samples import TOKENIZER, assert_same_tensors, tiny_model, weights_of

import ludic.rollouts.alias  # noqa: F401  # binds the name rollouts
from ludic.errors import ConfigError


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def my_loss_fn(logits, batch):
    """The mean over trained tokens, as a user may write it."""
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch["labels"][:, 1:, None])[..., 0]
    mask = batch["loss_mask"][:, 1:]
    return -(logp * mask).sum() / mask.sum()


def make_batch():
    """Two rows of a prompt of two tokens and answers of two and one."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]),
        "advantages": torch.tensor([1.0, -0.5]),
    }


def log_probabilities(model, batch):
    """[B, T] of the labels, 0 at the first token of a row."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch["labels"][:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(len(logp), 1), logp], 1)


@pytest.fixture(scope="module")
def named_model(tmp_path_factory):
    """A folder with a model and its tokenizer, in the place of a name on the hub."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


async def test_sft_training():
    from rollouts.training import PyTorchTrainingBackend, SFTTrainingConfig, run_sft_training
    from rollouts.training.metrics import JSONLLogger

    model, samples, metrics_logger = tiny_model(), make_samples(6), JSONLLogger("logs")
    optimizer, loss_fn = make_optimizer(model), my_loss_fn

    backend = PyTorchTrainingBackend(model, optimizer, loss_fn, "checkpoints")
    config = SFTTrainingConfig(num_steps=9, batch_size=4)
    metrics = await run_sft_training(backend, samples, config, metrics_logger)

    assert [line["step"] for line in metrics] == list(range(1, 10))
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
    [line] = Path("logs/metrics.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["loss"]) == (9, metrics[-1]["loss"])


async def test_protocol():
    """A class with the three methods trains as ours does."""
    from typing import Dict, Protocol  # noqa: UP035  # the document's names

    from rollouts.training import ImmediateTrainFuture, PyTorchTrainingBackend, SFTTrainingConfig, TrainFuture, run_sft_training

    class TrainingBackend(Protocol):
        async def forward_backward(self, batch: Dict) -> TrainFuture[Dict[str, float]]:  # noqa: UP006
            """Returns {"loss": float, "grad_norm": float, ...}"""
            ...

        async def optim_step(self) -> TrainFuture[Dict[str, float]]:  # noqa: UP006
            """Returns {"lr": float, "step": int, ...}"""
            ...

        async def save_checkpoint(self, step: int, metrics: Dict) -> Path:  # noqa: UP006
            """Save checkpoint, return path"""
            ...

    class MyBackend(TrainingBackend):
        def __init__(self):
            self.model, self.saved, self.steps = tiny_model(), [], 0
            self.optimizer = make_optimizer(self.model)

        async def forward_backward(self, batch):
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = my_loss_fn(logits, batch)
            loss.backward()
            return ImmediateTrainFuture({"loss": loss.item(), "grad_norm": 1.0})

        async def optim_step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            return ImmediateTrainFuture({"lr": 1e-2, "step": self.steps})

        async def save_checkpoint(self, step, metrics):
            self.saved.append((step, metrics["loss"]))
            return Path(str(step))

    config, own = SFTTrainingConfig(num_steps=3, batch_size=4), MyBackend()
    metrics = await run_sft_training(own, make_samples(6), config)
    model = tiny_model()
    expected = await run_sft_training(
        PyTorchTrainingBackend(model, make_optimizer(model), my_loss_fn, "ours"), make_samples(6), config
    )
    assert [line["loss"] for line in metrics] == pytest.approx([line["loss"] for line in expected], abs=1e-5)
    assert own.saved == [(3, metrics[-1]["loss"])]
    assert metrics[-1]["optim_step"] == 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def test_pytorch_backend(device):
    from rollouts.training import PyTorchTrainingBackend

    model = tiny_model().to(device)
    optimizer = make_optimizer(model)
    backend = PyTorchTrainingBackend(
        model=model,
        optimizer=optimizer,
        loss_fn=my_loss_fn,
        checkpoint_dir=Path("checkpoints"),
        device=torch.device(device),
    )
    metrics = await backend.forward_backward(make_batch())
    expected = my_loss_fn(tiny_model()(input_ids=make_batch()["input_ids"]).logits, make_batch())
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["grad_norm"] > 0
    assert (await backend.optim_step())["step"] == 1
    assert await backend.save_checkpoint(1, metrics) == Path("checkpoints/step_000001")


@pytest.fixture
def one_rank(monkeypatch):
    """The environment that torchrun makes for one process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


async def test_fsdp_backend(one_rank):
    """On one rank; `training/backends/test_fsdp` has two."""
    import torch.distributed as dist
    from rollouts.training.backends.fsdp import FSDPConfig, FSDPTrainingBackend

    model = tiny_model()

    dist.init_process_group(backend="gloo")

    backend = FSDPTrainingBackend(
        model=model,
        optimizer_fn=lambda m: torch.optim.AdamW(m.parameters()),
        loss_fn=my_loss_fn,
        checkpoint_dir=Path("checkpoints"),
        config=FSDPConfig(
            sharding_strategy="FULL_SHARD",
            mixed_precision=True,
            gradient_checkpointing=False,
        ),
    )
    losses = []
    for _ in range(4):
        losses.append((await backend.forward_backward(make_batch()))["loss"])
        await backend.optim_step()
    expected = my_loss_fn(tiny_model()(input_ids=make_batch()["input_ids"]).logits, make_batch())
    assert losses[0] == pytest.approx(expected.item(), rel=2e-2)  # bfloat16 has 8 bits
    assert losses[3] < losses[0]
    assert backend.get_state_snapshot()["is_fsdp"]
    assert {"model.safetensors", "metadata.json"} <= {file.name for file in (await backend.save_checkpoint(4, {})).iterdir()}


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_factory(named_model, device_type):
    from rollouts.training.backends import create_pytorch_backend

    backend = create_pytorch_backend(
        model_name=named_model,
        checkpoint_dir=Path("checkpoints"),
        device_type=device_type,
        learning_rate=1e-4,
    )
    assert backend.get_state_snapshot()["dtype"] == "bfloat16"
    assert (await backend.forward_backward(make_batch()))["loss"] > 0
    assert (await backend.optim_step())["lr"] == 1e-4


def test_without_a_gpu_the_factory_says_what_to_leave_out(named_model, monkeypatch):
    from rollouts.training.backends import create_pytorch_backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA device; .*device_type"):
        create_pytorch_backend(model_name=named_model, checkpoint_dir=Path("checkpoints"), device_type="cuda", learning_rate=1e-4)


def test_grpo_loss():
    from rollouts.training.rl_losses import grpo_loss

    model, batch = tiny_model(), make_batch()
    model_output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])

    loss = grpo_loss(
        logits=model_output.logits,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        advantages=batch["advantages"],
    )
    logp = log_probabilities(model, batch)
    # -E[log_prob(sequence) * advantage]: means over two tokens and one, times 1 and -0.5
    by_hand = -((logp[0, 2] + logp[0, 3]) / 2 * 1.0 + logp[1, 2] * -0.5) / 2
    assert loss.item() == pytest.approx(by_hand.item(), abs=1e-6)
    loss.backward()
    by_hand_gradient = torch.autograd.grad(by_hand, model.lm_head.weight)[0]
    assert torch.allclose(model.lm_head.weight.grad, by_hand_gradient, atol=1e-6)


def test_ppo_loss():
    from rollouts.training.rl_losses import ppo_loss

    model, batch = tiny_model(), make_batch()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    ratios = torch.tensor([[1.0, 1.0, 1.1, 3.0], [1.0, 1.0, 0.5, 1.0]])  # of the policy now to that which sampled

    loss = ppo_loss(
        logits=logits,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        advantages=batch["advantages"],
        old_log_probs=log_probabilities(model, batch).detach() - ratios.log(),
        clip_range=0.2,
    )
    # min(r A, clip(r, 0.8, 1.2) A) is 1.1 and 1.2 for A = 1, and -0.4 for r = 0.5 and A = -0.5
    assert loss.item() == pytest.approx(-(1.1 + 1.2 - 0.4) / 3, abs=1e-5)


async def test_single_gpu_sft(named_model):
    """The device is what is there: a GPU, or the CPU."""
    from rollouts.training import SFTTrainingConfig, run_sft_training
    from rollouts.training.backends import create_pytorch_backend

    sft_samples = make_samples(6)

    backend = create_pytorch_backend(
        model_name=named_model,
        checkpoint_dir=Path("ckpts"),
        learning_rate=1e-4,
    )

    metrics = await run_sft_training(
        backend=backend,
        samples=sft_samples,
        config=SFTTrainingConfig(num_steps=2, batch_size=4),
    )
    assert [(line["step"], line["lr"]) for line in metrics] == [(1, 1e-4), (2, 1e-4)]
    assert all(math.isfinite(line["loss"]) for line in metrics)
    assert Path("ckpts/step_000002/metadata.json").is_file()


async def test_advantages():
    from rollouts.training import RLTrainingConfig, Sample
    from rollouts.training.loops.rl_loop import compute_advantages, prepare_grpo_batch
    from rollouts.training.rl_losses import grpo_loss
    from rollouts.training.rollout_gen import convert_to_batch

    samples, rewards = make_samples(2), [1.0, 0.0]
    assert all(isinstance(sample, Sample) for sample in samples)
    rl_batch = prepare_grpo_batch(convert_to_batch(samples), rewards, RLTrainingConfig(num_steps=1, baseline=0.5))
    prepared = rl_batch["advantages"]

    advantages = compute_advantages(rewards, baseline=0.5)
    rl_batch["advantages"] = torch.tensor(advantages)

    assert rl_batch["advantages"].tolist() == prepared.tolist() == [0.5, -0.5]
    model = tiny_model()
    logits = model(input_ids=rl_batch["input_ids"], attention_mask=rl_batch["attention_mask"]).logits
    assert grpo_loss(logits, rl_batch["labels"], rl_batch["loss_mask"], rl_batch["advantages"]).item() != 0


async def test_futures():
    from rollouts.training import PyTorchTrainingBackend

    model, batch = tiny_model(), make_batch()
    backend = PyTorchTrainingBackend(model, make_optimizer(model), my_loss_fn, "checkpoints")

    fwd_future = backend.forward_backward(batch)
    next_batch = make_batch()  # other work
    fwd_metrics = await fwd_future.result()

    opt_metrics = await backend.optim_step().result()

    assert {"loss", "grad_norm"} <= fwd_metrics.keys()
    assert (opt_metrics["lr"], opt_metrics["step"]) == (1e-2, 1)
    ahead = [backend.forward_backward(next_batch), backend.optim_step()]  # the step before its gradient is awaited
    assert (await ahead[0])["loss"] < fwd_metrics["loss"]
    assert (await ahead[1])["step"] == 2


async def test_checkpoint_loading(named_model):
    """Loading works, and so do the document's two ways around it."""
    from rollouts.training.backends import create_pytorch_backend

    settings = {"checkpoint_dir": Path("checkpoints"), "dtype": "float32", "learning_rate": 1e-2}
    trained = create_pytorch_backend(named_model, **settings)
    await trained.forward_backward(make_batch())
    await trained.optim_step()
    checkpoint = await trained.save_checkpoint(1, {})

    backend = create_pytorch_backend(named_model, **settings)  # Fresh model
    metadata = await backend.load_checkpoint(checkpoint)
    assert (metadata["step"], backend.current_step) == (1, 1)
    assert_same_tensors(weights_of(backend.model), weights_of(trained.model))

    by_hand = create_pytorch_backend(named_model, **settings)
    await by_hand.load_weights(await trained.get_weights())
    assert_same_tensors(weights_of(by_hand.model), weights_of(trained.model))
    assert (await backend.forward_backward(make_batch()))["loss"] == (await by_hand.forward_backward(make_batch()))["loss"]
