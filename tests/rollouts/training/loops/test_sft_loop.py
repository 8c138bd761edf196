"""Supervised fine-tuning: a `Trainer` on samples, and nothing else."""

import asyncio

import pytest
import torch
from document_samples import ListLogger, make_backend, make_samples
from training_samples import assert_same_tensors, tiny_model, weights_of

from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.files.atomic import read_json
from ludic.models.images.rows import RowImages
from ludic.rollouts.training import Sample, SFTTrainingConfig, run_sft_training
from ludic.rollouts.training.backends.protocol import ForeignBackend
from ludic.rollouts.training.loops.sft_loop import collate_batch, prepare_sft_batch
from ludic.rollouts.training.rl_losses import SFT_LOSS, sft_loss
from ludic.training import RLAlgorithm, SAWItem, Trainer, TrainerConfig
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.packing import MicroBatch
from ludic.training.credit_assignment import ConstantCredit

CONFIG = SFTTrainingConfig(num_steps=5, batch_size=3, log_every=2, checkpoint_every=2)


@pytest.mark.parametrize("in_thread", [True, False])
async def test_the_loop_ends_with_the_bits_of_a_trainer_written_by_hand(tmp_path, in_thread):
    samples = make_samples(7)
    backend = make_backend(tmp_path, sft_loss, in_thread=in_thread)
    metrics = await run_sft_training(backend, samples, CONFIG)

    model = tiny_model()
    items = [
        SAWItem(sample.tokens, [1] * len(sample.tokens), [int(value) for value in sample.loss_mask], 1.0) for sample in samples
    ]
    trainer = Trainer(
        model=model,
        algo=RLAlgorithm("sft", ConstantCredit(1.0), SFT_LOSS),
        batch_source=ItemBatchSource(items, batch_size=3, seed=0),
        cfg=TrainerConfig(
            lr=1e-2, weight_decay=1e-2, max_grad_norm=None, max_seq_len=128, model_device="cpu", sync_every_steps=0
        ),
    )
    losses = []
    await trainer.train(5, log_fn=lambda stats: losses.append(stats["train/loss"]))
    assert_same_tensors(weights_of(backend.model), weights_of(model))
    assert [line["loss"] for line in metrics] == losses


async def test_metrics_checkpoints_and_the_logger(tmp_path):
    logger = ListLogger()
    backend = make_backend(tmp_path, sft_loss)
    metrics = await run_sft_training(backend, make_samples(4), CONFIG, logger)
    assert [(line["step"], line["optim_step"], line["epoch"]) for line in metrics] == [
        (1, 1, 0.0),
        (2, 2, 0.0),
        (3, 3, 1.0),
        (4, 4, 1.0),
        (5, 5, 2.0),
    ]
    assert all({"loss", "grad_norm", "lr", "train/loss"} <= line.keys() for line in metrics)
    assert [step for step, _ in logger.lines] == [2, 4, 5]  # every second, and the last
    assert logger.finished == 1
    assert not [name for line in metrics for name in line if "reward" in name]  # demonstrations have none
    for line in logger.lines:
        saved = read_json(tmp_path / f"step_{line[0]:06d}" / "metadata.json")["metrics"]
        assert saved["loss"] == line[1]["loss"]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000004", "step_000005"]


async def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path):
    samples = make_samples(5)
    whole = make_backend(tmp_path / "whole", sft_loss)
    expected = await run_sft_training(whole, samples, CONFIG)
    parts = tmp_path / "parts"
    await run_sft_training(make_backend(parts, sft_loss), samples, SFTTrainingConfig(num_steps=3, batch_size=3))
    resumed = make_backend(parts, sft_loss, seed=9)
    rest = await run_sft_training(resumed, samples, CONFIG, resume=True)
    assert [(line["step"], line["loss"]) for line in rest] == [(line["step"], line["loss"]) for line in expected[3:]]
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))
    assert await run_sft_training(resumed, samples, CONFIG, resume=True) == []


