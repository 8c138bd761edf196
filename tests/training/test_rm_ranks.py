"""A step of reward-model training on two ranks, with unlike numbers of pairs, is the step on one; so is an evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from preference_samples import reward_model, rm_config, sorted_pairs
from training_samples import ListSource

from ludic.training import RMTrainer, make_bradley_terry

SCRIPT = Path(__file__).parents[1] / "support" / "two_ranks_rm.py"


@pytest.mark.integration
@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp"])
def test_two_ranks_take_the_step_of_one(tmp_path, wrapping):
    out = tmp_path / "result.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "store"), str(out), wrapping],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    result = json.loads(out.read_text())
    assert result["difference"] < 2e-6
    assert result["stats"]["train/loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert result["stats"]["train/total_pairs"] == result["stats"]["train/num_pairs"] == 9
    alone = RMTrainer(
        model=reward_model(),
        algo=make_bradley_terry(beta=1.5),
        batch_source=ListSource([]),
        cfg=rm_config(),
        eval_items=sorted_pairs(7, seed=5),
    ).evaluate()
    assert result["eval"] == pytest.approx({name.removeprefix("eval_"): value for name, value in alone.items()}, abs=1e-5)
