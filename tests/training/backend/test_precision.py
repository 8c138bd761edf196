"""Float32 master weights of half-precision parameters, which the optimizer steps."""

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from training_samples import ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError, NonFiniteError
from ludic.training import CheckpointConfig, LoraSettings, ReinforceLoss, RLAlgorithm, Trainer
from ludic.training.backend.precision import LossScale, MasterWeights
from ludic.training.credit_assignment import ConstantCredit

ALGO = RLAlgorithm("plain", ConstantCredit(1.0), ReinforceLoss())


def half_model(seed=0):
    return tiny_model(seed).bfloat16()


def make_trainer(model, *, lr=1e-5, master_weights=True, **options):
    cfg = cpu_config(lr=lr, weight_decay=0.01, master_weights=master_weights)
    return Trainer(model=model, algo=ALGO, batch_source=ListSource(sorting_items(8, weight=1.0)), cfg=cfg, **options)


def stepped_weights(trainer):
    """The tensors that the optimizer steps, in its order."""
    return [parameter.detach().clone() for group in trainer.optimizer.param_groups for parameter in group["params"]]


def fraction_moved(before, after):
    moved = sum((left != right).sum().item() for left, right in zip(before, after, strict=True))
    return moved / sum(tensor.numel() for tensor in before)


def test_masters_move_where_most_bfloat16_weights_would_round_back():
    fractions = {}
    for master_weights in (True, False):
        trainer = make_trainer(half_model(), master_weights=master_weights)
        before = stepped_weights(trainer)
        trainer.train_sync(20)
        fractions[master_weights] = fraction_moved(before, stepped_weights(trainer))
    assert fractions[True] > 0.99
    assert fractions[False] < 0.5


def test_bfloat16_weights_follow_those_of_a_float32_run():
    """100 steps at 1e-5 move a weight by at most 1e-3, less than half the bfloat16 spacing of most
    weights. The two runs still stay together."""
    initial = weights_of(half_model())
    ends = {}
    for name, model, master_weights in (
        ("float32", half_model().float(), True),
        ("masters", half_model(), True),
        ("bfloat16", half_model(), False),
    ):
        make_trainer(model, master_weights=master_weights).train_sync(100)
        ends[name] = weights_of(model)

    def along(name):
        """The distance covered in the direction of the float32 run, as a fraction of that run's
        distance."""
        travelled = torch.cat([(ends["float32"][key] - initial[key]).flatten() for key in initial])
        own = torch.cat([(ends[name][key].float() - initial[key].float()).flatten() for key in initial])
        return float(own @ travelled / (travelled @ travelled))

    assert along("masters") == pytest.approx(1.0, abs=0.1)
    assert along("bfloat16") < 0.5


class Priced(torch.nn.Module):
    """The loss is the inner product with fixed prices, so the gradient does not depend on the
    weights."""

    def __init__(self, weight, price):
        super().__init__()
        self.weight, self.price = torch.nn.Parameter(weight), price

    def loss(self):
        return (self.weight * self.price).sum()


@given(seed=st.integers(0, 2**16), steps=st.integers(1, 40), lr=st.sampled_from([1e-6, 1e-5, 1e-3, 0.1]))
def test_masters_equal_a_float32_run_bitwise_when_the_gradients_are_equal(seed, steps, lr):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, generator=generator).bfloat16()
    prices = [torch.randn(64, generator=generator).bfloat16() for _ in range(steps)]
    wide, half = Priced(weight.float(), None), Priced(weight.clone(), None)
    plain = torch.optim.AdamW(wide.parameters(), lr=lr)
    masters = MasterWeights(torch.optim.AdamW(half.parameters(), lr=lr))
    for price in prices:
        wide.price, half.price = price.float(), price
        wide.loss().backward()
        half.loss().backward()
        masters.move_gradients()
        for optimizer in (plain, masters.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        masters.write_back()
    assert torch.equal(masters.stepped_tensor(half.weight), wide.weight)
    assert torch.equal(half.weight, wide.weight.bfloat16())


def test_gradients_of_micro_batches_are_summed_in_float32():
    # 1 + 2^-9 is not representable in bfloat16, so the second gradient would be lost there.
    model = Priced(torch.zeros(1, dtype=torch.bfloat16), None)
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
    for price in (1.0, 2.0**-9):
        model.price = torch.tensor([price], dtype=torch.bfloat16)
        model.loss().backward()
        masters.move_gradients()
    assert masters.stepped_tensor(model.weight).grad.tolist() == [1 + 2.0**-9]
    assert model.weight.grad is None


def test_float32_parameters_are_stepped_directly():
    trainer = make_trainer(tiny_model())
    stepped = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in stepped} == {id(parameter) for parameter in trainer.model.parameters()}


