import json
import math

import pytest

from ludic.errors import CheckpointError
from ludic.training.coefficients import Coefficient
from ludic.training.controllers import (
    EntropyController,
    KLController,
    MetaController,
    Observation,
    load_controller_state,
    save_controller_state,
)


def run_with_laws(tau=0.3, beta=0.1):
    coefficients = {"tau": Coefficient(tau), "beta": Coefficient(beta)}
    laws = [
        KLController(coefficients["beta"], target=0.1, horizon=10),
        EntropyController(coefficients["tau"], target=1.6, lr=0.05),
    ]
    return coefficients, laws


def test_a_saved_state_is_loaded_bit_for_bit(tmp_path):
    coefficients, laws = run_with_laws()
    for step in range(5):
        for law in laws:
            law.update(Observation(step=step, entropy=1.1 + 0.1 * step, kl=0.3))
    save_controller_state(tmp_path / "controller_state.json", laws, coefficients, step=5)
    content = json.loads((tmp_path / "controller_state.json").read_text())
    assert content["schema_version"] == 1
    assert content["step"] == 5
    assert content["tau"] == float(coefficients["tau"])
    assert content["tau_log"] == laws[1].state_dict()["log_tau"]
    others, copies = run_with_laws(tau=0.7, beta=0.9)
    load_controller_state(tmp_path / "controller_state.json", copies, others)
    assert [law.state_dict() for law in copies] == [law.state_dict() for law in laws]
    assert {name: float(value) for name, value in others.items()} == {name: float(value) for name, value in coefficients.items()}


def test_the_moments_of_the_meta_controller_are_in_the_file(tmp_path):
    coefficients = {"tau": Coefficient(0.3), "beta": Coefficient(0.1)}
    controller = MetaController(*coefficients.values(), kl_target=0.1, beta_lr=0.02, optimizer="adam")
    controller.update(Observation(step=0, kl=0.3))
    save_controller_state(tmp_path / "s.json", [controller], coefficients, step=1)
    again = {"tau": Coefficient(0.5), "beta": Coefficient(0.5)}
    copy = MetaController(*again.values(), kl_target=0.1, beta_lr=0.02, optimizer="adam")
    load_controller_state(tmp_path / "s.json", [copy], again)
    assert copy.state_dict() == controller.state_dict()
    assert copy.state_dict()["moments"]["beta"]["steps"] == 1
    assert float(again["tau"]) == 0.3


def test_a_file_of_another_implementation_is_loaded(tmp_path):
    meta = {"version": 1, "controller": {"enabled": False, "method": "analytic"}}
    (tmp_path / "s.json").write_text(json.dumps({"beta": 0.2, "tau": 0.4, "tau_log": -0.9, "tau_entropy_ema": 1.4, "meta": meta}))
    coefficients, laws = run_with_laws()
    load_controller_state(tmp_path / "s.json", laws, coefficients)
    assert [law.state_dict() for law in laws] == [{"beta": 0.2}, {"tau": 0.4, "log_tau": -0.9, "ema": 1.4}]


@pytest.mark.parametrize("ema", [math.nan, None])
def test_a_missing_log_is_computed_and_a_missing_average_begins_anew(tmp_path, ema):
    (tmp_path / "s.json").write_text(json.dumps({"beta": 0.2, "tau": 0.4, "tau_entropy_ema": ema}))
    coefficients, laws = run_with_laws()
    load_controller_state(tmp_path / "s.json", laws, coefficients)
    assert laws[1].state_dict() == {"tau": 0.4, "log_tau": math.log(0.4), "ema": None}


@pytest.mark.parametrize("wrong", [{"beta": "0.2", "tau": 0.4}, {"beta": 0.2, "tau": math.nan}, {"beta": True, "tau": 0.4}])
def test_what_is_not_a_number_is_refused_and_nothing_changes(tmp_path, wrong):
    (tmp_path / "s.json").write_text(json.dumps(wrong))
    coefficients, laws = run_with_laws()
    before = [law.state_dict() for law in laws]
    with pytest.raises(CheckpointError, match="must be a finite number"):
        load_controller_state(tmp_path / "s.json", laws, coefficients)
    assert [law.state_dict() for law in laws] == before


def test_another_version_is_refused_and_a_missing_coefficient_is_named(tmp_path, caplog):
    coefficients, laws = run_with_laws()
    (tmp_path / "s.json").write_text(json.dumps({"schema_version": 2, "tau": 0.4}))
    with pytest.raises(CheckpointError, match="schema_version 2"):
        load_controller_state(tmp_path / "s.json", laws, coefficients)
    (tmp_path / "s.json").write_text(json.dumps({"tau": 0.4}))
    load_controller_state(tmp_path / "s.json", laws, coefficients)
    assert "lacks beta, which keeps its present value" in caplog.text
    assert float(coefficients["beta"]) == 0.1
    assert float(coefficients["tau"]) == 0.4
