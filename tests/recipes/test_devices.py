"""The device is chosen by the process that trains, not by a launcher on another machine."""

import pytest
import torch

from ludic.cli.app import app
from ludic.recipes.compose import choose_devices, compose, config_hash, to_yaml
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.model import choose_threads


def have_gpu(monkeypatch, answer):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: answer)


@pytest.mark.parametrize("place", ["ranks=2", "place=ray", "place=slurm"])
@pytest.mark.parametrize("make", [compose, compose_sft, compose_rm, compose_dpo])
def test_the_recipe_of_a_launcher_leaves_the_device_to_its_processes(tmp_path, monkeypatch, make, place):
    have_gpu(monkeypatch, False)  # a login node
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(make([place])))
    have_gpu(monkeypatch, True)  # the machine that trains
    recipe = make([str(config)])
    choose_devices(recipe)
    assert recipe.trainer.model_device == "cuda"
    if make is compose:
        assert recipe.warmup.trainer.model_device == "cuda"


@pytest.mark.parametrize(("has_gpu", "device"), [(False, "cpu"), (True, "cuda")])
def test_the_recipe_of_one_process_names_the_device(monkeypatch, has_gpu, device):
    have_gpu(monkeypatch, has_gpu)
    assert compose([]).trainer.model_device == compose([]).warmup.trainer.model_device == device
    assert compose_sft(["trainer.model_device=auto"]).trainer.model_device == device


def test_a_device_that_was_set_stays_and_results_are_those_of_one_process():
    recipe = compose(["ranks=2", "trainer.model_device=cuda:1"])
    choose_devices(recipe)
    assert recipe.trainer.model_device == "cuda:1"
    launched = compose(["ranks=2"])
    choose_devices(launched)
    assert config_hash(launched) == config_hash(compose([]))


@pytest.mark.parametrize(
    ("given", "weights", "threads"), [(None, 9_999_999, 1), (None, 10_000_000, 7), (3, 10, 3), (3, 10**8, 3)]
)
def test_threads_follow_the_size_of_the_model_unless_they_are_set(monkeypatch, given, weights, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    recipe = compose([] if given is None else [f"threads={given}"])
    assert choose_threads(recipe, torch.nn.Linear(weights, 1, bias=False, device="meta")) == threads


def test_a_run_writes_its_threads_down_and_restores_the_process_s(tmp_path, capsys):
    torch.set_num_threads(2)
    try:
        where = [f"output={tmp_path}", "name=run", "steps=1", "warmup.steps=0", "evaluation.prompts=1", "rollout.prompts=1"]
        assert app(["train", *where, "network.hidden_size=16", "network.intermediate_size=16"], standalone_mode=False) in (
            0,
            None,
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert "1 threads" in capsys.readouterr().out
    assert compose([str(tmp_path / "run" / "config.yaml")]).threads == 1