def checkpoints(tmp_path, **options):
    return {"checkpoint_config": CheckpointConfig(tmp_path, every_n_steps=1, max_to_keep=9), **options}


def test_a_resumed_run_restores_the_masters_bitwise(tmp_path):
    trainer = make_trainer(half_model(), **checkpoints(tmp_path))
    trainer.train_sync(5)
    resumed = make_trainer(half_model(seed=1), **checkpoints(tmp_path, resume_from=3))
    resumed.train_sync(2)
    assert_same_tensors(weights_of(resumed.model), weights_of(trainer.model))
    assert all(map(torch.equal, stepped_weights(resumed), stepped_weights(trainer)))


def test_a_checkpoint_has_the_weights_in_the_models_dtype_and_the_masters_in_float32(tmp_path):
    trainer = make_trainer(half_model(), **checkpoints(tmp_path))
    trainer.train_sync(1)
    assert {tensor.dtype for tensor in load_file(tmp_path / "step_000001/model.safetensors").values()} == {torch.bfloat16}
    stored = load_file(tmp_path / "step_000001/optimizer.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if name.endswith("/master")} == {torch.float32}
    assert all(map(torch.equal, stepped_weights(trainer), [stored[f"{n}/master"] for n in range(len(stepped_weights(trainer)))]))


def remove_masters(folder):
    """Rewrite the checkpoint as versions without masters wrote it: optimizer state in bfloat16 and
    no masters."""
    path = folder / "optimizer.safetensors"
    stored = {name: tensor for name, tensor in load_file(path).items() if not name.endswith("/master")}
    save_file({name: tensor.bfloat16() if tensor.ndim else tensor for name, tensor in stored.items()}, path)
    for file in [*folder.parent.glob("step_*/manifest.json"), folder.parent / "latest.json"]:
        file.unlink()


def test_a_checkpoint_without_masters_initialises_them_from_its_weights(tmp_path):
    make_trainer(half_model(), lr=1e-3, **checkpoints(tmp_path)).train_sync(2)
    remove_masters(tmp_path / "step_000002")
    resumed = make_trainer(half_model(seed=1), lr=1e-3, **checkpoints(tmp_path, resume_from=2))
    weights = [parameter.detach() for parameter in resumed.model.parameters()]
    assert all(torch.equal(master, weight.float()) for master, weight in zip(stepped_weights(resumed), weights, strict=True))
    assert all(value.dtype == torch.float32 for state in resumed.optimizer.state.values() for value in state.values())
    resumed.train_sync(1)
    assert fraction_moved(weights, stepped_weights(resumed)) > 0.99


def test_a_checkpoint_without_an_optimizer_initialises_masters_from_its_weights(tmp_path):
    config = CheckpointConfig(tmp_path, every_n_steps=1, save_optimizer=False)
    trainer = make_trainer(half_model(), lr=1e-2, checkpoint_config=config)
    trainer.train_sync(1)
    resumed = make_trainer(half_model(seed=1), lr=0.0, checkpoint_config=config, resume_from=1)
    resumed.train_step_sync()  # with a learning rate of 0, the saved weights are the loaded ones
    assert_same_tensors(weights_of(resumed.model), weights_of(trainer.model))


def test_masters_in_a_checkpoint_are_ignored_when_master_weights_are_off(tmp_path):
    make_trainer(half_model(), **checkpoints(tmp_path)).train_sync(1)
    resumed = make_trainer(half_model(), master_weights=False, **checkpoints(tmp_path, resume_from=1))
    assert all("master" not in state for state in resumed.optimizer.state.values())
    resumed.train_sync(1)


def test_weights_set_from_outside_are_the_ones_that_the_next_step_updates():
    trainer = make_trainer(half_model(), lr=0.0)
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(3.0)
    trainer.train_step_sync()
    assert trainer.model.model.norm.weight.tolist() == [3.0] * 16


def test_frozen_parameters_have_no_masters_and_do_not_change():
    model = half_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = weights_of(model)
    trainer = make_trainer(model, lr=1e-1)
    trainer.train_sync(2)
    assert torch.equal(before["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    assert len(stepped_weights(trainer)) == len(before) - 1


def test_adapters_in_bfloat16_have_masters():
    from peft import get_peft_model

    config = LoraSettings(rank=2).config()
    config.target_modules = ["q_proj"]
    model = get_peft_model(half_model(), config, autocast_adapter_dtype=False)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    trainer = make_trainer(model)
    before = stepped_weights(trainer)
    trainer.train_sync(2)
    assert {tensor.dtype for tensor in before} == {torch.float32}
    assert fraction_moved(before, stepped_weights(trainer)) > 0.99


def test_published_weights_have_the_dtype_of_the_model():
    class Publisher:
        def publish(self, state_dict, version=None):
            self.dtypes = {tensor.dtype for tensor in state_dict.values()}

    publisher = Publisher()
    make_trainer(half_model(), publisher=publisher).train_sync(1)
    assert publisher.dtypes == {torch.bfloat16}


def test_float16_weights_that_would_be_stepped_as_such_are_refused():
    with pytest.raises(ConfigError, match=r"is float16 .*master_weights is False.*leave master_weights on"):
        make_trainer(tiny_model().half(), master_weights=False)


# -- the scale of the loss


def scaled_trainer(model, monkeypatch, start, *, weight=1.0, **changes):
    """A trainer whose scale begins at `start`."""
    monkeypatch.setattr(LossScale, "START", float(start))
    cfg = cpu_config(lr=1e-3, max_grad_norm=None, **changes)
    return Trainer(model=model, algo=ALGO, batch_source=ListSource(sorting_items(8, weight=weight)), cfg=cfg)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_scaled_loss_keeps_gradients_that_float16_rounds_to_nothing(monkeypatch, mixed):
    model, changes = (tiny_model(), {"mixed_precision_dtype": "fp16"}) if mixed else (tiny_model().half(), {})
    weight = 1e-5
    exact = scaled_trainer(tiny_model(), monkeypatch, 1, weight=weight).train_step_sync()["train/grad_norm"]
    lost = scaled_trainer(copy.deepcopy(model), monkeypatch, 1, weight=weight, **changes).train_step_sync()
    kept = scaled_trainer(model, monkeypatch, 65536, weight=weight, **changes).train_step_sync()
    assert kept["train/grad_norm"] == pytest.approx(exact, rel=0.02)
    assert abs(lost["train/grad_norm"] / exact - 1) > 10 * abs(kept["train/grad_norm"] / exact - 1)
    assert (kept["train/loss_scale"], kept["train/skipped_steps"]) == (65536, 0)


def test_a_step_whose_scaled_gradient_overflows_is_skipped_and_halves_the_scale(monkeypatch):
    trainer = scaled_trainer(tiny_model().half(), monkeypatch, 2.0**40)
    before, stats = weights_of(trainer.model), trainer.train_step_sync()
    assert_same_tensors(weights_of(trainer.model), before)
    assert (stats["train/loss_scale"], stats["train/skipped_steps"], stats["train/grad_norm"]) == (2.0**39, 1, 0)
    assert not trainer.optimizer.state
    while stats["train/skipped_steps"]:
        stats = trainer.train_step_sync()
    assert stats["train/grad_norm"] > 0
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {1.0}


def test_a_gradient_that_no_scale_makes_finite_is_an_error(monkeypatch):
    trainer = scaled_trainer(tiny_model().half(), monkeypatch, 2)
    trainer.model.model.layers[0].mlp.down_proj.weight.register_hook(lambda gradient: gradient * float("inf"))
    assert trainer.train_step_sync()["train/loss_scale"] == 1
    with pytest.raises(NonFiniteError, match=r"not finite.*No weight was changed"):
        trainer.train_step_sync()


def test_the_scale_doubles_after_2000_steps_that_were_not_skipped():
    model = tiny_model().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = LossScale(model, optimizer, cpu_config())
    seen = []
    for finite in [*[True] * 1999, False, *[True] * 2000, True]:
        assert scale.update(is_finite=finite)
        seen.append(scale.value)
    # as torch.amp.GradScaler: 2^16, halved once, and the count begins anew
    assert seen == [65536.0] * 1999 + [32768.0] * 2000 + [65536.0] * 2


def test_models_without_float16_have_no_scale():
    trainer = make_trainer(half_model())
    assert "train/loss_scale" not in trainer.train_step_sync()
    assert "loss_scale" not in trainer.optimizer.param_groups[0]


def test_a_resumed_run_has_the_scale_of_its_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(LossScale, "START", 2.0**40)
    options = {"checkpoint_config": CheckpointConfig(tmp_path, every_n_steps=1)}
    make_trainer(tiny_model().half(), **options).train_sync(2)
    assert make_trainer(tiny_model().half(), resume_from=2, **options).train_step_sync()["train/loss_scale"] == 2.0**37
