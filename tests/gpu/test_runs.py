"""Sampling, scoring, memory, adapters, checkpoints and whole runs on a GPU."""

import asyncio
import gzip
import json
import random

import numpy as np
import pytest
import torch
from playing import tokenizer
from tiny_recipe import TINY
from training_samples import (
    DrawingSource,
    ListSource,
    assert_same_tensors,
    branching_items,
    cpu_config,
    sorting_items,
    tiny_model,
    weights_of,
)
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.inference import LocalChatClient, SamplingParams
from ludic.models.output_layer import OutputLayer
from ludic.training import CheckpointConfig, LoraSettings, Profiler, Trainer, apply_lora, collate_saw_items, make_grpo
from ludic.training.algorithm import forward_logits
from ludic.training.backend.memory import MIB
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.loss import token_scores
from ludic.training.loss.token_scores import TokenScores

pytestmark = pytest.mark.gpu


def policy(**changes):
    return tiny_model(hidden_size=32, **changes)


@pytest.fixture
def deterministic(monkeypatch):
    """Kernels with one order of sums, or an error."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def score(dtype, device):
    """Log-probabilities, entropies and gradients from hidden states [2, 40, 64] and a head of 500
    rows, every third token of which is scored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 40, 64, generator=generator).to(device, dtype).requires_grad_()
    head = torch.nn.Linear(64, 500, bias=True)
    torch.nn.init.normal_(head.weight, std=0.3, generator=generator)
    torch.nn.init.normal_(head.bias, generator=generator)
    head = head.to(device, dtype)
    ids = torch.randint(500, (2, 40), generator=generator).to(device)
    mask = (torch.arange(40) % 3 == 0).float().expand(2, -1).to(device)
    scores = TokenScores(hidden, OutputLayer(head), ids, mask=mask, with_entropy=True)
    (scores.logp * mask[:, 1:] + 0.3 * scores.entropy * mask[:, 1:]).sum().backward()
    found = {"logp": scores.logp.detach(), "entropy": scores.entropy.detach(), "hidden": hidden.grad}
    found |= {"weight": head.weight.grad, "bias": head.bias.grad}
    return {name: value.float().cpu() for name, value in found.items()}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_scores_without_logits_are_those_of_the_cpu(dtype, bound):
    """bfloat16 rounds each logit by up to 2^-9 of it; sums are float32."""
    want = score(torch.float32, "cpu")
    for name, value in score(dtype, "cuda").items():
        assert (value - want[name]).norm() <= bound * want[name].norm(), name


async def sample(client, count, **sampling):
    settings = SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **sampling})
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11]]
    calls = [client.complete_tokens(prompts[seed % 3], sampling=settings, seed=seed) for seed in range(count)]
    return await asyncio.gather(*calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_log_probabilities_are_those_of_the_trainers_forward_pass(dtype):
    model = policy().to("cuda", dtype)
    worst = 0.0
    for trace in asyncio.run(sample(LocalChatClient(model, tokenizer()), 60)):
        prompt, answer = list(trace.prompt_token_ids), list(trace.completion_token_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer], device="cuda")).logits[0]
        logp = logits.float().log_softmax(-1).cpu()
        expected = torch.tensor([logp[len(prompt) - 1 + i, token] for i, token in enumerate(answer)])
        worst = max(worst, (torch.tensor(list(trace.completion_logprobs)) - expected).abs().max().item())
    assert worst < (1e-4 if dtype == torch.float32 else 0.15)  # logits up to about 16 are rounded to 1/16 in bfloat16


def test_tokens_of_a_gpu_are_sampled_with_the_models_probabilities():
    model = tiny_model(hidden_size=32, initializer_range=0.1).to("cuda")
    client, draws = LocalChatClient(model, tokenizer(), max_batch_size=4096), 6000
    got = asyncio.run(sample(client, draws, max_tokens=1))
    first = [trace.completion_token_ids[0] for trace in got[::3]]  # those of the first prompt
    with torch.no_grad():
        p = model(input_ids=torch.tensor([[5, 6, 7]], device="cuda")).logits[0, -1].softmax(-1).double().cpu()
    counts = torch.bincount(torch.tensor(first), minlength=259).double()
    # The chi-squared statistic has mean 258 and standard deviation about sqrt(2 * 258) = 22.7; the
    # bound is six of them above the mean.
    assert ((counts - len(first) * p) ** 2 / (len(first) * p)).sum() < 258 + 6 * 23


def test_adapters_train_as_on_the_cpu():
    def train(device):
        torch.manual_seed(0)
        model = apply_lora(policy(), LoraSettings(rank=2)).to(device)
        cfg = cpu_config(model_device=device, eps=1e-3)
        source = ListSource(sorting_items(8, seed=1), sorting_items(8, seed=2))
        trainer = Trainer(model=model, algo=make_grpo(group_size=4), batch_source=source, cfg=cfg)
        trainer.train_sync(3)
        return {name: weight.cpu() for name, weight in weights_of(model).items()}

    got, want = train("cuda"), train("cpu")
    assert any("lora" in name for name in want)
    assert_same_tensors(got, want, atol=1e-4)


def trainer_of(folder, **options):
    model = policy(attention_dropout=0.2) if not options.get("prefix_sharing") else policy()
    return Trainer(
        model=model.to("cuda"),
        algo=make_grpo(group_size=4),
        batch_source=DrawingSource(),
        cfg=cpu_config(
            **{"prefix_sharing": "off", **options},
            model_device="cuda",
            minibatches_per_batch=2,
            lr_scheduler_type="cosine",
            warmup_steps=2,
        ),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=1, max_to_keep=9),
        total_training_steps=4,
        resume_from=None if folder.name == "whole" else 2,
    )


