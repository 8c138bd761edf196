"""Estimates of memory against what torch really allocates in training steps."""

from typing import Any

import pytest
import torch
from tiny_vision import make_tiny_vision
from torch.profiler import ProfilerActivity, profile

from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_rm
from ludic.recipes.model import add_adapters, make_small_model
from ludic.runs.memory_estimate import MemoryEstimate, MemoryEstimator, Settings
from ludic.training import Trainer, TrainerConfig, make_sft
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.samples.sft import SFTItems

NETWORK = [
    *("network.hidden_size=128", "network.num_layers=4", "network.num_heads=4", "network.num_kv_heads=2"),
    *("network.intermediate_size=384", "trainer.max_seq_len=128", "trainer.micro_token_budget=1024"),
]
TOLERANCE = 0.25


def estimate(*settings: str) -> MemoryEstimate:
    recipe = compose([*NETWORK, *settings])
    return MemoryEstimator(recipe).estimate(Settings.of(recipe))


def measured_peak(*settings: str) -> int:
    """Bytes that torch has allocated at the peak of the second training step, weights included. The
    batch is one full micro-batch."""
    recipe = compose([*NETWORK, *settings])
    tokenizer = make_byte_tokenizer()
    model: Any = add_adapters(make_small_model(recipe.network, tokenizer).to(getattr(torch, recipe.dtype)), recipe, seed=0)
    rows = [(f"row {n}", {"prompt": "", "completion": chr(97 + n) * 127}) for n in range(8)]  # 127 and an end token
    cfg = TrainerConfig(
        model_device="cpu",
        lr=1e-3,
        max_seq_len=128,
        micro_token_budget=1024,
        pad_token_id=tokenizer.pad_token_id,
        logits=recipe.trainer.logits,
    )
    source = ItemBatchSource(SFTItems(tokenizer).of(rows), batch_size=8)
    trainer = Trainer(
        model=model,
        algo=make_sft(normalizer="tokens"),
        batch_source=source,
        cfg=cfg,
        enable_gradient_checkpointing=recipe.gradient_checkpointing,
    )
    trainer.train_sync(1)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    held += sum(
        value.nbytes for state in trainer.backend.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train_sync(1)
    changes = [
        event.nbytes()
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
        if event.name() == "[memory]"
    ]
    present = peak = 0
    for change in changes:
        present += change
        peak = max(peak, present)
    return held + peak


@pytest.mark.parametrize(
    "settings",
    [(), ("trainer.logits=full",), ("lora.rank=8",), ("dtype=bfloat16",), ("gradient_checkpointing=true",)],
    ids=lambda settings: " ".join(settings) or "as set",
)
def test_an_estimate_is_near_the_measured_peak(settings: tuple[str, ...]) -> None:
    expected, measured = estimate(*settings).training, measured_peak(*settings)
    assert expected == pytest.approx(measured, rel=TOLERANCE), f"{expected / 2**20:.1f} MiB, measured {measured / 2**20:.1f} MiB"


def test_weights_and_caches_are_those_of_the_config() -> None:
    """The embedding has 259 * 128 weights, tied. A layer has q 128 * 128 + 128, k and v each
    128 * 64 + 64, o 128 * 128, three projections of 128 * 384, and two norms of 128; the last norm
    has 128. A cached token has 4 layers * 2 * 2 heads * 32 values of 4 bytes."""
    layer = 128 * 128 + 128 + 2 * (128 * 64 + 64) + 128 * 128 + 3 * 128 * 384 + 2 * 128
    weights = 259 * 128 + 4 * layer + 128
    found = estimate("rollout.concurrency=10")
    assert (found.parameters, found.trained) == (weights, weights)
    assert (found.weights, found.gradients, found.optimizer) == (4 * weights, 4 * weights, 8 * weights)
    assert found.kv_cache == 10 * 128 * 4 * 2 * 2 * 32 * 4
    half = estimate("dtype=bfloat16")
    assert (half.weights, half.gradients, half.optimizer) == (2 * weights, 2 * weights, 16 * weights)  # with masters
    matrices = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384)  # which muon steps, with one moment
    assert estimate("trainer.optimizer=muon").optimizer == 8 * (weights - matrices) + 4 * matrices
    assert estimate("trainer.optimizer=adamw8bit").optimizer == 2 * weights
    both = estimate("algorithm=ppo", "critic.model=policy")
    assert (both.weights, both.gradients, both.optimizer) == (8 * weights, 8 * weights, 16 * weights)
    adapted = estimate("lora.rank=8")
    per_layer = 8 * (2 * (128 + 128) + 2 * (128 + 64) + 2 * (128 + 384) + (384 + 128))
    assert adapted.trained == 4 * per_layer
    assert adapted.optimizer == 8 * adapted.trained


def test_remedies_save_memory() -> None:
    recipe = compose([*NETWORK, "trainer.logits=full"])
    estimator = MemoryEstimator(recipe)
    own = estimator.estimate(Settings.of(recipe))
    remedies = {name: estimator.estimate(changed) for name, changed in estimator.list_remedies(own.settings)}
    assert list(remedies) == [
        *("dtype=bfloat16", "lora.rank=16", "trainer.micro_token_budget=128", "gradient_checkpointing=true"),
        *("trainer.logits=chunked", "rollout.concurrency=8", "all of these"),
    ]
    assert remedies["all of these"].peak == min(one.peak for one in remedies.values())
    assert remedies["all of these"].peak < own.peak / 4
    assert remedies["rollout.concurrency=8"].kv_cache < own.kv_cache


def test_a_frozen_tower_has_weights_and_no_gradients(tmp_path):
    model, _ = make_tiny_vision("qwen2_vl")
    model.save_pretrained(tmp_path)
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    frozen, trained = (estimate(f"model={tmp_path}", f"images.tower={each}") for each in ("frozen", "trained"))
    assert frozen.parameters == trained.parameters == trained.trained == sum(each.numel() for each in model.parameters())
    assert trained.trained - frozen.trained == tower
    recipe = compose_rm([f"model={tmp_path}", "images.tower=frozen"])
    scoring = MemoryEstimator(recipe).estimate(Settings.of(recipe))
    assert scoring.trained == frozen.trained - model.lm_head.weight.numel() + model.lm_head.in_features
