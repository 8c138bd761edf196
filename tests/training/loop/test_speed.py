"""FLOPs and tokens per second and device, as a step logs them."""

import pytest
import torch
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import ConfigError
from ludic.training import FrozenModel, Trainer, as_value_model, make_grpo, make_ppo
from ludic.training.loop import profiler
from ludic.training.loop.profiler import Speed

ITEMS = sorting_items(8, seed=1)


def trainer_of(*, algo=None, reference=None, critic=None, **changes):
    model = tiny_model()
    cfg = cpu_config(**changes)
    reference = FrozenModel(model, cfg) if reference else None
    algo = make_grpo(group_size=4) if algo is None else algo
    return Trainer(model=model, algo=algo, batch_source=ListSource(ITEMS), cfg=cfg, reference=reference, critic=critic)


def test_a_step_logs_its_speed():
    """tokens/s: real and shared tokens over the whole step; FLOPs: over its training phases."""
    stats = trainer_of(peak_tflops=0.5).train_step_sync()
    tokens = stats["perf/real_tokens"] + stats["perf/shared_tokens"]
    assert stats["perf/tokens_per_s_per_gpu"] == pytest.approx(tokens / stats["perf/step_s"])
    assert stats["perf/tokens_per_s_per_gpu"] == pytest.approx(stats["perf/tokens_per_s"])  # one rank
    assert stats["perf/mfu"] == pytest.approx(stats["perf/tflops"] / 0.5)
    assert stats["perf/tflops"] > 0


def test_the_cpu_has_no_peak_of_its_own():
    stats = trainer_of().train_step_sync()
    assert "perf/mfu" not in stats
    assert stats["perf/tflops"] > 0


@pytest.fixture
def counted(monkeypatch):
    """The FLOPs of each step."""
    found, original = [], Speed.stats

    def stats(self, **facts):
        found.append(self._total() - self._before)
        return original(self, **facts)

    monkeypatch.setattr(Speed, "stats", stats)
    return found


def test_passes_of_the_reference_are_counted(counted):
    """A forward pass over all samples is a third of forward and backward passes, or a little less
    where the embedding needs no gradient; the evaluator's passes between steps are not counted."""
    trainer_of(algo=make_grpo(group_size=4, reference_kl=0.1), reference=True, skip_zero_weight=False).train_step_sync()
    trainer_of(skip_zero_weight=False).train_step_sync()
    assert 1.2 < counted[0] / counted[1] < 1.45


def test_passes_of_the_critic_are_counted(counted):
    """A value head has two forward passes through the layers, for values and for the loss; a model
    of its own two more, of its backward pass. The layers have 4,608 products for a
    token and the output layer 4,144; attention adds up to a quarter to the layers."""
    for critic in (None, as_value_model(tiny_model(1))):
        trainer_of(algo=make_ppo(), critic=critic, skip_zero_weight=False).train_step_sync()
    trainer_of(skip_zero_weight=False).train_step_sync()
    head, own, policy = counted
    assert own - policy == pytest.approx(2 * (head - policy), rel=0.01)
    assert 2 * 4608 / 3 / (4608 + 4144) < head / policy - 1 < 2 * 1.25 * 4608 / 3 / (1.25 * 4608 + 4144)


def test_sums_over_ranks_are_divided(monkeypatch):
    """Ranks with 3e12 and 5e12 FLOPs in 2 s each, at a peak of 4 TFLOPS: 2 TFLOPS, and half of the
    peak. 100 and 300 tokens in 4 s each: 50 per second and device."""
    run = trainer_of(peak_tflops=4.0)
    measured = Speed(run)
    run.backend.flops.total += 3e12
    other = [5e12, 2.0, 8e12, 0.0, 300.0, 4.0]
    monkeypatch.setattr(profiler.ranks, "sum_over_ranks", lambda own, device: [a + b for a, b in zip(own, other, strict=True)])
    assert measured.stats(training_s=2.0, tokens=100.0, step_s=4.0) == pytest.approx(
        {"perf/tokens_per_s_per_gpu": 50.0, "perf/tflops": 2.0, "perf/mfu": 0.5}
    )
    other[3] = 1.0  # a device of unknown peak
    assert "perf/mfu" not in measured.stats(training_s=2.0, tokens=100.0, step_s=4.0)


def test_the_peak_of_a_known_device_follows_the_dtype_of_the_products(monkeypatch):
    monkeypatch.setattr(profiler, "find_peak_tflops", lambda device, dtype: {torch.float32: 10.0, torch.bfloat16: 40.0}[dtype])
    for precision, peak in ((None, 10.0), ("bf16", 40.0)):
        stats = trainer_of(mixed_precision_dtype=precision).train_step_sync()
        assert stats["perf/mfu"] == pytest.approx(stats["perf/tflops"] / peak)


@pytest.mark.parametrize("peak", [0, -1.0, float("nan")])
def test_a_peak_must_be_positive(peak):
    with pytest.raises(ConfigError, match=r"peak_tflops .* must be above 0"):
        cpu_config(peak_tflops=peak)


@pytest.mark.parametrize(
    ("name", "half", "rounded", "single"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 156, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7, 67),
        ("NVIDIA H100 PCIe", 756, 378, 51),
        ("NVIDIA H200", 989.4, 494.7, 67),
        ("NVIDIA B200", 2250, 1125, 75),
        ("NVIDIA L40S", 362.05, 183, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6),
        ("NVIDIA A10", 125, 62.5, 31.2),
        ("AMD Instinct MI300X", 1307.4, 653.7, 163.4),
    ],
)
def test_the_peak_of_a_device_follows_its_name_and_the_dtype(name, half, rounded, single):
    assert profiler.peak_of(name, torch.bfloat16) == half
    assert profiler.peak_of(name, torch.float32, tf32=True) == rounded
    assert profiler.peak_of(name, torch.float32) == single
    assert profiler.peak_of(name, torch.float64) is None


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 NVL", "NVIDIA A10G", "H1000"]
)
def test_other_devices_have_no_known_peak(name):
    assert profiler.peak_of(name, torch.bfloat16) is None


def test_the_cpu_has_no_known_peak():
    assert profiler.find_peak_tflops("cpu", torch.float32) is None
