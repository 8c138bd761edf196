"""Backends from a name, a checkpoint folder, or their parts."""

import pytest
import torch
from training_samples import TOKENIZER, assert_same_tensors, tiny_model, weights_of

from ludic.errors import ConfigError
from ludic.rollouts.training.backends import (
    PyTorchTrainingBackend,
    compute_device_map_single_gpu,
    create_adamw_optimizer,
    create_backend_with_scheduler,
    create_pytorch_backend,
    create_warmup_cosine_scheduler,
    parse_dtype,
)
from ludic.rollouts.training.rl_losses import sft_loss

BATCH = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "loss_mask": torch.tensor([[0, 0, 1, 1]])}


async def test_a_checkpoint_folder_is_a_model_name(tmp_path):
    options = {"device_type": "cpu", "dtype": "float32", "learning_rate": 1e-2}
    source = create_pytorch_backend("unused", tmp_path / "sft", model=tiny_model(), tokenizer=TOKENIZER, **options)
    await source.forward_backward(BATCH)
    assert (await source.optim_step())["lr"] == 1e-2
    folder = await source.save_checkpoint(1)
    backend = create_pytorch_backend(folder, tmp_path / "rl", **options)
    assert_same_tensors(weights_of(backend.model), weights_of(source.model))
    assert backend.tokenizer.encode("sort") == TOKENIZER.encode("sort")
    assert await backend.forward_backward(BATCH) == await source.forward_backward(BATCH)


async def test_a_checkpoint_of_a_backend_without_a_tokenizer_is_a_model_name_too(tmp_path):
    model = tiny_model()
    source = PyTorchTrainingBackend(model, create_adamw_optimizer(model, 1e-2), sft_loss, tmp_path / "sft")
    folder = await source.save_checkpoint(1)
    backend = create_pytorch_backend(folder, tmp_path / "rl", device_type="cpu", dtype="float32")
    assert_same_tensors(weights_of(backend.model), weights_of(model))
    assert backend.tokenizer is None
    (folder / "metadata.json").unlink()  # then it is any model, whose tokenizer is missing
    with pytest.raises(ConfigError, match="has no tokenizer"):
        create_pytorch_backend(folder, tmp_path / "rl", device_type="cpu", dtype="float32")


async def test_the_schedule_is_stepped_by_the_backend(tmp_path):
    options = {"model": tiny_model(), "device_type": "cpu", "learning_rate": 0.1, "warmup_ratio": 0.5}
    backend, scheduler = create_backend_with_scheduler("unused", tmp_path, 4, **options)
    rates = []
    for _ in range(3):
        await backend.forward_backward(BATCH)
        rates.append((await backend.optim_step())["lr"])
    assert rates == pytest.approx([0.01, 0.055, 0.1])
    assert scheduler.last_epoch == 3


def test_the_schedule_warms_up_and_falls_by_a_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = create_warmup_cosine_scheduler(optimizer, 2, 6, min_lr_ratio=0.0)
    factors = [scheduler.lr_lambdas[0](step) for step in range(8)]
    # cos(pi k / 4) for k = 0 .. 4: 1, 0.7071, 0, -0.7071, -1
    assert factors == pytest.approx([0.1, 0.55, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0], abs=1e-6)


def test_names_of_dtypes_and_devices():
    assert parse_dtype("bfloat16") is torch.bfloat16
    assert compute_device_map_single_gpu("cuda", 3) == {"": "cuda:3"}
    assert compute_device_map_single_gpu("cpu", 0) is None
    for call in (
        lambda: parse_dtype("fp8"),
        lambda: compute_device_map_single_gpu("tpu", 0),
        lambda: create_adamw_optimizer(tiny_model(), lr=1.5),
        lambda: create_backend_with_scheduler("unused", "x", 10, warmup_ratio=2.0),
    ):
        with pytest.raises(ConfigError, match="must be"):
            call()
