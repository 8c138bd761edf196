import json
import math
from copy import deepcopy

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

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

LOG = -0.9162907318
"""log 0.4, rounded."""


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
    settings = json.loads((tmp_path / "s.json").read_text())["controllers"]["meta"]["settings"]
    assert settings == {
        "method": "analytic",
        "optimizer": "adam",
        "kl_target": 0.1,
        "beta_lr": 0.02,
        "update_interval": 1,
        "truncation_steps": 1,
        "use_hessian": False,
    }
    again = {"tau": Coefficient(0.5), "beta": Coefficient(0.5)}
    copy = MetaController(*again.values(), kl_target=0.1, beta_lr=0.02, optimizer="adam")
    load_controller_state(tmp_path / "s.json", [copy], again)
    assert copy.state_dict() == controller.state_dict()
    assert copy.state_dict()["moments"]["beta"]["steps"] == 1
    assert float(again["tau"]) == 0.3


def test_a_file_of_another_implementation_is_loaded(tmp_path):
    meta = {"version": 1, "controller": {"enabled": False, "method": "analytic"}}
    (tmp_path / "s.json").write_text(json.dumps({"beta": 0.2, "tau": 0.4, "tau_log": LOG, "tau_entropy_ema": 1.4, "meta": meta}))
    coefficients, laws = run_with_laws()
    load_controller_state(tmp_path / "s.json", laws, coefficients)
    assert [law.state_dict() for law in laws] == [{"beta": 0.2}, {"tau": 0.4, "log_tau": LOG, "ema": 1.4}]


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


def run_with_meta(tau=0.3, beta=0.1):
    coefficients = {"tau": Coefficient(tau), "beta": Coefficient(beta)}
    law = EntropyController(coefficients["tau"], target=1.6, lr=0.05)
    meta = MetaController(None, coefficients["beta"], kl_target=0.1, beta_lr=0.02, optimizer="adam")
    return coefficients, [law, meta]


def saved_content(path):
    coefficients, laws = run_with_meta()
    for law in laws:
        law.update(Observation(step=3, entropy=1.1, kl=0.3))
    save_controller_state(path, laws, coefficients, step=5)
    return json.loads(path.read_text())


def state_of(coefficients, laws):
    return [law.state_dict() for law in laws], [float(value) for value in coefficients.values()]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["controllers"]["entropy"].pop("ema"), "'entropy' in .* lacks 'ema'"),
        (lambda c: c["controllers"]["entropy"].update(log_tau="x"), "controllers.entropy.log_tau in .* must be a finite number"),
        (lambda c: c["controllers"]["entropy"].update(ema=math.nan), "controllers.entropy.ema in .* must be a finite number"),
        (
            lambda c: c["controllers"]["meta"]["moments"]["beta"].update(second=10**400),
            "beta.second in .* must be a finite number",
        ),
        (lambda c: c["controllers"]["meta"]["moments"]["beta"].update(steps=-1), "'meta' in .* is invalid: .*steps"),
        (lambda c: c["controllers"]["meta"].update(moments=[]), "controllers.meta.moments in .* must be an object"),
        (lambda c: c.update(controllers=[]), "controllers in .* must be an object"),
        (lambda c: c.update(tau=0.0), "tau in .* must be above 0"),
    ],
)
def test_a_damaged_state_is_refused_by_name_and_nothing_changes(tmp_path, edit, words):
    path = tmp_path / "s.json"
    content = saved_content(path)
    edit(content)
    path.write_text(json.dumps(content))
    coefficients, laws = run_with_meta(tau=0.7, beta=0.9)
    before = state_of(coefficients, laws)
    with pytest.raises(CheckpointError, match=words):
        load_controller_state(path, laws, coefficients)
    assert state_of(coefficients, laws) == before


def test_an_edited_tau_counts_and_its_log_follows(tmp_path):
    path = tmp_path / "s.json"
    content = saved_content(path)
    path.write_text(json.dumps({**content, "tau": 0.7}))
    coefficients, laws = run_with_meta()
    load_controller_state(path, laws, coefficients)
    ema = content["controllers"]["entropy"]["ema"]
    assert laws[0].state_dict() == {"tau": 0.7, "log_tau": math.log(0.7), "ema": ema}


def places(content, path=()):
    """Every key of the content, as a path."""
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(-1e6, 1e6, allow_subnormal=False),
    st.integers(-1000, 1000),
    st.sampled_from([math.nan, math.inf, -math.inf, "x", [], {}, 10**400]),
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_edit_is_loaded_as_finite_numbers_or_refused_and_nothing_changes(tmp_path, data):
    path = tmp_path / "s.json"
    content = deepcopy(saved_content(path))
    for _ in range(data.draw(st.integers(1, 2))):
        *sections, key = data.draw(st.sampled_from(list(places(content))))
        part = content
        for section in sections:
            part = part[section]
        if data.draw(st.booleans()):
            part[key] = data.draw(WRONG)
        else:
            del part[key]
    path.write_text(json.dumps(content))
    coefficients, laws = run_with_meta(tau=0.7, beta=0.9)
    before = state_of(coefficients, laws)
    try:
        load_controller_state(path, laws, coefficients)
    except CheckpointError:
        assert state_of(coefficients, laws) == before
        return
    law = laws[0].state_dict()
    assert math.exp(law["log_tau"]) == pytest.approx(law["tau"], rel=1e-8)
    for law in laws:
        law.update(Observation(step=6, entropy=1.1, kl=0.3))
    json.dumps(state_of(coefficients, laws), allow_nan=False)  # raises for NaN and infinities
