"""Training with adapters: only they change, the gradient is that of the unsplit batch, and a
resumed run equals the uninterrupted one."""

import asyncio
import random
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file
from training_samples import (
    DrawingSource,
    ListSource,
    assert_same_tensors,
    cpu_config,
    gradients_of,
    sorting_items,
    tiny_model,
    weights_of,
)

from ludic.errors import CheckpointError, ConfigError
from ludic.training import (
    CheckpointConfig,
    CISPOLoss,
    LoraSettings,
    MaskedCausalLMCrossEntropyLoss,
    RLAlgorithm,
    TokenClippedSurrogateLoss,
    Trainer,
    apply_lora,
    collate_saw_items,
    make_grpo,
)
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.credit_assignment import ConstantCredit

COUNT = 12
LOSSES = {
    "grpo": TokenClippedSurrogateLoss(ratio_clip=10.0),
    "cispo_tokens": CISPOLoss(length_normalize=False, normalizer="tokens"),
    "supervised": MaskedCausalLMCrossEntropyLoss(),
}


def adapted(seed=0, model_seed=0, **changes):
    """A model with non-zero adapters."""
    model = tiny_model(model_seed, **changes)
    torch.manual_seed(seed)
    model = apply_lora(model, LoraSettings(rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def trainer_of(model, **options):
    cfg = cpu_config(**options.pop("config", {}))
    source = options.pop("source", None) or ListSource(sorting_items(8, seed=3))
    return Trainer(model=model, algo=make_grpo(group_size=4), batch_source=source, cfg=cfg, **options)


@cache
def model():
    return adapted()


@cache
def samples():
    return tuple(sorting_items(COUNT, seed=3))


def algorithm(name):
    return RLAlgorithm(name, ConstantCredit(1.0), LOSSES[name])


@cache
def unsplit_gradient(name):
    model().zero_grad(set_to_none=True)
    loss, _ = algorithm(name).compute_loss(model(), collate_saw_items(samples(), pad_token_id=0, device="cpu"))
    loss.backward()
    return gradients_of(model())


def largest(gradients):
    return max(gradient.abs().max().item() for gradient in gradients.values())


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(COUNT)),
    budget=st.integers(20, 260),
    packing=st.sampled_from(["greedy", "optimal", "padding_free"]),
)
def test_the_adapters_gradient_equals_that_of_the_unsplit_batch(name, order, budget, packing):
    expected = unsplit_gradient(name)
    assert largest(expected) > 1e-3
    assert all("lora_" in parameter for parameter in expected)
    cfg = cpu_config(max_seq_len=20, micro_token_budget=budget, packing=packing)
    mini_batch = MiniBatch(MacroBatch.ingest([samples()[i] for i in order], cfg.max_seq_len), np.arange(COUNT), cfg)
    backend = TorchBackend(model(), cfg, algo=algorithm(name))
    model().zero_grad(set_to_none=True)
    asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    assert_same_tensors(gradients_of(model()), expected, atol=1e-6 * max(1.0, largest(expected)))


def test_a_step_changes_only_the_adapters():
    trainer = trainer_of(tiny_model(), lora_config=LoraSettings(rank=2))
    before = weights_of(trainer.model)
    trainer.train_sync(2)  # the first step changes only B, since the gradient of A is zero while B is zero
    moved = {name for name, weight in weights_of(trainer.model).items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_the_optimizer_and_the_gradient_norm_cover_only_the_adapters():
    trainer = trainer_of(adapted(), config={"max_grad_norm": None})
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert [p for group in trainer.optimizer.param_groups for p in group["params"]] == trained
    stats = trainer.train_step_sync()
    assert set(trainer.optimizer.state) == set(trained)
    reference = trainer_of(adapted(), config={"max_grad_norm": None})
    asyncio.run(accumulate(reference))
    by_hand = sum((gradient.double() ** 2).sum().item() for gradient in gradients_of(reference.model).values()) ** 0.5
    assert stats["train/grad_norm"] == pytest.approx(by_hand, rel=1e-5)


async def accumulate(trainer):
    """The gradient of the trainer's first batch, without a step."""
    batch = await trainer.batch_source.next_batch()
    macro = MacroBatch.ingest(batch.items, trainer.cfg.max_seq_len)
    mini_batch = MiniBatch(macro, np.arange(len(batch.items)), trainer.cfg)
    await trainer.backend.forward_backward(mini_batch, totals=mini_batch.totals).result()


def test_gradient_checkpointing_does_not_change_the_gradient():
    kept, recomputed = trainer_of(adapted()), trainer_of(adapted(), enable_gradient_checkpointing=True)
    for trainer in (kept, recomputed):
        asyncio.run(accumulate(trainer))
    assert recomputed.model.get_base_model().is_gradient_checkpointing
    assert not kept.model.get_base_model().is_gradient_checkpointing
    assert largest(gradients_of(kept.model)) > 1e-3
    assert_same_tensors(gradients_of(recomputed.model), gradients_of(kept.model), atol=1e-6)


def test_an_invalid_setting_leaves_the_model_without_adapters():
    plain = tiny_model()
    with pytest.raises(ConfigError, match="PolicyPublisher"):
        trainer_of(plain, lora_config=LoraSettings(), config={"sync_every_steps": 2})
    assert not hasattr(plain, "peft_config")
    assert all(parameter.requires_grad for parameter in plain.parameters())


# --- checkpoints

STEPS = 4


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def resumable(folder, *, adapter_seed=0, **options):
    torch.manual_seed(adapter_seed)
    return trainer_of(
        tiny_model(0),
        source=DrawingSource(),
        config={"minibatches_per_batch": 2, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
        lora_config=LoraSettings(rank=2, dropout=0.3),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=1, max_to_keep=STEPS),
        total_training_steps=STEPS,
        **options,
    )


def test_a_resumed_run_is_bitwise_equal_and_its_checkpoints_have_only_adapters(tmp_path):
    trainer = resumable(tmp_path)
    seed_everything(7)
    losses = [trainer.train_step_sync()["train/loss"] for _ in range(STEPS)]
    for killed_after in range(1, STEPS):
        seed_everything(99)
        again = resumable(tmp_path, adapter_seed=5, resume_from=killed_after)
        assert [again.train_step_sync()["train/loss"] for _ in range(STEPS - killed_after)] == losses[killed_after:]
        assert_same_tensors(weights_of(again.model), weights_of(trainer.model))
    folder = tmp_path / f"step_{STEPS:06d}"
    assert not (folder / "model.safetensors").exists()
    stored = load_file(folder / "adapter_model.safetensors")
    assert {name.replace(".weight", ".default.weight") for name in stored} == {
        name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    }
    moments = load_file(folder / "optimizer.safetensors")
    assert sum(name.endswith("/exp_avg") for name in moments) == len(stored)
    assert (folder / "adapter_model.safetensors").stat().st_size < 0.5 * sum(4 * p.numel() for p in tiny_model().parameters())


def test_a_run_with_adapters_is_not_resumed_without_them(tmp_path):
    resumable(tmp_path).train_step_sync()
    with pytest.raises(CheckpointError, match="holds an adapter"):
        trainer_of(tiny_model(), checkpoint_config=CheckpointConfig(tmp_path), resume_from=1)
