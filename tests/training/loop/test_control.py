import json
from dataclasses import replace

import pytest
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import CheckpointError, ConfigError
from ludic.training import Trainer, make_reinforce
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.coefficients import Coefficient
from ludic.training.config import TrainerConfig
from ludic.training.controllers import EntropyController, KLController, MetaController
from ludic.training.credit_assignment import EpisodicReturn
from ludic.training.loop.control import Control
from ludic.training.loop.schedule import RunSchedule
from ludic.training.loss import ReferenceKLLoss, TokenClippedSurrogateLoss
from ludic.training.preparation import Prepared
from ludic.training.presets import make_maxent_grpo
from ludic.training.types import SAWItem


def algorithm(coefficients, loss=None):
    loss = ReferenceKLLoss(0.1) if loss is None else loss
    return RLAlgorithm("maxent_grpo", EpisodicReturn(), loss, coefficients=coefficients)


def make(*, tau=0.3, beta=0.1, kinds=("kl", "entropy")):
    coefficients = {"tau": Coefficient(tau), "beta": Coefficient(beta)}
    made = {
        "kl": lambda: KLController(coefficients["beta"], target=0.1, horizon=10),
        "entropy": lambda: EntropyController(coefficients["tau"], target=1.6, lr=0.5),
        "meta": lambda: MetaController(None, coefficients["beta"], kl_target=0.1, lr=0.1),
    }
    return Control([made[kind]() for kind in kinds], algorithm(coefficients))


def update(control, step=1, stats=None):
    stats = {"weight_entropy": 1.0, "reference/kl": 0.2} if stats is None else stats
    prepared = Prepared(MacroBatch.ingest([SAWItem([1, 2], [1, 1], [0, 1], 1.0)], 8))
    return control.update(stats, prepared, RunSchedule(TrainerConfig(), 100), "cpu", step=step)


def test_a_step_logs_the_coefficients_that_it_used_and_their_change():
    """beta .1 (1 + 1 / 10) = .11; tau .3 e^(.5 * .6)."""
    control = make()
    stats = update(control)
    assert stats["tau"] == 0.3
    assert stats["beta"] == 0.1
    assert stats["delta_beta"] == pytest.approx(0.01)
    assert control.values() == {"tau": 0.3 + stats["delta_tau"], "beta": pytest.approx(0.11)}
    assert stats["weight_entropy_error"] == pytest.approx(0.6)


def test_controllers_see_the_kl_that_the_loss_penalises():
    """The target is .1: .2 raises beta by a tenth, .05 lowers it by a twentieth."""
    stats = {"reference/kl": 0.2, "reference/sequence_kl": 0.05}
    for level, beta in (("token", 0.11), ("sequence", 0.095)):
        algo = make_maxent_grpo(group_size=4, beta=0.1, kl_level=level)
        control = Control([KLController(algo.coefficients["beta"], target=0.1, horizon=10)], algo)
        update(control, stats=stats)
        assert control.values()["beta"] == pytest.approx(beta)


def test_what_a_step_did_not_measure_is_not_seen():
    control = make()
    assert update(control, stats={})["delta_tau"] == 0
    assert control.values() == {"tau": 0.3, "beta": 0.1}


def test_state_goes_through_json_bit_for_bit():
    control, resumed = make(), make(tau=0.9, beta=0.9)
    for step in range(1, 5):
        update(control, step)
    resumed.load_state_dict(json.loads(json.dumps(control.state_dict())))
    for step in range(5, 9):
        assert update(resumed, step) == update(control, step)
    assert resumed.state_dict() == control.state_dict()
    assert resumed.files(9) == control.files(9)
    assert control.files(9)["files"]["controller_state.json"]["tau"] == control.values()["tau"]


def test_a_state_without_a_controller_is_warned_of(caplog):
    control = make()
    control.load_state_dict({"kl": {"beta": 0.2}})
    assert "no state of the controllers entropy" in caplog.text
    assert control.values() == {"tau": 0.3, "beta": 0.2}


def test_a_damaged_state_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match=r"controller 'kl' .*checkpoint is invalid"):
        make().load_state_dict({"kl": {"alpha": 0.2}, "entropy": {}})


def test_controllers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="'kl' and 'meta' both set beta"):
        make(kinds=("kl", "meta"))
    with pytest.raises(ConfigError, match="two controllers have the name 'kl'"):
        make(kinds=("kl", "kl"))
    with pytest.raises(ConfigError, match=r"sets a beta .*algo\.coefficients, .*: tau"):
        Control([KLController(Coefficient(0.1), target=0.1, horizon=10)], algorithm({"tau": Coefficient(0.3)}))
    beta = Coefficient(0.1)
    with pytest.raises(ConfigError, match=r"'kl' reads the KL .*maxent_grpo"):
        Control([KLController(beta, target=0.1, horizon=10)], algorithm({"beta": beta}, TokenClippedSurrogateLoss()))
    tau = Coefficient(0.1)
    with pytest.raises(ConfigError, match=r"must be at most 1.386.* log\(group_size\) = log\(4\)"):
        Control([EntropyController(tau, target=1.6, lr=0.1)], make_maxent_grpo(group_size=4, tau=tau))


def test_without_controllers_nothing_is_logged_or_saved():
    control = Control([], algorithm({"tau": Coefficient(0.3)}))
    assert control.files(3) == {}
    assert control.state_dict() == {}
    algo = replace(make_reinforce(), coefficients={"tau": Coefficient(0.3)})
    trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(sorting_items(4)), cfg=cpu_config())
    assert not {"train/tau", "train/delta_tau"} & trainer.train_step_sync().keys()
