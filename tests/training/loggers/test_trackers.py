"""Loggers of tracking services, with the services' own libraries: what is written is read back with
their readers."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ludic.errors import MissingExtraError
from ludic.training import MlflowLogger, TensorboardLogger, TrackioLogger, WandbLogger
from ludic.training.loggers.base import Percent

STATS = [
    {"train/loss": 0.5, "train/clip_rate": Percent(0.25), "phase": "reinforce"},
    {"train/loss": 0.125, "train/clip_rate": Percent(0.5), "phase": "reinforce"},
]
EVALUATION = {"eval/accuracy": 0.75}


def run_in_subprocess(folder, script):
    """Run the script in a process of its own, without network. Returns the last line that it
    prints, as JSON."""
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(folder),
        "WANDB_MODE": "offline",
        "PYTHONPATH": os.pathsep.join([str(root / "python"), str(root)]),
    }
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr
    return json.loads(next(line for line in process.stdout.splitlines() if line.startswith("[")))


def log_all(logger):
    with logger:
        for step, stats in enumerate(STATS, 1):
            logger.log(step, stats)
        logger.log(2, EVALUATION)


# --- mlflow


def test_a_server_of_mlflow_that_is_away_is_given_up_soon_unless_the_user_says_otherwise(monkeypatch):
    """Its own 7 retries with growing pauses halt every logged step for minutes."""
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    retries, timeout = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"
    monkeypatch.delenv(retries, raising=False)
    monkeypatch.setenv(timeout, "77")
    MlflowLogger()
    assert (os.environ[retries], os.environ[timeout]) == ("2", "77")


def test_mlflow_has_every_scalar_with_its_step_and_the_settings(tmp_path):
    pytest.importorskip("mlflow")
    found = run_in_subprocess(
        tmp_path,
        f"""
import json, warnings
warnings.simplefilter("ignore")
from mlflow import MlflowClient
from ludic.training import MlflowLogger
from tests.training.loggers.test_trackers import log_all
here = "sqlite:///{tmp_path / "store.db"}"
config = {{"trainer": {{"lr": 0.5}}, "reward": None, "notes": "x" * 9000}}
logger = MlflowLogger(tracking_uri=here, name="first", config=config, tags={{"group": "all"}})
log_all(logger)
again = MlflowLogger(tracking_uri=here, run_id=logger.run_id)
with again:
    again.log(3, {{"reference/kl_bucket/257+": float("nan"), "train/loss": 0.0}})
client = MlflowClient(tracking_uri=here)
run = client.get_run(logger.run_id)
history = {{key: [(m.step, m.value) for m in client.get_metric_history(logger.run_id, key)] for key in run.data.metrics}}
experiment = client.get_experiment(run.info.experiment_id).name
params = {{key: value[:3] for key, value in run.data.params.items()}}
print(json.dumps([history, params, run.data.tags["group"], run.info.run_name, run.info.status, experiment]))
""",
    )
    history, *others = found
    bucket = history.pop("reference/kl_bucket/257_")
    assert [step for step, _ in bucket] == [3]
    assert history == {
        "train/loss": [[1, 0.5], [2, 0.125], [3, 0.0]],
        "train/clip_rate": [[1, 0.25], [2, 0.5]],
        "eval/accuracy": [[2, 0.75]],
    }
    assert others == [{"trainer.lr": "0.5", "reward": "Non", "notes": "xxx"}, "all", "first", "FINISHED", "Ludic"]


# --- tensorboard


@pytest.fixture
def accumulator(monkeypatch):
    """TensorBoard's event reader, without its optional dependencies."""
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator


def test_tensorboard_has_every_scalar_with_its_step(tmp_path, accumulator):
    log_all(TensorboardLogger(tmp_path / "run"))
    events = accumulator(str(tmp_path / "run"))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {
        "train/loss": [(1, 0.5), (2, 0.125)],
        "train/clip_rate": [(1, 0.25), (2, 0.5)],
        "eval/accuracy": [(2, 0.75)],
    }


def test_tensorboard_makes_no_file_before_the_first_statistics(tmp_path, accumulator):
    with TensorboardLogger(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_closed_logger_continues_in_another_file(tmp_path, accumulator):
    logger = TensorboardLogger(tmp_path)
    for step in (1, 2):
        logger.log(step, {"x": float(step)})
        logger.close()
    events = accumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("x")] == [1, 2]


@pytest.mark.parametrize(
    ("module", "make"),
    [
        *[("tensorboard", lambda: TensorboardLogger("x")), ("trackio", TrackioLogger)],
        *[("wandb", WandbLogger), ("mlflow", MlflowLogger)],
    ],
)
def test_without_the_package_the_error_names_the_extra(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"ludic-rl\[{module}\]"):
        make()


# --- wandb


def test_real_wandb_keeps_the_users_run_open_and_finishes_the_loggers_own(tmp_path):
    pytest.importorskip("wandb", reason="pip install 'ludic-rl[wandb]'")
    script = """
import json, wandb
from ludic.training import WandbLogger
with WandbLogger() as logger:
    for step in (1, 2):
        logger.log(step, {"train/loss": 0.5 / step})
    found = [wandb.run.project, wandb.run.summary["train/loss"]]
found += [wandb.run is None]
with wandb.init(project="mine") as run:
    with WandbLogger() as logger:
        for step in (1, 2):
            logger.log(step, {"train/loss": 0.25 / step})
    found += [wandb.run is run, run.project, run.summary["train/loss"]]
print(json.dumps(found))
"""
    assert run_in_subprocess(tmp_path, script) == ["Ludic", 0.5, True, True, "mine", 0.25]


# trackio fixes the folder of its database when it is imported


def test_trackio_has_what_was_logged_and_continues_a_run(tmp_path):
    pytest.importorskip("trackio", reason="constraints-trackio.txt has an environment for it")
    begun = """
import json
from ludic.training import TrackioLogger
from ludic.training.loggers.base import Percent
with TrackioLogger(project="sorting", name="a", config={"lr": 0.5}, resume="allow") as logger:
    logger.log(STEP, {"train/loss": 0.5, "train/clip_rate": Percent(0.25), "phase": "reinforce"})
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([{key: line[key] for key in line if key != "timestamp"} for line in SQLiteStorage.get_logs("sorting", "a")]))
"""
    line = {"train/loss": 0.5, "train/clip_rate": 0.25, "phase": "reinforce"}
    assert run_in_subprocess(tmp_path, begun.replace("STEP", "1")) == [{**line, "step": 1}]
    assert run_in_subprocess(tmp_path, begun.replace("STEP", "2")) == [{**line, "step": 1}, {**line, "step": 2}]


def test_trackio_arguments_override_init_kwargs_and_the_environment_overrides_the_default_project(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", types.ModuleType("trackio"))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    assert TrackioLogger(init_kwargs={"name": "a", "group": "g"}, name="b").init_kwargs == {
        "project": "Ludic",
        "name": "b",
        "group": "g",
    }
    monkeypatch.setenv("TRACKIO_PROJECT", "c")
    assert TrackioLogger().init_kwargs == {"project": "c"}
    assert TrackioLogger(project="d").init_kwargs == {"project": "d"}
