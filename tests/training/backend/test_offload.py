"""Weights and optimizer that leave the device while a server samples: all of them, and bit for
bit."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_card import FakeCard, held_tensors, storage_of
from training_samples import (
    DrawingSource,
    ListSource,
    assert_same_tensors,
    cpu_config,
    dialogues,
    sorting_items,
    tiny_model,
    weights_of,
    without_times,
)

from ludic.errors import ConfigError
from ludic.inference.client import Publisher
from ludic.models.quantization import QuantizationSettings, quantize_layers
from ludic.training import (
    CheckpointConfig,
    LoraSettings,
    Trainer,
    apply_lora,
    as_value_model,
    make_grpo,
    make_opd,
    make_ppo,
)
from ludic.training.backend import offload
from ludic.training.backend.protocol import BackendBase
from ludic.training.distillation import Teacher
from ludic.training.reference import CachedReference, FrozenModel
from ludic.training.rng import seed_everything


class Watching(Publisher):
    """Has what is published, and calls `look` then."""

    def __init__(self, look=lambda: None):
        self.look, self.versions = look, []

    def publish(self, state_dict, version=None):
        self.look()
        self.versions.append(version)
        self.published = {name: value.clone() for name, value in state_dict.items()}


def plain(cfg):
    return {"model": tiny_model()}


def half(cfg):
    return {"model": tiny_model().bfloat16()}


def adapted(cfg):
    return {"model": apply_lora(tiny_model(), LoraSettings(rank=2)), "algo": make_grpo(group_size=4, reference_kl=0.1)}


def quantized(cfg):
    model = tiny_model(hidden_size=64, intermediate_size=128)
    quantize_layers(model, QuantizationSettings("int8"))
    return {"model": apply_lora(model, LoraSettings(rank=2))}


def referenced(cfg):
    frozen = CachedReference(FrozenModel(tiny_model(1), cfg))
    return {"model": tiny_model(), "reference": frozen, "algo": make_grpo(group_size=4, reference_kl=0.1)}


def taught(cfg):
    teachers = {"a": FrozenModel(tiny_model(1), cfg), "b": Teacher(CachedReference(FrozenModel(tiny_model(2), cfg)))}
    items = [replace(item, meta={**item.meta, "teacher": "ab"[number % 2]}) for number, item in enumerate(sorting_items(8))]
    return {"model": tiny_model(), "algo": make_opd(teacher=teachers), "items": items}


def value_head(cfg):
    return {"model": tiny_model(), "algo": make_ppo(), "items": dialogues((1, 3, 2, 1))}


def value_model(cfg):
    return {**value_head(cfg), "critic": as_value_model(tiny_model(2))}


def quantized_nf4(cfg):
    pytest.importorskip("bitsandbytes")
    model = tiny_model(hidden_size=64, intermediate_size=128)
    quantize_layers(model, QuantizationSettings("nf4", double=True))
    return {"model": apply_lora(model, LoraSettings(rank=2))}


KINDS = [plain, half, adapted, quantized, quantized_nf4, referenced, taught, value_head, value_model]


def make_trainer(kind, *, offload=None, look=lambda: None, **changes):
    cfg = cpu_config(max_seq_len=120, micro_token_budget=512, offload=offload, **changes)
    parts = {"algo": make_grpo(group_size=4), "items": sorting_items(8), **kind(cfg)}
    source = ListSource(parts.pop("items"))
    return Trainer(batch_source=source, cfg=cfg, publisher=Watching(look), **parts)


def everything(trainer):
    backends = [trainer.backend, *([] if trainer.critic is None else [trainer.critic.backend])]
    modules = [backend.model for backend in backends]
    if isinstance(trainer.reference, CachedReference):
        modules += [trainer.reference.inner.model]
    if trainer.algo.teacher is not None:
        first, second = trainer.algo.teacher.by_name.values()
        modules += [first.model, second.policy.inner.model]
    return held_tensors(*modules, *(backend.optimizer for backend in backends))


def trained(kind, steps=4, **settings):
    trainer = make_trainer(kind, **settings)
    lines = []
    trainer.train_sync(steps, log_fn=lines.append)
    return trainer, [without_times(line) for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_leaves_the_device_at_each_step_is_the_same_bit_for_bit(kind):
    expected, lines = trained(kind)
    with FakeCard() as card:
        trainer, own = trained(kind, offload=True)
    assert card.copies["to host"] > 0
    assert own == lines
    assert_same_tensors(trainer.publisher.published, expected.publisher.published)
    assert_same_tensors(weights_of(trainer.model), weights_of(expected.model))
    for left, right in zip(everything(trainer), everything(expected), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_on_the_device_while_weights_are_published(kind):
    with FakeCard() as card:

        def look():
            gc.collect()
            held = everything(trainer)
            assert not [tensor.shape for tensor in held if card.holds(tensor)]
            assert all(storage.expired() for storage in before), "memory of the device is not freed"

        trainer = make_trainer(kind, offload=True)
        trainer.train_sync(1)
        trainer.reload_sync()
        before = [storage_of(tensor) for tensor in everything(trainer) if card.holds(tensor)]
        assert len(before) > 20
        assert all(card.holds(tensor) for tensor in everything(trainer) if tensor.dim())
        trainer.publisher.look = look
        trainer._event_loop.run(trainer.publish(), instead="publish")
        assert trainer.publisher.versions == [1, 1]


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_other_optimizers_go_on_bit_for_bit(name):
    expected, lines = trained(plain, optimizer=name)
    with FakeCard():
        trainer, own = trained(plain, optimizer=name, offload=True)
    assert own == lines
    assert_same_tensors(weights_of(trainer.model), weights_of(expected.model))


def test_tied_weights_stay_one_tensor_that_is_moved_once():
    with FakeCard() as card:
        trainer = make_trainer(plain, offload=True)
        model, ids = trainer.model, {id(parameter) for parameter in trainer.model.parameters()}
        trainer.train_sync(1)
        own = len(list(model.parameters())) + len(list(model.buffers()))
        state = 2 * len(list(model.parameters()))
        assert card.copies["to host"] == own + state
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {id(parameter) for parameter in model.parameters()} == ids


def test_a_checkpoint_of_offloaded_weights_resumes_like_any_other(tmp_path):
    def make(offload, steps, **options):
        places = CheckpointConfig(tmp_path / str(offload), every_n_steps=2)
        cfg = cpu_config(offload=offload)
        return Trainer(
            model=tiny_model().bfloat16(),
            algo=make_grpo(group_size=4),
            batch_source=DrawingSource(),
            cfg=cfg,
            publisher=Watching(),
            checkpoint_config=places,
            **options,
        )

    ends = {}
    for is_offloaded in (False, True):
        with FakeCard():
            seed_everything(0)
            make(is_offloaded, 2).train_sync(2)
            trainer = make(is_offloaded, 2, resume_from=2)
            assert trainer.current_step == 2
            trainer.train_sync(2)
            ends[is_offloaded] = weights_of(trainer.model)
    assert_same_tensors(ends[True], ends[False])


def test_weights_in_host_memory_are_restored_and_trained_further():
    """A checkpoint is loaded into them: `step` of AdamW stays where it is, the moments move."""
    with FakeCard() as card:
        trainer = make_trainer(plain, offload=True)
        trainer.train_sync(2)
        state = trainer.optimizer.state_dict()
        trainer.optimizer.load_state_dict(state)
        trainer.reload_sync()
        moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
        assert moments
        assert all(map(card.holds, moments))


def test_a_backend_elsewhere_says_what_it_lacks():
    with pytest.raises(ConfigError, match=r"define offload and reload"):
        BackendBase().offload()


def test_weights_must_be_published_at_each_step():
    with pytest.raises(ConfigError, match=r"sync_every_steps \(2\) must be 1"):
        make_trainer(plain, offload=True, sync_every_steps=2)
    with pytest.raises(ConfigError, match=r"must be 1, with a publisher"):
        Trainer(model=tiny_model(), algo=make_grpo(group_size=4), batch_source=ListSource([]), cfg=cpu_config(offload=True))


def test_eight_bit_layers_with_two_owners_are_refused():
    class Linear8bitLt(torch.nn.Linear):
        state = object()

    Linear8bitLt.__module__ = "bitsandbytes.nn"
    with pytest.raises(ConfigError, match=r"8-bit weights of bitsandbytes"):
        offload.Offload([torch.nn.Sequential(Linear8bitLt(2, 2))]).to_host()


@pytest.mark.integration
def test_shards_leave_the_device_and_return_bit_for_bit():
    support = Path(__file__).parents[2] / "support"
    paths = os.pathsep.join([str(support), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(support / "offloaded_ranks.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind, found in json.loads(done.stdout.splitlines()[-1]).items():
        padded = 2 if kind == "uneven" else 0  # FSDP2 pads what was copied, in host memory that the ledger does not know
        assert [rank["left"] for rank in found] == [[0] * 4, [padded] * 4], kind
        assert [rank["stayed"] for rank in found] == [[], []], kind
        assert found[0]["published"] > 20, kind
