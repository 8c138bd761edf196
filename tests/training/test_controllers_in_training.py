"""Controllers in the training loop: what they see, what is saved, and that a killed run goes on."""

import json

import pytest
import torch
from controlled_runs import KINDS, controlled_trainer
from forked_scripts import run_script
from training_samples import assert_same_tensors, weights_of, without_times

from ludic.errors import NonFiniteError
from ludic.files.checkpoints import STATE
from ludic.training.controllers import load_controller_state

STEPS = 4


@pytest.fixture(scope="module", params=KINDS)
def whole_run(request, tmp_path_factory):
    """(kind, folder of the checkpoints, statistics of each step, trainer at the end)."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = controlled_trainer(request.param, folder)
    stats = [without_times(trainer.train_step_sync()) for _ in range(STEPS)]
    return request.param, folder, stats, trainer


@pytest.mark.parametrize("killed_after", range(1, STEPS))
def test_a_run_that_was_killed_goes_on_bit_for_bit(whole_run, killed_after):
    kind, folder, stats, whole = whole_run
    trainer = controlled_trainer(kind, folder, model_seed=5, resume_from=killed_after)
    rest = [without_times(trainer.train_step_sync()) for _ in range(STEPS - killed_after)]
    assert rest == stats[killed_after:]
    assert trainer.control.values() == whole.control.values()
    assert trainer.control.state_dict() == whole.control.state_dict()
    assert_same_tensors(weights_of(trainer.model), weights_of(whole.model))


def test_a_step_logs_what_it_used_and_the_next_one_uses_what_was_set(whole_run):
    _, _, stats, trainer = whole_run
    assert stats[0]["train/tau"] == 0.3
    assert stats[0]["train/beta"] == 0.1
    for before, after in zip(stats, [*stats[1:], None], strict=True):
        for name in ("tau", "beta"):
            following = trainer.control.values()[name] if after is None else after[f"train/{name}"]
            assert following == pytest.approx(before[f"train/{name}"] + before[f"train/delta_{name}"], abs=1e-15)
            assert before[f"train/delta_{name}"] != 0 or name == "tau"
    assert stats[-1]["reference/kl"] > 0


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_meta_controller_aims_at_the_entropy_that_is_logged(kind):
    trainer = controlled_trainer(kind)
    [meta] = trainer.control.controllers
    meta.kl_target = None
    for stats in (trainer.train_step_sync() for _ in range(3)):
        assert stats["train/meta/loss"] == pytest.approx((stats["train/weight_entropy"] - 1.2) ** 2 / 2)


def test_a_checkpoint_has_a_file_with_the_coefficients(whole_run):
    kind, folder, _, trainer = whole_run
    content = json.loads((folder / f"step_{STEPS:06d}" / "controller_state.json").read_text())
    state = json.loads((folder / f"step_{STEPS:06d}" / STATE).read_text())
    assert content["controllers"] == state["controllers"] == trainer.control.state_dict()
    assert content["step"] == STEPS
    assert {name: content[name] for name in ("tau", "beta")} == trainer.control.values()
    fresh = controlled_trainer(kind)
    load_controller_state(
        folder / f"step_{STEPS:06d}" / "controller_state.json", fresh.control.controllers, fresh.algo.coefficients
    )
    assert fresh.control.state_dict() == trainer.control.state_dict()


def test_controllers_see_the_steps_that_are_not_logged(whole_run):
    kind, _, _, whole = whole_run
    trainer = controlled_trainer(kind, config={"log_every": 3})
    stats = [trainer.train_step_sync() for _ in range(STEPS)]
    assert [len(each) > 1 for each in stats] == [False, False, True, False]
    assert trainer.control.values() == whole.control.values()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_leaves_them_as_they_were(kind):
    trainer = controlled_trainer(kind)
    trainer.train_step_sync()
    before = trainer.control.state_dict()
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        trainer.train_step_sync()
    assert trainer.control.state_dict() == before


@pytest.mark.integration
def test_two_ranks_have_the_same_coefficients():
    said = json.loads(run_script("controlled_ranks.py").splitlines()[-1])
    first, second = said["ranks"]
    assert first == second
    for kind, alone in said["alone"].items():
        own, shared = first[f"{kind}, own"], first[f"{kind}, shared"]
        assert own != alone  # the samples of the other rank count
        for step, values in zip(shared, alone, strict=True):
            assert step == pytest.approx(values, abs=1e-5)