@pytest.mark.parametrize(
    "options", [{}, {"packing": "padding_free", "mixed_precision_dtype": "bf16"}, {"prefix_sharing": "tree"}]
)
def test_a_resumed_run_on_a_gpu_equals_the_uninterrupted_one_bit_for_bit(tmp_path, deterministic, options):
    def finish(folder, steps, seed):
        trainer = trainer_of(folder, **options)
        if folder.name == "whole":
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
        stats = [trainer.train_step_sync() for _ in range(steps)]
        losses = [step["train/loss"] for step in stats]
        return losses, {name: weight.cpu() for name, weight in weights_of(trainer.model).items()}

    losses, weights = finish(tmp_path / "whole", 4, 7)
    (tmp_path / "whole").rename(tmp_path / "resumed")
    torch.manual_seed(99)
    rest, resumed = finish(tmp_path / "resumed", 2, 8)
    assert rest == losses[2:]
    assert_same_tensors(resumed, weights)
    assert losses[2] != losses[3]


def test_the_profile_of_memory_counts_the_passes_of_a_gpu(monkeypatch):
    """The float32 logits of 128 tokens and 16,384 words take 8 MiB, and so does their gradient; a
    tile takes 1 MiB."""
    for name in ("TILE_ELEMENTS", "GPU_TILE_ELEMENTS"):
        monkeypatch.setattr(token_scores, name, 1 << 18)
    model = policy(vocab_size=16_384)
    items = sorting_items(12, seed=3)
    found = {}
    for logits in ("full", "chunked"):
        cfg = cpu_config(model_device="cuda", profile_memory=True, logits=logits, micro_token_budget=512)
        algo = make_grpo(group_size=4)
        backend = TorchBackend(model.to("cuda"), cfg, algo=algo)
        macro = MacroBatch.ingest(items, 32)
        mini_batch = MiniBatch(macro, np.arange(len(macro.items)), cfg)
        result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
        [found[logits]] = result.micro_stats
    for stats in found.values():
        assert stats["gpu_mem_peak_mb"] >= stats["gpu_forward_peak_mb"] >= stats["gpu_forward_activation_peak_mb"] > 0
        assert stats["gpu_mem_peak_mb"] <= torch.cuda.get_device_properties(0).total_memory / MIB
    assert found["chunked"]["gpu_activation_peak_mb"] < found["full"]["gpu_activation_peak_mb"]


@pytest.mark.parametrize(
    "extra", [[], ["trainer.prefix_sharing=tree"], ["trainer.mixed_precision_dtype=bf16"], ["trainer.packing=padding_free"]]
)
def test_the_built_in_task_trains_on_a_gpu(tmp_path, extra):
    words = ["train", *TINY, f"output={tmp_path}", "name=run", "trainer.model_device=cuda", *extra]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) >= 3
    assert all(np.isfinite(losses))


@pytest.fixture
def one_rank(monkeypatch):
    """The environment that torchrun makes for one process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group(backend="cpu:gloo,cuda:nccl")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}])
def test_a_sharded_model_on_one_gpu_takes_the_steps_of_a_whole_one(one_rank, options):
    from ludic.models.sharding import ShardingSettings, make_mesh, shard_model

    items = sorting_items(8, seed=1)

    def steps(model, device):
        cfg = cpu_config(model_device=device, eps=1e-3)
        trainer = Trainer(model=model, algo=make_grpo(group_size=4), batch_source=ListSource(items), cfg=cfg)
        return [trainer.train_step_sync()["train/loss"] for _ in range(3)]

    want = steps(policy(), "cpu")
    settings = ShardingSettings("full", **options)
    model = policy() if settings.cpu_offload else policy().to("cuda")
    got = steps(shard_model(model, settings, make_mesh(settings, "cuda")), "cuda")
    assert got == pytest.approx(want, rel=1e-4, abs=1e-4)


def test_logits_of_trees_on_a_gpu_are_finite_everywhere():
    model = policy().to("cuda")
    batch = collate_saw_items(branching_items((4, 3), 1), pad_token_id=0, device="cuda")
    with torch.no_grad():
        assert forward_logits(model, batch).isfinite().all()


def test_a_step_on_a_gpu_logs_its_utilization(tmp_path):
    """No GPU exceeds its peak, and the second step, which is calculated, equals the first."""
    model = tiny_model(hidden_size=512, intermediate_size=2048).to(torch.bfloat16)
    cfg = cpu_config(model_device="cuda", micro_token_budget=4096, packing="padding_free", peak_tflops=989.4)
    profiler = Profiler(2, 2, folder=tmp_path)
    trainer = Trainer(
        model=model, algo=make_grpo(group_size=4), batch_source=ListSource(sorting_items(64)), cfg=cfg, profiler=profiler
    )
    first, second = (trainer.train_step_sync() for _ in range(2))
    assert 0 < second["perf/mfu"] < 1
    assert second["perf/mfu"] == pytest.approx(second["perf/tflops"] / 989.4)
    work = [stats["perf/tflops"] * (stats["perf/forward_backward_s"] + stats["perf/optimizer_s"]) for stats in (first, second)]
    assert work[0] == pytest.approx(work[1], rel=0.01)  # the same batch: measured, then calculated
    with gzip.open(profiler.files[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert any(event.get("name") == "ludic.backward" for event in events)
