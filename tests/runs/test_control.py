"""Controllers of `ludic train`: what is logged of them, and the file in the run's folder."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.recipes.build import build_algorithm
from ludic.recipes.compose import compose
from ludic.runs.control import check_control

KL = ("controllers.kl.target=0.001", "controllers.kl.horizon=5")
MAXENT = ("algorithm=maxent_grpo", "algorithm_args.beta=0.1")


@pytest.mark.integration
def test_controllers_change_the_coefficients_from_step_to_step(tiny: list[str], tmp_path: Path) -> None:
    entropy = ("controllers.entropy.target=1.0", "controllers.entropy.lr=0.5", "controllers.entropy.warmup_steps=0")
    done = CliRunner().invoke(app, ["train", "sort", *tiny, *MAXENT, *KL, *entropy, "trainer.lr=0.01"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "reinforce" and "train/tau" in line]
    assert len(steps) == 3
    assert (steps[0]["train/tau"], steps[0]["train/beta"]) == (0.1, 0.1)
    assert steps[1]["train/beta"] == steps[0]["train/beta"] + steps[0]["train/delta_beta"] != 0.1
    assert steps[2]["train/tau"] == steps[1]["train/tau"] + steps[1]["train/delta_tau"] != 0.1
    state = json.loads((tmp_path / "run" / "controller_state.json").read_text())
    last = steps[2]
    assert state["step"] == 3
    assert state["tau"] == pytest.approx(last["train/tau"] + last["train/delta_tau"], abs=1e-15)
    assert state["controllers"]["entropy"]["ema"] == last["train/weight_entropy_ema"]


def test_settings_that_do_not_fit_are_refused_before_anything_is_written(tiny: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "sort", *tiny, *KL])
    assert done.exit_code != 0
    assert "controllers.kl controls beta" in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()


def test_the_seeded_answers_of_infoseed_count_in_the_largest_entropy() -> None:
    """log(4 + 4) = 2.079, log 4 = 1.386."""
    settings = ["maxent", "rollout.group_size=4", "controllers.entropy.target=2.0", "controllers.entropy.lr=0.1"]
    seeded = compose([*settings, "info_seed.num_seeds=4"])
    check_control(seeded, build_algorithm(seeded))
    plain = compose(settings)
    with pytest.raises(ConfigError, match=r"target \(2.0\) .*log\(group_size\) = log\(4\)"):
        check_control(plain, build_algorithm(plain))
