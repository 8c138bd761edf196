"""Trainer and server on one GPU: what leaves it, and a model that fits only in turn."""

import json

import pytest
import torch
from commands import ludic
from fake_card import held_tensors
from real_vllm import vllm_or_skip
from training_samples import ListSource, cpu_config, sorting_items, tiny_model, weights_of

from ludic.inference.client import Publisher
from ludic.training import LoraSettings, Trainer, apply_lora, make_grpo

pytestmark = pytest.mark.gpu


class Publishing(Publisher):
    def publish(self, state_dict, version=None):
        assert {tensor.device.type for tensor in state_dict.values()} == {"cpu"}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
def test_weights_and_optimizer_leave_the_gpu_and_return_bit_for_bit(kind):
    model = tiny_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    model = model.bfloat16() if kind == "bfloat16" else model
    model = apply_lora(model, LoraSettings(rank=8)) if kind == "lora" else model
    source = ListSource(sorting_items(8))
    cfg = cpu_config(model_device="cuda", offload=True, sync_every_steps=1)
    trainer = Trainer(model=model, algo=make_grpo(group_size=4), batch_source=source, cfg=cfg, publisher=Publishing())
    trainer.train_sync(2)
    trainer.reload_sync()
    held = held_tensors(trainer.backend.model, trainer.optimizer)
    before, bytes_of = weights_of(trainer.model), sum(tensor.nbytes for tensor in held)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    trainer._event_loop.run(trainer.offload(), instead="offload")
    assert all(tensor.device.type == "cpu" for tensor in held_tensors(trainer.backend.model, trainer.optimizer))
    assert torch.cuda.memory_allocated() < 0.05 * bytes_of
    assert reserved - torch.cuda.memory_reserved() > 0.9 * bytes_of  # other processes can have it
    trainer.reload_sync()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer.model).items())
    trainer.train_sync(1)


@pytest.mark.integration
def test_a_model_that_fits_only_in_turn_is_trained(tmp_path):
    """Weights, masters and moments take four tenths of the GPU, and the server nine: 2 bytes of
    each weight, 2 of its gradient, 12 of master and moments and 4 of the master's gradient."""
    vllm_or_skip()
    _, total = torch.cuda.mem_get_info()
    width = 2048
    layers = max(2, int(0.4 * total / 20 / (12 * width**2)))  # attention 4, feed-forward 3 times 8/3 of the width squared
    network = [f"network.hidden_size={width}", "network.num_heads=16", "network.num_kv_heads=16", f"network.num_layers={layers}"]
    network += [f"network.intermediate_size={8 * width // 3 // 64 * 64}", "dtype=bfloat16", "trainer.model_device=cuda"]
    rows = tmp_path / "rows.jsonl"
    problems = [{"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"} for n in range(30)]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in problems))
    task = [f"data={rows}", "reward=byte_rewards:mean_id", "task.args.max_new_tokens=16", "task.args.num_heldout=3"]
    sizes = ["warmup.steps=2", "steps=3", "rollout.prompts=4", "rollout.group_size=4", "evaluation.prompts=2"]
    where = ["inference=vllm", "inference.colocate=true", f"output={tmp_path}", "name=run"]
    ludic("train", *network, *task, *sizes, *where)
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["weight_sync"]["pushes"] == 3
    assert found["mismatch"]["mean"] < 0.1
    log = (tmp_path / "run" / "server.log").read_text()
    assert log.count("Sleep mode freed") == 4
    assert log.count("wake up the engine with tags: ['kv_cache']") == 4