class UserBackend:
    """Three methods over a plain torch loop: a coroutine function, and functions that answer with a
    mapping."""

    def __init__(self, folder):
        self.model, self.folder, self.saved, self.steps = tiny_model(), folder, [], 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    async def forward_backward(self, batch):
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = sft_loss(logits, batch["labels"], batch["loss_mask"])
        loss.backward()
        return {"loss": loss.item(), "size": len(batch["labels"])}

    def optim_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return {"lr": 1e-2, "step": self.steps}

    async def save_checkpoint(self, step, metrics):
        self.saved.append((step, metrics["loss"]))
        return self.folder / str(step)


async def test_a_backend_of_the_users_own_trains_in_the_same_loop(tmp_path):
    samples, own = make_samples(7), UserBackend(tmp_path)
    backend = make_backend(tmp_path / "ours", sft_loss)
    metrics = await run_sft_training(own, samples, CONFIG)
    expected = await run_sft_training(backend, samples, CONFIG)
    assert [line["loss"] for line in metrics] == pytest.approx([line["loss"] for line in expected], abs=1e-6)
    assert_same_tensors(weights_of(own.model), weights_of(backend.model), atol=1e-4)  # AdamW divides by small numbers
    assert [step for step, _ in own.saved] == [2, 4, 5]
    assert (metrics[-1]["optim_step"], metrics[-1]["train/size"]) == (5, 3)


async def test_a_backend_without_the_methods_is_refused_and_the_logger_finished():
    logger = ListLogger()
    with pytest.raises(ConfigTypeError, match="backend object has no forward_backward, optim_step, save_checkpoint"):
        await run_sft_training(object(), make_samples(2), CONFIG, logger)
    with pytest.raises(DataError, match=r"sample 0 has no token .*train"):
        await run_sft_training(object(), [Sample("a", tokens=[5], loss_mask=[0.0])], CONFIG, logger)
    assert logger.finished == 2


async def test_a_backend_of_the_users_own_cannot_be_resumed_by_the_loop(tmp_path):
    with pytest.raises(ConfigError, match="resume=True needs a PyTorchTrainingBackend"):
        await run_sft_training(UserBackend(tmp_path), make_samples(2), CONFIG, resume=True)


def test_a_batch_wraps_over_the_end_as_often_as_needed():
    a, b, c = make_samples(3)
    assert collate_batch([a, b, c], 2, 0) == [a, b]
    assert collate_batch([a, b, c], 2, 1) == [c, a]
    assert collate_batch([a, b, c], 7, 1) == [b, c, a, b, c, a, b]
    with pytest.raises(ConfigError, match="samples is empty"):
        collate_batch([], 2, 0)


async def test_packed_samples_train_as_padded_ones(tmp_path):
    samples = make_samples(3)
    batch = prepare_sft_batch(samples)
    lengths = [len(sample.tokens) for sample in samples]
    assert batch["cu_seqlens"].tolist() == [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
    assert batch["position_ids"][0].tolist() == [position for length in lengths for position in range(length)]
    packed, padded = make_backend(tmp_path / "a", sft_loss), make_backend(tmp_path / "b", sft_loss)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.tokens) for sample in samples], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.loss_mask) for sample in samples], batch_first=True)
    columns = {"input_ids": ids, "attention_mask": (ids != 0).long(), "loss_mask": mask}
    losses = [(await backend.forward_backward(each))["loss"] for backend, each in ((packed, batch), (padded, columns))]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_backend_of_columns_refuses_images():
    class Columns:
        def forward_backward(self, batch):
            raise AssertionError("it is not called")

        optim_step = save_checkpoint = forward_backward

    images = MicroBatch({"images": RowImages(9, [()])}, 1)
    with pytest.raises(ConfigError, match="Columns gets columns of numbers"):
        asyncio.run(ForeignBackend(Columns()).forward_backward(images).result())
